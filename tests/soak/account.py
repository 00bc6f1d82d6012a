"""The account of a soak: every message, handling and copy, and its explanation.

No message is lost or invented. A repetition is explained by one documented event:
a killed process, a moved topic, a killed broker. Messages
are counted by their application numbers, in the topics and in the journals of
handlers. A receipt is compared with the stored messages, and proves nothing alone.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.soak.journal import plan

SEND_SECONDS = 15.0
"""The time-out of a send without receipt. The message may have been stored anyway."""
MOVED = frozenset({"redrive.retried", "redrive.dead_lettered"})
"""Events of messages with a stored copy; without an id if an earlier send stored it."""
DISPATCH_SECONDS = 5.0
"""If a broker sends a retry to two consumers, both begin within this time: on a busy machine they
were 0.73 s apart, on one with five times as much work as processors 3.2 s."""


@dataclass(frozen=True)
class Disturbance:
    """A disturbance of a consumer or of the broker, with times in seconds of the clock.

    Attributes:
        process: the consumer's; None if all are concerned.
        redelivers: in-flight messages are delivered to another consumer.
        forgets: acknowledgements of this many seconds before, and until its end, may be lost;
            None for no loss.
        crashes: the broker ends without storing its cursors.
        unanswered: a copy may be stored without a receipt for the consumer.
        settles: the time after its end until clients are connected again.
        loads: the broker loads topics with deduplication.
    """

    kind: str
    start: float
    end: float
    process: str | None = None
    redelivers: bool = False
    forgets: float | None = None
    crashes: bool = False
    unanswered: bool = False
    settles: float = 0.0
    loads: bool = False

    def concerns(self, process: str) -> bool:
        """Return True if it concerns *process*."""
        return self.process in (None, process)

    def lasts_into(self, moment: float) -> bool:
        """Return True if it may affect clients at *moment*."""
        return moment <= self.end + self.settles


@dataclass(frozen=True)
class Stored:
    """A message of one of the three topics.

    Attributes:
        failed: the number of its failed attempts.
        sent: the producer name and the sequence id, which a topic with deduplication stores once;
            None if not read.
    """

    id: str
    origin: str
    number: int
    failed: int = 0
    published: float = math.inf
    sent: tuple[str, int] | None = None


@dataclass
class Handling:
    """One call of a handler, or one reception of a simple consumer.

    Attributes:
        redeliveries: of the message, as the broker counts them.
    """

    process: str
    id: str
    origin: str
    attempt: int
    number: int
    began: float
    redeliveries: int
    ended: float | None = None
    ok: bool = False
    settled: float | None = None


@dataclass(frozen=True)
class Receipt:
    """A consumer's report of a stored copy."""

    process: str
    id: str
    new: str


@dataclass
class Account:
    """All events of a soak, and lists of faults, which must stay empty.

    Attributes:
        requests: times at which a process asked the broker to deliver again.
        lost: messages that were neither handled nor moved on, by number.
        doubled: copies in excess of failed handlings; no disturbance explains one, and only a fault
            of the broker that its metadata proves.
        invented: copies without a failed handling, and receipts without a stored message.
        repeated: handlings after the first that no disturbance explains.
        copied: copies without receipt that no disturbance explains.
        misplanned: messages whose attempts or result differ from the plan.
        without_id: receipts without the id of a copy.
        stored_twice: messages that the broker stored although it has them.
        explained: the number of explanations by kind of disturbance.
    """

    source: Sequence[Stored]
    retried: Sequence[Stored]
    dead: Sequence[Stored]
    handlings: list[Handling] = field(default_factory=list)
    receipts: list[Receipt] = field(default_factory=list)
    requests: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    disturbances: Sequence[Disturbance] = ()
    lost: list[str] = field(default_factory=list)
    doubled: list[str] = field(default_factory=list)
    invented: list[str] = field(default_factory=list)
    repeated: list[str] = field(default_factory=list)
    copied: list[str] = field(default_factory=list)
    misplanned: list[str] = field(default_factory=list)
    stored_twice: list[Stored] = field(default_factory=list)
    explained: Counter[str] = field(default_factory=Counter)
    repetitions: int = 0
    without_receipt: int = 0
    without_id: int = 0

    def add(self, process: str, lines: Iterable[Mapping[str, Any]]) -> None:
        """Add the journal of *process*."""
        open_: dict[str, Handling] = {}
        for line in lines:
            match line["what"]:
                case "begin":
                    handling = Handling(
                        process, line["id"], line["origin"], line["attempt"], line["number"],
                        line["at"], line["redeliveries"],
                    )  # fmt: skip
                    open_[line["id"]] = handling
                    self.handlings.append(handling)
                case "end":
                    handling = open_[line["id"]]
                    handling.ended, handling.ok = line["at"], line["ok"]
                    handling.settled = line["at"] if line["ok"] else None
                case "request":
                    self.requests[process].append(line["at"])
                case "late":
                    open_[line["id"]].ok, open_[line["id"]].settled = False, None
                case "event" if line["name"] in MOVED:
                    if line["new"]:
                        self.receipts.append(Receipt(process, line["id"], line["new"]))
                    else:
                        self.without_id += 1
                    if line["id"] in open_:
                        open_[line["id"]].settled = line["at"]

    def check(self) -> None:
        """Fill the lists of faults."""
        by_id: defaultdict[str, list[Handling]] = defaultdict(list)
        for handling in sorted(self.handlings, key=lambda call: call.began):
            by_id[handling.id].append(handling)
        self._check_numbers(by_id)
        self._check_receipts(by_id)
        self._check_repetitions(by_id)
        self._check_plans()

    def _check_numbers(self, by_id: Mapping[str, Sequence[Handling]]) -> None:
        """Check that each message was handled, or has one copy for a failed handling."""
        copies = Counter((copy.number, copy.failed) for copy in (*self.retried, *self.dead))
        moved: Counter[tuple[int, int]] = Counter()
        for message in (*self.source, *self.retried):
            if not any(handling.ok for handling in by_id.get(message.id, ())):
                moved[message.number, message.failed + 1] += 1
        failed = Counter((call.number, call.attempt) for call in self.handlings if not call.ok)
        self.lost += [
            f"{count} of {number} at attempt {attempt}, {copies[number, attempt]} copies"
            for (number, attempt), count in moved.items()
            if copies[number, attempt] < count
        ]
        self.stored_twice = list(self._stored_twice())
        self.explained.update("broker that recovers deduplication twice" for _ in self.stored_twice)
        twice = Counter((copy.number, copy.failed) for copy in self.stored_twice)
        self.doubled += [
            f"{count} copies of {number} at attempt {attempt}, {failed[number, attempt]} failed: "
            + ", ".join(
                f"{copy.id} sent as {copy.sent} at {copy.published}"
                for copy in (*self.retried, *self.dead)
                if (copy.number, copy.failed) == (number, attempt)
            )
            for (number, attempt), count in copies.items()
            if count - twice[number, attempt] > failed[number, attempt]
        ]

    def _stored_twice(self) -> Iterator[Stored]:
        """Yield each message that a broker stored although it has its producer name and number.

        A broker that loads a topic may recover its sequence ids twice at the same time, and then
        stores again what is sent again (apache/pulsar#25954). The first copy was sent before the
        topic was loaded, the second right after. The same sequence id proves it: a topic with
        deduplication never stores it twice otherwise, and redrive gives it to one message.
        """
        sends: defaultdict[tuple[str, int], list[Stored]] = defaultdict(list)
        for message in (*self.source, *self.retried, *self.dead):
            if message.sent is not None:
                sends[message.sent].append(message)
        for first, *others in (sorted(same, key=_id_place) for same in sends.values()):
            for other in others:
                same = (first.number, first.failed) == (other.number, other.failed)
                if same and any(
                    first.published <= loading.end + loading.settles
                    and loading.start - SEND_SECONDS <= other.published
                    and other.published <= loading.end + loading.settles
                    for loading in self.disturbances
                    if loading.loads
                ):
                    yield other

    def _check_receipts(self, by_id: Mapping[str, Sequence[Handling]]) -> None:
        """Check that each receipt has one stored copy, and explain copies without a receipt."""
        copies = {copy.id: copy for copy in (*self.retried, *self.dead)}
        receipts = Counter(receipt.new for receipt in self.receipts)
        self.invented += [
            f"{new}: {count} receipts" for new, count in receipts.items() if count > 1
        ]
        self.invented += [f"{new}: a receipt alone" for new in receipts if new not in copies]
        for receipt in self.receipts:
            failing = [
                attempt for attempt in by_id[receipt.id] if attempt.process == receipt.process
            ]
            if not any(not attempt.ok for attempt in failing):
                self.invented.append(f"{receipt.id}: moved on by {receipt.process}, and not failed")
        parents: defaultdict[tuple[str, int, int], list[Handling]] = defaultdict(list)
        for handling in self.handlings:
            if not handling.ok:
                parents[handling.origin, handling.number, handling.attempt].append(handling)
        for copy in copies.values():
            failed = parents.get((copy.origin, copy.number, copy.failed), [])
            if not failed:
                self.invented.append(f"{copy.id}: attempt {copy.failed} of {copy.origin} was none")
            elif copy.id not in receipts:
                self.without_receipt += 1
                self._explain(
                    self.copied,
                    f"{copy} of {[attempt.process for attempt in failed]}",
                    (
                        disturbance
                        for disturbance in self.disturbances
                        if disturbance.unanswered
                        and disturbance.start - SEND_SECONDS <= copy.published
                        and disturbance.lasts_into(copy.published - SEND_SECONDS)
                        and any(disturbance.concerns(handling.process) for handling in failed)
                    ),
                )

    def _check_repetitions(self, by_id: Mapping[str, Sequence[Handling]]) -> None:
        """Explain repetitions by disturbances while a message was in flight or just settled."""
        passed = _passed(self.source, by_id) | _passed(self.retried, by_id)
        published = {message.id: message.published for message in (*self.source, *self.retried)}
        for id_, handlings in by_id.items():
            moment = passed.get(id_, math.inf)
            for index, again in enumerate(handlings[1:], start=1):
                self.repetitions += 1
                before = handlings[index - 1]
                causes = [
                    disturbance
                    for disturbance in self.disturbances
                    if disturbance.start <= again.began
                    and (
                        _broke(disturbance, before)
                        or self._was_left_out(moment, disturbance)
                        or _waited(disturbance, published.get(id_, math.inf), before)
                    )
                ]
                if not causes and _dispatched_twice(before, again):
                    self.explained["broker that dispatches a retry twice"] += 1
                elif not causes and self._requested(before, again):
                    self.explained["request for redelivery"] += 1
                else:
                    self._explain(self.repeated, f"{again} after {before}", causes)

    def _requested(self, handling: Handling, again: Handling) -> bool:
        """Return True if a message came while its consumer's request for redelivery was on its way.

        An idle consumer asks for chunks that its client has dropped. The broker then delivers what
        it has just delivered to another consumer, and counts that.
        """
        return again.redeliveries > handling.redeliveries and any(
            requested <= handling.began <= requested + SEND_SECONDS
            for requested in self.requests[handling.process]
        )

    def _was_left_out(self, passed: float, killed: Disturbance) -> bool:
        """Return True if a cursor had just passed a message, and was stored at an earlier position.

        Acknowledgements after the cursor's position are stored one by one. A cursor that moves
        during its first write since the topic was loaded is stored at its old position, without the
        acknowledgements that it passes (seen at 4.0.8, 13 of 40 times). The next write is right.
        """
        if not killed.crashes or killed.forgets is None:
            return False
        return any(
            disturbance.start
            <= passed
            <= killed.start
            <= disturbance.end + disturbance.settles + killed.forgets
            for disturbance in self.disturbances
            if disturbance.process is None and disturbance.redelivers  # all topics are loaded
        )

    def _check_plans(self) -> None:
        """Check the number of attempts and the result of each message against its plan."""
        attempts: defaultdict[str, int] = defaultdict(int)
        well: set[str] = set()
        for handling in self.handlings:
            attempts[handling.origin] = max(attempts[handling.origin], handling.attempt)
            if handling.ok:
                well.add(handling.origin)
        dead = {message.origin for message in self.dead}
        for message in self.source:
            its = plan(message.number)
            if not its.poison and attempts[message.origin] != its.attempts:
                self.misplanned.append(f"{message}: {attempts[message.origin]} attempts")
            if (message.origin in well, message.origin in dead) != (not its.dies, its.dies):
                self.misplanned.append(f"{message}: has another end than planned")

    def _explain(
        self, unexplained: list[str], text: str, disturbances: Iterable[Disturbance]
    ) -> None:
        cause = next(iter(disturbances), None)
        if cause is None:
            unexplained.append(text)
        else:
            self.explained[cause.kind] += 1


def _passed(
    messages: Iterable[Stored], by_id: Mapping[str, Sequence[Handling]]
) -> dict[str, float]:
    """Return the times at which the cursor passed each of *messages*: all before are settled."""
    passed: dict[str, float] = {}
    latest: defaultdict[tuple[int, ...], float] = defaultdict(float)
    for place, id_ in sorted((_place(message.id), message.id) for message in messages):
        settled = (
            handling.settled for handling in by_id.get(id_, ()) if handling.settled is not None
        )
        partition = place[2:3]
        passed[id_] = latest[partition] = max(latest[partition], min(settled, default=math.inf))
    return passed


def _id_place(message: Stored) -> tuple[int, ...]:
    return _place(message.id)


def _place(id_: str) -> tuple[int, ...]:
    """Return ledger, entry, partition, index in a batch."""
    return tuple(map(int, id_.split(":")))


def _waited(disturbance: Disturbance, published: float, handling: Handling) -> bool:
    """Return True if the message may have waited in a consumer during *disturbance*.

    The queue of a client outlives its connection, and the broker delivers its messages again, to
    others as well. Both handle it when they reach it: on a busy machine, two minutes later.
    """
    everywhere = disturbance.process is None and disturbance.redelivers
    return (
        everywhere
        and published <= disturbance.end + disturbance.settles
        and handling.began >= disturbance.start
    )


def _dispatched_twice(handling: Handling, again: Handling) -> bool:
    """Return True if the broker delivered a delayed message to two consumers at the same time.

    It does not count that as a redelivery. Seen at 4.0.8 when a retry is stored at the moment when
    others are due: four of 4,000, with no consumer or producer connecting. Consumers cannot detect
    this.
    """
    delayed, two = again.attempt > 1, again.process != handling.process
    counted = again.redeliveries != handling.redeliveries
    return delayed and two and not counted and again.began - handling.began < DISPATCH_SECONDS


def _broke(disturbance: Disturbance, handling: Handling) -> bool:
    """Return True if *disturbance* came during *handling*, or before its result was stored."""
    if not disturbance.concerns(handling.process) or not disturbance.lasts_into(handling.began):
        return False
    if handling.settled is None or handling.settled > disturbance.end + disturbance.settles:
        return disturbance.redelivers
    lost = disturbance.forgets
    return lost is not None and handling.settled >= disturbance.start - lost
