"""A crash at every write about a Replay, and fields that change: it ends as it does in peace."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from redrive.api import Body
from redrive.errors import RedriveError
from redrive.kube import resources
from redrive.kube.cache import Cache
from redrive.kube.resources import Key
from redrive.replay.controller.reconciler import reconcile
from tests.support.crashes import Crash, Fault, Faulty
from tests.support.crd_fields import SpecField, SpecFields
from tests.support.fake_kubernetes import edit
from tests.unit.replay.controller.test_admission import SETTINGS, ctx, replay
from tests.unit.replay.controller.test_reconcile import provide

KEY = Key("shop", "now")
PARTS = ("Submitted", "Running", "Completed", "gone")
FIELDS = SpecFields("Replay")
CHANGEABLE = [leaf for leaf in FIELDS.all if not leaf.immutable]


@dataclass
class Life:
    """A Replay that is launched, runs, ends, and is deleted a day later.

    Attributes:
        stale: whether an operator that starts after a crash knows everything as it was before.
        states: what is stored after each part of it.
    """

    spec: Body = field(default_factory=lambda: {"ttlAfterFinished": "1d"})
    stale: bool = False
    fault: Fault = field(default_factory=lambda: Fault(0, done=False))
    states: list[Body] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.now = datetime(2026, 11, 22, tzinfo=UTC)
        self.kubernetes = Faulty()
        self.kubernetes.fault = self.fault
        self.kubernetes.add(resources.REPLAYS, replay(spec=dict(self.spec)))
        provide(self.kubernetes)

    @property
    def stored(self) -> dict[str, Any] | None:
        return self.kubernetes.objects[resources.REPLAYS].get(KEY)

    async def lived(self) -> Life:
        for part in PARTS:
            await self.reaches(part)
        return self

    async def reaches(self, part: str) -> None:
        """Have happen what leads to *part* of its life, and the operator see it."""
        known = self._all()
        if part == "Running":
            self._spark("RUNNING")
        elif part == "Completed":
            assert self.stored is not None
            self.stored["status"] |= {"matched": 8, "moved": 8, "left": 0, "finished": True}
            self._spark("COMPLETED")
        elif part == "gone":
            self.now += timedelta(days=2)
        try:
            await self.look()
        except Crash:
            if self.stale:
                with suppress(RedriveError):
                    await self._reconcile(known)
            await self.look()
        self.states.append(self.state())

    async def look(self) -> None:
        """Have the operator see all as it is."""
        await self._reconcile(self._all())

    def change(self, spec: Body) -> None:
        """Have a user apply another spec; a job that runs follows."""
        assert self.stored is not None
        self.stored["spec"].clear()
        edit(self.stored, **spec)
        status = self.stored.setdefault("status", {})
        status.pop("suspended", None)
        if status.get("phase") in {"Running", "Suspended"} and spec.get("suspend"):
            status["suspended"] = True

    def state(self) -> Body:
        """All there is, without what counts writes and changes."""
        found = copy.deepcopy(self._all())
        for bodies in found.values():
            for body in bodies:
                for counts in ("resourceVersion", "generation", "uid"):
                    body["metadata"].pop(counts, None)
                body.get("status", {}).pop("observedGeneration", None)
                for condition in body.get("status", {}).get("conditions", []):
                    del condition["observedGeneration"]
        return found

    @property
    def history(self) -> Counter[str]:
        verbs = ((write.verb, write.resource.kind) for write in self.kubernetes.writes)
        return Counter(f"{verb} {kind}" for verb, kind in verbs)

    def _all(self) -> dict[str, list[Body]]:
        kinds = (resources.REPLAYS, resources.SPARK_APPLICATIONS)
        objects = self.kubernetes.objects
        return {kind.kind: copy.deepcopy(list(objects[kind].values())) for kind in kinds}

    def _spark(self, state: str) -> None:
        for body in self.kubernetes.objects[resources.SPARK_APPLICATIONS].values():
            body["status"] = {"applicationState": {"state": state}}

    async def _reconcile(self, known: dict[str, list[Body]]) -> None:
        context = dataclasses.replace(
            ctx(replays=copy.deepcopy([dict(body) for body in known["Replay"]])),
            kubernetes=self.kubernetes,
            settings=SETTINGS,
            clock=lambda: self.now,
            applications={resources.SPARK_APPLICATIONS: Cache(known["SparkApplication"])},
        )
        await reconcile(KEY, context, asyncio.Lock())


@pytest.mark.parametrize("stale", [False, True], ids=["seen", "stale"])
@pytest.mark.parametrize("done", [False, True], ids=["not done", "done"])
async def test_a_crash_at_any_write_ends_as_peace_does_and_launches_one_run(
    *, done: bool, stale: bool
) -> None:
    peace = await Life().lived()
    assert [phase_of(state) for state in peace.states] == [*PARTS[:-1], None]
    writes = peace.fault.count
    assert writes == 5  # launch, three phases, deletion
    for number in range(1, writes + 1):
        disturbed = await Life(stale=stale, fault=Fault(number, done=done)).lived()
        assert disturbed.states == peace.states, f"write {number}"
        assert disturbed.history["create SparkApplication"] == 1, f"write {number}"
        more = disturbed.history - peace.history
        # One that is behind tries to launch it once more, is refused, and shows that.
        assert more.keys() <= {"patch_status Replay"}, f"write {number}: {more}"
        assert more.total() <= 2, f"write {number}: {more}"


def test_suspension_and_time_to_live_are_what_can_change() -> None:
    assert [str(leaf) for leaf in CHANGEABLE] == ["suspend", "ttlAfterFinished"]


@pytest.mark.parametrize("leaf", CHANGEABLE, ids=str)
@pytest.mark.parametrize("during", ["Pending", *PARTS[:-1]])
async def test_a_field_that_is_changed_and_changed_back_leaves_no_trace(
    leaf: SpecField, during: str
) -> None:
    base = {"policyRef": {"name": "orders"}}
    for spec in FIELDS.specs(leaf, base, 3):
        never, changed = Life(base), Life(base)
        if during == "Pending":
            changed.change(spec)
            await changed.look()
            fresh = Life(spec)
            await fresh.look()
            assert changed.state() == fresh.state()
            changed.change(base)
        for part in PARTS[:-1]:
            for life in (never, changed):
                await life.reaches(part)
            if part == during:
                changed.change(spec)
                await changed.look()
                assert phase_of(changed.state()) == (
                    "Suspended" if part == "Running" and spec.get("suspend") else part
                )
                changed.change(base)
                await changed.look()
            assert changed.state() == never.state(), (spec, part)


def phase_of(state: Body) -> str | None:
    phases = [replay["status"]["phase"] for replay in state["Replay"]]
    return phases[0] if phases else None
