"""What redrive asks of a Spark operator, whichever it is: a manifest, and how a run stands."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from redrive.api.launcher_name import LauncherName
from redrive.api.replay import Phase
from redrive.kube.resources import Body, Key, Resource
from redrive.replay.controller.application import JobApplication


@dataclass(frozen=True)
class SparkRun:
    """How a SparkApplication stands.

    Attributes:
        created: when the object was made.
        state: as the Spark operator writes it; empty while none has looked at the object.
        phase: what that means; Completed and Failed are final.
        error: what the Spark operator says that went wrong, if anything, in a line.
        submitted: since when its driver is to run, while it does not; None otherwise.
        pods: the label selector of its pods; `spark-role` tells driver from executors.
        serving: how to have the Spark operator serve the namespace.
    """

    key: Key
    created: datetime
    state: str
    phase: Phase
    error: str
    submitted: datetime | None
    pods: str
    serving: str


@dataclass(frozen=True)
class Launcher:
    """A Spark operator.

    Attributes:
        resource: the kind of its SparkApplications.
        manifest: what to create.
        run: how what was created stands.
    """

    name: LauncherName
    resource: Resource
    manifest: Callable[[JobApplication], Body]
    run: Callable[[Body], SparkRun]


def given(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out what is empty."""
    return {name: value for name, value in fields.items() if value not in (None, {}, [])}
