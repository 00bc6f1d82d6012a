"""Send orders, and log the id of each one that the broker has confirmed.

    PULSAR_URL=… PULSAR_TOKEN_FILE=… python producer.py --count 1000 --log produced.log

Every message is keyed by its order id. Of each hundred orders two are malformed, twelve need the
warehouse and five meet a payment service that answers only the second time.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
from pathlib import Path

import pulsar

TOPIC = "persistent://shop/prod/orders"


def order(number: int) -> bytes:
    """Return the body of order *number*."""
    kind = number % 100
    if kind < 2:
        return b'{"items": [}'
    needs = "warehouse" if kind < 14 else "slow-payment" if kind < 19 else "nothing"
    return json.dumps({"items": [number], "needs": needs}).encode()


def main() -> None:
    """Send the orders; exit when all of them are confirmed and logged."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--count", type=int, default=1_000)
    options.add_argument("--log", type=Path, required=True)
    arguments = options.parse_args()
    token = Path(os.environ["PULSAR_TOKEN_FILE"]).read_text(encoding="ascii").strip()
    authentication = pulsar.AuthenticationToken(token)
    with (
        contextlib.closing(pulsar.Client(os.environ["PULSAR_URL"], authentication)) as client,
        arguments.log.open("a", encoding="ascii", buffering=1) as log,
    ):
        producer = client.create_producer(TOPIC)
        for number in range(arguments.count):
            order_id = f"order-{number:06}"
            producer.send(order(number), partition_key=order_id)
            log.write(f"{order_id}\n")


if __name__ == "__main__":
    main()
