"""A topic that the broker compacts when a test wants it."""

from __future__ import annotations

import json
import time
from typing import Any

from redrive.policy.naming import TopicName
from sandbox.pulsar import Broker
from tests.support.provisioned_policy import path
from tests.support.waiting import wait_until

SECONDS = 120


def compact(broker: Broker, topic: TopicName) -> int:
    """Compact *topic*, and return how many messages are left.

    The first time may fail, for want of its cursor.
    """
    url = f"{path(topic)}/compaction"
    before = _compacted(broker, topic)
    deadline = time.monotonic() + SECONDS
    broker.request("PUT", url).check("compact")
    while True:
        answer = broker.request("GET", url)
        answer.check("tell about the compaction")
        status = json.loads(answer.body)["status"]
        if status == "SUCCESS":
            break
        assert time.monotonic() < deadline, answer.body
        if status != "RUNNING":
            broker.request("PUT", url)
        time.sleep(0.1)
    # The broker hears of the new ledger after its compaction is over.
    wait_until(lambda: _compacted(broker, topic)["ledgerId"] != before["ledgerId"])
    return int(_compacted(broker, topic)["entries"])


def _compacted(broker: Broker, topic: TopicName) -> dict[str, Any]:
    answer = broker.request("GET", f"{path(topic)}/internalStats")
    answer.check(f"tell what {topic} holds")
    return dict(json.loads(answer.body)["compactedLedger"])
