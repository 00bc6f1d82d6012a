"""Which Spark properties a connection or a Replay may set. Pure.

A list of what is open, not of what is closed: Spark has hundreds, and several of them run a program
(`extraJavaOptions`, discovery scripts, `spark.pyspark.python`), load one (`spark.jars`), mount
Secrets, or change the ServiceAccount, labels and annotations of a pod.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import TypeVar

from redrive.api.rules import Rule
from redrive.errors import InvalidSpecError

_Names = TypeVar("_Names", bound=Iterable[str])

_OPEN = frozenset(
    {
        "spark.driver.maxResultSize",
        "spark.driver.memoryOverhead",
        "spark.driver.memoryOverheadFactor",
        "spark.executor.heartbeatInterval",
        "spark.executor.memoryOverhead",
        "spark.executor.memoryOverheadFactor",
        "spark.executor.pyspark.memory",
        "spark.kubernetes.executor.deleteOnTermination",
        "spark.log.level",
        "spark.log.structuredLogging.enabled",
        "spark.scheduler.maxRegisteredResourcesWaitingTime",
        "spark.scheduler.minRegisteredResourcesRatio",
        "spark.ui.enabled",
        "spark.ui.prometheus.enabled",
    }
)
_OPEN_PREFIXES = (
    "spark.dynamicAllocation.executor",
    "spark.dynamicAllocation.scheduler",
    "spark.eventLog.",
    "spark.kubernetes.allocation.",
    "spark.network.",
    "spark.rpc.",
    "spark.task.",
)
_CLOSED = frozenset({"spark.kubernetes.allocation.pods.allocator"})
"""It names a class that makes pods."""

_PROBLEM = (
    "a Spark property is one that may be set here: that is harmless, and redrive does not set"
)
_REMEDY = "use the fields of job; docs/reference/replay-jobs.md lists the properties that are open"


def is_open(name: str) -> bool:
    """Whether a connection or a Replay may set the Spark property *name*."""
    return name in _OPEN or (name.startswith(_OPEN_PREFIXES) and name not in _CLOSED)


def _cel() -> str:
    prefixes = " || ".join(f"key.startsWith('{prefix}')" for prefix in _OPEN_PREFIXES)
    opened, closed = json.dumps(sorted(_OPEN)), json.dumps(sorted(_CLOSED))
    return f"self.all(key, key in {opened} || (({prefixes}) && !(key in {closed})))"


OPEN_KEYS = Rule(_cel(), _PROBLEM, _REMEDY)
"""Each name in a list, or key of a map, is open."""


def check_keys(names: _Names) -> _Names:
    """Return *names*, a list or the keys of a map, if all of them may be set.

    Raises:
        InvalidSpecError: one may not.
    """
    if closed := sorted(name for name in names if not is_open(name)):
        raise InvalidSpecError(_PROBLEM, got=closed[0], remedy=_REMEDY)
    return names
