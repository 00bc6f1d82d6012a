"""Which Spark operators there are; without pydantic, so that `redrive --help` needs no extra."""

from __future__ import annotations

import enum


class LauncherName(enum.StrEnum):
    """A Spark operator that can run replay jobs."""

    KUBEFLOW = "Kubeflow"
    APACHE = "Apache"
