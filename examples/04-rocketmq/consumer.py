"""Handle orders with the gRPC client of RocketMQ for Python, and log every handling.

    ROCKETMQ_PROXY=… ROCKETMQ_USER=… ROCKETMQ_SECRET=… \
        python consumer.py --log handled.jsonl --warehouse warehouse.up

The broker delays and counts retries by the policy of the group; this program only reports success
or failure. The warehouse counts as down for as long as the file given by --warehouse is missing.
Runs until it is terminated.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import time
from pathlib import Path
from typing import TextIO

from rocketmq import (
    ClientConfiguration,
    ConsumeResult,
    Credentials,
    FilterExpression,
    Message,
    MessageListener,
    PushConsumer,
)

TOPIC, GROUP = "orders", "fulfilment"


class WarehouseDown(Exception):  # noqa: N818
    """The warehouse does not answer."""


class Shop(MessageListener):
    """Handles orders.

    Args:
        warehouse: a file that exists while the warehouse answers.
        log: gets a line for each handling, as JSON.
    """

    def __init__(self, warehouse: Path, log: TextIO) -> None:
        self._warehouse = warehouse
        self._log = log

    def consume(self, message: Message) -> ConsumeResult:
        """Fulfil one order; report a failure to the broker."""
        (order_id,) = message.keys
        handling = {"id": order_id, "outcome": "done", "time": time.time()}
        try:
            order = json.loads(message.body)
            if order["needs"] == "warehouse" and not self._warehouse.exists():
                raise WarehouseDown(order_id)  # noqa: TRY301
        except Exception as error:  # noqa: BLE001
            handling["outcome"] = type(error).__name__
        self._log.write(json.dumps(handling) + "\n")
        done = handling["outcome"] == "done"
        return ConsumeResult.SUCCESS if done else ConsumeResult.FAILURE


def main() -> None:
    """Consume until SIGTERM."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--log", type=Path, required=True)
    options.add_argument("--warehouse", type=Path, required=True)
    arguments = options.parse_args()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    user = Credentials(os.environ["ROCKETMQ_USER"], os.environ["ROCKETMQ_SECRET"])
    # A proxy that has just started answers slowly.
    configuration = ClientConfiguration(os.environ["ROCKETMQ_PROXY"], user, request_timeout=20)
    with arguments.log.open("a", encoding="utf-8", buffering=1) as log:
        shop = Shop(arguments.warehouse, log)
        consumer = PushConsumer(configuration, GROUP, shop, {TOPIC: FilterExpression()})
        consumer.startup()
        signal.sigwait({signal.SIGTERM})
        consumer.shutdown()


if __name__ == "__main__":
    main()
