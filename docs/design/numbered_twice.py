"""Lose messages with the Python client: it numbers two of them alike, and has receipts for both.

    python numbered_twice.py SERVICE_URL ADMIN_URL TOPIC [TOKEN]

The topic has no partitions, exists, and deduplicates; no other client produces to it.
Needs pulsar-client only. Prints `16 receipts, 12 stored`, or any number below 16.

1. A producer without a name or sequence ids of its own is opened, and publishes nothing.
2. The topic is unloaded. Four threads send four messages each, while the producer reconnects.
3. It numbers what they send from 0. When it is connected again, it takes the broker's last sequence
   id, -1, for the number before the next (`ProducerImpl::handleCreateProducer` of the C++ client),
   though messages with the numbers from 0 are pending. So it uses these numbers twice.
4. The broker drops the second message of each number as a duplicate, and answers `-1:-1`. The
   client gives that to the program as a receipt.
"""

from __future__ import annotations

import sys
import threading
import urllib.request

import pulsar

THREADS = MESSAGES = 4


def main(service_url: str, admin_url: str, topic: str, token: str = "") -> None:
    """Send the messages, and count what is stored."""
    client = pulsar.Client(
        service_url,
        authentication=pulsar.AuthenticationToken(token) if token else None,
        logger=pulsar.ConsoleLogger(pulsar.LoggerLevel.Error),
    )
    producer = client.create_producer(topic, batching_enabled=False)
    receipts: list[pulsar.MessageId] = []
    senders = [
        threading.Thread(
            target=lambda: receipts.extend(producer.send(b"x") for _ in range(MESSAGES))
        )
        for _ in range(THREADS)
    ]
    unload(admin_url, topic, token)
    for sender in senders:
        sender.start()
    for sender in senders:
        sender.join()
    print(f"{len(receipts)} receipts, {stored(client, topic)} stored")  # noqa: T201
    client.close()


def unload(admin_url: str, topic: str, token: str) -> None:
    """Have the broker close the topic, and with it the producer."""
    path = topic.replace("://", "/")
    request = urllib.request.Request(f"{admin_url}/admin/v2/{path}/unload", method="PUT")  # noqa: S310
    request.add_header("Content-Type", "application/json")
    if token:
        request.add_header("Authorization", f"Bearer {token}")
    urllib.request.urlopen(request).close()  # noqa: S310


def stored(client: pulsar.Client, topic: str) -> int:
    """Count the messages of the topic."""
    reader = client.create_reader(topic, pulsar.MessageId.earliest)
    count = 0
    while reader.has_message_available():
        reader.read_next()
        count += 1
    return count


if __name__ == "__main__":
    main(*sys.argv[1:])
