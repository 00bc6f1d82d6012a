"""Replays of RocketMQ at two masters: a driver is killed or stopped, or a master restarts.

Others change rights, delete the dead-letter topic or write hostile messages meanwhile.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import signal
import subprocess
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from redrive.admin.errors import BrokerUnreachableError
from redrive.admin.rocketmq import Master, RocketMQSession
from redrive.api.crds import crds
from redrive.api.replay_status import ADMITTED, ReplayRun, ReplayStatus
from redrive.api.rocketmq import RocketMQMessages
from redrive.auth.method import ACCESS_VARIABLE, BrokerAccess, Method
from redrive.policy.envelope import CAUSE_TYPE, REPLAY_SOURCE
from redrive.reading.queues import parse_stored
from redrive.replay.job.plan import SHOWN
from redrive.replay.spec import Choice, QueueReplayJob
from sandbox import chart, kubernetes, rocketmq
from sandbox.kubernetes import Cluster
from sandbox.process import Processes
from sandbox.rocketmq import RocketMQ, allow, create_user
from tests.support.local_runs import driver_process
from tests.support.namespaces import new_namespace
from tests.support.spark_runs import CLUSTER, POD, spark_environment
from tests.support.waiting import wait_until

pytestmark = pytest.mark.timeout(240)
MASTERS = "broker-a", "broker-b"
DEAD_LETTERS = 60
SLOWLY = {"messages": 20, "per": "1s"}


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    started = Processes(tmp_path_factory.mktemp("rocketmq-runs"))
    yield started
    started.kill_all()


@pytest.fixture(scope="module")
def api(processes: Processes, tmp_path_factory: pytest.TempPathFactory) -> Cluster:
    cluster = kubernetes.start(tmp_path_factory.mktemp("api"), processes)
    cluster.define(crds())
    return cluster


@pytest.fixture(scope="module")
def broker(processes: Processes, tmp_path_factory: pytest.TempPathFactory) -> RocketMQ:
    return rocketmq.start(tmp_path_factory.mktemp("rocketmq"), processes, MASTERS)


class Shop:
    """A group with dead letters, and a user for jobs with the documented rights."""

    def __init__(self, api: Cluster, namespace: str, session: RocketMQSession, env: Any) -> None:  # noqa: ANN401
        self.api, self.namespace, self.session, self.env = api, namespace, session, env
        self.group = f"g-{secrets.token_hex(4)}"
        self.source, self.dead_letters = f"orders-{self.group}", f"%DLQ%{self.group}"
        self.ledger, self.retries = f"redrive-ledger-{self.group}", f"%RETRY%{self.group}"
        self.repair, self.others = f"repair-{self.group}", f"others-{self.group}"

    async def prepare(self, cluster: RocketMQ, folder: Path) -> None:
        user, secret = f"jobs-{self.group}", secrets.token_hex(16)
        (folder / "credentials").mkdir()
        (folder / "credentials" / "secret-key").write_text(secret)
        (folder / "ledger").mkdir()
        (folder / "ledger" / "key").write_text(secrets.token_hex(32))
        masters = await self.session.masters()
        for master in masters:
            for topic in (self.dead_letters, self.ledger, self.retries):
                await self.session.put_topic(master, topic, 1)
            for topic in (self.source, self.repair, self.others):
                await self.session.put_topic(master, topic, 2)
            await self.session.put_group(master, {"groupName": self.group})
            await create_user(self.session, master, user, secret=secret)
            rights = {f"Topic:{self.dead_letters}": ["Get", "Sub"]}
            rights |= {f"Group:{self.group}": ["Get", "Sub"]}
            await allow(self.session, master, user, rights)
        await self.allow(self.source, self.ledger, self.repair)
        for number in range(DEAD_LETTERS):
            await self.bury(f"id{number}", number, f"KEYS\x01key{number % 7}\x02")
        self.env[ACCESS_VARIABLE] = BrokerAccess(Method.ACCESS_KEY, str(folder), user=user).encode()
        self.messages = RocketMQMessages(
            self.dead_letters, self.group, [cluster.name_server], None, []
        )

    async def allow(self, *topics: str, actions: tuple[str, ...] = ("Get", "Sub", "Pub")) -> None:
        """Allow actions on topics to the jobs, and no others."""
        rights = {f"Topic:{topic}": [*actions] for topic in topics}
        for master in await self.session.masters():
            await allow(self.session, master, f"jobs-{self.group}", rights)

    async def bury(
        self, name: str, number: int, properties: str, content: bytes = b"order", flags: int = 0
    ) -> None:
        """Store a dead letter at the master that is next by its number."""
        masters = await self.session.masters()
        master = masters[number % len(masters)]
        properties += f"UNIQ_KEY\x01{name}\x02"
        await self.session.send(master, self.dead_letters, 0, content, properties, flags=flags)

    def replay(self, name: str, **spec: object) -> QueueReplayJob:
        """Create a Replay, and return the job that moves all messages to the source."""
        reference = {"kind": "RocketMQRetryPolicy", "name": "orders"}
        metadata = {"name": name, "namespace": self.namespace}
        manifest = {"apiVersion": "redrive.io/v1beta1", "kind": "Replay", "metadata": metadata}
        body = self.api.objects.create(manifest | {"spec": {"policyRef": reference, **spec}})
        uid = body["metadata"]["uid"]
        addresses = self.messages, self.ledger, self.source
        return QueueReplayJob(self.namespace, name, uid, *addresses, pod=POD)

    def patch(self, name: str, **spec: object) -> None:
        body = self.api.objects.get("replay", name, self.namespace)
        self.api.objects.apply(
            {
                "apiVersion": body["apiVersion"],
                "kind": body["kind"],
                "metadata": {"name": name, "namespace": self.namespace},
                "spec": {**body["spec"], **spec},
            }
        )

    def confirm(self, job: QueueReplayJob) -> None:
        """Confirm a review as its author, and admit it as the operator."""
        metadata = {"annotations": {ADMITTED: job.uid}}
        patch = json.dumps({"metadata": metadata, "spec": {"mode": "Run"}})
        named = "replay", job.name, "--namespace", self.namespace
        self.api.kubectl("patch", *named, "--type=merge", f"--patch={patch}")

    def driver(self, job: QueueReplayJob) -> AbstractContextManager[subprocess.Popen[str]]:
        """Start a driver, which is killed in the end."""
        return driver_process("-m", "redrive.replay", job.encode(), env=self.env)

    def run(self, name: str) -> ReplayRun:
        """Return what the last run has reported."""
        return ReplayStatus.of(self.api.objects.get("replay", name, self.namespace)).run

    def moved(self, name: str) -> int:
        """Return the number of messages that a run has reported as moved."""
        return self.run(name).counts.moved or 0

    def doubled(self, name: str) -> int:
        """Return the number of messages that may be stored twice, as a run has reported."""
        return self.run(name).counts.doubled or 0

    def ends(self, name: str, process: subprocess.Popen[str]) -> list[int | None]:
        """Wait for the end of a driver.

        Returns:
            matched, moved, skipped, refused, left and doubled.
        """
        _, log = process.communicate(timeout=120)
        assert process.returncode == 0, log
        run = self.run(name)
        assert run.finished, log
        counts = run.counts
        settled = [counts.moved, counts.skipped, counts.refused]
        return [counts.matched, *settled, counts.left, counts.doubled]

    async def copies(self) -> Counter[str]:
        """Return the number of copies in all targets, by the id of the message."""
        masters = await self.session.masters()
        assert [master.name for master in masters] == list(MASTERS)
        copies: Counter[str] = Counter()
        for master in masters:
            for topic in (self.source, self.repair, self.retries):
                queues = await self.session.topic(master, topic)
                for queue in range(queues.read if queues else 0):
                    copies += await self._copies_in(master, topic, queue)
        return copies

    async def _copies_in(self, master: Master, topic: str, queue: int) -> Counter[str]:
        offsets = await self.session.offsets(master, topic, queue)
        copies, offset = Counter[str](), offsets.start
        while offset < offsets.stop:
            place = master, topic, queue, offset, self.group
            content, offset = await self.session.pull(*place)
            for message in parse_stored(content):
                assert message.properties is not None
                if REPLAY_SOURCE not in message.properties:
                    continue  # of another producer
                assert not {"MAX_OFFSET", "REAL_TOPIC"} & message.properties.keys()
                assert message.properties[REPLAY_SOURCE].startswith(f"{master.name}:")
                copies[message.properties["UNIQ_KEY"]] += 1
        return copies

    async def delete_dead_letters(self) -> None:
        """Delete the dead-letter topic, and create it again as the operator does then."""
        for master in await self.session.masters():
            await self.session.delete_topic(master, self.dead_letters)
            await self.session.put_topic(master, self.dead_letters, 1)


ONCE = {f"id{number}": 1 for number in range(DEAD_LETTERS)}
WHOLE = [DEAD_LETTERS, DEAD_LETTERS, 0, 0, 0, 0]


@pytest.fixture
async def shop(api: Cluster, broker: RocketMQ, tmp_path: Path) -> AsyncIterator[Shop]:
    with new_namespace(api) as namespace:
        chart.prepare_replays(api, namespace)
        account = api.service_account_kubeconfig(namespace, "redrive-job")
        async with broker.admin.session() as session:
            made = Shop(api, namespace, session, {"KUBECONFIG": str(account)})
            await made.prepare(broker, tmp_path)
            yield made


async def has_moved(
    shop: Shop, name: str, process: subprocess.Popen[str], seconds: float = 60
) -> None:
    """Wait until a run at a low rate has moved a part of its messages."""

    def has() -> bool:
        assert process.poll() is None, process.communicate()[1]
        return shop.moved(name) >= 10

    try:
        await asyncio.to_thread(wait_until, has, seconds)
    except AssertionError:
        process.kill()
        print(process.communicate()[1])  # noqa: T201  pytest shows it
        raise


async def is_killed_after_a_part(shop: Shop, job: QueueReplayJob) -> None:
    """Run a driver of a Replay at a low rate, and kill it when it has moved a part."""
    with shop.driver(job) as process:
        await has_moved(shop, job.name, process)
        process.kill()
        process.wait()


async def test_killed_driver_is_followed_without_copies(shop: Shop) -> None:
    job = shop.replay("killed", rateLimit=SLOWLY)
    await is_killed_after_a_part(shop, job)
    assert 10 <= (await shop.copies()).total() < DEAD_LETTERS
    shop.patch("killed", rateLimit=None)
    with shop.driver(job) as second:
        assert await asyncio.to_thread(shop.ends, "killed", second) == WHOLE
    with shop.driver(shop.replay("next")) as third:
        assert await asyncio.to_thread(shop.ends, "next", third) == [0] * 6
    assert await shop.copies() == ONCE


@pytest.mark.timeout(480)  # Spark starts in a minute beside other runs
async def test_driver_killed_after_spark_is_followed(shop: Shop, tmp_path: Path) -> None:
    """Executors select messages, of which one can't be evaluated; then the driver moves them."""
    await shop.bury("unreadable", 0, "AMOUNT\x01n/a\x02KEYS\x01key1\x02")
    where = "key in ('key1', 'key2') and coalesce(cast(properties['AMOUNT'] as int), 7) > 5"
    shop.env |= spark_environment(CLUSTER, tmp_path)
    slowly = {"messages": 2, "per": "1s"}  # 18 are selected, and a run reports every two seconds
    job = replace(shop.replay("where", rateLimit=slowly), where=where, pod=None)
    with shop.driver(job) as first:
        await has_moved(shop, "where", first, 360)
        lines = []
        for child in psutil.Process(first.pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):  # it has just ended
                lines.append(" ".join(child.cmdline()))
        assert not [line for line in lines if "Executor" in line]
        first.kill()
        first.wait()
    shop.patch("where", rateLimit=None)
    with shop.driver(job) as second:
        assert await asyncio.to_thread(shop.ends, "where", second) == [18, 18, 0, 0, 0, 0]
    counts = shop.run("where").counts
    assert (counts.scanned, counts.unevaluated) == (DEAD_LETTERS + 1, 1)
    assert await shop.copies() == {f"id{n}": 1 for n in range(DEAD_LETTERS) if n % 7 in {1, 2}}


async def test_next_replay_knows_what_a_killed_one_moved(shop: Shop) -> None:
    job = replace(shop.replay("lost", rateLimit=SLOWLY), target=shop.repair)
    await is_killed_after_a_part(shop, job)
    copies = (await shop.copies()).total()
    job = replace(shop.replay("next"), target=shop.retries, retry_of=shop.source)
    with shop.driver(job) as second:
        matched, moved, *others = await asyncio.to_thread(shop.ends, "next", second)
    assert (matched, moved, others) == (DEAD_LETTERS - copies, DEAD_LETTERS - copies, [0] * 4)
    assert await shop.copies() == ONCE


async def test_messages_of_ids_go_to_another_topic(shop: Shop) -> None:
    ids = ("broker-b:0:2", "broker-a:0:0", "broker-a:0:99", "broker-c:0:1")
    job = replace(shop.replay("ids"), target=shop.repair, choice=Choice(ids=ids))
    with shop.driver(job) as first:
        assert await asyncio.to_thread(shop.ends, "ids", first) == [2, 2, 0, 0, 0, 0]
    assert await shop.copies() == {"id0": 1, "id5": 1}
    with shop.driver(replace(shop.replay("all"), target=shop.repair)) as second:
        moved = DEAD_LETTERS - 2
        assert await asyncio.to_thread(shop.ends, "all", second) == [moved, moved, 0, 0, 0, 0]
    assert await shop.copies() == ONCE


async def test_killed_review_moves_what_it_has_shown(shop: Shop) -> None:
    """Another Replay moves a part of the plan before the confirmation."""
    job = replace(shop.replay("review", mode="Review"), review=True)
    with shop.driver(job) as first:
        await asyncio.to_thread(wait_until, lambda: shop.run("review").review is not None, 60)
        first.kill()
        first.wait()
    assert shop.run("review").counts.left == DEAD_LETTERS
    other = replace(shop.replay("other"), choice=Choice(limit=20), target=shop.repair)
    with shop.driver(other) as second:
        assert await asyncio.to_thread(shop.ends, "other", second) == [20, 20, 0, 0, 0, 0]
    await shop.bury("later", 0, "")
    shop.confirm(job)
    with shop.driver(job) as third:
        counts = [DEAD_LETTERS, DEAD_LETTERS - 20, 20, 0, 0, 0]
        assert await asyncio.to_thread(shop.ends, "review", third) == counts
    assert await shop.copies() == ONCE


async def test_target_without_rights_gets_nothing(shop: Shop) -> None:
    """The broker refuses the user of Replays, even if a rule of the connection is too wide."""
    with shop.driver(replace(shop.replay("others"), target=shop.others)) as process:
        _, log = await asyncio.to_thread(process.communicate, timeout=120)
    assert process.returncode != 0, log
    run = shop.run("others")
    assert run.failure is not None
    assert run.failure.reason == "Forbidden"
    assert shop.others in run.failure.message
    (master, _) = await shop.session.masters()
    assert not await shop.session.count(master, shop.others, 2)
    with shop.driver(shop.replay("next")) as second:
        assert await asyncio.to_thread(shop.ends, "next", second) == WHOLE


async def test_target_that_is_created_again_doubles_and_counts(shop: Shop) -> None:
    """The next driver knows the number of copies that was reported."""
    job = replace(shop.replay("again", rateLimit=SLOWLY), target=shop.repair)
    await is_killed_after_a_part(shop, job)
    for master in await shop.session.masters():
        await shop.session.delete_topic(master, shop.repair)
        await shop.session.put_topic(master, shop.repair, 2)
        for number in range(40):
            await shop.session.send(master, shop.repair, number % 2, b"of another producer")
    with shop.driver(job) as second:
        await asyncio.to_thread(wait_until, lambda: shop.doubled("again") >= 10, 60)
        second.kill()
        second.wait()
    shop.patch("again", rateLimit=None)
    with shop.driver(job) as third:
        assert await asyncio.to_thread(shop.ends, "again", third) == [*WHOLE[:5], DEAD_LETTERS]
    assert await shop.copies() == ONCE


async def test_stopped_driver_sends_nothing_after_the_second(shop: Shop) -> None:
    """At this rate the first driver is stopped while it waits for its next message."""
    job = shop.replay("stopped", rateLimit={"messages": 5, "per": "1s"})
    with shop.driver(job) as first:
        await has_moved(shop, "stopped", first)
        first.send_signal(signal.SIGSTOP)
        shop.patch("stopped", rateLimit=None)
        with shop.driver(job) as second:
            assert await asyncio.to_thread(shop.ends, "stopped", second) == WHOLE
        first.send_signal(signal.SIGCONT)
        await asyncio.to_thread(first.wait, 60)
    assert await shop.copies() == ONCE


STOPS = """
import os, signal, sys
from redrive.reading.queues import QueueCluster
from redrive.replay.__main__ import main

send, count = QueueCluster.send, 0

def stop_before_a_send(*place, **fields):
    global count
    count += 1
    if count == 15:  # two of them are plans
        os.kill(os.getpid(), signal.SIGSTOP)
    send(*place, **fields)

QueueCluster.send = stop_before_a_send
main(sys.argv[1:])
"""
"""A driver that stops after it has checked its fence, and before it sends."""


async def test_driver_stopped_before_a_send_doubles_and_counts(shop: Shop) -> None:
    job = shop.replay("doubled", rateLimit={"messages": 10, "per": "1s"})
    with driver_process("-c", STOPS, job.encode(), env=shop.env) as first:
        stopped = psutil.Process(first.pid)
        is_stopped = lambda: stopped.status() == psutil.STATUS_STOPPED  # noqa: E731
        await asyncio.to_thread(wait_until, is_stopped, 60)
        with shop.driver(job) as second:
            await asyncio.to_thread(wait_until, lambda: shop.moved("doubled") >= 20, 60)
            first.send_signal(signal.SIGCONT)
            _, log = await asyncio.to_thread(first.communicate, timeout=60)
            assert "another run" in log
            counts = [*WHOLE[:5], 1]
            assert await asyncio.to_thread(shop.ends, "doubled", second) == counts
    copies = await shop.copies()
    assert (copies.keys(), copies.total()) == (ONCE.keys(), DEAD_LETTERS + 1)


async def test_run_continues_after_a_restart_of_a_master(
    shop: Shop, broker: RocketMQ, processes: Processes
) -> None:
    with shop.driver(shop.replay("restarted", rateLimit=SLOWLY)) as process:
        await has_moved(shop, "restarted", process)
        processes.kill(MASTERS[0])
        rocketmq.start_broker(broker, MASTERS[0], processes)
        assert await asyncio.to_thread(shop.ends, "restarted", process) == WHOLE
    # A restarted broker is registered again within 30 s; the link to the former one is broken.
    for _ in range(60):
        with suppress(BrokerUnreachableError):
            if len(await shop.session.masters()) == len(MASTERS):
                assert await shop.copies() == ONCE
                return
        await asyncio.sleep(1)
    pytest.fail("the broker is not registered again")


async def test_records_that_a_raw_client_repeats_hide_nothing(shop: Shop) -> None:
    """It stores records and copies again, also those of the other master, and other messages."""
    job = shop.replay("raw", rateLimit=SLOWLY)
    await is_killed_after_a_part(shop, job)
    repeated = 0
    masters = await shop.session.masters()
    for master, other in zip(masters, reversed(masters), strict=True):
        for topic in (shop.ledger, shop.source):
            content, _ = await shop.session.pull(master, topic, 0, 0, shop.group, 3)
            for message in parse_stored(content):
                kept = {k: v for k, v in (message.properties or {}).items() if "OFFSET" not in k}
                properties = "".join(f"{name}\x01{value}\x02" for name, value in kept.items())
                repeated += topic == shop.source
                for place in {master} if topic == shop.source else {master, other}:
                    await shop.session.send(place, topic, 0, message.content, properties)
        await shop.session.send(master, shop.ledger, 0, b"no record", "KEYS\x01raw\x02")
    assert repeated
    shop.patch("raw", rateLimit=None)
    with shop.driver(job) as second:
        counts = [*WHOLE[:5], repeated]
        assert await asyncio.to_thread(shop.ends, "raw", second) == counts
    copies = await shop.copies()
    assert (copies.keys(), copies.total()) == (ONCE.keys(), DEAD_LETTERS + repeated)
    with shop.driver(shop.replay("next")) as third:
        assert await asyncio.to_thread(shop.ends, "next", third) == [0] * 6


async def test_rights_that_end_meanwhile_fail_the_run_with_an_account(shop: Shop) -> None:
    """The next driver of the Replay continues when they are back."""
    job = shop.replay("revoked", rateLimit=SLOWLY)
    with shop.driver(job) as first:
        await has_moved(shop, "revoked", first)
        await shop.allow(shop.source, actions=("Get", "Sub"))
        _, log = await asyncio.to_thread(first.communicate, timeout=60)
    assert first.returncode != 0, log
    run = shop.run("revoked")
    assert run.failure is not None
    assert run.failure.reason == "Forbidden"
    copies = await shop.copies()
    assert set(copies.values()) == {1}
    await shop.allow(shop.source)
    shop.patch("revoked", rateLimit=None)
    with shop.driver(job) as second:
        assert await asyncio.to_thread(shop.ends, "revoked", second) == WHOLE
    assert await shop.copies() == ONCE


async def test_deleted_dead_letter_topic_hides_no_later_one(shop: Shop) -> None:
    """The master numbers its messages from 0 again."""
    job = shop.replay("deleted", rateLimit=SLOWLY)
    await is_killed_after_a_part(shop, job)
    copies = await shop.copies()
    await shop.delete_dead_letters()
    for number in range(DEAD_LETTERS + 2):
        await shop.bury(f"new{number}", number, "")
    shop.patch("deleted", rateLimit=None)
    with shop.driver(job) as second:
        moved = copies.total()
        counts = [DEAD_LETTERS, moved, DEAD_LETTERS - moved, 0, 0, 0]
        assert await asyncio.to_thread(shop.ends, "deleted", second) == counts
    assert await shop.copies() == copies
    with shop.driver(shop.replay("next")) as third:
        counts = [DEAD_LETTERS + 2, DEAD_LETTERS + 2, 0, 0, 0, 0]
        assert await asyncio.to_thread(shop.ends, "next", third) == counts
    others = Counter({f"new{number}": 1 for number in range(DEAD_LETTERS + 2)})
    assert await shop.copies() == copies + others


async def test_hostile_dead_letters_are_moved_or_refused(shop: Shop) -> None:
    """Producers write what a broker accepts: 32 KiB of properties, any text, and 4 MiB."""
    marks = (
        "REDRIVE_REPLAYS\x01-1\x02REDRIVE_REPLAY_PROOF\x010\x02REDRIVE_REPLAY_SOURCE\x01x:y:z\x02"
    )
    own = "_SYS_MSG_PRIORITY_\x017\x02__LITE_TOPIC\x01x\x02__CRC32\x0112\x02MSG_TYPE\x01reply\x02"
    await shop.bury("marks", 0, marks)
    await shop.bury("own", 0, own)
    await shop.bury("large", 0, "", bytes(4 * 2**20 - 2**16))
    await shop.bury("compressed", 0, "", b"no zlib", flags=1)
    await shop.bury("text", 0, "KEYS\x01\u202e\U0001f4a5 ${jndi:x}\x02no pair\x02=\x01\x02")
    await shop.bury("full", 0, f"LONG\x01{'x' * 32_620}\x02")  # no room for marks
    for number in range(150):
        await shop.bury(f"cause{number}", 0, f"{CAUSE_TYPE}\x01Error{number}\x02")
    plan = replace(shop.replay("plan", mode="Plan"), dry_run=True)
    with shop.driver(plan) as process:
        _, log = await asyncio.to_thread(process.communicate, timeout=120)
    shown = shop.run("plan").preview
    assert shown is not None, log
    assert len(shown.causes) == SHOWN
    with shop.driver(shop.replay("hostile")) as process:
        counts = [DEAD_LETTERS + 156, DEAD_LETTERS + 155, 0, 1, 0, 0]
        assert await asyncio.to_thread(shop.ends, "hostile", process) == counts
    (refusal,) = shop.run("hostile").refusals or ()
    assert refusal.cause == "NotAccepted"
    moved = {"marks", "own", "large", "compressed", "text", *(f"cause{n}" for n in range(150))}
    assert await shop.copies() == ONCE | dict.fromkeys(moved, 1)


async def test_master_frozen_for_half_a_minute_doubles_what_is_counted(
    shop: Shop, processes: Processes
) -> None:
    """It stores the message that it has not answered when it resumes."""
    with shop.driver(shop.replay("frozen", rateLimit=SLOWLY)) as process:
        await has_moved(shop, "frozen", process)
        frozen = psutil.Process(processes.pid(MASTERS[0]))
        frozen.suspend()
        try:
            await asyncio.sleep(30)
        finally:
            frozen.resume()
        *counts, doubled = await asyncio.to_thread(shop.ends, "frozen", process)
    assert counts == WHOLE[:5]
    copies = await shop.copies()
    assert (copies.keys(), copies.total()) == (ONCE.keys(), DEAD_LETTERS + (doubled or 0))
