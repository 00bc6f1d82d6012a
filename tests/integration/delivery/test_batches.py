"""The broker counts the redeliveries of a batch as a whole; a message dies for its own failures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from functools import partial

from sandbox.pulsar import SUPERUSER
from tests.support.messages import receive_until_quiet
from tests.support.provisioned_policy import ProvisionedPolicy

ProvisionPolicy = Callable[..., ProvisionedPolicy]
SECOND = timedelta(seconds=1)


def send_batch(provisioned: ProvisionedPolicy, *contents: bytes) -> None:
    producer = provisioned.client(SUPERUSER).create_producer(
        str(provisioned.policy.topic), batching_enabled=True, batching_max_publish_delay_ms=60_000
    )
    for content in contents:
        producer.send_async(content, lambda *_: None)
    producer.flush()
    producer.close()


def test_a_message_does_not_die_for_the_failures_of_another_in_its_batch(
    provision_policy: ProvisionPolicy,
) -> None:
    provisioned = provision_policy(max_retries=2)
    topic = provisioned.policy.topic
    send_batch(provisioned, b"bad", b"late", b"good")
    given_back: Counter[bytes] = Counter()
    before = {}
    with provisioned.consumer(nack_delay=timedelta(seconds=0.5)) as consumer:
        left = partial(provisioned.backlog, topic)
        for message in receive_until_quiet(consumer, quiet=SECOND, unsettled=left):
            content = message.data()
            failed_first = content == b"bad" and given_back[content] < 3
            if failed_first or (content == b"late" and given_back == {b"bad": 3}):
                before[content] = message.redelivery_count()
                given_back[content] += 1
                consumer.negative_acknowledge(message)
            elif content != b"late" or given_back[content]:
                consumer.acknowledge(message)  # what is acknowledged comes again with the others

    assert given_back == {b"bad": 3, b"late": 1}
    assert before[b"late"] >= provisioned.policy.max_retries
    [dead] = provisioned.dead_letters(1)
    assert (dead.data(), dead.properties()["RECONSUMETIMES"]) == (b"bad", "3")
    assert provisioned.backlog(topic) == 0
