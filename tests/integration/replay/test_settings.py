"""Settings of a Pulsar namespace that keep a Replay from its topics."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pulsar
import pytest

from redrive.errors import RedriveError
from redrive.replay.job import run as runs
from tests.support.local_engine import Local
from tests.support.local_runs import Notes, job_of, replay, wait_until_moved

ProvisionPolicy = Callable[..., Any]
pytestmark = pytest.mark.usefixtures("replay_token", "pulsar_namespace")


def set_on_namespace(provisioned: Any, setting: str, value: object) -> None:  # noqa: ANN401
    path = f"/admin/v2/namespaces/{provisioned.policy.topic.namespace_name}/{setting}"
    provisioned.broker.request("POST", path, value).check(f"set {setting}")


@pytest.mark.parametrize(
    ("setting", "value", "reason"),
    [
        ("encryptionRequired", True, "EncryptionRequired"),
        ("maxProducersPerTopic", 1, "LimitReached"),
        ("maxSubscriptionsPerTopic", 1, "LimitReached"),
    ],
)
def test_setting_that_refuses_a_replay_is_named_at_once(
    provision_policy: ProvisionPolicy, setting: str, value: object, reason: str
) -> None:
    provisioned = provision_policy()
    provisioned.bury(1)
    busy = provisioned.client.create_producer(str(provisioned.policy.retry_topic))
    set_on_namespace(provisioned, setting, value)
    begun = time.monotonic()

    with pytest.raises(RedriveError, match=setting) as failure:
        replay(provisioned)

    assert failure.value.reason == reason
    assert time.monotonic() - begun < 60
    busy.close()


@pytest.mark.parametrize(
    ("topic", "limit", "setting"),
    [
        ("retry_topic", "maxProducers", "maxProducersPerTopic"),
        ("dead_letter_topic", "maxConsumers", "maxConsumersPerTopic"),
        ("dead_letter_topic", "maxSubscriptionsPerTopic", "maxSubscriptionsPerTopic"),
        ("dead_letter_topic", "maxConsumersPerSubscription", "maxConsumersPerSubscription"),
    ],
)
def test_limit_of_a_topic_that_refuses_a_replay_is_named(
    provision_policy: ProvisionPolicy, topic: str, limit: str, setting: str
) -> None:
    provisioned = provision_policy()
    provisioned.bury(1)
    policy, client = provisioned.policy, provisioned.client
    busy = [
        client.create_producer(str(policy.retry_topic)),
        client.subscribe(
            str(policy.dead_letter_topic),
            policy.dead_letter_subscription,
            pulsar.ConsumerType.Shared,
        ),
    ]
    provisioned.change_policy("POST", getattr(policy, topic), limit, 1)
    begun = time.monotonic()

    with pytest.raises(RedriveError, match=setting):
        replay(provisioned)

    assert time.monotonic() - begun < 60
    for one in busy:
        one.close()


@pytest.mark.parametrize("role", ["retry_topic", "ledger_topic"])
def test_terminated_topic_ends_a_replay_with_its_name(
    provision_policy: ProvisionPolicy, role: str
) -> None:
    provisioned = provision_policy()
    provisioned.bury(1)
    topic = getattr(provisioned.policy, role)
    provisioned.admin("POST", topic, "terminate")

    with pytest.raises(RedriveError, match=topic.local) as failure:
        replay(provisioned)

    assert failure.value.reason == "TopicTerminated"


@pytest.mark.parametrize("role", ["retry_topic", "ledger_topic"])
def test_topic_terminated_under_a_replay_ends_it(
    provision_policy: ProvisionPolicy, role: str
) -> None:
    provisioned = provision_policy()
    provisioned.bury_many(600)
    topic = getattr(provisioned.policy, role)
    job = dataclasses.replace(job_of(provisioned), rate_limit=20.0)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(runs.run, job, Local(), Notes())
        wait_until_moved(provisioned, 20)
        provisioned.admin("POST", topic, "terminate")
        begun = time.monotonic()
        with pytest.raises(RedriveError, match=topic.local) as failure:
            running.result(120)

    assert failure.value.reason == "TopicTerminated"
    assert time.monotonic() - begun < 60
