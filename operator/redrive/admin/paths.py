"""Where a broker's admin API answers, and where things lie below it, their names quoted."""

from __future__ import annotations

from urllib.parse import quote

from redrive.policy.naming import TopicName


def quoted(text: str) -> str:
    """Quote *text* as one or more whole parts of a path: slashes stay."""
    return quote(text, safe="/")


def topic_path(topic: TopicName) -> str:
    """Return where a topic lies."""
    return f"persistent/{quoted(topic.namespace_name)}/{quote(topic.local, safe='')}"


def schema_path(topic: TopicName) -> str:
    """Return where the newest schema of a topic lies."""
    # The broker decodes the name twice.
    name = quote(quote(topic.local, safe=""), safe="")
    return f"schemas/{quoted(topic.namespace_name)}/{name}/schema"


def schemas_path(topic: TopicName) -> str:
    """Return where all versions of a topic's schema lie."""
    return f"{schema_path(topic)}s"


def subscription_path(topic: TopicName, name: str) -> str:
    """Return where a subscription of a topic lies."""
    # The broker decodes this part of the path twice.
    return f"{topic_path(topic)}/subscription/{quoted(quoted(name))}"


def permission_path(topic: TopicName, role: str) -> str:
    """Return where the rights of a role on a topic lie."""
    return f"{topic_path(topic)}/permissions/{quote(role, safe='')}"


def broker_at(admin_url: str) -> str:
    """Name a broker by its admin URL, for lack of anything that a tenant admin may read.

    Two connections to one broker name it alike, unless they call it by different addresses.
    """
    return admin_url.rstrip("/").lower()
