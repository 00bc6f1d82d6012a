"""Argument of a replay job, and the selection of dead letters.

`ReplayJob` is the one argument that the operator passes to a replay job. It contains no secret,
because arguments are visible in process lists and in the Spark UI. Driver and executors mount the
credentials of the replay role as files, which `BrokerAccess` in the environment variable
`ACCESS_VARIABLE` describes.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple, TypeVar

from pydantic import Field, PlainSerializer, PlainValidator, TypeAdapter

from redrive.api.replay import MessageSelection, milliseconds
from redrive.api.rocketmq import RocketMQMessages
from redrive.auth.method import without_dollars
from redrive.errors import InvalidSpecError
from redrive.policy import codec
from redrive.policy.envelope import CAUSE_FINGERPRINT, CAUSE_TYPE, MAX_CAUSE
from redrive.policy.model import Policy
from redrive.policy.naming import TopicName
from redrive.policy.verdict import DeadReason
from redrive.reading import bitmap
from redrive.reading.positions import EntryId, Position
from redrive.reading.ranges import Range

MESSAGES_PER_SECOND = 2_000
"""Minimum messages per second of one task on an idle broker, for estimates."""


@dataclass(frozen=True)
class Choice:
    """Selection of dead letters without SQL. A message has to match all criteria.

    Attributes:
        ids: ids `ledger:entry`, optionally with `:partition` and `:index`; empty matches all.
        keys: ordering keys or keys; empty matches all.
        since: earliest publish time in milliseconds since 1970; None for no limit.
        until: publish time in milliseconds before which messages match; None for no limit.
        limit: maximum number of messages, the first ones.
        max_replays: number of replays from which selected messages are refused; None for no limit.
        discards: True to acknowledge selected entries that no client can show, without a move.
        settles_unproven: True to acknowledge selected messages that may have been moved before,
            without a move.
        causes: causes, of which the first `MAX_CAUSE` characters count; empty matches all.
        fingerprints: fingerprints of causes; empty matches all.
    """

    ids: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()
    since: int | None = None
    until: int | None = None
    limit: int | None = None
    max_replays: int | None = None
    discards: bool = False
    settles_unproven: bool = False
    causes: tuple[str, ...] = ()
    fingerprints: tuple[str, ...] = ()

    @classmethod
    def of(cls, select: MessageSelection, **others: Any) -> Choice:  # noqa: ANN401  other attributes
        """Return the choice of the fields of *select*, and of *others*."""
        return cls(
            ids=select.ids or (),
            keys=select.keys or (),
            causes=select.causes or (),
            fingerprints=select.fingerprints or (),
            since=milliseconds(select.since),
            until=milliseconds(select.until),
            **others,
        )


_FINGERPRINT_DIGITS = 16
_FINGERPRINT = re.compile(rf"[0-9a-f]{{{_FINGERPRINT_DIGITS}}}")


class FailureCause(NamedTuple):
    """Cause of a dead letter; empty if its consumer did not record one.

    Attributes:
        cause: class of the exception, at most `MAX_CAUSE` characters.
        fingerprint: 16 hexadecimal digits, which are equal for failures of one kind.
    """

    cause: str = ""
    fingerprint: str = ""

    @staticmethod
    def of(properties: Mapping[str, str | None]) -> FailureCause:
        """Return the cause in the properties of a message, which any client may have written."""
        cause = properties.get(CAUSE_TYPE) or ""
        if len(cause) > MAX_CAUSE:
            cause = cause[:MAX_CAUSE]
        fingerprint = properties.get(CAUSE_FINGERPRINT) or ""
        if len(fingerprint) != _FINGERPRINT_DIGITS:
            fingerprint = ""
        return _failure(cause, fingerprint)


@functools.lru_cache(1_024)  # most messages have one of few causes
def _failure(cause: str, fingerprint: str) -> FailureCause:
    return FailureCause(cause, fingerprint if _FINGERPRINT.fullmatch(fingerprint) else "")


FOLLOWER = FailureCause(DeadReason.FOLLOWS.value)
"""In place of the cause of a message that follows a dead letter of its key, if that is unknown."""
EVERYTHING = Choice()


class PodSize(NamedTuple):
    """Size of the pod of engine Job.

    Attributes:
        cores: number of concurrent tasks.
        memory: memory in bytes.
    """

    cores: int
    memory: int


_Topic = Annotated[TopicName, PlainValidator(TopicName.parse_whole), PlainSerializer(str)]


@dataclass(frozen=True)
class ReplayJob:
    """One run.

    Attributes:
        namespace: namespace of the Replay.
        name: name of the Replay.
        uid: uid of the Replay, which identifies its runs.
        policy: policy of the dead letters.
        service_url: URL of the cluster.
        admin_url: URL of its admin API.
        where: SQL condition of the selection, as written by the author; None matches all.
        dry_run: True to only plan, or to audit.
        audited: targets to compare; empty except for an audit.
        review: True to show a plan, and wait until the Replay is confirmed and admitted.
        reason: reason that the author gave; may be empty.
        ticket: ticket that the author gave; may be empty.
        rate_limit: limit in messages per second of all tasks at the launch; None for no limit.
        choice: other criteria of the selection.
        approval_above: number of messages that may be moved without approval; None for no limit.
        target: target topic; None for the retry topic.
        exactly_once: see `Route`.
        follow_for: seconds for which the outcome of moved messages is tracked; None for none.
        batch: True to send messages in batches.
        pod: size of the pod of engine Job; None if Spark runs the job with executors.
    """

    namespace: str
    name: str
    uid: str
    policy: Annotated[Policy, PlainValidator(codec.decode), PlainSerializer(codec.encode)]
    service_url: str
    admin_url: str
    where: str | None
    dry_run: bool = False
    audited: tuple[_Topic, ...] = ()
    review: bool = False
    reason: str = ""
    ticket: str = ""
    rate_limit: float | None = None
    choice: Choice = EVERYTHING
    approval_above: int | None = None
    target: _Topic | None = None
    exactly_once: bool = True
    follow_for: float | None = None
    batch: bool = False
    pod: PodSize | None = None

    @property
    def is_fenced_by_ledger(self) -> bool:
        """Return True if the position of its record in the ledger orders the runs."""
        return not self.dry_run

    @property
    def destination(self) -> TopicName:
        """Return the target topic."""
        return self.target or self.policy.retry_topic

    @property
    def receiver(self) -> str:
        """Return the subscription that has to retain messages in the target; empty for any.

        In the retry topic and in the source topic it is the policy's. The subscriptions of other
        applications do not replace it: they have handled the messages, or never received them.
        """
        own = self.policy.topic, self.policy.retry_topic
        return self.policy.subscription if self.destination in own else ""

    def encode(self) -> str:
        """Return the job as JSON. Equal jobs have equal texts.

        The text is ASCII, because Java passes no other characters as arguments in a container with
        locale C. It contains no dollar sign, because a kubelet replaces `$(NAME)` in arguments by
        the value of a variable, which may be a Secret, and any user may write a selection.
        """
        return encode_argument(self, _RUN_JOB)

    @classmethod
    def decode(cls, text: str) -> ReplayJob:
        """Parse the text of `encode`.

        Raises:
            InvalidSpecError: the text has another form.
        """
        return decode_argument(text, _REPLAY_JOB)


@dataclass(frozen=True)
class QueueReplayJob:
    """One run of a RocketMQRetryPolicy; `ReplayJob` describes the attributes that both have.

    Attributes:
        source: address of the dead-letter topic.
        ledger: topic with the records of Replays.
        target: target topic.
        retry_of: source topic of messages in a retry topic; empty for another target.
    """

    namespace: str
    name: str
    uid: str
    source: RocketMQMessages
    ledger: str
    target: str
    retry_of: str = ""
    where: str | None = None
    dry_run: bool = False
    rate_limit: float | None = None
    choice: Choice = EVERYTHING
    approval_above: int | None = None
    pod: PodSize | None = None
    review: bool = False

    is_fenced_by_ledger = False

    def encode(self) -> str:
        """Return the job as JSON, see `ReplayJob.encode`."""
        return encode_argument(self, _RUN_JOB)


RunJob = ReplayJob | QueueReplayJob
"""One run, of a policy of any kind."""


def decode_job(text: str) -> RunJob:
    """Parse the text of `encode`.

    Raises:
        InvalidSpecError: the text has another form.
    """
    return decode_argument(text, _RUN_JOB)


_Job = TypeVar("_Job")
_REPLAY_JOB = TypeAdapter(ReplayJob)
_RUN_JOB = TypeAdapter[RunJob](
    Annotated[QueueReplayJob | ReplayJob, Field(union_mode="left_to_right")]
)


def encode_argument(job: object, kind: TypeAdapter[Any]) -> str:
    """Return the argument of a job, as JSON; see `ReplayJob.encode`."""
    return without_dollars(json.dumps(kind.dump_python(job, mode="json")))


def decode_argument(text: str, kind: TypeAdapter[_Job]) -> _Job:
    """Parse the text of `encode_argument`.

    Raises:
        InvalidSpecError: the text has another form.
    """
    try:
        return kind.validate_json(text)
    except ValueError as error:
        raise InvalidSpecError(
            "the argument of the job can't be read",
            got=repr(error),
            remedy="use an image of the operator's version; the operator starts jobs, not people",
        ) from error


class Chooser:
    """Evaluates a choice for single messages, without its limit.

    The partition of an id is ignored, because partitions share no ledgers of BookKeeper.

    Attributes:
        reads_keys: True if the choice depends on keys.
    """

    def __init__(self, choice: Choice) -> None:
        self._choice = choice
        lists = choice.ids, choice.keys, choice.causes, choice.fingerprints
        self._takes_all = not any(lists) and choice.since is None and choice.until is None
        self.reads_keys = bool(choice.keys)
        self._keys = frozenset(choice.keys)
        self._causes = frozenset(cause[:MAX_CAUSE] for cause in choice.causes)
        self._fingerprints = frozenset(choice.fingerprints)
        # Indexes of messages that ids name, by entry; -1 for all.
        self._named: dict[EntryId, set[int]] = {}
        for written in choice.ids:
            ledger, entry, _, index, *_ = (*map(int, written.split(":")), -1, -1)
            self._named.setdefault(EntryId(ledger, entry), set()).add(max(-1, index))

    def entries(self, source_range: Range) -> int:
        """Return a bitmap of the entries of a range that have to be read."""
        if not self._named:
            return bitmap.span(0, source_range.size - 1)
        named = (entry for entry in self._named if source_range.holds(Position(*entry, 0)))
        return bitmap.of((entry.entry - source_range.first for entry in named), source_range.size)

    def takes_undelivered(self, position: Position) -> bool | None:
        """Return True if an entry with unknown content is selected; None if this depends on it."""
        if not self._is_named(position):
            return False
        choice = self._choice
        by_content = (choice.keys, choice.causes, choice.fingerprints)
        is_known = not any(by_content) and choice.since is None and choice.until is None
        return True if is_known else None

    def takes(
        self,
        position: Position,
        keys: tuple[str | None, ...],
        published: int,
        failure: FailureCause,
    ) -> bool:
        """Return True if a message is selected.

        Args:
            position: its position.
            keys: its ordering key and its key.
            published: its publish time, in milliseconds since 1970.
            failure: cause of its last failure.
        """
        choice = self._choice
        return self._takes_all or (
            self._is_named(position)
            and (not self._keys or not self._keys.isdisjoint(keys))
            and (not self._causes or failure.cause in self._causes)
            and (not self._fingerprints or failure.fingerprint in self._fingerprints)
            and (choice.since is None or published >= choice.since)
            and (choice.until is None or published < choice.until)
        )

    def _is_named(self, position: Position) -> bool:
        if not self._named:
            return True
        indexes = self._named.get(position.entry_id, set[int]())
        return not indexes.isdisjoint({-1, position.batch_index})
