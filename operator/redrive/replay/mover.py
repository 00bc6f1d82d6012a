"""Movement of one range of a dead-letter topic to the target: send, receipt, acknowledgement.

Any engine runs it in any process, without Spark. A task may be killed at any point, be stopped and
resume, or run twice. A lease in the ledger records that the range may have been sent partly. The
next task of the range searches the target before it sends the remaining messages.
"""

from __future__ import annotations

import functools
import itertools
import logging
import math
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import replace

from redrive.errors import RedriveError
from redrive.policy import envelope
from redrive.policy.naming import TopicName
from redrive.reading import bitmap, broker, ranges, reader, rows
from redrive.reading.positions import EntryId, SendAttempt, Source, Tail, TargetPartition
from redrive.reading.ranges import Partition
from redrive.reading.reader import ReadableTopic
from redrive.reading.rows import DeadLetterRow
from redrive.replay import lookup, sending
from redrive.replay.lookup import by_entry, read_first, refusal, schema_refusals
from redrive.replay.outcome import RangeOutcome, RangeResult, StoredMessages
from redrive.replay.records import Permit
from redrive.replay.task import RangeTask
from redrive.replay.transport import (
    SEND_SECONDS,
    ClientTransport,
    NameTakenError,
    StalledError,
    Transport,
)

logger = logging.getLogger(__name__)

MAX_SENT_BEFORE = 3
"""Number of attempts by other processes in one lease, after which another client is assumed."""
MAX_UNLOADS = 3
"""Number of unloads of the target after which a range is sent by the client, because each needs a
search."""
RELOAD_SECONDS = 0.5
"""Time for a broker to load a topic again before the next attempt."""
GRACE_SECONDS = 1.0
"""Time for a broker to begin to write messages that it received from a closed producer."""
QUIET_SECONDS = SEND_SECONDS + GRACE_SECONDS
"""Time after the end of its lease in which a disconnected or stopped process may store in-flight
messages."""


def move(task: RangeTask, *, again: bool = False) -> RangeResult:
    """Move a range, and return the result.

    At most `sending.MESSAGES` and `sending.BYTES` are in-flight. It waits for a restarting broker.

    Args:
        task: the task.
        again: True if another process may have run the same task.

    Raises:
        FencedError: another run has taken over. It finds the messages that were sent.
        RedriveError: the broker refuses, or does not answer for minutes.
    """
    return move_all([task], again=again)[0]


def move_all(tasks: Sequence[RangeTask], *, again: bool = False) -> list[RangeResult]:
    """Move ranges one after the other, and return their results; see `move`.

    If one of them ends early, or fails after others, the next ranges are not begun.

    Args:
        tasks: ranges of one partition, in order, under one lease of the same run.
        again: see `move`.
    """
    results: list[RangeResult] = []
    with (
        broker.connect(tasks[0].route.service_url) as client,
        closing(sending.TaskConnections(tasks, client)) as connections,
    ):
        for task in tasks:
            mover = RangeMover(task, connections, again=again)
            try:
                is_begun = not (results and results[-1].drained)
                results.append(mover.run() if is_begun else mover.give_back())
            except RedriveError as error:
                if not results:
                    raise
                # The error is raised if it occurs again, when this range is leased alone.
                logger.warning("range %s of several failed: %s", task.range, error)
                results.append(mover.give_back())
    return results


class RangeMover:
    """Moves one range.

    Args:
        task: the task.
        connections: connections of the task.
        again: see `move`.
    """

    def __init__(
        self, task: RangeTask, connections: sending.TaskConnections, *, again: bool
    ) -> None:
        route = task.route
        self._task, self._route, self._connections = task, route, connections
        self._client, self._key = connections.client, connections.key
        self._begun = time.monotonic()
        self._outcome = RangeOutcome(task.partly, route.uid, proven=connections.proven)
        self._drained = False
        self._unloads, self._checked, self._has_searched_chunks = 0, -math.inf, False
        # In this lease: True if another process may have sent messages, and where this one has.
        self._again = again
        self._sent_to: set[TargetPartition] = set()
        self._consumer = connections.consumer
        self._schema_refusal = schema_refusals(self._client, route.source)
        # Acknowledged entries in the last known state of the source.
        self._source: Partition | None = None
        self._acknowledged, self._is_first_reading = task.acknowledged, True
        # Places where earlier attempts may have stored messages, and the ends of searches there.
        self._tails = task.tails
        self._read: dict[TargetPartition, EntryId] = {}
        self._doubts = lookup.Doubts(task)
        # The last sequence ids before the first send of this task.
        self._last: dict[TargetPartition, int] = {}

    def run(self) -> RangeResult:
        """Repeat attempts until each entry is moved, refused or acknowledged, or the task ends."""
        sent_in = SendAttempt(self._task.generation, 0)
        before = SendAttempt(self._task.generation - 1, 0)
        sent_before = 0
        while sent_in.attempt < sending.MAX_ATTEMPTS:
            try:
                if self._attempt(sent_in, before):
                    # Another process of this lease may have stored messages that a drained task
                    # did not search for, or send them later.
                    is_known = not (self._drained and self._again)
                    self._connections.proven |= self._outcome.proven
                    return self._result() if is_known else self.give_back()
            except sending.UnsubscribedError:
                return self._cut_off()
            except sending.TopicFullError as error:
                return replace(self.give_back(), full=error.topic)
            except sending.SentBeforeError as error:
                self._again, sent_in = True, error.sent_in
                sent_before += 1
                if sent_before > MAX_SENT_BEFORE:
                    return self._blocked()
            except NameTakenError:
                return self._blocked()
            before, sent_in = sent_in, SendAttempt(sent_in.generation, sent_in.attempt + 1)
            if self._has_sent or self._outcome.doubts:
                self._tails = self._unread(self._task.since)
        if self._outcome.settled:  # record refused messages for the next task
            return self.give_back()
        raise RedriveError(
            "the broker neither stores dead letters nor refuses them",
            got=f"{self._task.range} after {sending.MAX_ATTEMPTS} attempts",
            remedy="check the log of the broker; another Replay moves the messages that are left",
            reason="SendFailed",
        )

    def _attempt(self, sent_in: SendAttempt, before: SendAttempt) -> bool:
        """Send messages that are not in the target; return True if none is in doubt at the end.

        Args:
            sent_in: this attempt.
            before: the previous attempt.
        """
        route = self._route
        with ExitStack() as stack:
            transport = self._transport(sent_in, stack)
            senders = {
                topic: self._sender(transport(), topic, sent_in, stack)
                for topic in {route.target, *(place.topic for place in self._tails)}
            }
            dead_letters = stack.enter_context(closing(self._dead_letters(self._to_read)))
            entries = self._movable(dead_letters)
            first = next(entries, None)
            version = first[0].schema_version if first else None
            entries = itertools.chain(iter([first] if first else []), entries)
            del first  # before the next one is decompressed
            permit = self._check_lease()
            window = sending.Window(
                senders[route.target],
                self._outcome,
                self._check_lease,
                (permit, self._checked),
                self._acknowledge,
                self._task.range.first,
                self._is_subscribed,
                self._is_acknowledged,
                self._connections.pace,
            )
            try:
                unfinished = self._send_within(window, senders, before, version, entries)
                window.confirm()
            except (sending.UnsubscribedError, NameTakenError):
                window.give_up()
                self._outcome.doubts.update(window.unconfirmed)
                raise
        return not (unfinished or self._outcome.doubts)

    def _send_within(
        self,
        window: sending.Window,
        senders: Mapping[TopicName, sending.Sender],
        before: SendAttempt,
        version: int | None,
        entries: Iterable[Sequence[DeadLetterRow]],
    ) -> bool:
        """Send messages that are not in the target; return True if another attempt is needed.

        Args:
            window: window of this attempt.
            senders: see `_search`.
            before: previous attempt.
            version: see `_search`.
            entries: entries to send.
        """
        try:
            if self._tails:
                if not self._is_subscribed():  # no consumer receives messages that are found
                    raise sending.UnsubscribedError
                self._search(senders, before, version)
            is_late = self._send_all(window, entries)
            return is_late or self._has_distant_chunks()
        except sending.DrainedError:
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

    def _transport(self, sent_in: SendAttempt, stack: ExitStack) -> Callable[[], Transport]:
        """Return the factory of transports for one attempt; see the module `transport`."""
        url = self._route.service_url
        if not self._task.tails and sent_in.attempt == self._unloads <= MAX_UNLOADS:
            return self._connections.transport
        # A separate client, because the broker closes the connection when it refuses a message.
        return functools.partial(ClientTransport, stack.enter_context(broker.connect(url)))

    def _sender(
        self, transport: Transport, topic: TopicName, sent_in: SendAttempt, stack: ExitStack
    ) -> sending.Sender:
        route = self._route
        target = topic, route.target_partitions
        source_range = self._task.range
        name = functools.partial(
            self._key.producer_name, f"{route.source} {source_range}", self._task.renamed
        )
        sender = sending.Sender(transport, target, route.source, source_range, sent_in, name)
        stack.callback(sender.close)
        stack.callback(self._record_sends, sender, topic)
        return sender

    def _record_sends(self, sender: sending.Sender, topic: TopicName) -> None:
        self._sent_to |= {TargetPartition(topic, index) for index in sender.sent_to}
        for index, last in sender.last.items():
            self._last.setdefault(TargetPartition(topic, index), last)

    def _search(
        self, senders: Mapping[TopicName, sending.Sender], before: SendAttempt, version: int | None
    ) -> None:
        """Search for messages of earlier attempts, while no other process can send more.

        Args:
            senders: senders of this attempt, by topic of earlier attempts.
            before: previous attempt.
            version: schema version of the first entry to send; most targets accept it.

        Raises:
            DrainedError: the run asks the task to end.
        """
        topics = {place.topic for place in self._tails}
        places = {
            place
            for topic in topics
            for place in lookup.target_partitions(self._route.admin_url, topic)
        } & self._tails.keys()
        last = {place: senders[place.topic].hold_any(place.partition, version) for place in places}
        time.sleep(GRACE_SECONDS)
        if any(self._is_elsewhere(place) or self._is_renamed(place) for place in places):
            self._wait_until(self._begun - self._task.fenced_seconds + QUIET_SECONDS)
        stored = StoredMessages(self._task.all_replays)
        for topic in {place.topic for place in places}:
            target = ReadableTopic(self._client, self._route.admin_url, topic)
            tails = {place: self._tails[place] for place in places if place.topic == topic}
            lookup.find_in_target(stored, target, tails, self._task.range, self._key)
        self._outcome.resolve_doubts(stored)
        size = self._task.range.size
        # Any attempt of another process may have stored more than the last one.
        only = None if self._again and before.attempt else before
        for place in stored.trimmed:
            if not self._has_stored_none(place, last[place]):
                tail = self._tails[place]
                entries = tail.stored(last[place], only, size)
                self._doubts.add((place, tail.partitions), entries, own=self._has_sent)
        self._doubts.unseen.clear()
        for place in self._tails.keys() - places:
            tail = self._tails[place]
            sent_to, entries = (place, tail.partitions), tail.to_send(size)
            self._doubts.add_unseen(sent_to, entries, own=self._has_sent)
        self._read.update(stored.ends)

    def _is_elsewhere(self, place: TargetPartition) -> bool:
        """Return True if messages of an earlier attempt there have another target now."""
        route = self._route
        sent_to = place.topic, self._tails[place].partitions
        return sent_to != (route.target, route.target_partitions)

    def _is_renamed(self, place: TargetPartition) -> bool:
        """Return True if an earlier attempt used another producer name there."""
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
            self._check_continues()
            time.sleep(sending.LEASE_CHECK_SECONDS)

    def _check_continues(self) -> None:
        """Check the lease every `LEASE_CHECK_SECONDS`.

        Raises:
            DrainedError: the run asks the task to end.
        """
        is_due = time.monotonic() - self._checked >= sending.LEASE_CHECK_SECONDS
        if is_due and self._check_lease().drain:
            raise sending.DrainedError

    def _has_stored_none(self, place: TargetPartition, last: int) -> bool:
        """Return True if no message of this lease, the only one in doubt, is in a partition."""
        generation = self._task.generation
        only = self._tails[place].generation == generation > SendAttempt.of(last).generation
        sent = self._again or place in self._sent_to
        return only and (not sent or self._last.get(place) == last)

    @property
    def _has_sent(self) -> bool:
        """Return True if messages of this lease may be in-flight or stored."""
        return self._again or bool(self._sent_to)

    def _movable(self, dead_letters: Iterable[DeadLetterRow]) -> Iterator[Sequence[DeadLetterRow]]:
        """Yield the entries that can be moved, and record refusals of unread ones."""
        task = self._task
        # Sending in bursts is cheaper for the broker, which writes concurrent messages together.
        for entry in by_entry(itertools.chain.from_iterable(rows.in_batches(dead_letters))):
            offset = entry[0].position.entry - task.range.first
            if len(entry[0].chunks) > 1:
                self._outcome.parts |= task.range.offsets(entry[0].chunks[:-1])
            if not task.unread or read_first(
                entry, offset, self._outcome, task.acknowledged, self._refusal
            ):
                yield entry
            del entry  # before the next one is decompressed

    def _send_all(self, window: sending.Window, entries: Iterable[Sequence[DeadLetterRow]]) -> bool:
        """Send *entries*; return True if one came out of order, which the next attempt sends."""
        outcome, doubts, settles = self._outcome, self._doubts, self._task.settles_unproven
        is_checked = (doubts.unproven or doubts.unseen) and (self._route.exactly_once or settles)
        late, newest = False, (-1, 0)
        for entry in entries:
            keyed = [(window.key(row), row) for row in entry]
            key = keyed[0][0]
            if late := key < newest:
                break
            newest = key
            unsent = [(key, row) for key, row in keyed if not outcome.is_stored(key)]
            if not unsent:
                if outcome.store(key, entry[0].batch_size):
                    self._acknowledge(entry[0])
            elif is_checked and any(places := doubts.of((row for _, row in unsent), key[0])):
                if settles and doubts.are_of_others(places):
                    outcome.skip(key)
                    self._acknowledge(entry[0])
                else:
                    outcome.refuse(key, "Unproven")
            else:
                for unsent_key, row in unsent:
                    window.send(unsent_key, row, self._properties(row))
                    del row
            del entry, keyed, unsent
        window.drain()
        return late

    def _refusal(self, entry: Sequence[DeadLetterRow]) -> str:
        cause = refusal(entry, len(entry), self._task.max_replays)
        return cause or self._schema_refusal(entry[0].schema_version)

    @property
    def _to_read(self) -> int:
        """Return a bitmap of entries that are neither moved, refused nor acknowledged.

        Acknowledged unread entries are included, to count their messages.
        """
        return self._task.to_read & ~self._outcome.settled

    def _dead_letters(self, entries: int) -> Generator[DeadLetterRow]:
        """Yield all messages of *entries*, a bitmap."""
        if not entries:
            return
        task, route = self._task, self._route
        if self._is_first_reading:
            self._is_first_reading = False
            for message in self._connections.messages.of(task.range):
                entries &= ~task.range.offsets(message.place.entries)
                yield DeadLetterRow.of(message, task.range.partition)
                del message  # before the next one is decompressed
            if not entries:
                return
        topic = ReadableTopic(self._client, route.admin_url, route.source)
        after = task.first_of(entries)
        messages = reader.read_entries(topic, task.range, entries, after, task.ahead)
        # `map` holds no message while the next one is decompressed.
        yield from map(DeadLetterRow.of, messages, itertools.repeat(task.range.partition))

    def _properties(self, row: DeadLetterRow) -> dict[str, str]:
        route = self._route
        source = str(Source(route.uid, row.partition, row.position))
        carried = envelope.for_replay(row.properties, replay=route.replay, source=source)
        return carried | {envelope.REPLAY_PROOF: self._key.proof(source, route.target)}

    def _is_acknowledged(self, offset: int) -> bool:
        """Return True if an entry was acknowledged at the last poll of the source."""
        self._connections.poll()
        if (source := self._connections.source) is not None and source is not self._source:
            self._source, self._acknowledged = source, ranges.settled(self._task.range, source)
        return bitmap.contains(self._acknowledged, offset)

    def _is_subscribed(self) -> bool:
        return broker.waited(self._route.is_subscribed)

    def _acknowledge(self, row: DeadLetterRow) -> None:
        for message_id in row.acknowledgements:
            self._consumer.acknowledge(message_id)

    def _check_lease(self) -> Permit:
        lease, self._checked = self._connections.lease, time.monotonic()
        broker.waited(lease.check)
        return lease.permit

    def _cut_off(self) -> RangeResult:
        """Return the result of a task whose target has lost its subscriptions.

        Stored messages that are not settled may be in the topic but in no backlog. So they are not
        searched for: they are refused as unproven with `ExactlyOnce`, and otherwise sent again.
        Earlier messages of the range are settled. A Replay that settles unproven messages refuses
        these, because its author has confirmed those of earlier Replays only.
        """
        if self._task.settles_unproven:
            for key in self._outcome.doubts:
                self._outcome.refuse(key, "Unproven")
        result = self.give_back()
        if not self._outcome.doubts:
            return replace(result, unsubscribed=True)
        offsets = (offset for offset, _ in self._outcome.doubts)
        entries = bitmap.of(offsets, self._task.range.size)
        for place in self._sent_to:
            self._doubts.add((place, self._route.target_partitions), entries, own=True)
        tails = result.tails if self._again else self._unread(self._task.tails)
        unproven = self._doubts.unproven
        return replace(result, unsubscribed=True, unproven=unproven, tails=tails)

    def _blocked(self) -> RangeResult:
        """Return the result of a task whose producer names another client uses.

        The next lease has other names, and searches for messages in doubt.
        """
        self._drained = True
        is_known = not self._again and not self._outcome.doubts
        return replace(self._result() if is_known else self.give_back(), blocked=True)

    def give_back(self) -> RangeResult:
        """Return the result of a task whose messages in doubt the next lease searches for.

        A lease that has sent no messages needs no search. Otherwise messages of a full target that
        are consumed and deleted meanwhile would be in doubt permanently.
        """
        self._drained = True
        result = self._result()
        if not self._has_sent:
            return result
        return replace(result, tails=self._unread(self._task.since), replays=self._task.all_replays)

    def _result(self) -> RangeResult:
        task, outcome = self._task, self._outcome
        unseen = task.entries & ~outcome.settled
        if unseen and not self._drained:
            self._account_for(unseen)
        # After a stored message of this lease, the broker drops messages of earlier leases there.
        closed = {TargetPartition(self._route.target, index) for index in outcome.stored_in}
        # All messages of this lease are accounted for, so only tails of earlier leases remain.
        tails = self._unread(task.tails)
        remaining = {place: tails[place] for place in tails.keys() - closed}
        result = outcome.result(task.range, remaining, self._doubts.replays(remaining))
        return replace(result, unproven=self._doubts.unproven, drained=self._drained)

    def _unread(self, tails: Mapping[TargetPartition, Tail]) -> dict[TargetPartition, Tail]:
        """Return *tails*, moved to the ends of searches."""
        return {
            place: tail._replace(entry=self._read.get(place, tail.entry))
            for place, tail in tails.items()
        }

    def _account_for(self, unseen: int) -> None:
        """Record entries that were not received as acknowledged, undelivered or empty.

        Entries are empty if no plan has read them and the broker holds no message of them.
        """
        source_range = self._task.range
        partition = self._connections.read_source()
        if source_range.ledger not in partition.held:
            self._outcome.miss(unseen, bitmap.EMPTY)
            return
        gone = unseen & (self._task.acknowledged | ranges.settled(source_range, partition))
        unread = self._outcome.unseen(unseen & self._task.unread, source_range)
        parts = unseen & unread & ~gone & self._outcome.parts
        hidden = unseen & ~gone & ~parts
        if hidden and self._task.discards:
            try:
                hidden = self._discard(hidden)
            except sending.DrainedError:
                self._drained = True
                return
        empty = unread & (gone | parts)
        self._outcome.miss(gone & ~empty, hidden, empty)

    def _has_distant_chunks(self) -> bool:
        """Return True if messages were not received because their chunks are far apart.

        The next attempt begins to read before their first chunks.
        """
        task, outcome = self._task, self._outcome
        unread = task.entries & task.unread & ~(outcome.settled | outcome.parts | task.acknowledged)
        if self._has_searched_chunks or not (unseen := outcome.unseen(unread, task.range)):
            return False
        self._has_searched_chunks, chunks = True, self._chunks(unseen)
        outcome.parts |= chunks.parts
        self._task = replace(task, chunks={**task.chunks, **chunks.firsts})
        return bool(chunks.firsts)

    def _chunks(
        self, entries: int, on_read: Callable[[], object] | None = None
    ) -> lookup.ReadableChunks:
        """Find the messages of chunks among *entries*; see `lookup.find_chunks`.

        If only some chunks of a message are acknowledged, the others are acknowledged again.
        """
        source_range, source = self._task.range, self._connections.read_source()
        topic = ReadableTopic(self._client, self._route.admin_url, self._route.source)
        chunks = lookup.find_chunks(topic, source, source_range, entries, on_read)
        for entry in chunks.returned:
            self._consumer.acknowledge(rows.entry_acknowledgement(source_range.partition, entry))
        return chunks

    def _discard(self, entries: int) -> int:
        """Acknowledge entries that no client can show; return those that have to be refused.

        It waits until producers of chunks have given up, because more chunks may follow. Chunks of
        a readable message are refused, wherever its other chunks are.

        Raises:
            DrainedError: the run asks the task to end.
        """
        source_range = self._task.range
        self._wait_until(self._begun + QUIET_SECONDS)
        partial = entries & self._outcome.parts
        chunks = self._chunks(entries & ~partial, self._check_continues)
        self._check_continues()
        partial |= chunks.parts | bitmap.of(chunks.firsts, source_range.size)
        for offset in bitmap.members(entries & ~partial):
            entry = source_range.entry_id(offset)
            self._consumer.acknowledge(rows.entry_acknowledgement(source_range.partition, entry))
        self._outcome.discard(entries & ~partial)
        return partial
