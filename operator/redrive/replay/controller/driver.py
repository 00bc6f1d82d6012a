"""Whether the driver of a submitted SparkApplication runs, and what keeps its pod from it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from datetime import datetime, timedelta

from redrive.kube import resources
from redrive.kube.context import Context
from redrive.kube.errors import KubernetesError
from redrive.kube.resources import Body
from redrive.replay.controller.errors import DriverNotStartedError
from redrive.replay.controller.launcher import SparkRun

MAX_REASON = 500
"""Characters of what Kubernetes says that a message has room for."""

_START_TIME = timedelta(minutes=2)
"""Enough to fetch an image."""
_IN_URLS = re.compile(r"(?<=://)[^/@\s]+@|\?[\w-]+=[^\s\"']*")
"""Where a registry's address may hold credentials: before the host, and in its query."""


async def check_runs(run: SparkRun, now: datetime, ctx: Context) -> None:
    """Check that the driver of an application that was submitted has begun to run in time.

    Raises:
        DriverNotStartedError: it has not. It names the pod and why, where the operator may read
            that: the chart lets it do so in the namespaces that it prepares for Replays.
    """
    if run.submitted is None or now - run.submitted <= _START_TIME:
        return
    pod, why = f"pod --selector {run.driver}", ""
    try:
        found = await _pod(run, ctx)
        if found is not None:
            pod, why = f"pod {found['metadata']['name']}", await _reason(found, ctx)
    except KubernetesError:
        pass  # the command in the message tells it
    raise DriverNotStartedError(
        f"the driver of the SparkApplication {run.key.name} does not run, "
        f"{_START_TIME.total_seconds():.0f} s after it was submitted{why and f': {why}'}",
        got=pod,
        remedy="provide the Secret, image or room on a node that it lacks, see `kubectl "
        f"--namespace {run.key.namespace} describe {pod}`; it starts by itself then. Delete the "
        "SparkApplication to have it made again from the operator's settings",
    )


async def _pod(run: SparkRun, ctx: Context) -> Body | None:
    of_run = replace(resources.PODS, selector=run.driver)
    pods = await ctx.kubernetes.list(of_run, run.key.namespace)
    return max(pods, key=lambda pod: str(pod["metadata"]["creationTimestamp"]), default=None)


async def _reason(pod: Body, ctx: Context) -> str:
    metadata = pod["metadata"]
    said = awaited(pod)
    if not said:  # as while a volume is missing
        # Of each type: a large image is `Pulling` after warnings of mounts that have passed.
        of_pod = replace(resources.EVENTS, fields=f"involvedObject.uid={metadata['uid']}")
        said = last(await ctx.kubernetes.list(of_pod, metadata["namespace"]))
    plain = _IN_URLS.sub("…", " ".join(said.split()))
    return plain if len(plain) <= MAX_REASON else f"{plain[: MAX_REASON - 1]}…"


def awaited(pod: Body) -> str:
    """Say what a pod waits for by its status; empty where that does not explain it. Pure."""
    status = pod.get("status") or {}
    conditions = status.get("conditions", ())
    containers = [*status.get("initContainerStatuses", ()), *status.get("containerStatuses", ())]
    said = (
        *(c for c in conditions if (c["type"], c["status"]) == ("PodScheduled", "False")),
        *(each.get("state", {}).get("waiting") or {} for each in containers),
    )
    return next((_line(each) for each in said if each.get("message")), "")


def last(events: Iterable[Body]) -> str:
    """Say what the last of *events* says; empty without any. Pure."""
    newest = max(events, key=_time, default=None)
    return "" if newest is None else _line(newest)


def _time(event: Body) -> str:
    return str(event.get("lastTimestamp") or event.get("eventTime") or "")


def _line(said: Body) -> str:
    return ": ".join(filter(None, map(said.get, ("reason", "message"))))
