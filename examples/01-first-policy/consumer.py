"""Handle orders with `RetryConsumer`, and log every handling.

    PULSAR_URL=… PULSAR_TOKEN_FILE=… REDRIVE_POLICY=policy.json \
        python consumer.py --log handled.jsonl --warehouse warehouse.up

The warehouse counts as down for as long as the file given by --warehouse is missing. Runs until it
is terminated.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import threading
from datetime import timedelta
from pathlib import Path

import pulsar

from redrive import PolicyFile, RetryConsumer


class WarehouseDown(Exception):  # noqa: N818 - a dead letter shows this name
    """The warehouse does not answer: worth a retry."""


class PaymentTimeout(Exception):  # noqa: N818 - a dead letter shows this name
    """The payment service answered too late: worth a retry."""


class Shop:
    """Handles orders against services that have their moods."""

    def __init__(self, warehouse: Path) -> None:
        self._warehouse = warehouse
        self._asked_before: set[str] = set()

    def handle(self, order_id: str, body: bytes) -> None:
        """Fulfil one order, or raise why not."""
        order = json.loads(body)
        if order["needs"] == "warehouse" and not self._warehouse.exists():
            msg = f"no answer from the warehouse about {order_id}"
            raise WarehouseDown(msg)
        if order["needs"] == "slow-payment" and order_id not in self._asked_before:
            self._asked_before.add(order_id)
            msg = "no answer within 200 ms"
            raise PaymentTimeout(msg)


def main() -> None:
    """Consume until SIGTERM; what is in flight then is finished first."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--log", type=Path, required=True)
    options.add_argument("--warehouse", type=Path, required=True)
    given = options.parse_args()
    token = Path(os.environ["PULSAR_TOKEN_FILE"]).read_text(encoding="ascii").strip()
    authentication = pulsar.AuthenticationToken(token)
    stopping = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopping.set())
    shop = Shop(given.warehouse)
    with (
        contextlib.closing(pulsar.Client(os.environ["PULSAR_URL"], authentication)) as client,
        given.log.open("a", encoding="utf-8", buffering=1) as log,
        RetryConsumer(client, PolicyFile()) as consumer,
    ):
        while not stopping.is_set():
            message = consumer.receive(timeout=timedelta(seconds=1))
            if message is None:
                continue
            order_id, outcome = message.partition_key(), "done"
            try:
                shop.handle(order_id, message.data())
                consumer.acknowledge(message)
            except json.JSONDecodeError as error:  # no retry will fix it
                consumer.reconsume_later(message, level=-1, cause=error)
                outcome = type(error).__name__
            except (WarehouseDown, PaymentTimeout) as error:
                consumer.reconsume_later(message, cause=error)
                outcome = type(error).__name__
            log.write(json.dumps({"id": order_id, "outcome": outcome}) + "\n")


if __name__ == "__main__":
    main()
