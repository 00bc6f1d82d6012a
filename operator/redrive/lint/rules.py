"""Rules of `redrive lint`: their stable names, severities and meanings.

A rule that the operator checks as well has the name of the operator's reason: `TopicNotAllowed` of
a condition is `topic-not-allowed` here. `docs/reference/lint-rules.md` is generated from this
table.
"""

from __future__ import annotations

import difflib
import enum
import re
from collections.abc import Iterable
from dataclasses import dataclass

from redrive.errors import RedriveError
from redrive.lint.manifests import FieldPath, Manifest, Place, shown


class Severity(enum.StrEnum):
    """Severity of a rule: an error would be refused, a warning works but is rarely meant."""

    ERROR = "error"
    WARNING = "warning"


ERROR, WARNING = Severity


class LintRule(enum.Enum):
    """A rule: its severity and its meaning, which may name an example."""

    # fmt: off
    YAML_SYNTAX = ERROR, "A document that names redrive can't be read as YAML."
    DUPLICATE_KEY = ERROR, "An object has a key twice; only one of the values counts."
    API_VERSION = ERROR, "`apiVersion` is not the version of redrive's kinds."
    UNKNOWN_KIND = ERROR, "redrive has no kind of this name."
    OBJECT_NAME = (ERROR,
        "`metadata.name` is missing, malformed, too long, or not the one that the kind requires.")
    DUPLICATE_OBJECT = ERROR, "Two manifests are for the same object."
    UNKNOWN_FIELD = ERROR, "The kind has no field of this name; a near name is suggested."
    UNKNOWN_ANNOTATION = WARNING, "An annotation has nearly the name of one that redrive reads."
    ANNOTATION_VALUE = WARNING, "An annotation has a value without effect."
    MISSING_FIELD = ERROR, "A required field is missing."
    INVALID_TYPE = (ERROR,
        "A value has another type than its field, such as a number in quotes, or is empty.")
    INVALID_VALUE = ERROR, "A value is out of bounds, or is not one of those permitted."
    DUPLICATE_ITEM = ERROR, "A list that is a set contains a value twice."
    CONTRADICTION = ERROR, "Fields of one object exclude each other."
    SELECT_COLUMN = ERROR, "`select.where` names an unknown column."
    SELECT_SYNTAX = ERROR, "`select.where` is not a condition that redrive runs."
    CONNECTION_NOT_FOUND = (WARNING,
        "`connectionRef` names no BrokerConnection of these manifests, but nearly one.")
    POLICY_NOT_FOUND = (WARNING,
        "`policyRef` names no policy of these manifests, but nearly one.")
    OTHER_BROKER = ERROR, "A connection, a policy or a field is for another kind of broker."
    NAMESPACE_NOT_ALLOWED = (ERROR,
        "No rule of the connection's `allow` is for the namespace of the policy.")
    TOPIC_NOT_ALLOWED = (ERROR,
        "The connection does not allow the source topic, or a topic derived from it.")
    GROUP_NOT_ALLOWED = ERROR, "The connection does not allow the group of RocketMQ, or its topic."
    ROLE_NOT_ALLOWED = ERROR, "The connection does not allow a role of the policy."
    DELETION_NOT_ALLOWED = ERROR, "The connection does not allow to delete the topics or the group."
    LIMIT_EXCEEDED = ERROR, "The policy exceeds a limit of its connection."
    RESOURCE_CONFLICT = (ERROR,
        "Two policies are for the same subscription of the same topic, or for one group.")
    CONFIG_MAP_NOT_OURS = ERROR, "Two policies of a namespace have one ConfigMap."
    NAME_COLLISION = ERROR, "Two policies need a topic of the same name."
    CHAINED_POLICY = ERROR, "The source topic is a retry or dead-letter topic of another policy."
    LADDER_DESCENDS = WARNING, "A later retry waits a shorter time than one before it."
    LADDER_UNUSED = WARNING, "The ladder has more delays than the policy has retries."
    UNUSED_FIELD = (WARNING,
        "A field has no effect beside another, such as a TTL of dead letters that are discarded.")
    DEAD_LETTERS_DISCARDED = (ERROR,
        "A Replay or an Inspection is of a policy that keeps no dead letters.")
    REPLAY_IDENTITY_MISSING = (ERROR,
        "A Replay is of a policy whose connection has no credentials for Replays.")
    INSPECTION_IDENTITY_MISSING = (ERROR,
        "An Inspection is of a policy whose connection has no credentials for Inspections.")
    TRUST_NOT_SUPPORTED = (ERROR,
        "The connection has certificate authorities of its own, and none for its jobs.")
    CONSENT_MISSING = (WARNING,
        "A Secret of jobs lacks the annotation `redrive.io/usable-by` for its connection.")
    TARGET_NOT_ALLOWED = ERROR, "The connection does not allow the target of a Replay."
    BATCH_MIXES_KEYS = ERROR, "A Replay sends batches to a topic that is read by key."
    JOB_NOT_PERMITTED = ERROR, "The connection does not permit the job template."
    REPLAY_NOT_SAFE = (ERROR,
        "The policy excludes Replays, or requires a confirmation that the Replay lacks.")
    STARTED_TOO_LATE = (WARNING,
        "`startBefore` is in the past: a Replay that was not launched then moves nothing.")
    RETRIES_NOT_INSPECTED = ERROR, "The connection does not permit to inspect waiting retries."
    CLEAR_TEXT_NOT_PERMITTED = ERROR, "The connection does not permit Inspections in clear text."
    DESTINATION_NOT_FOUND = ERROR, "The connection names no such destination for files."
    AUTHOR_FIELD_MISSING = ERROR, "A Replay lacks a reason or ticket that its connection requires."
    UNKNOWN_RULE = WARNING, "A comment disables a rule that does not exist."
    # fmt: on

    def __init__(self, severity: Severity, meaning: str) -> None:
        self.severity = severity
        self.meaning = meaning

    @property
    def id(self) -> str:
        """Return the stable name."""
        return self.name.lower().replace("_", "-")

    @classmethod
    def of(cls, error: RedriveError) -> LintRule:
        """Return the rule that the operator's *error* breaks, by its reason."""
        return cls[re.sub(r"(?<!^)(?=[A-Z])", "_", error.reason).upper()]


IDS = frozenset(rule.id for rule in LintRule)
_NEAR = 0.75
"""Similarity of two names that may be the same one, misspelled."""


@dataclass(frozen=True)
class Finding:
    """One broken rule.

    Attributes:
        field: path of the field, as in `spec.select.where`; empty for a whole document.
        message: problem, value and remedy.
        title: kind, namespace and name of the object; empty where it has none.
        related: positions of other fields that take part.
    """

    rule: LintRule
    position: Place
    field: str
    message: str
    title: str = ""
    related: tuple[Place, ...] = ()


def finding_at(  # noqa: PLR0913  position and texts of one finding
    manifest: Manifest,
    rule: LintRule,
    path: FieldPath,
    message: str,
    *,
    at_key: bool = False,
    related: tuple[Manifest, FieldPath] | None = None,
) -> Finding:
    """Return the finding that *rule* is broken by the field at *path*."""
    position = manifest.key_position(path) if at_key else manifest.position(path)
    others = () if related is None else (related[0].position(related[1]),)
    return Finding(rule, position, shown(path), message, manifest.title, others)


def suggestion(name: str, names: Iterable[str]) -> str:
    """Return the remedy for an unknown *name*: the nearest of *names*, else all of them."""
    near = nearest(name, names)
    return f"did you mean {near}?" if near else f"use one of {', '.join(sorted(names))}"


def nearest(name: str, names: Iterable[str], cutoff: float = _NEAR) -> str:
    """Return the most similar of *names*, whatever its case; empty where none is similar."""
    by_form = {other.lower(): other for other in sorted(names)}
    matches = difflib.get_close_matches(name.lower(), by_form, n=1, cutoff=cutoff)
    return by_form[matches[0]] if matches else ""


def concerned(manifest: Manifest, path: FieldPath, text: str) -> FieldPath:
    """Return the field at or below *path* that the message *text* is about.

    It is the one whose value the message shows, else the first one that it names by its path, else
    one that its remedy names, else *path*.
    """
    names: dict[str, FieldPath] = {}
    for field, value in manifest.scalars(path):
        if f"got {value!r}" in text:
            return field
        for depth in range(len(path) + 1, len(field) + 1):
            if isinstance(field[depth - 1], str):
                names.setdefault(shown(field[:depth]), field[:depth])
                names.setdefault(shown(field[len(path) : depth]), field[:depth])
                names.setdefault(str(field[depth - 1]), field[:depth])
    remedy = text.rpartition("; ")[2]
    paths = re.findall(r"`([\w.]+)`|\b(spec[.][\w.]*\w)", text)
    words = [*(quoted or dotted for quoted, dotted in paths), *re.findall(r"[\w.]*\w", remedy)]
    return next((names[word] for word in words if word in names), path)
