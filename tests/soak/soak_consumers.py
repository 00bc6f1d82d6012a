"""Consumers of all kinds for minutes, while they and the broker are disturbed.

Every message ends as planned, and each repetition is explained by one event: no figure may be
off by one. `make soak SOAK="--minutes 60"` takes an hour.
"""

from __future__ import annotations

import itertools
import json
import queue
import random
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pulsar as client_library
import pytest

from redrive.messages import id_text
from redrive.policy.naming import TopicName
from sandbox import pulsar
from sandbox.pulsar import SUPERUSER
from sandbox.sandbox import Sandbox
from tests.soak import journal
from tests.soak.account import Account, Disturbance, Stored
from tests.soak.consumers import Consumers
from tests.soak.journal import BURST, MAX_RETRIES
from tests.support.provisioned_policy import ProvisionedPolicy
from tests.support.topics import deduplicate, path, sent_as

KINDS = ("threads", "batches", "coroutines", "simple")
PARTITIONS, MOST_PARTITIONS = 4, 8
MESSAGES_PER_SECOND = 40
MESSAGES_PER_BURST = 60
QUIET_SECONDS = (8, 14)
NOTICE_SECONDS = 65
"""The interval at which clients poll for new partitions."""
DRAIN_SECONDS = 900


class Soak:
    """One run: produces, disturbs, and prints its progress."""

    def __init__(
        self, sandbox: Sandbox, provisioned: ProvisionedPolicy, consumers: Consumers, seed: int
    ) -> None:
        self._sandbox = sandbox
        self._provisioned = provisioned
        self._consumers = consumers
        self._chance = random.Random(seed)  # noqa: S311 - the same for one seed
        self._asked: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._paused = threading.Event()
        self._next: list[Callable[[], None]] = []
        self.disturbances: list[Disturbance] = []
        self.partitions = PARTITIONS
        self.produced: list[int] = []

    def produce(self, over: threading.Event) -> None:
        """Produce numbers until *over* is set, and bursts of others on request.

        Sequence ids are set here: those of the client restart after a lost connection,
        and the broker drops a message with a stored number.
        """
        client = self._provisioned.client(SUPERUSER)
        producer = client.create_producer(
            str(self._provisioned.policy.topic),
            producer_name="soak",
            block_if_queue_full=True,
            send_timeout_millis=0,
        )
        numbers, burst = itertools.count(), itertools.count(BURST)
        while not over.wait(1 / MESSAGES_PER_SECOND):
            sent = [] if self._paused.is_set() else [next(numbers)]
            with suppress(queue.Empty):
                sent += itertools.islice(burst, self._asked.get_nowait())
            for number in sent:
                self.produced.append(number)
                producer.send_async(b"%d" % number, lambda *_: None, sequence_id=len(self.produced))
        producer.flush()
        producer.close()

    def disturb(self) -> None:
        """Apply one disturbance: each of them once, then some more often."""
        if not self._next:
            choices = self._choices()
            first = [do for _, do in choices] if not self.disturbances else []
            more = [do for weight, do in choices for _ in range(weight)]
            self._next = [
                *self._chance.sample(more, len(more)),
                *self._chance.sample(first, len(first)),
            ]
        self._next.pop()()

    def _choices(self) -> list[tuple[int, Callable[[], None]]]:
        policy = self._provisioned.policy
        return [
            (4, lambda: self._kill(self._chance.choice(KINDS))),
            (3, lambda: self._freeze(self._chance.choice(KINDS))),
            (3, lambda: self._restart(self._chance.choice(KINDS))),
            (2, lambda: self._unload(policy.topic, policy.retry_topic)),
            (2, lambda: self._unload(policy.retry_topic)),
            (3, self._unload_fresh),
            (2, self._kill_broker),
            (2, self._grow),
            (2, lambda: self._throttle(policy.retry_topic)),
            (2, lambda: self._throttle(policy.dead_letter_topic)),
            (2, lambda: self._refuse(policy.retry_topic, "consume")),
            # A permission that consumers do not use.
            (2, lambda: self._refuse(policy.dead_letter_topic, "functions")),
        ]

    def rest(self) -> None:
        """Wait for some seconds without a disturbance."""
        end = time.monotonic() + self._chance.uniform(*QUIET_SECONDS)
        while time.monotonic() < end:
            time.sleep(1)
            self._consumers.revive()

    def show(self, done: float, minutes: float) -> None:
        """Print the progress."""
        counts: dict[str, int] = {}
        for disturbance in self.disturbances:
            counts[disturbance.kind] = counts.get(disturbance.kind, 0) + 1
        summary = ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items()))
        print(
            f"\r{done / 60:5.1f} of {minutes:g} min, {len(self.produced)} produced; {summary}",
            file=sys.__stderr__, flush=True,
        )  # fmt: skip

    def _kill(self, kind: str) -> None:
        name = self._consumers.name(kind)
        start = time.time()
        self._consumers.signal(kind, signal.SIGKILL)
        self._consumers.wait(kind)
        # The client sends grouped acknowledgements after 0.1 s.
        self.disturbances.append(
            Disturbance(
                "killed consumer",
                start,
                time.time(),
                name,
                redelivers=True,
                forgets=0.5,
                unanswered=True,
            )
        )
        time.sleep(1)
        self._consumers.start(kind)

    def _freeze(self, kind: str) -> None:
        start, name = time.time(), self._consumers.name(kind)
        self._consumers.signal(kind, signal.SIGSTOP)
        time.sleep(self._chance.uniform(2, 8))
        self._consumers.signal(kind, signal.SIGCONT)
        self.disturbances.append(Disturbance("frozen consumer", start, time.time(), name))

    def _restart(self, kind: str) -> None:
        start, name = time.time(), self._consumers.name(kind)
        self._consumers.signal(kind, signal.SIGTERM)
        self._consumers.wait(kind)
        self.disturbances.append(
            Disturbance("restarted consumer", start, time.time(), name, redelivers=True)
        )
        self._consumers.start(kind)

    def _unload_fresh(self) -> None:
        """Move the retry topic right after the start of all consumers, while many messages fail.

        Their producers have not published to all partitions yet. A client that reconnects a
        producer without a published message may use one number for two messages, and a broker with
        deduplication drops the second.
        """
        self._paused.set()
        try:
            self.wait_until_settled()
            start = time.time()
            for kind in KINDS:
                self._consumers.signal(kind, signal.SIGTERM)
            for kind in KINDS:
                self._consumers.wait(kind)
                self._consumers.start(kind)
            self.disturbances.append(
                Disturbance("restarted consumer", start, time.time(), redelivers=True)
            )
            self._burst(len(KINDS))
            time.sleep(1)
            self.wait_until_settled()
            with ThreadPoolExecutor(1) as pool:
                moving = pool.submit(self._move, self._provisioned.policy.retry_topic)
                for _ in range(20):
                    self._burst(8)
                    time.sleep(0.05)
                moving.result()
        finally:
            self._paused.clear()

    def wait_until_settled(self) -> None:
        """Wait until no message is left to handle."""
        end = time.monotonic() + DRAIN_SECONDS
        while unsettled := self._provisioned.unsettled(self.partitions):
            self._consumers.revive()
            assert time.monotonic() < end, f"{unsettled} messages are not settled"
            time.sleep(0.2)

    def _burst(self, messages: int = MESSAGES_PER_BURST) -> None:
        """Request a burst of failing messages."""
        self._asked.put(messages)

    def _unload(self, *topics: TopicName) -> None:
        """Move all partitions of *topics*, while many messages fail."""
        self._burst()
        time.sleep(self._chance.uniform(0, 1))
        self._move(*topics)

    def _move(self, *topics: TopicName) -> None:
        start = time.time()
        for topic in topics:
            self._provisioned.broker.request("PUT", f"{path(topic)}/unload").check("unload")
        # The retry topic has deduplication: messages sent meanwhile are stored once, but the
        # receipt may have no id.
        self.disturbances.append(
            Disturbance(
                "unload",
                start,
                time.time(),
                redelivers=True,
                forgets=2,
                unanswered=True,
                settles=5,
                loads=True,
            )
        )

    def _kill_broker(self) -> None:
        start = time.time()
        # Acknowledgements are stored every 10 s (managedLedgerDefaultMarkDeleteRateLimit of
        # a standalone broker; every second in others), the last ones before a pause after up to
        # 60 s (managedLedgerCursorPositionFlushSeconds), and a little later on a busy machine.
        self._sandbox.processes.kill(pulsar.NAME)
        self._sandbox.restart_broker()
        self.disturbances.append(
            Disturbance(
                "killed broker",
                start,
                time.time(),
                redelivers=True,
                forgets=62,
                crashes=True,
                unanswered=True,
                settles=30,
                loads=True,
            )
        )

    def _grow(self) -> None:
        """Add two partitions to the source and to the retry topic, while many messages fail.

        Clients detect them within a minute. This explains no repeated handling or copy.
        """
        if self.partitions == MOST_PARTITIONS:
            self._unload_fresh()
            return
        start = time.time()
        self.partitions += 2
        topics = [self._provisioned.policy.topic, self._provisioned.policy.retry_topic]
        for topic in self._chance.sample(topics, 2):
            self._provisioned.broker.request(
                "POST", f"{path(topic)}/partitions", self.partitions
            ).check(f"grow {topic}")
            time.sleep(self._chance.uniform(0, 2))
        while time.time() < start + NOTICE_SECONDS:
            self._burst()
            time.sleep(self._chance.uniform(2, 5))
            self._consumers.revive()
        self.disturbances.append(Disturbance("growth", start, time.time()))

    def _throttle(self, topic: TopicName) -> None:
        """Limit the messages per second of each producer, while many messages fail.

        The broker reads nothing from a connection whose producer exceeds the rate, not even
        acknowledgements; a client whose pings get no answer reconnects.
        """
        start, rate = time.time(), f"{path(topic)}/publishRate"
        limit = {
            "publishThrottlingRateInMsg": self._chance.randint(1, 4),
            "publishThrottlingRateInByte": -1,
        }
        self._provisioned.broker.request("POST", rate, limit).check(f"limit {topic}")
        self._burst()
        time.sleep(self._chance.uniform(10, 25))
        self._provisioned.broker.request("DELETE", rate).check(f"take the limit off {topic}")
        self.disturbances.append(
            Disturbance(
                "publish rate",
                start,
                time.time(),
                redelivers=True,
                forgets=0.5,
                unanswered=True,
                settles=30,
            )
        )

    def _refuse(self, topic: TopicName, other: str) -> None:
        start = time.time()
        self._provisioned.grant(topic, other)
        time.sleep(self._chance.uniform(5, 15))
        self._provisioned.grant(topic, other, "produce")
        self.disturbances.append(Disturbance("refused sends", start, time.time(), unanswered=True))


def test_all_messages_end_as_planned_whatever_happens(
    sandbox: Sandbox,
    provision_policy: Callable[..., ProvisionedPolicy],
    tmp_path: Path,
    pytestconfig: pytest.Config,
) -> None:
    minutes, seed = pytestconfig.getoption("--minutes") or 10.0, pytestconfig.getoption("--seed")
    provisioned = provision_policy(
        delays=["1s", "2s", "5s"], max_retries=MAX_RETRIES, partitions=PARTITIONS
    )
    policy = provisioned.policy
    for topic in (policy.topic, policy.retry_topic, policy.dead_letter_topic):
        _keep_for_audit(provisioned, topic)
    # So that a message sent again after a lost connection is stored once.
    deduplicate(provisioned.broker, policy.topic)
    deduplicate(provisioned.broker, policy.dead_letter_topic)
    consumers, over = Consumers(provisioned, tmp_path), threading.Event()
    soak = Soak(sandbox, provisioned, consumers, seed)
    with ExitStack() as ending:
        ending.callback(consumers.kill_all)
        for kind in KINDS:
            consumers.start(kind)
        producing = threading.Thread(target=soak.produce, args=(over,))
        ending.callback(producing.join)
        ending.callback(over.set)
        producing.start()
        began = time.monotonic()
        while (done := time.monotonic() - began) < 60 * minutes:
            soak.rest()
            soak.disturb()
            soak.show(done, minutes)
        over.set()
        producing.join()
        soak.wait_until_settled()
        for kind in KINDS:
            consumers.signal(kind, signal.SIGTERM)
            consumers.wait(kind)
    account = Account(
        _stored(provisioned, policy.topic),
        _stored(provisioned, policy.retry_topic),
        _stored(provisioned, policy.dead_letter_topic),
        disturbances=soak.disturbances,
    )
    for name, file in consumers.journals().items():
        account.add(name, journal.read(file))
    account.check()
    _report(account)
    assert consumers.failed == []
    assert provisioned.unsettled(soak.partitions) == 0
    stored = Counter(message.number for message in account.source)
    stored -= Counter(message.number for message in account.stored_twice if not message.failed)
    assert sorted(stored.elements()) == sorted(soak.produced)
    assert account.lost == []
    assert account.doubled == []
    assert account.invented == []
    assert account.repeated == []
    assert account.copied == []
    assert account.misplanned == []
    messages, copies = len(account.source), len(account.retried) + len(account.dead)
    assert len(account.handlings) == messages + len(account.retried) + account.repetitions
    assert copies == len(account.receipts) + account.without_receipt
    assert account.without_id <= account.without_receipt
    assert sum(account.explained.values()) == account.repetitions + account.without_receipt + len(
        account.stored_twice
    )


def _keep_for_audit(provisioned: ProvisionedPolicy, topic: TopicName) -> None:
    """Create a subscription that keeps all messages of *topic*."""
    earliest = {"ledgerId": -1, "entryId": -1}
    provisioned.broker.request("PUT", f"{path(topic)}/subscription/audit", earliest).check(
        f"keep all messages of {topic}"
    )


def _stored(provisioned: ProvisionedPolicy, topic: TopicName) -> list[Stored]:
    """Return all messages ever stored in *topic*, delayed or not."""
    client = provisioned.client(SUPERUSER)
    reader = client.subscribe(str(topic), "audit", client_library.ConsumerType.Exclusive)
    messages: list[Stored] = []
    while True:
        try:
            message = reader.receive(5_000)
        except client_library.Timeout:
            reader.close()
            return _identified(provisioned, topic, messages)
        properties: dict[str, Any] = message.properties()
        own = id_text(message.message_id())
        messages.append(
            Stored(
                own,
                properties.get("ORIGIN_MESSAGE_ID", own),
                int(message.data()),
                int(properties.get("RECONSUMETIMES", 0)),
                message.publish_timestamp() / 1_000,
            )
        )


def _identified(
    provisioned: ProvisionedPolicy, topic: TopicName, messages: Sequence[Stored]
) -> list[Stored]:
    """Read producer name and sequence id of messages that are one of several of an attempt."""
    counts = Counter((message.number, message.failed) for message in messages)
    return [
        replace(message, sent=sent_as(provisioned.broker, topic, message.id))
        if counts[message.number, message.failed] > 1
        else message
        for message in messages
    ]


def _report(account: Account) -> None:
    figures = {
        "messages": len(account.source),
        "handled": len(account.handlings),
        "retried": len(account.retried),
        "dead-lettered": len(account.dead),
        "handled again": account.repetitions,
        "stored twice by the broker": len(account.stored_twice),
        "copies without receipt": account.without_receipt,
        "receipts without id": account.without_id,
        "explained by": dict(account.explained),
    }
    print(json.dumps(figures, indent=2), file=sys.__stderr__, flush=True)
    wrong = [
        f"{name}: {line}"
        for name in ("lost", "doubled", "invented", "repeated", "copied", "misplanned")
        for line in getattr(account, name)
    ]
    if wrong:  # a failed assertion shows only the first of them
        print(*wrong, *account.disturbances, sep="\n", file=sys.__stderr__, flush=True)
