"""A replay job as one argument, and the choice of dead letters. Pure.

`ReplayJob`: all that the operator tells a replay job, as its one argument. Pure.

It holds no secret: arguments show in process lists and in the Spark UI. The credentials of the
replay role are files that driver and executors mount. `BrokerAccess`, in the environment variable
`ACCESS_VARIABLE`, says which, so that each process of a job knows.

A `Choice` → which messages it takes, and which entries need not be read. Pure.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import NamedTuple

from redrive.auth.method import without_dollars
from redrive.errors import InvalidSpecError
from redrive.policy import codec
from redrive.policy.envelope import MAX_CAUSE
from redrive.policy.model import Policy
from redrive.policy.naming import TopicName
from redrive.reading import bitmap
from redrive.reading.positions import EntryId, Position
from redrive.reading.ranges import Range

MESSAGES_PER_SECOND = 2_000
"""The messages that one task of a job moves in a second at least, on a broker with nothing else to
do; estimates of a run's time count with it."""


@dataclass(frozen=True)
class Choice:
    """Which dead letters to take, besides by SQL: those for which all holds that is given.

    Attributes:
        ids: one of these, as `ledger:entry`, with `:partition` and `:index` or without; empty takes
            any, like *keys*.
        keys: with one of these.
        since: published then or later, in milliseconds since 1970; None takes any, like *until*.
        until: published before.
        limit: at most so many, the first ones.
        max_replays: of what is taken, a message that was replayed so often before is refused; None
            for any number.
        discards: whether to acknowledge, without moving it, what is taken and no client can show.
        settles_unproven: whether to acknowledge, without moving it, what is taken and may have been
            moved before.
        causes: with one of these causes, of which the first `MAX_CAUSE` characters count.
        fingerprints: with a cause that has one of these fingerprints.
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


CHOICE_LISTS = ("ids", "keys", "causes", "fingerprints")
"""Attributes of a `Choice` that are lists in JSON."""


class FailureCause(NamedTuple):
    """Cause of a dead letter; empty where its consumer did not write one.

    Attributes:
        cause: class of the exception.
        fingerprint: the same for failures of one kind.
    """

    cause: str = ""
    fingerprint: str = ""


EVERYTHING = Choice()


class PodSize(NamedTuple):
    """Size of the one pod that runs a whole job.

    Attributes:
        cores: number of tasks at a time.
        memory: in bytes.
    """

    cores: int
    memory: int


@dataclass(frozen=True)
class ReplayJob:
    """One run.

    Attributes:
        namespace: that of the Replay.
        name: that of the Replay.
        uid: the Replay's; it makes a repeated run of this Replay known to the broker.
        where: the condition of the selection as its author wrote it; None is true for all.
        dry_run: whether to plan only.
        review: whether to show a plan, and to wait until the Replay is confirmed and admitted.
        reason: why, in the words of the Replay's author; empty if it gives none.
        ticket: where that was decided; likewise.
        rate_limit: messages a second that all tasks may send together, at the launch; None for no
            limit.
        batch: whether messages are sent in batches.
        choice: the other parts of the selection.
        approval_above: how many messages it may move without approval; None for any number.
        target: where to move them; None for the retry topic.
        exactly_once: see `Route`.
        follow_for: how many seconds to look at what becomes of what was moved; None for none.
        pod: of engine Job; None if Spark runs the job with executors.
    """

    namespace: str
    name: str
    uid: str
    policy: Policy
    service_url: str
    admin_url: str
    where: str | None
    dry_run: bool = False
    review: bool = False
    reason: str = ""
    ticket: str = ""
    rate_limit: float | None = None
    choice: Choice = EVERYTHING
    approval_above: int | None = None
    target: TopicName | None = None
    exactly_once: bool = True
    follow_for: float | None = None
    batch: bool = False
    pod: PodSize | None = None

    @property
    def destination(self) -> TopicName:
        """Return where dead letters are moved."""
        return self.target or self.policy.retry_topic

    def encode(self) -> str:
        """Write the job as JSON in ASCII; equal jobs give equal text.

        Java passes on no other character as an argument where the locale of a container is C.

        It holds no dollar sign: in a container's arguments a kubelet puts the value of a variable,
        of a Secret too, in the place of `$(NAME)`, and selections are written by anybody.
        """
        written = json.dumps(
            {
                "namespace": self.namespace,
                "name": self.name,
                "uid": self.uid,
                "policy": codec.encode(self.policy),
                "serviceURL": self.service_url,
                "adminURL": self.admin_url,
                "where": self.where,
                "dryRun": self.dry_run,
                "review": self.review,
                "reason": self.reason,
                "ticket": self.ticket,
                "rateLimit": self.rate_limit,
                "choice": asdict(self.choice),
                "approvalAbove": self.approval_above,
                "target": str(self.target) if self.target else None,
                "exactlyOnce": self.exactly_once,
                "followFor": self.follow_for,
                "batch": self.batch,
                "pod": self.pod,
            }
        )
        return without_dollars(written)

    @classmethod
    def decode(cls, text: str) -> ReplayJob:
        """Read what `encode` wrote.

        Raises:
            InvalidSpecError: *text* is something else.
        """
        try:
            document = json.loads(text)
            choice, target, pod = document["choice"], document["target"], document["pod"]
            lists = {name: tuple(choice[name]) for name in CHOICE_LISTS}
            return cls(
                namespace=document["namespace"],
                name=document["name"],
                uid=document["uid"],
                policy=codec.decode(document["policy"]),
                service_url=document["serviceURL"],
                admin_url=document["adminURL"],
                where=document["where"],
                dry_run=document["dryRun"],
                review=document["review"],
                reason=document["reason"],
                ticket=document["ticket"],
                rate_limit=document["rateLimit"],
                choice=Choice(**choice | lists),
                approval_above=document["approvalAbove"],
                target=TopicName.parse_whole(target) if target else None,
                exactly_once=document["exactlyOnce"],
                follow_for=document["followFor"],
                batch=document["batch"],
                pod=pod and PodSize(*pod),
            )
        except (ValueError, KeyError, TypeError) as error:
            raise InvalidSpecError(
                "a replay job takes one argument, the JSON document that the operator writes",
                got=repr(error),
                remedy="start it by a Replay; run the same version of operator and image",
            ) from error


class Chooser:
    """Tells what a choice takes, all but its limit, which is about many messages.

    The partition of an id says nothing: no two partitions share a ledger of BookKeeper.
    """

    def __init__(self, choice: Choice) -> None:
        self._choice = choice
        self._keys = frozenset(choice.keys)
        self._causes = frozenset(cause[:MAX_CAUSE] for cause in choice.causes)
        self._fingerprints = frozenset(choice.fingerprints)
        # Entry → the indexes that are named of it; -1 for all.
        self._named: dict[EntryId, set[int]] = {}
        for written in choice.ids:
            ledger, entry, _, index, *_ = (*map(int, written.split(":")), -1, -1)
            self._named.setdefault(EntryId(ledger, entry), set()).add(max(-1, index))

    def entries(self, of: Range) -> int:
        """Return which entries of a range to look at, a bitmap of offsets."""
        if not self._named:
            return bitmap.span(0, of.size - 1)
        named = (entry for entry in self._named if of.holds(Position(*entry, 0)))
        return bitmap.of((entry.entry - of.first for entry in named), of.size)

    def takes_undelivered(self, position: Position) -> bool | None:
        """Return whether an entry is taken of which only its position is known.

        None if it depends on what it holds.
        """
        if not self._is_named(position):
            return False
        choice = self._choice
        by_content = (choice.keys, choice.causes, choice.fingerprints)
        is_known = not any(by_content) and choice.since is None and choice.until is None
        return True if is_known else None

    def takes(
        self, position: Position, key: str | None, published: int, failure: FailureCause
    ) -> bool:
        """Return True if a message is taken.

        Args:
            position: of the message.
            key: of the message.
            published: its publish time, in milliseconds since 1970.
            failure: cause of its last failure.
        """
        choice = self._choice
        return (
            self._is_named(position)
            and (not self._keys or key in self._keys)
            and (not self._causes or failure.cause[:MAX_CAUSE] in self._causes)
            and (not self._fingerprints or failure.fingerprint in self._fingerprints)
            and (choice.since is None or published >= choice.since)
            and (choice.until is None or published < choice.until)
        )

    def _is_named(self, position: Position) -> bool:
        if not self._named:
            return True
        indexes = self._named.get(position.entry_id, set[int]())
        return not indexes.isdisjoint({-1, position.batch_index})
