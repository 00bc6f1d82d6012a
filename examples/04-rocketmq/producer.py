"""Send orders over gRPC, and log the id of each one that the broker has confirmed.

    ROCKETMQ_PROXY=… ROCKETMQ_USER=… ROCKETMQ_SECRET=… \
        python producer.py --count 30 --log produced.log

Every message has its order id as its key. Of each ten orders one is malformed, and three need the
warehouse.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

from rocketmq import ClientConfiguration, Credentials, Message, Producer

TOPIC = "orders"


def order(number: int) -> bytes:
    """Return the body of order *number*."""
    kind = number % 10
    if kind == 0:
        return b'{"items": [}'
    return json.dumps({"items": [number], "needs": "warehouse" if kind < 4 else "nothing"}).encode()


def main() -> None:
    """Send the orders; exit when all of them are confirmed and logged."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--count", type=int, default=30)
    options.add_argument("--log", type=Path, required=True)
    arguments = options.parse_args()
    user = Credentials(os.environ["ROCKETMQ_USER"], os.environ["ROCKETMQ_SECRET"])
    # A proxy that has just started answers slowly.
    configuration = ClientConfiguration(os.environ["ROCKETMQ_PROXY"], user, request_timeout=20)
    producer = Producer(configuration, (TOPIC,))
    producer.startup()
    with arguments.log.open("a", encoding="ascii", buffering=1) as log:
        for number in range(arguments.count):
            message = Message()
            message.topic, message.body = TOPIC, order(number)
            message.keys = order_id = f"order-{number:06}"
            producer.send(message)
            log.write(f"{order_id}\n")
    producer.shutdown()


if __name__ == "__main__":
    main()
