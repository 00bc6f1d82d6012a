"""The `redrive.io/v1beta1` API: RetryPolicy, Replay and BrokerConnection as typed values.

The models define the API: the CRDs in `crds/` are generated from them, and the operator reads
objects through them. The API server refuses invalid objects at admission, by rules that are
declared beside the fields; the same values are refused when an object is read, because it may be
older than the rule.

Reading order: `model` (base of all models, rules, field types, parsing), `policy_defaults`,
`topology`, `permissions`; `connection`, `retrypolicy`, `job`, `replay`; `conditions`; `crds`
(models → CRDs). This file does not import pydantic, so `redrive --help` needs no extra.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any

GROUP = "redrive.io"
VERSION = "v1beta1"
API_VERSION = f"{GROUP}/{VERSION}"


class LauncherName(enum.StrEnum):
    """A Spark operator that can run replay jobs."""

    KUBEFLOW = "Kubeflow"
    APACHE = "Apache"


Body = Mapping[str, Any]
"""A Kubernetes object as the API server returns it."""
