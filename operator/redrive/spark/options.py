"""Options of a read or a write, as in the JVM connector for Pulsar; pure.

Spark passes names in lower case, and compares them case-insensitively.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from redrive.auth.method import Plugin, SourceAuthentication
from redrive.errors import InvalidSpecError, RedriveError
from redrive.policy.naming import SYSTEM_TOPIC, TopicName, check_subscription

PLUGIN = "pulsar.client.authPluginClassName"
PARAMETERS = "pulsar.client.authParams"
TRUSTED = "pulsar.client.tlsTrustCertsFilePath"


def authentication_of_options(options: Mapping[str, str]) -> SourceAuthentication:
    """Parse the authentication options.

    Raises:
        InvalidSpecError: they are invalid or contradict each other.
    """
    trusted, text = options.get(TRUSTED), options.get(PARAMETERS, "")
    written = options.get(PLUGIN)
    if written is None:
        if text:
            raise _invalid(f"{PARAMETERS} requires {PLUGIN}", f"set {PLUGIN}, too")
        return SourceAuthentication(trusted=trusted)
    try:
        plugin = Plugin(written.rpartition(".")[2])
    except ValueError:
        raise InvalidSpecError(
            f"{PLUGIN} is unknown", got=written, remedy=f"use one of {', '.join(Plugin)}"
        ) from None
    if plugin is Plugin.TOKEN:
        return _token(text, trusted)
    if plugin is Plugin.TLS:
        return _tls(text, trusted)
    if plugin is Plugin.OAUTH2:
        return _oauth2(text, trusted)
    return SourceAuthentication(trusted=trusted)


def _token(text: str, trusted: str | None) -> SourceAuthentication:
    if text.startswith("file:"):
        return SourceAuthentication(Plugin.TOKEN, None, {"token": _path(text)}, {}, trusted)
    before, marked, token = text.partition("token:")
    if before or not marked or not token.strip() or not token.strip().isascii():
        raise _invalid(
            f"{PARAMETERS} of a token must be token:… or file:///…",
            "write token: before the token, so that Spark redacts it; or better, use a file",
        )
    return SourceAuthentication(Plugin.TOKEN, token, {}, {}, trusted)


def _tls(text: str, trusted: str | None) -> SourceAuthentication:
    names = {"tlsCertFile": "certificate", "tlsKeyFile": "key"}
    parts = dict(part.strip().partition(":")[::2] for part in text.split(","))
    if set(parts) != set(names) or not all(parts.values()):
        raise _invalid(
            f"{PARAMETERS} of TLS must be tlsCertFile:PATH,tlsKeyFile:PATH",
            "set the files of the certificate and of its key",
        )
    files = {names[name]: path.removeprefix("//") for name, path in parts.items()}
    return SourceAuthentication(Plugin.TLS, None, files, {}, trusted)


def _oauth2(text: str, trusted: str | None) -> SourceAuthentication:
    try:
        parts: dict[str, Any] = json.loads(text)
        kind, key = parts.pop("type", "client_credentials"), parts.pop("privateKey")
        fits = kind == "client_credentials" and str(key).startswith("file:")
        fits = fits and "issuerUrl" in parts and set(parts) <= {"issuerUrl", "audience", "scope"}
    except (ValueError, AttributeError, KeyError, TypeError):
        fits = False
    if not fits:
        raise _invalid(
            f"{PARAMETERS} of OAuth 2.0 must be JSON with issuerUrl and privateKey, and optionally "
            "type, audience and scope",
            'write {"issuerUrl": "https://…", "privateKey": "file:///…"}: the client\'s secret '
            "must be in a file",
        )
    issuer = {name: str(value) for name, value in parts.items()}
    return SourceAuthentication(Plugin.OAUTH2, None, {"client": _path(str(key))}, issuer, trusted)


def _path(url: str) -> str:
    return url.removeprefix("file:").removeprefix("//")


def _invalid(problem: str, remedy: str) -> InvalidSpecError:
    return InvalidSpecError(problem, remedy=remedy)


COLUMN_NAMES = (
    "value", "__key", "__topic", "__messageId", "__publishTime", "__eventTime",
    "__messageProperties",
)  # fmt: skip
"""Default columns of a read."""
MORE_COLUMN_NAMES = (
    "__partition", "__ledger", "__entry", "__batchIndex", "__encrypted", "__oversized",
)  # fmt: skip
"""Columns that must be listed in `columns`."""

_CONNECTION = (
    "service.url",
    "admin.url",
    PLUGIN,
    PARAMETERS,
    TRUSTED,
)
_TOPICS = ("topic", "topics", "topicsPattern")
_DERIVED = "includeDerivedTopics"
_READ = (*_CONNECTION, *_TOPICS, _DERIVED, "startingOffsets", "failOnDataLoss", "columns")
BATCH_OPTIONS = (*_READ, "endingOffsets")
STREAM_OPTIONS = (*_READ, "maxBytesPerTrigger", "predefinedSubscription")
WRITE_OPTIONS = (*_CONNECTION, "topic")
_SHORT = re.compile(r"[^/]+")


@dataclass(frozen=True)
class SourceConnection:
    """Addresses of the broker, and authentication.

    Attributes:
        admin_url: None uses the binary protocol only.
    """

    service_url: str
    admin_url: str | None
    authentication: SourceAuthentication


@dataclass(frozen=True)
class TopicSelection:
    """Selection of topics to read.

    Attributes:
        names: topics, or single partitions.
        pattern: pattern of topics in one namespace, without partitions; None uses *names*.
        namespace: namespace of the pattern, `tenant/namespace`.
        derived: True includes retry topics, dead-letter topics and topics beside them.
    """

    names: tuple[TopicName, ...] = ()
    pattern: re.Pattern[str] | None = None
    namespace: str = ""
    derived: bool = False


@dataclass(frozen=True)
class ReadOptions:
    """Options of a read.

    Attributes:
        starting: text of `startingOffsets`, see `slices`; None if it was left out.
        ending: text of `endingOffsets`, likewise.
        max_bytes: approximate maximum bytes of a batch of a stream; None for no limit.
        subscription: subscription that acknowledges processed messages; None for none.
    """

    connection: SourceConnection
    topics: TopicSelection
    columns: tuple[str, ...]
    starting: str | None
    ending: str | None
    fail_on_data_loss: bool
    max_bytes: int | None = None
    subscription: str | None = None


@dataclass(frozen=True)
class WriteOptions:
    """Options of a write.

    Attributes:
        topic: None if each row has its own.
    """

    connection: SourceConnection
    topic: TopicName | None


def write_options(options: Mapping[str, str]) -> WriteOptions:
    """Parse the options of a write.

    Raises:
        RedriveError: an option is unknown, missing or invalid.
    """
    options = _named(options, WRITE_OPTIONS)
    topic = options.get("topic")
    return WriteOptions(_connection(options), None if topic is None else written_topic(topic))


def read_options(options: Mapping[str, str], names: Collection[str]) -> ReadOptions:
    """Parse the options of a read; *names* are the allowed ones.

    Raises:
        InvalidSpecError: an option is unknown, missing or invalid.
    """
    options = _named(options, names)
    connection = _connection(options)
    topics = _topics(options)
    if topics.pattern is not None and connection.admin_url is None:
        raise InvalidSpecError(
            "topicsPattern requires admin.url, because only the admin API lists topics",
            got=topics.pattern.pattern,
            remedy="set admin.url, or list the topics in `topics`",
        )
    subscription = options.get("predefinedSubscription")
    return ReadOptions(
        connection,
        topics,
        _columns(options.get("columns")),
        options.get("startingOffsets"),
        options.get("endingOffsets"),
        _boolean("failOnDataLoss", options.get("failOnDataLoss", "true")),
        _max_bytes(options.get("maxBytesPerTrigger"), connection),
        None if subscription is None else check_subscription(subscription),
    )


def _named(options: Mapping[str, str], allowed: Collection[str]) -> dict[str, str]:
    """Return the options under their documented names."""
    names = {name.lower(): name for name in allowed}
    for name in options:
        if name.lower() not in names:
            near = difflib.get_close_matches(name.lower(), names, n=1)
            hint = f"did you mean {names[near[0]]}? " if near else ""
            raise InvalidSpecError(
                "unknown option of the data source pulsar",
                got=name,  # not its value, which may be a secret
                remedy=f"{hint}Known are {', '.join(sorted(allowed))}",
            )
    return {names[name.lower()]: value for name, value in options.items()}


def _connection(options: Mapping[str, str]) -> SourceConnection:
    url = options.get("service.url", "")
    if not re.match(r"pulsar(\+ssl)?://.", url):
        raise InvalidSpecError(
            "service.url must be an address of Pulsar",
            got=url,
            remedy="set it to an address such as pulsar://pulsar:6650 or pulsar+ssl://pulsar:6651",
        )
    admin = options.get("admin.url")
    if admin is not None and not re.match(r"https?://.", admin):
        raise InvalidSpecError(
            "admin.url must be an HTTP address",
            got=admin,
            remedy="set it to an address such as http://pulsar:8080, or leave it out",
        )
    return SourceConnection(url, admin, authentication_of_options(options))


def _topics(options: Mapping[str, str]) -> TopicSelection:
    present = [name for name in _TOPICS if name in options]
    if len(present) != 1:
        raise InvalidSpecError(
            "exactly one of topic, topics and topicsPattern must be set",
            got=present,
            remedy="set one of them",
        )
    text = options[present[0]]
    derived = options.get(_DERIVED)
    if present[0] == "topicsPattern":
        return _pattern(text, derived=_boolean(_DERIVED, derived or "false"))
    if derived is not None:
        raise InvalidSpecError(
            f"{_DERIVED} can only be used with topicsPattern; {present[0]} reads all its topics",
            got=derived,
            remedy="leave it out",
        )
    names = [text] if present[0] == "topic" else text.split(",")
    return TopicSelection(tuple(dict.fromkeys(topic_name(name.strip()) for name in names)))


def topic_name(text: str) -> TopicName:
    """Parse the name of a topic; a short name is in `public/default`, as in clients.

    Raises:
        InvalidSpecError: it is invalid.
    """
    prefix = "persistent://public/default/" if _SHORT.fullmatch(text) else ""
    return TopicName.parse(f"{prefix}{text}")


def written_topic(text: str) -> TopicName:
    """Parse the name of a topic, or partition, to write to.

    Raises:
        InvalidSpecError: it is invalid, or a system topic.
    """
    topic = topic_name(text)
    if topic.is_system:
        raise InvalidSpecError(SYSTEM_TOPIC, got=text[:128], remedy="use a topic of an application")
    return topic


def _pattern(text: str, *, derived: bool) -> TopicSelection:
    """Parse a pattern; tenant and namespace are literal, because the broker lists one namespace."""
    whole = text if "://" in text else f"persistent://public/default/{text}"
    if whole.count("://") > 1:
        raise InvalidSpecError(
            "topicsPattern must be for one namespace, because only its topics are listed",
            got=text,
            remedy="read each namespace by a query of its own, and use union(…)",
        )
    parts = whole.split("/", 4)
    try:
        namespace = TopicName.parse("/".join([*parts[:4], "any"])).namespace_name
        return TopicSelection((), re.compile(whole), namespace, derived)
    except (RedriveError, re.error) as error:
        raise InvalidSpecError(
            "topicsPattern must be persistent://tenant/namespace/ and a regular expression",
            got=text,
            remedy=f"correct it ({error})",
        ) from None


def _columns(text: str | None) -> tuple[str, ...]:
    if text is None:
        return COLUMN_NAMES
    names = {name.lower(): name for name in (*COLUMN_NAMES, *MORE_COLUMN_NAMES)}
    columns = [name.strip() for name in text.split(",")]
    unknown = [name for name in columns if name.lower() not in names]
    if unknown or len(set(map(str.lower, columns))) < len(columns):
        raise InvalidSpecError(
            "option columns has an unknown or duplicate column",
            got=unknown or columns,
            remedy=f"choose from {', '.join(names.values())}",
        )
    return tuple(names[name.lower()] for name in columns)


def _max_bytes(text: str | None, connection: SourceConnection) -> int | None:
    if text is None:
        return None
    if not text.isdecimal() or int(text) == 0 or connection.admin_url is None:
        raise InvalidSpecError(
            "maxBytesPerTrigger must be a positive number of bytes, and requires admin.url: only "
            "the admin API returns the backlog",
            got=text,
            remedy="set a positive number, and admin.url",
        )
    return int(text)


def _boolean(name: str, text: str) -> bool:
    if text.lower() not in {"true", "false"}:
        raise InvalidSpecError(f"{name} must be true or false", got=text, remedy="correct it")
    return text.lower() == "true"
