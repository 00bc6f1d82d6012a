"""Movement of one range: send, receipt, acknowledgement.

One range of a dead-letter topic → the target, each message once: send, receipt, acknowledge.

Free of Spark: called by whatever runs the task, in any process. A task may die at any point, be
stopped and go on, or run twice. A lease in the ledger says that its range may have been sent in
part; whoever takes the range next reads what the target has of it before sending the rest.
"""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import replace

from redrive.errors import RedriveError
from redrive.messages import LATEST, SchemaError
from redrive.policy import envelope
from redrive.policy.naming import TopicName
from redrive.reading import bitmap, broker, ranges, reader, rows
from redrive.reading.positions import (
    EntryId,
    Position,
    Source,
    Tail,
    TargetPartition,
    Try,
)
from redrive.reading.ranges import Partition, Range
from redrive.reading.reader import ReadableTopic
from redrive.reading.rows import DeadLetterRow
from redrive.replay import lookup
from redrive.replay.ledger import Lease, mounted_key
from redrive.replay.lookup import by_entry, read_first, refusal, schema_refusals
from redrive.replay.outcome import Found, RangeOutcome, RangeResult
from redrive.replay.records import Permit, SentTo
from redrive.replay.sending import (
    LEASE_SECONDS,
    MAX_TRIES,
    DrainedError,
    NotLetInError,
    Sender,
    SentBeforeError,
    UnsubscribedError,
    Window,
)
from redrive.replay.task import RangeTask
from redrive.replay.transport import (
    SEND_SECONDS,
    ByClient,
    ByProtocol,
    NameTakenError,
    Outlet,
    StalledError,
)

MAX_SENT_BEFORE = 3
"""If another process has sent messages of one lease more often, it is none of this policy."""
MAX_UNLOADS = 3
"""After more unloads of the target a range is sent by the client: each of them costs a search."""
RELOAD_SECONDS = 0.5
"""The time that a broker has to load a topic again before the next try."""
GRACE_SECONDS = 1.0
"""How long a broker may take to begin to write what it had received of a producer that is gone."""
LOOK_SECONDS = 1.0
"""The time between two looks at what others have acknowledged of a range that is being sent."""
LOOK_SHARE = 20
"""A look that took some time is followed by none for so many times as long."""
QUIET_SECONDS = SEND_SECONDS + GRACE_SECONDS
"""How long after its lease was lost a process may store what it had on its way: one that was cut
off from the network, or stopped, and comes back."""


class SendFailedError(RedriveError):
    """The broker neither stores messages nor refuses them."""

    reason = "SendFailed"


def move(task: RangeTask, *, again: bool = False) -> RangeResult:
    """Move a range, and return what became of it.

    At most `window.MESSAGES` and `window.BYTES` are on their way at a time. A broker that is
    restarted is waited for.

    Args:
        task: the range.
        again: whether another process may have had this very task.

    Raises:
        FencedError: another run has taken over; what was sent by then is found by that one.
        RedriveError: the broker refuses, or does not answer for minutes.
    """
    with broker.connect(task.route.service_url) as client:
        return RangeMover(task, client, again=again).run()


class RangeMover:
    """Moves one range.

    Args:
        client: for all but sending.
        again: see `move`.
    """

    def __init__(self, task: RangeTask, client: broker.ReadingClient, *, again: bool) -> None:
        route = task.route
        self._task, self._route, self._client = task, route, client
        self._begun = time.monotonic()
        self._outcome = RangeOutcome(task.partly, route.uid, proven=not route.exactly_once)
        self._key = mounted_key()
        self._lease = Lease(
            client,
            route.ledger,
            route.owner,
            self._key,
            task.range,
            task.lease,
            task.number,
            task.permit,
        )
        self._drained = False
        self._unloads = 0
        # By this lease: whether another process may have sent something, and where this one has.
        self._again = again
        self._sent_to: set[TargetPartition] = set()
        topic = broker.partition_of(route.source, task.range.partition)
        self._consumer = broker.acknowledger(client, topic, route.subscription)
        self._schema_refusal = schema_refusals(client, route.source)
        # Which entries were acknowledged at the last look at the source, and when the next is due.
        self._acknowledged, self._look_due = task.acknowledged, self._begun + LOOK_SECONDS
        # Where earlier tries may have stored what is not on record, and what was read of it.
        self._tails = task.tails
        self._read: dict[TargetPartition, EntryId] = {}
        self._unproven = dict(task.unproven)
        # The same of partitions that can't be looked at now; they may come back.
        self._unseen: dict[SentTo, int] = {}
        # The last sequence ids before this task first sent there.
        self._last: dict[TargetPartition, int] = {}

    def run(self) -> RangeResult:
        """Try until each entry is moved, refused, or not there any more, or the target is full."""
        with closing(self._lease):
            return self._run()

    def _run(self) -> RangeResult:
        sent_in = Try(self._task.generation, 0)
        before = Try(self._task.generation - 1, 0)
        sent_before = 0
        while sent_in.attempt < MAX_TRIES:
            try:
                if self._try(sent_in, before):
                    # Another process of this lease may have stored what a drained one did not look
                    # for, or yet send it.
                    looked = not (self._drained and self._again)
                    return self._result() if looked else self._given_back()
            except UnsubscribedError:
                return self._cut_off()
            except NotLetInError as found:
                return replace(self._given_back(), full=found.topic)
            except SentBeforeError as found:
                self._again, sent_in = True, found.sent_in
                sent_before += 1
                if sent_before > MAX_SENT_BEFORE:
                    return self._blocked()
            except NameTakenError:
                return self._blocked()
            before, sent_in = sent_in, Try(sent_in.generation, sent_in.attempt + 1)
            if self._has_sent or self._outcome.doubts:
                self._tails = self._unread(self._task.since)
        if self._outcome.settled:  # what was refused one by one goes on record, for a next task
            return self._given_back()
        raise SendFailedError(
            "the broker neither stores dead letters nor refuses them",
            got=f"{self._task.range} after {MAX_TRIES} tries",
            remedy="look into the broker's log; another Replay goes on from what was moved",
        )

    def _try(self, sent_in: Try, before: Try) -> bool:
        """Send what is not in the target yet; return whether nothing is in doubt in the end.

        Args:
            sent_in: this try.
            before: the one before.
        """
        route = self._route
        with ExitStack() as stack:
            outlet = self._outlet(sent_in, stack)
            senders = {
                topic: self._sender(outlet(), topic, sent_in, stack)
                for topic in {route.target, *(place.topic for place in self._tails)}
            }
            sender = senders[route.target]
            self._check_lease()
            letters = stack.enter_context(closing(self._letters(self._to_read)))
            entries = self._movable(letters)
            first = list(itertools.islice(entries, 1))
            window = Window(
                sender,
                self._outcome,
                self._check_lease,
                self._acknowledge,
                self._task.range.first,
                self._is_subscribed,
                self._is_acknowledged,
            )
            try:
                unfinished = self._send_within(window, senders, before, first, entries)
                window.confirm()
            except (UnsubscribedError, NameTakenError):
                window.give_up()
                self._outcome.doubts.update(window.unconfirmed)
                raise
        return not (unfinished or self._outcome.doubts)

    def _send_within(
        self,
        window: Window,
        senders: Mapping[TopicName, Sender],
        before: Try,
        first: Sequence[Sequence[DeadLetterRow]],
        entries: Iterable[Sequence[DeadLetterRow]],
    ) -> bool:
        """Send what is not in the target yet; return whether something is left for another try.

        Args:
            window: of this try.
            senders: see `_look_for`, likewise *before* and *first*.
            before: the try before.
            first: the first entry to send.
            entries: all others.
        """
        try:
            if self._tails:
                if not self._is_subscribed():  # what is found is kept for no consumer
                    raise UnsubscribedError
                self._look_for(senders, before, first)
            return self._send_all(window, itertools.chain(first, entries))
        except DrainedError:
            self._drained = True
            with suppress(StalledError):
                window.drain()
            window.give_up()
            return False
        except StalledError as error:
            window.give_up()
            if error.unloaded:
                self._unloads += 1
                time.sleep(RELOAD_SECONDS)
            return True

    def _outlet(self, sent_in: Try, stack: ExitStack) -> Callable[[], Outlet]:
        """Return what makes the way for one try: see the module `transport`."""
        url = self._route.service_url
        if not self._task.tails and sent_in.attempt == self._unloads <= MAX_UNLOADS:
            return functools.partial(ByProtocol, url, batches=self._route.batch)
        # Of its own: the connection breaks when the broker refuses a message.
        return functools.partial(ByClient, stack.enter_context(broker.connect(url)))

    def _sender(self, outlet: Outlet, topic: TopicName, sent_in: Try, stack: ExitStack) -> Sender:
        route = self._route
        target = topic, route.target_partitions
        source_range = self._task.range
        name = functools.partial(
            self._key.producer_name, f"{route.source} {source_range}", self._task.renamed
        )
        sender = Sender(outlet, target, route.source, source_range, sent_in, name)
        stack.callback(sender.close)
        stack.callback(self._note, sender, topic)
        return sender

    def _note(self, sender: Sender, topic: TopicName) -> None:
        self._sent_to |= {TargetPartition(topic, index) for index in sender.sent_to}
        for index, last in sender.last.items():
            self._last.setdefault(TargetPartition(topic, index), last)

    def _look_for(
        self,
        senders: Mapping[TopicName, Sender],
        before: Try,
        first: Sequence[Sequence[DeadLetterRow]],
    ) -> None:
        """Find what earlier tries have stored; no other process can store more of it meanwhile.

        Args:
            senders: of this try, for each topic that one has sent to.
            before: the one before.
            first: the first entry to send, if there is any: most topics take its schema.

        Raises:
            DrainedError: the run wants no more to be sent.
        """
        topics = {place.topic for place in self._tails}
        there = {
            place
            for each in topics
            for place in lookup.target_partitions(self._route.admin_url, each)
        } & self._tails.keys()
        version = first[0][0].schema_version if first else None
        last = {place: _hold(senders[place.topic], place.partition, version) for place in there}
        time.sleep(GRACE_SECONDS)
        if any(self._is_elsewhere(place) or self._is_renamed(place) for place in there):
            self._wait_until(self._begun - self._task.fenced_seconds + QUIET_SECONDS)
        found = Found(self._task.replays)
        for topic in {place.topic for place in there}:
            target = ReadableTopic(
                self._client, self._route.admin_url, topic, max_content=lookup.MAX_CONTENT
            )
            tails = {place: self._tails[place] for place in there if place.topic == topic}
            lookup.find_in_target(found, target, tails, self._task.range, self._key)
        self._outcome.found(found)
        size = self._task.range.size
        # Of another process each try may have stored more than the last of them.
        only = None if self._again and before.attempt else before
        for place in found.trimmed:
            if not self._has_stored_none(place, last[place]):
                behind = self._tails[place]
                through = behind.stored_through(last[place], only, size)
                _doubt(self._unproven, (place, behind.partitions), through)
        self._unseen = {}
        for place in self._tails.keys() - there:
            behind = self._tails[place]
            _doubt(self._unseen, (place, behind.partitions), behind.last_offset(size))
        self._read.update(found.ends)

    def _is_elsewhere(self, place: TargetPartition) -> bool:
        """Whether an earlier try sent there what this one sends to another partition, or topic."""
        route = self._route
        there = place.topic, self._tails[place].partitions
        return there != (route.target, route.target_partitions)

    def _is_renamed(self, place: TargetPartition) -> bool:
        """Return True if an earlier try sent there by a producer of another name."""
        return 0 < self._task.renamed >= self._tails[place].generation

    def _wait_until(self, quiet: float) -> None:
        """Wait until no in-flight message of another process can be stored any more.

        In another target, and under another producer name, no message of this lease makes the
        broker drop it.

        Args:
            quiet: time by the monotonic clock.

        Raises:
            DrainedError: the run asks the task to end.
        """
        while time.monotonic() < quiet:
            if self._check_lease().drain:
                raise DrainedError
            time.sleep(LEASE_SECONDS)

    def _has_stored_none(self, place: TargetPartition, last: int) -> bool:
        """Whether nothing of this lease, the only one in question, is stored in a partition."""
        generation = self._task.generation
        only = self._tails[place].generation == generation > Try.of(last).generation
        sent = self._again or place in self._sent_to
        return only and (not sent or self._last.get(place) == last)

    @property
    def _has_sent(self) -> bool:
        """Whether anything may be on its way to the target, or stored there, by this lease."""
        return self._again or bool(self._sent_to)

    def _movable(self, letters: Iterable[DeadLetterRow]) -> Iterator[Sequence[DeadLetterRow]]:
        """Yield the entries of *letters* that can be moved, where no plan has looked at each."""
        task = self._task
        # A broker writes together what comes together: what is sent by ones and twos costs it more.
        for entry in by_entry(itertools.chain.from_iterable(rows.in_batches(letters))):
            offset = entry[0].position.entry - task.range.first
            self._outcome.is_part(
                chunk.entry - task.range.first
                for chunk in entry[0].chunks[:-1]
                if task.range.holds(Position(*chunk, 0))
            )
            if not task.unread or read_first(
                entry, offset, self._outcome, task.acknowledged, self._refusal
            ):
                yield entry

    def _send_all(self, window: Window, entries: Iterable[Sequence[DeadLetterRow]]) -> bool:
        """Send *entries*, and return whether one comes late: the next try has a number for it."""
        outcome, doubts = self._outcome, self._doubts()
        late, newest = False, (-1, 0)
        for entry in entries:
            keyed = [(window.key(letter), letter) for letter in entry]
            key = keyed[0][0]
            if late := key < newest:
                break
            newest = key
            unsent = [each for each in keyed if not outcome.is_stored(each[0])]
            if not unsent:
                if outcome.store(key, entry[0].batch_size):
                    self._acknowledge(entry[0])
            elif doubts and any(_is_among(doubts, letter, key[0]) for _, letter in unsent):
                if self._task.settles_unproven:
                    outcome.skip(key)
                    self._acknowledge(entry[0])
                else:
                    outcome.refuse(key, "Unproven")
            else:
                for each, letter in unsent:
                    window.send(each, letter, self._properties(letter))
        window.drain()
        return late

    def _refusal(self, entry: Sequence[DeadLetterRow]) -> str:
        cause = refusal(entry, len(entry), self._task.max_replays)
        if not cause:
            cause = self._schema_refusal(entry[0].schema_version)
        return cause

    @property
    def _to_read(self) -> int:
        """Return what is neither moved nor refused yet, nor acknowledged.

        What is unread and acknowledged is read, too, to know how many messages that were.
        """
        task = self._task
        return task.entries & ~self._outcome.settled & ~(task.acknowledged & ~task.unread)

    def _letters(self, entries: int) -> Generator[DeadLetterRow]:
        """Read all messages of *entries*, a bitmap."""
        if not entries:
            return
        task, route = self._task, self._route
        topic = ReadableTopic(
            self._client, route.admin_url, route.source, max_content=lookup.MAX_CONTENT
        )
        after = reader.first_entry(task.range, entries, task.chunks)
        if task.unread:
            after = min(after, task.after)
        yield from reader.read_entries(topic, task.range, entries, after, task.ahead)

    def _properties(self, letter: DeadLetterRow) -> dict[str, str]:
        route = self._route
        source = str(Source(route.uid, letter.partition, letter.position))
        carried = envelope.for_replay(letter.properties, replay=route.replay, source=source)
        return carried | {envelope.REPLAY_PROOF: self._key.proof(source, route.target)}

    def _doubts(self) -> list[tuple[SentTo, int]]:
        """Return where messages may be stored that can't be seen any more, and are not sent."""
        if not self._route.exactly_once:
            return []
        return [*self._unproven.items(), *self._unseen.items()]

    def _is_acknowledged(self, offset: int) -> bool:
        """Return True if an entry was acknowledged at the last look at the source.

        That is `LOOK_SECONDS` old at most, where the broker answers within a twentieth of that.
        """
        begun = time.monotonic()
        if begun >= self._look_due:
            self._acknowledged = ranges.settled(self._task.range, self._look_at_source())
            now = time.monotonic()
            self._look_due = now + max(LOOK_SECONDS, LOOK_SHARE * (now - begun))
        return bitmap.contains(self._acknowledged, offset)

    def _is_subscribed(self) -> bool:
        return broker.waited(self._route.is_subscribed)

    def _acknowledge(self, letter: DeadLetterRow) -> None:
        for message_id in letter.acknowledgements:
            self._consumer.acknowledge(message_id)

    def _check_lease(self) -> Permit:
        broker.waited(self._lease.check)
        return self._lease.permit

    def _cut_off(self) -> RangeResult:
        """Return the result of a task whose target has lost its subscriptions.

        What was stored by then and not settled may be in no subscription's backlog, though it is in
        the topic. So it is not looked for there: with exactly once it is refused as unproven, else
        it is sent again. All that came before it in the range is settled.
        """
        result = self._given_back()
        if not self._outcome.doubts:
            return replace(result, unsubscribed=True)
        through = max(offset for offset, _ in self._outcome.doubts)
        for place in self._sent_to:
            _doubt(self._unproven, (place, self._route.target_partitions), through)
        tails = result.tails if self._again else self._unread(self._task.tails)
        return replace(result, unsubscribed=True, unproven=self._unproven, tails=tails)

    def _blocked(self) -> RangeResult:
        """Return the result of a task that others keep from sending by the names of its producers.

        The next lease has other names. It looks for what is in doubt, if anything is.
        """
        self._drained = True
        is_known = not self._again and not self._outcome.doubts
        result = self._result() if is_known else self._given_back()
        return replace(result, blocked=True)

    def _given_back(self) -> RangeResult:
        """Return the result for a next lease: it looks for what is in doubt as after a lost one.

        Of a lease that has sent nothing there is nothing to look for. Else what the consumers of a
        full target take meanwhile, and the broker then trims, would be in doubt for good.
        """
        self._drained = True
        result = self._result()
        return replace(result, tails=self._unread(self._task.since)) if self._has_sent else result

    def _result(self) -> RangeResult:
        task, outcome = self._task, self._outcome
        unseen = task.entries & ~outcome.settled
        if unseen and not self._drained:
            self._account_for(unseen)
        # One stored message of this lease shuts out all that earlier ones have yet to send there.
        shut = {TargetPartition(self._route.target, index) for index in outcome.stored_in}
        # All that this lease has sent is accounted for: what remains is that of earlier ones.
        tails = self._unread(task.tails)
        left = {place: tails[place] for place in tails.keys() - shut}
        result = outcome.result(task.range, left)
        return replace(result, unproven=self._unproven, drained=self._drained)

    def _unread(self, tails: Mapping[TargetPartition, Tail]) -> dict[TargetPartition, Tail]:
        """Return *tails* behind what was read."""
        return {
            place: each._replace(entry=self._read.get(place, each.entry))
            for place, each in tails.items()
        }

    def _account_for(self, unseen: int) -> None:
        """Say of entries that did not come whether they are acknowledged, or can't be read.

        Of those that no plan has read either there is no message in what the broker holds.
        """
        source_range = self._task.range
        partition = self._look_at_source()
        if source_range.ledger not in partition.held:
            self._outcome.miss(unseen, bitmap.EMPTY)
            return
        gone = unseen & (self._task.acknowledged | ranges.settled(source_range, partition))
        unread = self._outcome.unseen(unseen & self._task.unread, source_range)
        parts = self._parts(unseen & unread & ~gone, partition)
        hidden = unseen & ~gone & ~parts
        if hidden and self._task.discards:
            try:
                hidden = self._discard(hidden)
            except DrainedError:
                self._drained = True
                return
        empty = unread & (gone | parts)
        self._outcome.miss(gone & ~empty, hidden, empty)

    def _look_at_source(self) -> Partition:
        route, index = self._route, self._task.range.partition
        return broker.waited(
            lambda: lookup.read_source(route.admin_url, route.source, route.subscription, index)
        )

    def _parts(self, entries: int, partition: Partition) -> int:
        """Return which of *entries*, a bitmap, are chunks of whole messages.

        Such a message may end in the next range, and is moved with that. One that was acknowledged
        before, but for some of its chunks, is acknowledged again.
        """
        of, parts = self._task.range, entries & self._outcome.parts
        if not entries & ~parts:
            return parts
        topic = ReadableTopic(self._client, self._route.admin_url, self._route.source)
        for chunks in reader.chunks_of_whole(topic, partition, of, entries & ~parts):
            last = chunks[-1]
            is_over = bool(
                ranges.settled(Range.of(of.partition, Position(*last, 0)), partition)
                >> last.entry % ranges.RANGE_ENTRIES
                & 1
            )
            for chunk in chunks[:-1]:
                if of.holds(Position(*chunk, 0)):
                    parts |= entries & 1 << chunk.entry - of.first
                    if is_over:
                        self._consumer.acknowledge(rows.entry_acknowledgement(of.partition, chunk))
        return parts

    def _discard(self, entries: int) -> int:
        """Acknowledge entries that no client can show; return those that are to be refused.

        Chunks may be followed by others until their producer has given up, which is waited for.

        Raises:
            DrainedError: the run wants no more.
        """
        source_range = self._task.range
        self._wait_until(self._begun + QUIET_SECONDS)
        partial = self._parts(entries, self._look_at_source())
        for offset in bitmap.members(entries & ~partial):
            entry = source_range.entry_id(offset)
            self._consumer.acknowledge(rows.entry_acknowledgement(source_range.partition, entry))
        self._outcome.discard(entries & ~partial)
        return partial


def _is_among(doubts: Iterable[tuple[SentTo, int]], letter: DeadLetterRow, offset: int) -> bool:
    """Whether *letter*, at *offset*, may be stored at one of these places."""
    return any(
        offset <= through
        and (not partitions or place.partition == letter.partition_in(place.topic, partitions))
        for (place, partitions), through in doubts
    )


def _doubt(doubts: dict[SentTo, int], sent_to: SentTo, through: int) -> None:
    """Take note that what was sent to a partition may be stored there, up to an offset."""
    doubts[sent_to] = max(through, doubts.get(sent_to, through))


def _hold(sender: Sender, index: int, version: int | None) -> int:
    """Keep others from sending to a partition, by a producer of whichever schema it takes."""
    for tried in dict.fromkeys((version, None)):
        with suppress(SchemaError):
            return sender.hold(index, tried)
    return sender.hold(index, LATEST)
