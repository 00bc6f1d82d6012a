"""Entries that end the client's process: a consumer with a crash log removes them at a restart."""

from __future__ import annotations

import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from redrive import CrashLog, Policy
from redrive.auth.method import ACCESS_VARIABLE, BrokerAccess, Method
from redrive.delivery.middleware.poison_guard import CrashLogFile, deaths_in
from redrive.policy.envelope import CAUSE_TYPE, NOT_COPIED, SOURCE_MESSAGE_ID
from redrive.policy.model import SubscriptionType
from redrive.replay import harmful
from sandbox.pulsar import SUPERUSER
from tests.support.consumers import StartProgram, start_program
from tests.support.raw_entries import HARMFUL, RawEntry, store
from tests.support.topics import tell

__all__ = ["start_program"]
ProvisionPolicy = Callable[..., Any]
MAX_REDELIVERIES = 1
SECONDS = 180.0
LEFT_OUT = {"a chunk of number -1", "a chunk without its first", "a batch of 2^31 - 1"}
"""On a Shared subscription the broker delivers no chunk before one of number 0. The client may read
2^31 messages of a batch out of the memory behind it, until that is used up."""
KILLER = HARMFUL["a batch without content"]
BEGINNING = f"""
import asyncio, logging, sys, time
from datetime import timedelta
from redrive import AsyncSimpleConsumer, CrashLog

logging.basicConfig()
log = CrashLog(
    os.environ["CRASHES"], max_redeliveries={MAX_REDELIVERIES}, token=os.environ["TOKEN"]
)

def handle(message):
    if os.environ["HOLDS"]:
        time.sleep(5)  # the client decodes ahead meanwhile, and most often dies
        os.kill(os.getpid(), signal.SIGKILL)
    with open(os.environ["HANDLED"], "ab", buffering=0) as file:
        file.write(message.data() + b"\\n")
"""
RUN = "RetryConsumer(client, load_policy(), crash_log=log).run(handle)"
PROGRAMS = {
    "run": RUN,
    "simple with asyncio": """
async def consume():
    async with AsyncSimpleConsumer(client, load_policy(), crash_log=log) as consumer:
        while True:
            for message in await consumer.receive(10, 60):
                handle(message)
                await consumer.acknowledge(message)
asyncio.run(consume())
""",
}


class Supervisor:
    """Starts a program again whenever it has died, as a kubelet does, and has its account."""

    def __init__(
        self,
        provisioned: Any,  # noqa: ANN401
        start: StartProgram,
        directory: Path,
        partitions: int = 0,
    ) -> None:
        self.provisioned, self._start, self._directory = provisioned, start, directory
        self._partitions = partitions
        self.deaths = 0
        self.output = ""

    @property
    def handled(self) -> Counter[bytes]:
        file = self._directory / "handled"
        return Counter(file.read_bytes().split() if file.exists() else ())

    def run(
        self, program: str, done: Callable[[], bool], *, processes: int = 1, holds: bool = True
    ) -> None:
        """Have *processes* run the program until *done*, then stop them.

        If *holds*, a process that must die when its client decodes an entry handles nothing.
        """
        starts = Counter[int]()
        running: list[subprocess.Popen[str]] = []

        def begin(number: int) -> subprocess.Popen[str]:
            starts[number] += 1
            return self._begin(
                program, number, holds=holds and starts[number] <= MAX_REDELIVERIES + 1
            )

        running += map(begin, range(processes))
        try:
            deadline = time.monotonic() + SECONDS
            while not done():
                assert time.monotonic() < deadline, self.output
                time.sleep(0.1)
                for number, process in enumerate(running):
                    if process.poll() is not None:
                        self.output += process.communicate()[0]
                        assert process.returncode in {-signal.SIGSEGV, -signal.SIGABRT,
                                                      -signal.SIGKILL}, self.output  # fmt: skip
                        self.deaths += 1
                        if processes == 1:
                            # On a Shared subscription the broker withholds a chunk from others than
                            # the dead consumer that it was assigned to, until the topic moves. With
                            # it move entries that another process is about to acknowledge.
                            self.provisioned.unload()
                        running[number] = begin(number)
        finally:
            for process in running:
                process.kill()
                self.output += process.communicate()[0]

    def _begin(self, program: str, number: int, *, holds: bool) -> subprocess.Popen[str]:
        """Start the program; if it *holds*, it handles nothing, and its client dies of an entry."""
        values = {
            "CRASHES": f"{self._directory}/crashes-{number}",
            "HANDLED": f"{self._directory}/handled",
            "HOLDS": "yes" if holds else "",
        }
        return self._start(self.provisioned, f"os.environ |= {values}\n{BEGINNING}{program}")

    def is_through(self, good: Iterable[bytes]) -> bool:
        """Return True if each good message was handled, and nothing is left."""
        return set(self.handled) == set(good) and not self.provisioned.unsettled(self._partitions)


@pytest.fixture
def supervise(start_program: StartProgram, tmp_path: Path) -> Callable[..., Supervisor]:
    def supervise(provisioned: Any, partitions: int = 0) -> Supervisor:  # noqa: ANN401
        return Supervisor(provisioned, start_program, tmp_path, partitions)

    return supervise


Supervise = Callable[..., Supervisor]


def send_among(
    provisioned: Any,  # noqa: ANN401
    entries: Iterable[RawEntry],
    topics: Iterable[Any] = (),
) -> list[bytes]:
    """Send a good message before each of the entries, and some at last; return them."""
    places = list(topics) or [provisioned.policy.topic]
    good = []
    for number, entry in enumerate([*entries, None, None]):
        topic = places[number % len(places)]
        good.append(b"good-%d" % number)
        provisioned.send(good[-1], topic=topic)
        if entry is not None:
            store(provisioned.broker, topic, [entry])
    return good


def check_dead_letters(provisioned: Any, entries: Iterable[RawEntry]) -> None:  # noqa: ANN401
    """Check that each entry is one dead letter, with all its bytes."""
    entries = list(entries)
    dead_letters = provisioned.dead_letters(len(entries))
    for dead_letter in dead_letters:
        properties = dead_letter.properties()
        assert properties[CAUSE_TYPE] == properties[NOT_COPIED] == "MalformedEntry"
    assert len(
        {dead_letter.properties()[SOURCE_MESSAGE_ID] for dead_letter in dead_letters}
    ) == len(entries)
    ends = Counter(
        next(
            entry
            for entry in entries
            if dead_letter.data().endswith(entry.metadata + entry.content)
        )
        for dead_letter in dead_letters
    )
    assert ends == Counter(entries)


def leave_deaths(policy: Policy, directory: Path) -> list[Path]:
    """Leave a crash log as the last of four processes that were killed leaves it."""
    with closing(CrashLogFile(directory, policy)):
        (file,) = directory.glob("*.notes")
    file.write_text("! 3\n")
    return [file]


def readers(provisioned: Any) -> list[str]:  # noqa: ANN401
    """Return the subscriptions of readers of the source topic."""
    subscriptions = tell(provisioned.broker, provisioned.policy.topic, "stats")["subscriptions"]
    return [name for name in subscriptions if name != provisioned.policy.subscription]


MALFORMED = [KILLER] + [entry for name, entry in HARMFUL.items() if name not in LEFT_OUT]


@pytest.mark.parametrize(("program", "partitions"), [("run", 0), ("simple with asyncio", 2)])
def test_malformed_entries_are_dead_lettered_at_a_restart(
    provision_policy: ProvisionPolicy, supervise: Supervise, program: str, partitions: int
) -> None:
    provisioned = provision_policy(partitions=partitions)
    topics = [provisioned.policy.topic, provisioned.policy.retry_topic]
    if partitions:
        topics = [topic.partition(number) for topic in topics for number in range(partitions)]
    good = send_among(provisioned, MALFORMED, topics)
    supervisor = supervise(provisioned, partitions)

    supervisor.run(PROGRAMS[program], lambda: supervisor.is_through(good))

    assert supervisor.handled == Counter(good)
    assert supervisor.deaths == MAX_REDELIVERIES + 1, supervisor.output
    check_dead_letters(provisioned, MALFORMED)


def test_concurrent_starts_dead_letter_each_entry_once(
    provision_policy: ProvisionPolicy, supervise: Supervise
) -> None:
    provisioned = provision_policy()
    killers = [KILLER] * 5
    good = send_among(provisioned, killers)
    supervisor = supervise(provisioned)

    supervisor.run(RUN, lambda: supervisor.is_through(good), processes=3, holds=False)

    assert supervisor.deaths > MAX_REDELIVERIES
    check_dead_letters(provisioned, killers)


def test_entry_that_ends_each_inspection_is_dead_lettered(
    provision_policy: ProvisionPolicy, supervise: Supervise
) -> None:
    provisioned = provision_policy()
    bomb = RawEntry(b"", b"bomb")
    good = send_among(provisioned, [KILLER, bomb])
    supervisor = supervise(provisioned)
    dies = """
from redrive.delivery import inspection
check = inspection.PartitionInspection._check
def check_or_die(self, place, entry):
    if entry.content == b"bomb":
        os.kill(os.getpid(), signal.SIGKILL)
    check(self, place, entry)
inspection.PartitionInspection._check = check_or_die
"""

    supervisor.run(dies + RUN, lambda: supervisor.is_through(good))

    assert supervisor.deaths == 2 * (MAX_REDELIVERIES + 1), supervisor.output
    check_dead_letters(provisioned, [KILLER, bomb])


def test_kill_before_acknowledgement_doubles_only_a_dead_letter(
    provision_policy: ProvisionPolicy, supervise: Supervise
) -> None:
    provisioned = provision_policy()
    good = send_among(provisioned, [KILLER])
    supervisor = supervise(provisioned)
    dies = """
from redrive.reading import frames
acknowledge = frames.acknowledge
def die_once(*details):
    if os.path.exists(os.environ["HANDLED"] + "-died"):
        return acknowledge(*details)
    open(os.environ["HANDLED"] + "-died", "w").close()
    os.kill(os.getpid(), signal.SIGKILL)
frames.acknowledge = die_once
"""

    supervisor.run(dies + RUN, lambda: supervisor.is_through(good))

    assert supervisor.handled == Counter(good)
    assert supervisor.deaths == MAX_REDELIVERIES + 2, supervisor.output
    dead_letters = provisioned.dead_letters(2)
    assert len({dead_letter.properties()[SOURCE_MESSAGE_ID] for dead_letter in dead_letters}) == 1


@pytest.mark.parametrize("kind", [kind for kind in SubscriptionType if kind != "Shared"])
def test_inspection_removes_entries_of_each_subscription_type(
    provision_policy: ProvisionPolicy, tmp_path: Path, kind: SubscriptionType
) -> None:
    provisioned = provision_policy(kind=kind)
    entries = [HARMFUL["a batch of none"], HARMFUL["zlib that is none"]]
    good = send_among(provisioned, entries)
    token = provisioned.broker.token(provisioned.role)
    leave_deaths(provisioned.policy, tmp_path)

    consumer = provisioned.consumer(crash_log=CrashLog(tmp_path, token=lambda: token))

    check_dead_letters(provisioned, entries)
    messages = [consumer.receive(timedelta(seconds=60)) for _ in good]
    assert [message.data() for message in messages] == good


def test_key_in_base64_that_is_none_stops_until_it_is_removed(
    provision_policy: ProvisionPolicy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    provisioned = provision_policy(kind=SubscriptionType.KEY_SHARED)
    policy, broker = provisioned.policy, provisioned.broker
    store(broker, policy.topic, [HARMFUL["a key in base64 that is none"]])
    provisioned.send(b"good", partition_key="a")
    with provisioned.consumer() as consumer:
        assert consumer.receive(timedelta(seconds=1)) is None
    (tmp_path / "credentials").mkdir()
    (tmp_path / "credentials" / "token").write_text(broker.token(SUPERUSER))
    monkeypatch.setenv(ACCESS_VARIABLE, BrokerAccess(Method.TOKEN, str(tmp_path)).encode())
    names = [broker.service_url, broker.admin_url, str(policy.topic), policy.subscription]
    assert harmful.main([*names, "--dead-letter", str(policy.dead_letter_topic)]) == 0
    assert len(provisioned.dead_letters(1)) == 1
    assert provisioned.consumer().receive(timedelta(seconds=60)).data() == b"good"


def test_inspection_without_credentials_is_only_logged(
    provision_policy: ProvisionPolicy, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    provisioned = provision_policy()
    provisioned.send(b"good")
    (file,) = leave_deaths(provisioned.policy, tmp_path)

    consumer = provisioned.consumer(crash_log=CrashLog(tmp_path))

    assert "check that crash_log= has the token" in caplog.text
    assert consumer.receive(timedelta(seconds=60)).data() == b"good"
    assert not file.exists()
    (file,) = tmp_path.glob("*.notes")
    assert deaths_in(file.read_text()) == 5


def test_inspection_leaves_valid_messages_as_they_were(
    provision_policy: ProvisionPolicy, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    provisioned = provision_policy()
    provisioned.send(*(b"%d" % number for number in range(100)))
    token = provisioned.broker.token(provisioned.role)
    leave_deaths(provisioned.policy, tmp_path)

    consumer = provisioned.consumer(crash_log=CrashLog(tmp_path, token=lambda: token))

    assert "the inspection is complete: 0 malformed entries; if processes are " in caplog.text
    messages = [consumer.receive(timedelta(seconds=60)) for _ in range(100)]
    assert [message.data() for message in messages] == [b"%d" % number for number in range(100)]
    assert {message.redelivery_count() for message in messages} == {0}


def test_broadcast_that_dies_resumes_behind_the_entry(
    provision_policy: ProvisionPolicy, supervise: Supervise
) -> None:
    provisioned = provision_policy()
    topic, supervisor = provisioned.policy.topic, supervise(provisioned)
    stored: list[RawEntry] = []

    def is_through() -> bool:
        if not stored and readers(provisioned):
            stored.append(KILLER)
            store(provisioned.broker, topic, stored)
        if supervisor.deaths:
            provisioned.send(b"good")
        return bool(supervisor.handled)

    supervisor.run(
        f"""
from redrive import BroadcastConsumer
BroadcastConsumer(client, {str(topic)!r}).run(handle)
""",
        is_through,
        holds=False,
    )

    assert set(supervisor.handled) == {b"good"}
