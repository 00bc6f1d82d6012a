"""Consumers of all kinds at work for minutes, while they and the broker are disturbed.

Every message ends as planned, and what happened twice is explained by one event: no figure may be
off by one. `make soak SOAK="--minutes 60"` takes an hour.
"""

from __future__ import annotations

import json
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pulsar as client_library
import pytest

from redrive.copying.reading import id_text
from redrive.policy.naming import TopicName
from sandbox import pulsar
from sandbox.pulsar import SUPERUSER
from sandbox.sandbox import Sandbox
from tests.soak import journal
from tests.soak.account import Account, Disturbance, Stored
from tests.soak.consumers import Consumers
from tests.soak.plan import MAX_RETRIES
from tests.support.deduplication import deduplicate
from tests.support.provisioned_policy import ProvisionedPolicy, path

KINDS = ("threads", "batches", "coroutines", "simple")
PARTITIONS = 2
MESSAGES_PER_SECOND = 40
QUIET_SECONDS = (8, 14)
DRAIN_SECONDS = 300


class Soak:
    """One run: produces, disturbs, and says how far it is."""

    def __init__(
        self, sandbox: Sandbox, provisioned: ProvisionedPolicy, consumers: Consumers, seed: int
    ) -> None:
        self._sandbox = sandbox
        self._provisioned = provisioned
        self._consumers = consumers
        self._chance = random.Random(seed)  # noqa: S311 - the same for one seed
        self._broker_is_up = threading.Event()
        self._broker_is_up.set()
        self.disturbances: list[Disturbance] = []
        self.produced = 0

    def produce(self, over: threading.Event) -> None:
        """Produce numbers until it is *over*; one whose send has failed may be stored as well."""
        client = self._provisioned.client(SUPERUSER)
        producer = client.create_producer(
            str(self._provisioned.policy.topic), block_if_queue_full=True, send_timeout_millis=0
        )
        while not over.wait(1 / MESSAGES_PER_SECOND):
            producer.send_async(b"%d" % self.produced, lambda *_: None)
            self.produced += 1
        producer.flush()
        producer.close()

    def disturb(self) -> None:
        """Do one of the things that happen."""
        kind = self._chance.choice(KINDS)
        policy = self._provisioned.policy
        choices: list[tuple[int, Callable[[], None]]] = [
            (4, lambda: self._kill(kind)),
            (3, lambda: self._freeze(kind)),
            (3, lambda: self._restart(kind)),
            (4, self._unload),
            (2, self._kill_broker),
            (2, lambda: self._refuse(policy.retry_topic, "consume")),
            # A right that consumers have no use for.
            (2, lambda: self._refuse(policy.dead_letter_topic, "functions")),
        ]
        weights, each = zip(*choices, strict=True)
        self._chance.choices(each, weights)[0]()

    def rest(self) -> None:
        """Leave all in peace for some seconds."""
        end = time.monotonic() + self._chance.uniform(*QUIET_SECONDS)
        while time.monotonic() < end:
            time.sleep(1)
            self._consumers.revive()

    def show(self, done: float, minutes: float) -> None:
        """Print how far it is."""
        counts: dict[str, int] = {}
        for each in self.disturbances:
            counts[each.kind] = counts.get(each.kind, 0) + 1
        told = ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items()))
        print(
            f"\r{done / 60:5.1f} of {minutes:g} min, {self.produced} produced; {told}",
            file=sys.__stderr__, flush=True,
        )  # fmt: skip

    def _kill(self, kind: str) -> None:
        name = self._consumers.name(kind)
        start = time.time()
        self._consumers.signal(kind, signal.SIGKILL)
        self._consumers.wait(kind)
        # What the client keeps back is acknowledged after 0.1 s.
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

    def _unload(self) -> None:
        start = time.time()
        for topic in (self._provisioned.policy.topic, self._provisioned.policy.retry_topic):
            self._provisioned.broker.request("PUT", f"{path(topic)}/unload").check("unload")
        # The retry topic has deduplication: what is sent to it meanwhile is stored once, though the
        # receipt may not tell its id.
        self.disturbances.append(
            Disturbance(
                "unload",
                start,
                time.time(),
                redelivers=True,
                forgets=0.5,
                unanswered=True,
                settles=5,
            )
        )

    def _kill_broker(self) -> None:
        start = time.time()
        # Acknowledgements are written down every 10 s (managedLedgerDefaultMarkDeleteRateLimit of
        # a standalone broker; every second in others), and a little later on a busy machine.
        self._sandbox.processes.kill(pulsar.NAME)
        self._sandbox.restart_broker()
        self.disturbances.append(
            Disturbance(
                "killed broker",
                start,
                time.time(),
                redelivers=True,
                forgets=11,
                crashes=True,
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
    # So that what its producer sends again after a lost connection is one message.
    deduplicate(provisioned.broker, policy.topic)
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
        end = time.monotonic() + DRAIN_SECONDS
        while left := provisioned.unsettled(PARTITIONS):
            consumers.revive()
            assert time.monotonic() < end, f"{left} messages are not settled"
            time.sleep(1)
        for kind in KINDS:
            consumers.signal(kind, signal.SIGTERM)
            consumers.wait(kind)
    client = provisioned.client(SUPERUSER)
    account = Account(
        _stored(client, policy.topic),
        _stored(client, policy.retry_topic),
        _stored(client, policy.dead_letter_topic),
        disturbances=soak.disturbances,
    )
    for name, file in consumers.journals().items():
        account.add(name, journal.read(file))
    account.check()
    _report(account)
    assert consumers.failed == []
    assert provisioned.unsettled(PARTITIONS) == 0
    assert account.lost == []
    assert account.invented == []
    assert account.repeated == []
    assert account.copied == []
    assert account.misplanned == []
    assert len(account.source) == soak.produced
    messages, copies = len(account.source), len(account.retried) + len(account.dead)
    assert len(account.handlings) == messages + len(account.retried) + account.repetitions
    assert copies == len(account.receipts) + account.without_receipt
    assert account.without_id <= account.without_receipt
    assert sum(account.explained.values()) == account.repetitions + account.without_receipt


def _keep_for_audit(provisioned: ProvisionedPolicy, topic: TopicName) -> None:
    """Have a subscription keep all that is ever stored in *topic*."""
    earliest = {"ledgerId": -1, "entryId": -1}
    provisioned.broker.request("PUT", f"{path(topic)}/subscription/audit", earliest).check(
        f"keep all messages of {topic}"
    )


def _stored(client: client_library.Client, topic: TopicName) -> list[Stored]:
    """Return all that was ever stored in *topic*, delayed or not."""
    reader = client.subscribe(str(topic), "audit", client_library.ConsumerType.Exclusive)
    found: list[Stored] = []
    while True:
        try:
            message = reader.receive(5_000)
        except client_library.Timeout:
            reader.close()
            return found
        properties: dict[str, Any] = message.properties()
        own = id_text(message.message_id())
        found.append(
            Stored(
                own,
                properties.get("ORIGIN_MESSAGE_ID", own),
                int(message.data()),
                int(properties.get("RECONSUMETIMES", 0)),
                message.publish_timestamp() / 1_000,
            )
        )


def _report(account: Account) -> None:
    figures = {
        "messages": len(account.source),
        "handled": len(account.handlings),
        "retried": len(account.retried),
        "dead-lettered": len(account.dead),
        "handled again": account.repetitions,
        "copies without receipt": account.without_receipt,
        "receipts without id": account.without_id,
        "explained by": dict(account.explained),
    }
    print(json.dumps(figures, indent=2), file=sys.__stderr__, flush=True)
    wrong = account.lost + account.invented + account.repeated + account.copied + account.misplanned
    if wrong:  # a failed assertion shows only the first of them
        print(*wrong, *account.disturbances, sep="\n", file=sys.__stderr__, flush=True)
