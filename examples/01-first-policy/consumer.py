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
from pathlib import Path
from typing import Any, TextIO

import pulsar

from redrive import FailureRules, PolicyFile, RetryConsumer


class WarehouseDown(Exception):  # noqa: N818 - a dead letter shows this name
    """The warehouse does not answer: worth a retry."""


class PaymentTimeout(Exception):  # noqa: N818 - a dead letter shows this name
    """The payment service answered too late: worth a retry."""


RULES = FailureRules(retry_on=(WarehouseDown, PaymentTimeout))
"""Whatever else is raised, the order itself is wrong: it is dead-lettered at its first failure."""


class Shop:
    """Handles orders against services that have their moods.

    Args:
        warehouse: a file that is there while the warehouse answers.
        log: gets a line for each handling, as JSON.
    """

    def __init__(self, warehouse: Path, log: TextIO) -> None:
        self._warehouse = warehouse
        self._log = log
        self._asked_before: set[str] = set()

    def handle(self, message: pulsar.Message) -> None:
        """Fulfil one order, or raise why not."""
        order_id, outcome = message.partition_key(), "done"
        try:
            self._fulfil(order_id, json.loads(message.data()))
        except Exception as error:
            outcome = type(error).__name__
            raise
        finally:
            self._log.write(json.dumps({"id": order_id, "outcome": outcome}) + "\n")

    def _fulfil(self, order_id: str, order: Any) -> None:  # noqa: ANN401 - whatever was sent
        if order["needs"] == "warehouse" and not self._warehouse.exists():
            msg = f"no answer from the warehouse about {order_id}"
            raise WarehouseDown(msg)
        if order["needs"] == "slow-payment" and order_id not in self._asked_before:
            self._asked_before.add(order_id)
            msg = "no answer within 200 ms"
            raise PaymentTimeout(msg)


def main() -> None:
    """Consume until SIGTERM, then finish the in-flight messages."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--log", type=Path, required=True)
    options.add_argument("--warehouse", type=Path, required=True)
    arguments = options.parse_args()
    token = Path(os.environ["PULSAR_TOKEN_FILE"]).read_text(encoding="ascii").strip()
    authentication = pulsar.AuthenticationToken(token)
    with (
        contextlib.closing(pulsar.Client(os.environ["PULSAR_URL"], authentication)) as client,
        arguments.log.open("a", encoding="utf-8", buffering=1) as log,
        RetryConsumer(client, PolicyFile()) as consumer,
    ):
        consumer.run(Shop(arguments.warehouse, log).handle, rules=RULES)


if __name__ == "__main__":
    main()
