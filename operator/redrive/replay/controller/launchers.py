"""The Spark operators that redrive knows: which one runs a job, and where one runs already."""

from __future__ import annotations

from typing import NamedTuple

from redrive.api.launcher_name import LauncherName
from redrive.kube.context import Context
from redrive.kube.resources import Body, Key, is_owned_by
from redrive.replay.controller import apache, kubeflow, launch
from redrive.replay.controller.errors import LauncherDisabledError, SparkOperatorNotFoundError
from redrive.replay.controller.launcher import Launcher

LAUNCHERS = (kubeflow.LAUNCHER, apache.LAUNCHER)
"""In the order of preference."""


class Launched(NamedTuple):
    """The application of a Replay, and the Spark operator that it is for."""

    launcher: Launcher
    application: Body


def choose(wanted: LauncherName | None, ctx: Context) -> Launcher:
    """Return the Spark operator for a new application.

    Args:
        wanted: as the connection has it; None takes the first one whose kind is installed.
        ctx: what the watches have shown.

    Raises:
        LauncherDisabledError: this operator may not use it.
        SparkOperatorNotFoundError: its kind is not installed.
    """
    enabled = [each for each in LAUNCHERS if each.resource in ctx.applications]
    if wanted is not None and wanted not in {each.name for each in enabled}:
        raise LauncherDisabledError(
            "this operator may not create applications of the Spark operator that job.launcher "
            "names",
            got=wanted.value,
            remedy=f"enable replay.launchers.{wanted.value.lower()} in the Helm chart, or leave "
            "job.launcher out",
        )
    allowed = [each for each in enabled if wanted in {None, each.name}]
    for each in allowed:
        if each.resource not in ctx.missing:
            return each
    raise SparkOperatorNotFoundError(
        "this cluster knows no SparkApplication, which runs a Replay",
        got=f"none of {' or '.join(each.resource.group for each in allowed)}",
        remedy="install the Spark operator; this Replay starts by itself then",
    )


def was_launched(replay: Body) -> bool:
    """Whether *replay* says that it has, or had, an application: its own, not that of another one.

    A status that was meant for a Replay of before, with the same name, may be written to this one.
    """
    return (replay.get("status") or {}).get("sparkApplication") == launch.name_of(replay)


def find(replay: Body, ctx: Context) -> Launched | None:
    """Return the application that has the name of that of *replay*, of any Spark operator.

    One that it owns comes before one that it does not.
    """
    key = Key(Key.of(replay).namespace, launch.name_of(replay))
    caches = ((launcher, ctx.applications.get(launcher.resource)) for launcher in LAUNCHERS)
    bodies = ((launcher, cache.get(key)) for launcher, cache in caches if cache is not None)
    found = [Launched(launcher, body) for launcher, body in bodies if body is not None]
    owned = [each for each in found if is_owned_by(each.application, replay)]
    return next(iter(owned or found), None)
