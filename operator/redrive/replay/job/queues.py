"""Run of a Replay of RocketMQ: plan, search, move and account.

A master has no acknowledgement of a dead letter, so a topic at each master records the Replays: its
plan before the first message is moved, and the moved offsets at its end. A copy of a dead letter is
stored at the same master, with its position and a proof. A run that follows a killed one searches
the target for them, from the offsets in the plan, so it moves no message again. Records and proofs
are signed with the key of the ledger: whoever may produce to these topics can't forge them.

A master deletes its oldest messages first, over all topics. Records and copies are younger than
the dead letters that they are about, so they exist as long as these do.

A run sends only while the status of the Replay has confirmed, within the last seconds, that no
later run has begun. A driver that is stopped after this check and before its send, and resumes
during a later run, stores one message twice. The later run counts it.

A dead-letter topic that was deleted and created again has other messages at the same offsets. Their
positions in the log of the master show that no earlier plan is about them.

A target that was deleted and created again has lost its copies, so a search proves nothing about
them. The run then writes its plan again, with the dead letters in doubt. It moves them, and counts
them as doubled.
"""

from __future__ import annotations

import itertools
import json
import logging
import math
import re
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from typing import Any

from redrive.admin.errors import BrokerFailedError, BrokerRefusedError, BrokerUnreachableError
from redrive.admin.rocketmq import Master
from redrive.api.replay_status import ReplayRun
from redrive.errors import RedriveError
from redrive.kube.client import UnavailableError
from redrive.policy import envelope
from redrive.reading import broker
from redrive.reading.queues import MessageQueue, QueueCluster, QueueMessage, named
from redrive.reasons import Reason
from redrive.replay.account import (
    SHOWN,
    Account,
    Leaders,
    count_message,
    drop_rare,
    frequent_causes,
)
from redrive.replay.evidence import LedgerKey, SignedRecord
from redrive.replay.job.dispatch import REPORT_SECONDS
from redrive.replay.job.plan import (
    SAMPLES,
    SUSPENDED,
    DesiredState,
    ReplayGoneError,
    RunEndedError,
    RunPreview,
    Scanned,
    check_continues,
)
from redrive.replay.job.plan import SHOWN as SHOWN_CAUSES
from redrive.replay.job.progress import Progress
from redrive.replay.job.queue_plan import (
    RECORD_BYTES,
    RECORD_OFFSETS,
    RECORD_PARTS,
    QueueEngine,
    QueueScan,
    Share,
    offsets_by_queue,
    position_of,
    read_positions,
    write_positions,
)
from redrive.replay.job.run import Review
from redrive.replay.job.scanned import ScannedMessage
from redrive.replay.ledger import FencedError, lost
from redrive.replay.records import RefusedMessage
from redrive.replay.spec import Chooser, QueueReplayJob
from redrive.replay.transport import Pace

BUSY_SECONDS = 0.2
"""Pause before a message is sent again to a busy broker."""
MAX_SENDS = 50
"""Sends of a message that the broker refuses without a cause, with the same pauses."""
_MESSAGES_PER_SECOND = 500
"""Messages per second that one process sends on two busy cores, for estimates."""
SETTLE_SECONDS = 2.0
"""Pause after a call without an answer. A broker drops requests that wait longer than 0.2 s."""
_OF_BROKER = re.compile(
    r"MAX_OFFSET|MIN_OFFSET|REAL_TOPIC|REAL_QID|DELAY|TIMER_\w+|__STARTDELIVERTIME|POP_CK|"
    r"1ST_POP_TIME|CONSUME_START_TIME|RECONSUME_TIME|MAX_RECONSUME_TIMES|RETRY_TOPIC|PGROUP|WAIT|"
    r"CLUSTER|MSG_REGION|TRACE_ON|TRAN_MSG|INNER_(NUM|BASE|MULTI_\w+)"
)
"""Properties that a broker adds or obeys: a copy must not have them."""
_COMPRESSION = 1 | 7 << 8
"""Flags of the storage of a message that a copy keeps."""

logger = logging.getLogger(__name__)


class QueueLedger:
    """Records of Replays at one master. The first plan of a Replay counts, with later doubts.

    A record counts if it was signed for this master. Others with the right to produce to the topic
    may write anything there, or copy records from other masters.

    Args:
        cluster: cluster of the master.
        queue: first queue of the ledger topic, with the offsets to read.
        key: key of the ledger.
    """

    def __init__(self, cluster: QueueCluster, queue: MessageQueue, key: LedgerKey) -> None:
        self._cluster, self._queue, self._key = cluster, queue, key
        self.plans: dict[str, Share] = {}
        self.ends: dict[str, set[int]] = {}
        foreign = 0
        for _, messages in cluster.pulls(queue):
            for message in messages:
                foreign += not self._add(message)
        if foreign:
            logger.warning(
                "%s messages of %s at %s are no signed records", foreign, queue.topic, queue.master
            )

    def _add(self, message: QueueMessage) -> bool:
        """Add a record; return False for any other message."""
        properties = message.properties or {}
        signed = self._key.verify(properties.get("KEYS", ""), message.content, properties)
        if signed is None or signed.owner != self._queue.master.name:
            return False
        try:
            record = json.loads(zlib.decompressobj().decompress(signed.value, RECORD_BYTES))
            if "moved" in record:
                self.ends[signed.key] = read_positions(record["moved"])
            else:
                plan = Share.of(record)
                first = self.plans.setdefault(signed.key, plan)
                first.unproven |= plan.unproven
                first.after = first.after if plan.after else {}
        except (zlib.error, ValueError, KeyError, TypeError, AttributeError):
            logger.warning("a record of %s at %s is invalid", self._queue.topic, self._queue.master)
        return True

    def write(self, uid: str, record: Mapping[str, Any]) -> None:
        """Store a record of a Replay."""
        content = zlib.compress(json.dumps(record).encode())
        signed = SignedRecord(uid, content, self._queue.master.name, 0)
        properties = {"KEYS": self._key.topic_key(uid), **self._key.properties(signed)}
        self._cluster.send(self._queue, content, _joined(properties))


def _joined(properties: Mapping[str, str]) -> str:
    """Return properties as a message has them."""
    return "".join(f"{name}\x01{value}\x02" for name, value in properties.items())


class QueueRun:
    """One run.

    Args:
        job: the run; a dry run is only planned.
        progress: reporter, which has begun.
        key: key of the ledger.
        before: status of earlier runs of the Replay. If they reported a plan, no other is made.
        engine: opens tasks that read and select the dead letters; None to do it here.
    """

    def __init__(  # noqa: PLR0913, PLR0917  each has a source of its own
        self,
        job: QueueReplayJob,
        cluster: QueueCluster,
        progress: Progress,
        key: LedgerKey,
        before: ReplayRun,
        engine: QueueEngine | None = None,
    ) -> None:
        self._engine = engine
        self._job, self._cluster, self._progress, self._key = job, cluster, progress, key
        self._was_planned, self._was_shown = before.counts.matched is not None, bool(before.review)
        self._reported = before.counts.moved or 0 if self._was_planned else None  # until a search
        self._ledgers: dict[Master, QueueLedger] = {}
        self._shares: dict[Master, Share] = {}
        self._confirmed = self._scan_due = -math.inf
        self._pace = Pace()
        self._not_accepted = Counter[Master]()
        self._needs_search = False  # True while copies may be stored that are not known

    def run(self, is_confirmed: Callable[[], bool]) -> bool:
        """Move the selected dead letters to their target, and report progress.

        The plan of a review is in the ledger before it is shown. Other Replays may move some of its
        messages until it is confirmed.

        Args:
            is_confirmed: waits until a review is confirmed, or has ended.

        Returns:
            False if the review has ended unconfirmed.

        Raises:
            RedriveError: the ledger has lost the reported plan, or a master does not answer.
            RunEndedError, ReplayGoneError: the run ended before all messages were moved.
            FencedError: another run has begun.
        """
        broker.waited(self._plan)
        if self._job.dry_run:
            self._progress.preview(self._preview())
            return True
        try:
            if self._progress.awaits_admission:
                if not self._was_shown:
                    self._progress.show_review(self._preview(), Review({}))
                if not is_confirmed():
                    self._record_end()
                    return False
            if self._job.review or self._needs_search:
                broker.waited(self._skip_moved)
            self._move()
        except (RunEndedError, ReplayGoneError):
            if not self._needs_search:
                self._record_end()
            raise
        self._record_end()
        self._progress.report(self.account())
        return True

    def _plan(self) -> None:
        """Read the plan of each master from its ledger, or make it.

        Raises:
            RedriveError: a topic is missing, a master does not answer, or the plan is lost.
        """
        job, masters = self._job, self._cluster.masters()
        queues = {master: self._queues(master, job.ledger)[0] for master in masters}
        self._ledgers = {m: QueueLedger(self._cluster, q, self._key) for m, q in queues.items()}
        plans = {
            master: ledger.plans[job.uid]
            for master, ledger in self._ledgers.items()
            if job.uid in ledger.plans
        }
        names = {name for share in plans.values() for name in share.masters}
        if missing := names - {master.name for master in masters}:
            raise BrokerUnreachableError(
                "the name server does not list a master of the plan",
                got=", ".join(sorted(missing))[:255],
                remedy="start it; the run resumes then",
            )
        self._needs_search = bool(plans)
        self._shares = plans  # an outage has others planned again
        others = [m for m in masters if m not in plans and (not names or m.name in names)]
        if not others:
            return
        if self._was_planned and not job.dry_run:
            raise lost(job.uid)
        with self._engine() if self._engine else nullcontext(self._scan) as scan:
            for master in others:
                share = self._planned(master, scan, tuple(master.name for master in masters))
                if not job.dry_run:
                    write = partial(self._ledgers[master].write, job.uid, share.to_json())
                    broker.waited(write)  # the first of two counts
                self._shares[master] = share

    def _queues(self, master: Master, topic: str) -> list[MessageQueue]:
        """Return the queues of a topic.

        Raises:
            TargetNotFound: the master has no such topic.
        """
        if queues := self._cluster.queues(master, topic):
            return queues
        raise Reason.TARGET_NOT_FOUND.error(
            f"{master} does not have a topic that this Replay needs",
            got=topic,
            remedy="create it there, and create another Replay",
        )

    def _planned(self, master: Master, scan: QueueScan, masters: tuple[str, ...]) -> Share:
        """Plan the dead letters at a master that no other Replay has moved."""
        job = self._job
        after = {queue.number: queue.offsets.stop for queue in self._queues(master, job.target)}
        share = Share(job.target, after, masters=masters)
        before = self._moved_before(master, self._ledgers[master], share)
        limit = min(job.choice.limit or math.inf, RECORD_OFFSETS)
        others = sum(share.matched for share in self._shares.values())
        sources, parts = self._cluster.queues(master, job.source.topic), 0
        for queue, message in scan(named(job.choice.ids, sources) if job.choice.ids else sources):
            self._report_scan(share)
            if others + share.matched >= limit or parts >= RECORD_PARTS:
                break
            offset = message.position.entry
            position = position_of(queue.number, offset)
            if position in before:
                continue
            share.scanned += 1
            share.unevaluated += not message.evaluated
            if not message.selected:
                continue
            place = f"{master.name}:{queue.number}:{offset}"
            if cause := self._refusal(message):
                share.refused |= {place: cause} if len(share.refused) < RECORD_PARTS else {}
                continue
            parts += position - 1 not in share.selected
            share.selected.add(position)
            share.last = max(share.last, message.position.ledger)
            share.samples = [*share.samples, place][:SAMPLES]
            count_message(share.causes, message.failure, message.replays, message.published)
            drop_rare(share.causes)
        return share

    def _refusal(self, message: ScannedMessage) -> str:
        """Return the cause for which a message can't be moved; empty without one."""
        if message.unreadable:
            return "UnreadableProperties"
        most = self._job.choice.max_replays
        return "ReplayedTooOften" if most is not None and message.replays >= most else ""

    def _scan(
        self, sources: Sequence[MessageQueue]
    ) -> Iterator[tuple[MessageQueue, ScannedMessage]]:
        """Yield the messages of queues, and whether the Replay selects them."""
        chooser, leaders = Chooser(replace(self._job.choice, ids=())), Leaders(0)
        for queue in sources:
            for _, messages in self._cluster.pulls(queue):
                for message in messages:
                    yield queue, ScannedMessage.of(message.row(queue), chooser, leaders)

    def _report_scan(self, share: Share) -> None:
        """Report the plan so far every few seconds."""
        if time.monotonic() > self._scan_due:
            self._scan_due = time.monotonic() + REPORT_SECONDS
            shares = [*self._shares.values(), share]
            count, unevaluated = (
                sum(getattr(share, name) for share in shares) for name in ("scanned", "unevaluated")
            )
            with suppress(UnavailableError):
                self._progress.report_scan(Scanned(count, unevaluated=unevaluated))

    def _moved_before(self, master: Master, ledger: QueueLedger, share: Share) -> set[int]:
        """Return the dead letters that other Replays have moved, and add to `share.unproven`.

        One without a record of its end was killed, so its target is searched.
        """
        moved = set[int]()
        plans = {uid: plan for uid, plan in ledger.plans.items() if uid != self._job.uid}
        oldest = self._oldest(master) if plans else 0
        for uid, other in plans.items():
            if other.last < oldest:  # the master has none of these any more
                continue
            share.unproven |= other.unproven
            if uid in ledger.ends:
                other.moved = ledger.ends[uid]
            elif not self._search(master, uid, other):
                share.unproven |= other.selected - other.moved
            moved |= other.moved
        return moved

    def _oldest(self, master: Master) -> int:
        """Return the position in the log of a master of its oldest dead letter."""
        sources = self._cluster.queues(master, self._job.source.topic)
        pulled = ((m for _, ms in self._cluster.pulls(queue) for m in ms) for queue in sources)
        firsts = [next(messages, None) for messages in pulled]
        return min((first.log for first in firsts if first is not None), default=0)

    def _skip_moved(self) -> None:
        """Skip the dead letters that other Replays have moved since the plan."""
        for master, share in self._shares.items():
            first, *_ = self._queues(master, self._job.ledger)
            ledger = QueueLedger(self._cluster, first, self._key)
            share.gone |= self._moved_before(master, ledger, share) & share.selected

    def _search(self, master: Master, uid: str, share: Share) -> bool:
        """Find the copies of the plan of a Replay; return False if its target has lost messages."""
        share.moved, share.repeated = set(), set()
        sent, lossy = set[int](), set(share.after)
        for queue in self._cluster.queues(master, share.target):
            kept, end = queue.offsets, share.after.get(queue.number, 0)
            if kept.start <= end <= kept.stop:
                lossy.discard(queue.number)
            after = replace(queue, offsets=range(max(kept.start, end), kept.stop))
            for _, messages in self._cluster.pulls(after):
                for message in messages:
                    properties = message.properties or {}
                    place = properties.get(envelope.REPLAY_SOURCE, "")
                    proof = properties.get(envelope.REPLAY_PROOF, "")
                    if not self._key.proves(proof, f"{uid}@{place}", share.target):
                        continue
                    name, number, offset = place.rsplit(":", 2)
                    if name != master.name:
                        continue  # others may store a copy again, at any master
                    position = position_of(int(number), int(offset))
                    share.moved.add(position)
                    if not message.retries:  # a consumer's retry has the proof of its copy
                        (share.repeated if position in sent else sent).add(position)
        return not lossy

    def _move(self) -> None:
        """Move the messages that are left. After an outage the target is searched again.

        Raises:
            BrokerUnreachableError: a master did not answer for five minutes.
        """
        is_unsure, failed_since = self._needs_search, None
        while True:
            try:
                if self._needs_search:
                    self._search_all()
                    self._needs_search, failed_since = False, None
                for master, share in self._shares.items():
                    self._move_share(master, share)
                for master, share in self._shares.items() if is_unsure else ():
                    self._search(master, self._job.uid, searched := replace(share))
                    share.repeated = searched.repeated
                return  # noqa: TRY300  the search may fail
            except BrokerUnreachableError as error:
                self._needs_search = is_unsure = True
                failed_since = failed_since or time.monotonic()
                if time.monotonic() - failed_since > broker.WAIT_SECONDS:
                    raise
                logger.warning("retrying: %s", error)
                time.sleep(SETTLE_SECONDS)
                self._confirm()

    def _search_all(self) -> None:
        """Search the target for the copies of each plan, and write it again if some are lost."""
        moved = self.account().moved if self._reported is None else self._reported
        searched = {master: replace(share) for master, share in self._shares.items()}
        is_whole = [self._search(m, self._job.uid, share) for m, share in searched.items()]
        copies = sum(len(share.moved) for share in searched.values())
        if not all(is_whole) or copies < moved:
            logger.warning("%s has lost copies, so some may be stored twice", self._job.target)
            for master, share in searched.items():
                share.after = {}
                self._search(master, self._job.uid, share)
                doubtful = self._shares[master].moved if self._reported is None else share.selected
                share.unproven |= doubtful - share.moved
                self._ledgers[master].write(self._job.uid, share.to_json())
        self._shares, self._reported = searched, None

    def _move_share(self, master: Master, share: Share) -> None:
        targets = self._queues(master, share.target)
        pending = share.left
        spans = offsets_by_queue(pending)
        for queue in self._cluster.queues(master, self._job.source.topic):
            span, kept = spans.get(queue.number, range(0)), queue.offsets
            offsets = range(max(span.start, kept.start), min(span.stop, kept.stop))
            for _, messages in self._cluster.pulls(source := replace(queue, offsets=offsets)):
                for message in messages:
                    is_pending = position_of(queue.number, message.offset) in pending
                    if is_pending and message.log <= share.last:
                        self._copy(message, source, share, targets)
        share.gone |= share.left

    def _copy(
        self, message: QueueMessage, source: MessageQueue, share: Share, targets: list[MessageQueue]
    ) -> None:
        """Store a dead letter in the target, unless the broker does not accept it."""
        id_ = f"{source.master.name}:{source.number}:{message.offset}"
        position = position_of(source.number, message.offset)
        properties = self._properties(message, id_, share)
        key = properties.get("__SHARDINGKEY") or properties.get("KEYS")
        place = message.offset if key is None else zlib.crc32(key.encode())
        began = time.monotonic()
        for sends in itertools.count(1):
            self._await_turn()
            try:
                self._cluster.send(
                    targets[place % len(targets)],
                    message.content,
                    _joined(properties),
                    flags=message.flags & _COMPRESSION,
                    born=message.born,
                )
            except BrokerFailedError:
                if time.monotonic() - began > broker.WAIT_SECONDS:
                    raise
                time.sleep(BUSY_SECONDS)
            except BrokerRefusedError as error:
                if not error.has_cause and sends < MAX_SENDS:
                    time.sleep(BUSY_SECONDS)
                    continue
                logger.warning("%s is refused: %s", id_, error)
                self._not_accepted[source.master] += 1
                if self._not_accepted[source.master] > RECORD_PARTS:
                    self._progress.report(self.account())
                    raise RunEndedError(
                        f"{source.master} does not accept more messages of this Replay in "
                        f"{share.target} than its record can contain, and dead letters are left",
                        got=str(error),
                        remedy="correct the cause, and create another Replay for those left",
                        reason="NotAccepted",
                    ) from error
                share.selected.remove(position)
                share.refused[id_] = "NotAccepted"
                return
            else:
                share.moved.add(position)
                return

    def _properties(self, message: QueueMessage, id_: str, share: Share) -> dict[str, str]:
        """Return the properties of a copy: those of the producer, and the marks of the move."""
        own = {k: v for k, v in (message.properties or {}).items() if not _OF_BROKER.fullmatch(k)}
        job = self._job
        carried = envelope.for_replay(own, replay=f"{job.namespace}/{job.name}", source=id_)
        del carried[envelope.RECONSUMETIMES]  # a field of the call
        proof = self._key.proof(f"{job.uid}@{id_}", share.target)
        carried[envelope.REPLAY_PROOF] = proof
        return carried | ({"RETRY_TOPIC": job.retry_of} if job.retry_of else {})

    def _await_turn(self) -> None:
        """Wait until one message may be sent.

        Raises:
            RunEndedError, ReplayGoneError, FencedError: the run has to end.
        """
        while True:
            self._confirm()
            rate, now = self._progress.rate_limit(self._job), time.monotonic()
            if not (seconds := self._pace.due_in(now, rate)):
                self._pace.sent(now, rate)
                return
            time.sleep(min(seconds, REPORT_SECONDS))

    def _confirm(self) -> None:
        """Report every `REPORT_SECONDS`, and wait while the run is suspended.

        Nothing is sent while the API server does not answer: another run may have begun.

        Raises:
            RunEndedError, ReplayGoneError, FencedError: the run has to end.
        """
        if time.monotonic() - self._confirmed < REPORT_SECONDS:
            return
        pause, failed_since = None, time.monotonic()
        while True:
            try:
                desired = self._progress.report(self.account(), pause=pause)
                self._confirmed = failed_since = time.monotonic()
            except FencedError:
                raise
            except RedriveError:
                if time.monotonic() - failed_since > broker.WAIT_SECONDS:
                    raise
                logger.warning("status update failed, retrying", exc_info=True)
            else:
                if desired is not DesiredState.SUSPEND:
                    if remaining := self.account().left:
                        check_continues(desired, remaining)
                    return
                pause = SUSPENDED
            time.sleep(REPORT_SECONDS)

    def _record_end(self) -> None:
        """Record the moved dead letters. Without a record the next Replay searches the target."""
        for master, share in self._shares.items():
            record = {"moved": write_positions(share.moved)}
            broker.waited(partial(self._ledgers[master].write, self._job.uid, record))

    def account(self) -> Account:
        """Return the account of all masters."""
        shares = self._shares.values()
        refused = [item for share in shares for item in share.refused.items()]
        matched = sum(share.matched for share in shares)
        moved = sum(len(share.moved) for share in shares)
        skipped = sum(share.skipped for share in shares)
        return Account(
            scanned=sum(share.scanned for share in shares),
            unevaluated=sum(share.unevaluated for share in shares),
            matched=matched,
            moved=moved,
            skipped=skipped,
            refused=len(refused),
            left=matched - moved - skipped - len(refused),
            doubled=sum(share.doubled for share in shares),
            refusals=tuple(RefusedMessage(place, 1, cause) for place, cause in refused[:SHOWN]),
        )

    def _preview(self) -> RunPreview:
        account, shares = self.account(), self._shares.values()
        refused = Counter(cause for share in shares for cause in share.refused.values())
        causes = frequent_causes((share.causes for share in shares), SHOWN_CAUSES)
        samples = [sample for share in shares for sample in share.samples][:SAMPLES]
        rate = min(_MESSAGES_PER_SECOND, self._job.rate_limit or math.inf)
        seconds = math.ceil(account.left / rate)
        return RunPreview(account, causes, refused, tuple(samples), seconds)
