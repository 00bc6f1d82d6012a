"""Handlers of Replays, and the imports that an operator does without."""

from __future__ import annotations

import asyncio
import dataclasses
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import pytest

from redrive.errors import Requeue
from redrive.kube import resources
from redrive.kube.connections import NamespaceLabels
from redrive.kube.context import Context
from redrive.kube.controller import OF_NAMESPACE
from redrive.kube.resources import Key
from redrive.replay import selection
from redrive.replay.controller import handlers, launch
from redrive.replay.controller.reconciler import reconcile
from tests.unit.replay.controller.test_admission import connection, ctx, launched, policy, replay


async def test_replay_is_reconciled_when_job_starts_or_stops_moving(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looked: asyncio.Queue[Key] = asyncio.Queue()

    async def look(key: Key, *_: object) -> Requeue:
        looked.put_nowait(key)
        return Requeue.ON_CHANGE

    monkeypatch.setattr(handlers, "reconcile", look)
    made = dataclasses.replace(ctx(), namespaces=NamespaceLabels(cast("Any", None)))
    (controller,) = handlers.start(made)
    made.replays.put(replay())
    assert await asyncio.wait_for(looked.get(), 60)
    rests = {"suspended": True, "approval": {"messages": 9}}
    reports: list[tuple[dict[str, Any], bool]] = [
        ({"scanned": 3}, False),
        ({"ratePerMinute": 6, "moved": 3}, True),
        ({"ratePerMinute": 150, "moved": 5}, False),
        ({"ratePerMinute": 0, "moved": 5}, True),
        ({"ratePerMinute": 0, "moved": 5, "refused": 1}, False),
        (rests, True),
        ({"suspended": True}, True),
        ({"fullTopic": "persistent://shop/prod/retry", "left": 3}, True),
    ]
    for version, (status, is_looked_at) in enumerate(reports, 2):
        body = replay(status=status)
        body["metadata"]["resourceVersion"] = str(version)
        made.replays.put(body)
        if is_looked_at:
            assert await asyncio.wait_for(looked.get(), 60) == Key("shop", "now")
        else:
            await asyncio.sleep(0)
    assert looked.empty()
    await controller.stop()


async def test_suspended_replays_wake_each_other_only_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looks = 0

    async def look(*_: object) -> Requeue:
        nonlocal looks
        looks += 1
        return Requeue.ON_CHANGE

    monkeypatch.setattr(handlers, "reconcile", look)
    made = dataclasses.replace(ctx(), namespaces=NamespaceLabels(cast("Any", None)))
    (controller,) = handlers.start(made)
    count = 50
    for version in range(1, 5):  # at first, and three of their statuses
        for number in range(count):
            body = replay(f"r{number}", spec={"suspend": True}, status={"remaining": version})
            body["metadata"] |= {"uid": str(number), "resourceVersion": str(version)}
            made.replays.put(body)
            for _ in range(20):
                await asyncio.sleep(0)
    assert looks == count
    await controller.stop()


@pytest.mark.parametrize("is_forged", [False, True])
async def test_condition_is_parsed_once_and_beside_the_loop(
    monkeypatch: pytest.MonkeyPatch, *, is_forged: bool
) -> None:
    threads: list[threading.Thread] = []
    to_sql = selection.to_sql

    def parse(where: str) -> str:
        threads.append(threading.current_thread())
        return to_sql(where)

    monkeypatch.setattr(selection, "to_sql", parse)
    suspended = replay(where="cause_type = 'x'", spec={"suspend": True})
    if is_forged:  # an author may write the annotations of a launch
        suspended = launched(suspended)
    made = ctx(replays=[suspended])
    lock = asyncio.Lock()
    for _ in range(3):
        with suppress(AttributeError):  # this context has no API server to write a status to
            await reconcile(Key("shop", "now"), made, lock)
    (thread,) = threads
    assert thread is not threading.main_thread()


def of_tenant(body: dict[str, Any], tenant: str, **metadata: object) -> dict[str, Any]:
    """Return *body* as an object of another namespace, or a later state of it."""
    return {**body, "metadata": body["metadata"] | {"namespace": tenant} | metadata}


@pytest.fixture
def tenants() -> Context:
    """Two namespaces with a policy, a connection and an open Replay each."""
    made = ctx(
        policies=[of_tenant(policy(), name) for name in ("one", "two")],
        connections=[of_tenant(connection(), name) for name in ("one", "two")],
        replays=[of_tenant(replay(), name) for name in ("one", "two")],
    )
    return dataclasses.replace(made, namespaces=NamespaceLabels(cast("Any", None)))


async def test_replays_of_hanging_broker_do_not_delay_others(
    tenants: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: asyncio.Queue[Key] = asyncio.Queue()

    async def look(key: Key, *_: object) -> Requeue:
        looked.put_nowait(key)
        if key.namespace == "one":
            await asyncio.Event().wait()
        return Requeue.ON_CHANGE

    monkeypatch.setattr(handlers, "reconcile", look)
    tenants.replays.drop(of_tenant(replay(), "two"))
    (controller,) = handlers.start(tenants)
    for number in range(OF_NAMESPACE + 10):
        tenants.replays.put(of_tenant(replay(f"slow-{number}"), "one"))
    for _ in range(OF_NAMESPACE):
        assert (await asyncio.wait_for(looked.get(), 60)).namespace == "one"
    tenants.replays.put(of_tenant(replay(), "two"))
    assert await asyncio.wait_for(looked.get(), 60) == Key("two", "now")
    assert looked.empty()
    await controller.stop()


class Looked:
    """Replays that are reconciled, instead of being changed."""

    def __init__(self) -> None:
        self._keys: list[Key] = []

    async def look(self, key: Key, *_: object) -> Requeue:
        self._keys.append(key)
        return Requeue.ON_CHANGE

    async def keys(self) -> list[Key]:
        """Return the Replays since the last call, once all that are enqueued were reconciled."""
        for _ in range(60):
            await asyncio.sleep(0)
        keys, self._keys = self._keys, []
        return keys

    async def names(self) -> list[str]:
        return [key.name for key in await self.keys()]


@pytest.fixture
def looked(monkeypatch: pytest.MonkeyPatch) -> Looked:
    looked = Looked()
    monkeypatch.setattr(handlers, "reconcile", looked.look)
    return looked


async def test_changed_connection_enqueues_only_its_replays(
    tenants: Context, looked: Looked
) -> None:
    (controller,) = handlers.start(tenants)
    await looked.keys()
    shown = of_tenant(connection(), "one", resourceVersion="2", labels={"a": "b"})
    tenants.connections.put(shown)
    ready = {"conditions": [{"type": "Ready", "status": "True", "reason": "Connected"}]}
    for version, change, expected in (
        ("3", {"metadata": {"labels": {"c": "d"}}}, []),
        ("4", {"status": {"policies": 5}}, []),
        ("5", {"status": ready}, [Key("one", "now")]),
        ("6", {"status": ready | {"policies": 6}}, []),
        ("7", {"metadata": {"generation": 2}}, [Key("one", "now")]),
    ):
        metadata = shown["metadata"] | {"resourceVersion": version} | change.pop("metadata", {})
        shown = shown | change | {"metadata": metadata}
        tenants.connections.put(shown)
        assert await looked.keys() == expected, version
    tenants.connections.drop(shown)
    assert await looked.keys() == [Key("one", "now")]
    await controller.stop()


async def test_end_of_a_run_wakes_the_next_replay_of_each_policy(looked: Looked) -> None:
    def of_policy(name: str, policy: str, reason: str = "TooManyRuns") -> dict[str, Any]:
        condition = {"type": "Ready", "status": "False", "reason": reason}
        spec = {"mode": "Plan", "policyRef": {"name": policy}}
        return replay(name, spec=spec, status={"conditions": [condition]})

    waiting = [of_policy(f"{name}-{n}", name) for name in ("a", "b") for n in range(9)]
    other, running = of_policy("other", "d", "Progressing"), of_policy("running", "c", "Running")
    metadata = {"namespace": "shop", "name": launch.name_of(running), "uid": "u"}
    created = {"resourceVersion": "1", "creationTimestamp": "2026-01-01T00:00:00Z"}
    application = {"metadata": metadata | created}
    policies = [policy() | {"metadata": policy()["metadata"] | {"name": name}} for name in "abc"]
    made = ctx(replays=[*waiting, other, running], applications=[application], policies=policies)
    made = dataclasses.replace(made, namespaces=NamespaceLabels(cast("Any", None)))
    (controller,) = handlers.start(made)
    assert len(await looked.names()) == 20
    made.replays.drop(other)  # thousands that never ran may be deleted at once
    assert await looked.names() == ["other"]
    made.replays.drop(running)  # its application runs until Kubernetes deletes it
    assert await looked.names() == ["running"]
    applications = made.applications[resources.SPARK_APPLICATIONS]
    applications.put({**application, "status": {"applicationState": {"state": "COMPLETED"}}})
    assert await looked.names() == ["a-0", "b-0"]
    # This one runs now, or waits for something else, so the next one is tried.
    made.replays.put(of_policy("a-0", "a", "Progressing"))
    assert await looked.names() == ["a-1", "b-0"]
    applications.drop(application)
    assert await looked.names() == ["a-1", "b-0"]
    await controller.stop()


async def test_withdrawal_wakes_replays_whose_policy_is_gone(looked: Looked) -> None:
    running = launched(replay("running"))
    metadata = {"namespace": "shop", "name": launch.name_of(running), "uid": "u"}
    owner = {"kind": "Replay", "name": "running", "uid": running["metadata"]["uid"]}
    through = {"ownerReferences": [owner], "annotations": {resources.CONNECTION: "shop/main"}}
    made = ctx(replays=[running], applications=[{"metadata": metadata | through}], policies=[])
    made = dataclasses.replace(made, namespaces=NamespaceLabels(cast("Any", None)))
    (controller,) = handlers.start(made)
    assert await looked.names() == ["running"]
    made.connections.drop(connection())
    assert await looked.names() == ["running"]
    await controller.stop()


async def test_copy_of_an_ended_replay_reaches_all_listeners() -> None:
    """A Replay from a backup has the annotation of its end when it is created."""
    made = dataclasses.replace(ctx(), namespaces=NamespaceLabels(cast("Any", None)))
    (controller,) = handlers.start(made)
    seen: list[Key] = []
    made.replays.listen(lambda key, *_: seen.append(key))
    made.replays.put(replay(ended_at="2026-01-01T00:00:00Z"))
    assert seen == [Key("shop", "now")]
    await controller.stop()


async def test_limited_replays_wake_only_as_many_as_may_run(looked: Looked) -> None:
    def of_policy(number: int, reason: str, version: int) -> dict[str, Any]:
        condition = {"type": "Ready", "status": "False", "reason": reason}
        spec = {"mode": "Plan", "policyRef": {"name": f"p{number}"}}
        body = replay(f"r{number}", spec=spec, status={"conditions": [condition]})
        body["metadata"]["resourceVersion"] = str(version)
        return body

    rule = {"name": "one", "topics": ["persistent://shop/*/*"], "limits": {"runs": 1}}
    named = [policy() | {"metadata": policy()["metadata"] | {"name": f"p{n}"}} for n in range(9)]
    running = launched(of_policy(0, "Progressing", 1))
    metadata = {"namespace": "shop", "name": launch.name_of(running), "uid": "u"}
    created = {"resourceVersion": "1", "creationTimestamp": "2026-01-01T00:00:00Z"}
    application = {"metadata": metadata | created}
    made = ctx(
        replays=[running, *(of_policy(n, "TooManyRuns", 1) for n in range(1, 9))],
        applications=[application],
        policies=named,
        connections=[connection(allow=[rule])],
    )
    made = dataclasses.replace(made, namespaces=NamespaceLabels(cast("Any", None)))
    (controller,) = handlers.start(made)
    assert len(await looked.names()) == 9
    for version in range(2, 9, 2):  # it is suspended and resumed
        made.replays.put(of_policy(1, "Suspended", version))
        made.replays.put(of_policy(1, "TooManyRuns", version + 1))
    assert await looked.names() == []
    made.replays.drop(running)
    made.applications[resources.SPARK_APPLICATIONS].drop(application)
    assert await looked.names() == ["r0", "r1"]
    # It waits for something else now, so the next one is tried.
    made.replays.put(of_policy(1, "PolicyNotReady", 10))
    assert await looked.names() == ["r2"]
    await controller.stop()


async def test_end_of_a_replay_wakes_only_the_next_of_its_policy(looked: Looked) -> None:
    def later(body: dict[str, Any], **more: object) -> dict[str, Any]:
        return {**body, "metadata": body["metadata"] | {"resourceVersion": "2"}, **more}

    running, suspended = launched(replay("running", age=9)), replay("s", spec={"suspend": True})
    waiting = [replay(f"r{n}", age=n) for n in range(1, 6)]
    elsewhere = replay("elsewhere", spec={"policyRef": {"name": "another"}})
    made = ctx(replays=[*reversed(waiting), suspended, elsewhere, running])
    made = dataclasses.replace(made, namespaces=NamespaceLabels(cast("Any", None)))
    (controller,) = handlers.start(made)
    assert len(await looked.names()) == 8
    made.replays.drop(waiting[3])
    assert await looked.names() == ["r4"]
    made.replays.drop(running)
    assert await looked.names() == ["running", "r1"]
    stalls = {"type": "Stalled", "status": "True", "reason": "ReplayNotSafe", "message": "no"}
    made.replays.put(later(waiting[0], status={"conditions": [stalls]}))
    assert await looked.names() == ["r2"]
    ended = replay("r2", age=2, ended_at="2026-01-01T00:00:00Z")
    made.replays.put(later(ended))
    assert sorted(await looked.names()) == ["r2", "r3"]
    # It may have missed the end of the one that it waited for.
    corrected = later(waiting[0], status={})
    corrected["metadata"]["resourceVersion"] = "3"
    made.replays.put(corrected)
    assert await looked.names() == ["r1"]
    await controller.stop()


PROGRAM = """
import sys
import redrive.cli
print(*sorted({"pyspark", "pyarrow"} & {name.partition(".")[0] for name in sys.modules}))
"""


def test_operator_imports_neither_spark_nor_arrow() -> None:
    source_root = str(Path(launch.__file__).parents[3])
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={"PYTHONPATH": source_root},
        capture_output=True,
        check=True,
        text=True,
    )
    assert done.stdout.strip() == ""
