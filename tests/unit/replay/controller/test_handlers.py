"""What has a Replay looked at; all of it is tried at a real API server too."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any, cast

import kopf
import pytest

from redrive.errors import Requeue
from redrive.kube.namespaces import NamespaceLabels
from redrive.kube.resources import Key
from redrive.replay.controller import handlers
from tests.unit.replay.controller.test_admission import ctx, replay


async def test_a_replay_is_looked_at_when_its_job_says_that_it_rests_and_not_for_its_numbers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looked: asyncio.Queue[Key] = asyncio.Queue()

    async def look(key: Key, *_: object) -> Requeue:
        looked.put_nowait(key)
        return Requeue.ON_CHANGE

    monkeypatch.setattr(handlers, "reconcile", look)
    made = dataclasses.replace(ctx(), namespaces=NamespaceLabels(cast("Any", None)))
    (controller,) = handlers.register(kopf.OperatorRegistry(), made)
    made.replays.put(replay())
    assert await asyncio.wait_for(looked.get(), 5)
    reports: list[dict[str, Any]] = [{"moved": 3}, {"moved": 5}, {"suspended": True}]
    for version, status in enumerate(reports, 2):
        body = replay(status=status)
        body["metadata"]["resourceVersion"] = str(version)
        made.replays.put(body)
        if status.get("suspended"):
            assert await asyncio.wait_for(looked.get(), 5) == Key("shop", "now")
        else:
            await asyncio.sleep(0)
    assert looked.empty()
    await controller.stop()
