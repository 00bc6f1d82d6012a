"""Options of the data source, in the words of Pulsar's client.

The options of a read or a write, as users of the JVM connector for Pulsar know them. Pure.

Spark hands over names in lower case, and compares them without regard to it.
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


class InvalidAuthenticationError(RedriveError):
    """The options do not say how to authenticate; what they say is never shown."""

    reason = "InvalidAuthentication"


def authentication_of_options(options: Mapping[str, str]) -> SourceAuthentication:
    """Read the options that are about it.

    Raises:
        InvalidAuthenticationError: they don't fit together.
    """
    trusted, text = options.get(TRUSTED), options.get(PARAMETERS, "")
    written = options.get(PLUGIN)
    if written is None:
        if text:
            raise _invalid(f"{PARAMETERS} is given without {PLUGIN}", f"give {PLUGIN} too")
        return SourceAuthentication(trusted=trusted)
    try:
        plugin = Plugin(written.rpartition(".")[2])
    except ValueError:
        raise InvalidAuthenticationError(
            f"{PLUGIN} is an unknown one", got=written, remedy=f"use one of {', '.join(Plugin)}"
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
    _, marked, token = text.partition("token:")
    if (
        not marked
        or text.partition("token:")[0]
        or not token.strip().isascii()
        or not token.strip()
    ):
        raise _invalid(
            f"{PARAMETERS} of a token is neither token:… nor file:///…",
            "write token: before the token, by which Spark redacts it; better, name a file",
        )
    return SourceAuthentication(Plugin.TOKEN, token, {}, {}, trusted)


def _tls(text: str, trusted: str | None) -> SourceAuthentication:
    names = {"tlsCertFile": "certificate", "tlsKeyFile": "key"}
    parts = dict(part.strip().partition(":")[::2] for part in text.split(","))
    if set(parts) != set(names) or not all(parts.values()):
        raise _invalid(
            f"{PARAMETERS} of TLS is not tlsCertFile:PATH,tlsKeyFile:PATH",
            "name the files of the certificate and of its key",
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
            f"{PARAMETERS} of OAuth 2.0 is not JSON with issuerUrl and privateKey, and if needed "
            "type, audience and scope",
            'write {"issuerUrl": "https://…", "privateKey": "file:///…"}: the client\'s secret '
            "stands in a file only",
        )
    issuer = {name: str(value) for name, value in parts.items()}
    return SourceAuthentication(Plugin.OAUTH2, None, {"client": _path(str(key))}, issuer, trusted)


def _path(url: str) -> str:
    return url.removeprefix("file:").removeprefix("//")


def _invalid(problem: str, remedy: str) -> InvalidAuthenticationError:
    return InvalidAuthenticationError(problem, remedy=remedy)


COLUMN_NAMES = (
    "value", "__key", "__topic", "__messageId", "__publishTime", "__eventTime",
    "__messageProperties",
)  # fmt: skip
"""The columns of a read that names none."""
MORE_COLUMN_NAMES = ("__partition", "__ledger", "__entry", "__batchIndex", "__encrypted")
"""Columns to be named in `columns`."""

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


class InvalidOptionError(RedriveError):
    """An option of the data source is not what it can be."""

    reason = "InvalidOption"


@dataclass(frozen=True)
class SourceConnection:
    """The broker, and who to be there.

    Attributes:
        admin_url: None where only the binary protocol is to be used.
    """

    service_url: str
    admin_url: str | None
    authentication: SourceAuthentication


@dataclass(frozen=True)
class TopicSelection:
    """Which topics to read.

    Attributes:
        names: each may be one partition.
        pattern: of topics without their partitions, in one namespace; None for *names* alone.
        namespace: that of the pattern, `tenant/namespace`.
        derived: the pattern matches retry topics, dead-letter topics and those beside them, too.
    """

    names: tuple[TopicName, ...] = ()
    pattern: re.Pattern[str] | None = None
    namespace: str = ""
    derived: bool = False


@dataclass(frozen=True)
class ReadOptions:
    """All that is said about a read.

    Attributes:
        starting: as written, see `offsets`; None where it was left out. Likewise *ending*.
        max_bytes: about how many a batch of a stream reads; None for all there is.
        subscription: what has been processed is acknowledged there; None for nowhere.
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
    """All that is said about a write.

    Attributes:
        topic: None where each row names its own.
    """

    connection: SourceConnection
    topic: TopicName | None


def write_options(given: Mapping[str, str]) -> WriteOptions:
    """Read the options of a write.

    Raises:
        RedriveError: one is unknown, missing, or not what it can be.
    """
    options = _named(given, WRITE_OPTIONS)
    topic = options.get("topic")
    return WriteOptions(_connection(options), None if topic is None else written_topic(topic))


def read_options(given: Mapping[str, str], known: Collection[str]) -> ReadOptions:
    """Read the options of a read, of which those in *known* exist.

    Raises:
        InvalidOptionError: one is unknown, missing, or not what it can be.
    """
    options = _named(given, known)
    connection = _connection(options)
    topics = _topics(options)
    if topics.pattern is not None and connection.admin_url is None:
        raise InvalidOptionError(
            "topicsPattern needs admin.url, as only the admin API lists topics",
            got=topics.pattern.pattern,
            remedy="give admin.url, or name the topics in `topics`",
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


def _named(given: Mapping[str, str], known: Collection[str]) -> dict[str, str]:
    """Return the options under the names that the documentation has for them."""
    names = {name.lower(): name for name in known}
    for name in given:
        if name.lower() not in names:
            near = difflib.get_close_matches(name.lower(), names, n=1)
            hint = f"did you mean {names[near[0]]}? " if near else ""
            raise InvalidOptionError(
                "the data source pulsar has no such option here",
                got=name,  # not its value, which may be a secret
                remedy=f"{hint}Known are {', '.join(sorted(known))}",
            )
    return {names[name.lower()]: value for name, value in given.items()}


def _connection(options: Mapping[str, str]) -> SourceConnection:
    url = options.get("service.url", "")
    if not re.match(r"pulsar(\+ssl)?://.", url):
        raise InvalidOptionError(
            "service.url is missing, or not one of Pulsar",
            got=url,
            remedy="give the broker's, such as pulsar://pulsar:6650 or pulsar+ssl://pulsar:6651",
        )
    admin = options.get("admin.url")
    if admin is not None and not re.match(r"https?://.", admin):
        raise InvalidOptionError(
            "admin.url is not one of HTTP",
            got=admin,
            remedy="give the address of the admin API, such as http://pulsar:8080, or leave it out",
        )
    return SourceConnection(url, admin, authentication_of_options(options))


def _topics(options: Mapping[str, str]) -> TopicSelection:
    given = [name for name in _TOPICS if name in options]
    if len(given) != 1:
        raise InvalidOptionError(
            "exactly one of topic, topics and topicsPattern says what to read",
            got=given,
            remedy="give one of them",
        )
    text = options[given[0]]
    derived = options.get(_DERIVED)
    if given[0] == "topicsPattern":
        return _pattern(text, derived=_boolean(_DERIVED, derived or "false"))
    if derived is not None:
        raise InvalidOptionError(
            f"{_DERIVED} concerns topicsPattern only; {given[0]} reads each topic that it names",
            got=derived,
            remedy="leave it out",
        )
    names = [text] if given[0] == "topic" else text.split(",")
    return TopicSelection(tuple(dict.fromkeys(topic_name(name.strip()) for name in names)))


def topic_name(text: str) -> TopicName:
    """Read the name of a topic; a short one, as clients take it, is of `public/default`.

    Raises:
        InvalidSpecError: it is none.
    """
    return TopicName.parse(f"persistent://public/default/{text}" if _is_short(text) else text)


def written_topic(text: str) -> TopicName:
    """Read the name of a topic to write to, which may name one partition.

    Raises:
        InvalidSpecError: it is none, or is a topic of Pulsar's own.
    """
    topic = topic_name(text)
    if topic.is_system:
        raise InvalidSpecError(
            SYSTEM_TOPIC, got=text[:128], remedy="name a topic of an application"
        )
    return topic


def _is_short(text: str) -> bool:
    return _SHORT.fullmatch(text) is not None


def _pattern(text: str, *, derived: bool) -> TopicSelection:
    """Read a pattern; its tenant and namespace are no patterns, as the broker lists one."""
    whole = text if "://" in text else f"persistent://public/default/{text}"
    parts = whole.split("/", 4)
    try:
        namespace = TopicName.parse("/".join([*parts[:4], "any"])).namespace_name
        return TopicSelection((), re.compile(whole), namespace, derived)
    except (RedriveError, re.error) as error:
        raise InvalidOptionError(
            "topicsPattern is persistent://tenant/namespace/ and a regular expression for the rest",
            got=text,
            remedy=f"correct it ({error})",
        ) from None


def _columns(text: str | None) -> tuple[str, ...]:
    if text is None:
        return COLUMN_NAMES
    known = {name.lower(): name for name in (*COLUMN_NAMES, *MORE_COLUMN_NAMES)}
    asked = [name.strip() for name in text.split(",")]
    unknown = [name for name in asked if name.lower() not in known]
    if unknown or len(set(map(str.lower, asked))) < len(asked):
        raise InvalidOptionError(
            "columns names columns that there are not, or one twice",
            got=unknown or asked,
            remedy=f"choose from {', '.join(known.values())}",
        )
    return tuple(known[name.lower()] for name in asked)


def _max_bytes(text: str | None, connection: SourceConnection) -> int | None:
    if text is None:
        return None
    if not text.isdecimal() or int(text) == 0 or connection.admin_url is None:
        raise InvalidOptionError(
            "maxBytesPerTrigger is a number of bytes, and needs admin.url: only the admin API "
            "tells how many bytes wait",
            got=text,
            remedy="give a positive number, and admin.url",
        )
    return int(text)


def _boolean(name: str, text: str) -> bool:
    if text.lower() not in {"true", "false"}:
        raise InvalidOptionError(f"{name} is neither true nor false", got=text, remedy="give one")
    return text.lower() == "true"
