"""Store messages twice on a topic that deduplicates: the broker recovers its sequence ids twice.

    python stored_twice.py SERVICE_URL ADMIN_URL NAMESPACE [TOKEN]

Needs pulsar-client only, and a token that may do everything in the namespace. Takes two minutes.
Prints `60 unloads: 400943 sent, 400944 stored, 1 twice`, or more on a slow machine.

1. The topic has the topic policy `deduplicationEnabled`. Each producer has a name of its own and
   sends messages with sequence ids that rise, one at a time.
2. The topic is unloaded while all producers send. The client sends again what has no receipt, under
   the same name and sequence id.
3. While the broker loads the topic, its topic policies start a recovery of deduplication
   (`PersistentTopic.onUpdate`), and so does the end of loading (`BrokerService`). Both read the
   same cursor: each reads a part of the entries. When the first of them has read to the end, the
   broker takes deduplication for enabled, while the other still has entries to apply.
4. In that time the broker knows too low a sequence id of the producers of these entries, and stores
   again what it has. https://github.com/apache/pulsar/issues/25954
"""

from __future__ import annotations

import collections
import json
import os
import sys
import threading
import time
import urllib.request
import uuid

import pulsar

PARTITIONS = 8
PRODUCERS = 32
UNLOADS = 60


def main(service_url: str, admin_url: str, namespace: str, token: str = "") -> None:
    """Send while the topic is unloaded, and count what is stored."""
    name = f"{namespace}/twice-{uuid.uuid4()}"
    path = f"{admin_url}/admin/v2/persistent/{name}"
    call("PUT", f"{path}/partitions", token, PARTITIONS)
    call(
        "PUT", f"{path}/subscription/all", token, {"ledgerId": -1, "entryId": -1}
    )  # keeps the messages
    call("POST", f"{path}/deduplicationEnabled", token, body=True)
    client = pulsar.Client(
        service_url,
        authentication=pulsar.AuthenticationToken(token) if token else None,
        logger=pulsar.FileLogger(pulsar.LoggerLevel.Error, os.devnull),
    )
    topic, over, sent = f"persistent://{name}", threading.Event(), collections.Counter[str]()

    def send(number: int) -> None:
        producer = client.create_producer(
            f"{topic}-partition-{number % PARTITIONS}",
            f"p{number}",
            send_timeout_millis=0,
            batching_enabled=False,
        )
        while not over.is_set():
            sent[f"p{number}"] += 1
            id_ = sent[f"p{number}"]
            producer.send(f"{number}:{id_}".encode(), sequence_id=id_)

    senders = [threading.Thread(target=send, args=(number,)) for number in range(PRODUCERS)]
    for sender in senders:
        sender.start()
    for _ in range(UNLOADS):
        time.sleep(1)
        call("PUT", f"{path}/unload", token)
    over.set()
    for sender in senders:
        sender.join()
    copies = collections.Counter(stored(client, topic))
    twice = [message for message, count in copies.items() if count > 1]
    print(  # noqa: T201
        f"{UNLOADS} unloads: {sent.total()} sent, {copies.total()} stored, {len(twice)} twice"
    )
    client.close()


def call(method: str, url: str, token: str, body: object = None) -> None:
    """Send a request to the admin API."""
    request = urllib.request.Request(url, json.dumps(body).encode(), method=method)  # noqa: S310
    request.add_header("Content-Type", "application/json")
    if token:
        request.add_header("Authorization", f"Bearer {token}")
    urllib.request.urlopen(request).close()  # noqa: S310


def stored(client: pulsar.Client, topic: str) -> list[bytes]:
    """Return the contents of the messages of the topic."""
    contents = []
    for index in range(PARTITIONS):
        reader = client.create_reader(f"{topic}-partition-{index}", pulsar.MessageId.earliest)
        while reader.has_message_available():
            contents.append(reader.read_next().data())
        reader.close()
    return contents


if __name__ == "__main__":
    main(*sys.argv[1:])
