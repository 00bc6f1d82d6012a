"""A topic that the broker compacts when a test wants it."""

from __future__ import annotations

import json
import time

from redrive.policy.naming import TopicName
from sandbox.pulsar import Broker
from tests.support.provisioned_policy import path

SECONDS = 120


def compact(broker: Broker, topic: TopicName) -> int:
    """Compact *topic*, and return how many messages are left.

    The first time may fail, for want of its cursor.
    """
    url = f"{path(topic)}/compaction"
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
    stored = json.loads(broker.request("GET", f"{path(topic)}/internalStats").body)
    return int(stored["compactedLedger"]["entries"])
