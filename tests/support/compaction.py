"""A topic that the broker compacts when a test wants it."""

from __future__ import annotations

import time
from typing import Any

from redrive.policy.naming import TopicName
from sandbox.pulsar import Broker
from tests.support.provisioned_policy import path
from tests.support.subscriptions import tell
from tests.support.waiting import wait_until

SECONDS = 120


def compact(broker: Broker, topic: TopicName) -> int:
    """Compact *topic*, and return the number of remaining messages.

    The first attempt may fail, because its cursor is missing.
    """
    url = f"{path(topic)}/compaction"
    before = _compacted(broker, topic)["ledgerId"]
    deadline = time.monotonic() + SECONDS
    broker.request("PUT", url).check("compact")
    while True:
        state = tell(broker, topic, "compaction")
        status = state["status"]
        if status == "SUCCESS":
            break
        assert time.monotonic() < deadline, state
        if status != "RUNNING":
            broker.request("PUT", url)
        time.sleep(0.1)
    # The broker learns of the new ledger after the end of the compaction.
    wait_until(lambda: _compacted(broker, topic)["ledgerId"] != before)
    return int(_compacted(broker, topic)["entries"])


def _compacted(broker: Broker, topic: TopicName) -> dict[str, Any]:
    return dict(tell(broker, topic, "internalStats")["compactedLedger"])
