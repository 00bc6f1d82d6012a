"""A broker's answers, as JSON → values; called by `client`. Statistics are read by `stats`.

An answer of another form raises what Python raises then; `client` makes an `AdminError` of it.
"""

from __future__ import annotations

import re
from typing import Any

from redrive.admin.model import Schema, TopicMetadata, TopicPermissions


def as_is(answer: Any) -> Any:  # noqa: ANN401  JSON
    """Return the answer itself."""
    return answer


def partitioned(answer: Any) -> TopicMetadata:  # noqa: ANN401  JSON
    """Read the metadata of a topic with partitions."""
    return TopicMetadata(int(answer["partitions"]), dict(answer.get("properties") or {}))


def unpartitioned(answer: Any) -> TopicMetadata:  # noqa: ANN401  JSON
    """Read the properties of a topic without partitions, which are all of its metadata."""
    return TopicMetadata(0, dict(answer or {}))


def policies(answer: Any) -> dict[str, Any]:  # noqa: ANN401  JSON
    """Read what a `NamespaceState` holds of the policies of a namespace."""
    return {
        "permissions": TopicPermissions(answer["auth_policies"]["destination_auth"]),
        "subscription_expiry_minutes": answer.get("subscription_expiration_time_minutes") or 0,
        "backlog_quotas": answer.get("backlog_quota_map") or {},
        "delayed_delivery": answer.get("delayed_delivery_policies"),
        "replicated_to": frozenset(answer.get("replication_clusters") or ()),
        "enforces_schemas": answer.get("schema_validation_enforced") is True,
    }


def schema(answer: Any) -> Schema | None:  # noqa: ANN401  JSON
    """Read a schema; one of plain bytes is none."""
    if answer["type"] in {"NONE", "BYTES"}:
        return None
    return Schema(str(answer["type"]), str(answer["data"]), dict(answer.get("properties") or {}))


def schemas(answer: Any) -> tuple[Schema, ...]:  # noqa: ANN401  JSON
    """Read all versions of a schema, the oldest first; what is none is left out."""
    found = sorted(answer["getSchemaResponses"], key=lambda each: int(each["version"]))
    return tuple(version for version in map(schema, found) if version is not None)


def version(answer: str) -> tuple[int, ...]:
    """Read a release such as `4.0.8` or `4.2.0-SNAPSHOT`; empty for anything else."""
    found = re.match(r"(\d{1,3})\.(\d{1,3})(?:\.(\d{1,3}))?(?![.\d])", answer)
    return () if found is None else tuple(int(part) for part in found.groups() if part)
