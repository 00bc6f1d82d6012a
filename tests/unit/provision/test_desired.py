from __future__ import annotations

from collections.abc import Callable
from typing import Any

from redrive.admin.policies import Holds, LimitsBacklog, Ttl
from redrive.policy import codec
from redrive.policy.naming import TopicName
from redrive.provision.actions import CreateTopic
from redrive.provision.desired import Observed, desired
from redrive.provision.diff import diff
from redrive.provision.request import Request

MakeBody = Callable[..., dict[str, Any]]
MakeRequest = Callable[..., Request]
RETRY = "persistent://shop/prod/orders-fulfilment-RETRY"
DEAD_LETTER = "persistent://shop/prod/orders-fulfilment-DLQ"
LEDGER = "persistent://shop/prod/orders-fulfilment-DLQ-LEDGER"


def granted(requested: Request, body: dict[str, Any]) -> dict[tuple[str, str], set[str]]:
    return {(str(g.topic), g.role): set(g.actions) for g in desired(requested, body, "here").grants}


def test_a_policy_needs_two_topics_with_a_subscription_each(
    policy: MakeBody, requested: MakeRequest
) -> None:
    body = policy()
    wanted = desired(requested(body), body, "here")
    assert (str(wanted.retry.name), wanted.retry.subscription) == (RETRY, "fulfilment")
    assert [str(p) for p in wanted.retry.policies] == [
        "deduplication",
        "messageTTL 0 s",
        "delayedDelivery active True",
        "backlog quota",
        "inactiveTopicPolicies deleteWhileInactive False",
    ]
    assert wanted.dead_letter is not None
    assert (str(wanted.dead_letter.name), wanted.dead_letter.subscription) == (
        DEAD_LETTER,
        "redrive",
    )
    assert [str(p) for p in wanted.dead_letter.policies] == [
        "deduplication",
        "messageTTL 0 s",
        "backlog quota",
        "inactiveTopicPolicies deleteWhileInactive False",
    ]
    assert wanted.ledger is not None
    assert (str(wanted.ledger.name), wanted.ledger.subscription) == (LEDGER, "__compaction")
    assert [str(p) for p in wanted.ledger.policies] == [
        "messageTTL 0 s",
        "backlog quota",
        "compaction above 10485760 bytes",
        "inactiveTopicPolicies deleteWhileInactive False",
    ]


def test_what_is_kept_and_for_how_long_is_as_the_policy_says(
    policy: MakeBody, requested: MakeRequest
) -> None:
    body = policy(
        retry={"messageTTL": "11d"},
        deadLetter={
            "messageTTL": "30d",
            "retention": {"time": "7d"},
            "backlogQuota": {"size": "3Mi"},
        },
    )
    wanted = desired(requested(body), body, "here")
    assert Ttl(11 * 86_400) in wanted.retry.policies
    assert wanted.dead_letter is not None
    assert {Ttl(30 * 86_400), LimitsBacklog(3 * 2**20)} <= set(wanted.dead_letter.policies)
    retention = (("retentionTimeInMinutes", 7 * 1_440), ("retentionSizeInMB", -1))
    assert Holds("retention", retention) in wanted.dead_letter.policies


def test_dead_letters_have_the_partitions_and_the_subscription_asked_for(
    policy: MakeBody, requested: MakeRequest
) -> None:
    body = policy(deadLetter={"partitions": 3, "subscription": "triage"})
    wanted = desired(requested(body), body, "here")
    assert wanted.dead_letter is not None
    assert (wanted.dead_letter_partitions, wanted.dead_letter.subscription) == (3, "triage")
    written = codec.decode(wanted.config_map["data"]["policy.json"])
    assert written.dead_letter_subscription == "triage"


def test_consumers_read_and_write_retries_and_only_write_dead_letters(
    policy: MakeBody, requested: MakeRequest
) -> None:
    body = policy(consumerRoles=["shop-a", "shop-b"])
    assert granted(requested(body, replay=None), body) == {
        (RETRY, "shop-a"): {"produce", "consume"},
        (DEAD_LETTER, "shop-a"): {"produce"},
        (RETRY, "shop-b"): {"produce", "consume"},
        (DEAD_LETTER, "shop-b"): {"produce"},
    }


def test_a_policy_that_discards_needs_no_dead_letter_topic_and_no_rights_on_one(
    policy: MakeBody, requested: MakeRequest
) -> None:
    body = policy(deadLetter={"mode": "Discard"})
    assert desired(requested(body), body, "here").dead_letter is None
    assert granted(requested(body), body) == {(RETRY, "fulfilment"): {"produce", "consume"}}
    written = desired(requested(body), body, "here").config_map["data"]["policy.json"]
    assert not codec.decode(written).dead_letters


def test_readers_only_read_dead_letters(policy: MakeBody, requested: MakeRequest) -> None:
    body = policy(consumerRoles=[], deadLetter={"readerRoles": ["shop-oncall"]})
    assert granted(requested(body, replay=None), body) == {
        (DEAD_LETTER, "shop-oncall"): {"consume"}
    }


def test_replays_read_dead_letters_and_have_a_ledger_of_their_own(
    policy: MakeBody, requested: MakeRequest
) -> None:
    body = policy(consumerRoles=[])
    assert granted(requested(body), body) == {
        (RETRY, "replayer"): {"produce", "consume"},
        (DEAD_LETTER, "replayer"): {"consume"},
        (LEDGER, "replayer"): {"produce", "consume"},
    }
    without = desired(requested(body, replay=None), body, "here")
    assert without.ledger is None
    assert without.grants == ()


def test_a_role_that_consumes_and_replays_gets_both_rights_in_one_grant(
    policy: MakeBody, requested: MakeRequest, connection: dict[str, Any]
) -> None:
    body = policy(consumerRoles=["fulfilment", "fulfilment"])
    both = connection["replay"] | {"role": "fulfilment"}
    assert granted(requested(body, replay=both), body) == {
        (RETRY, "fulfilment"): {"produce", "consume"},
        (DEAD_LETTER, "fulfilment"): {"produce", "consume"},
        (LEDGER, "fulfilment"): {"produce", "consume"},
    }


def test_the_config_map_holds_the_policy_and_belongs_to_it(
    policy: MakeBody, requested: MakeRequest
) -> None:
    body = policy(maxRetries=3)
    config_map = desired(requested(body), body, "here").config_map
    assert config_map["metadata"]["name"] == "orders-redrive"
    assert config_map["metadata"]["namespace"] == "shop"
    assert config_map["metadata"]["labels"] == {"app.kubernetes.io/managed-by": "redrive"}
    assert config_map["metadata"]["ownerReferences"] == [
        {
            "apiVersion": "redrive.io/v1beta1",
            "kind": "RetryPolicy",
            "name": "orders",
            "uid": "uid-orders",
            "controller": True,
        }
    ]
    written = codec.decode(config_map["data"]["policy.json"])
    assert written == requested(body).policy
    assert (written.name, written.generation, written.max_retries) == ("shop/orders", 7, 3)


def test_a_ledger_has_no_partitions_whatever_the_dead_letter_topic_has(
    policy: MakeBody, requested: MakeRequest
) -> None:
    body = policy(deadLetter={"partitions": 3})
    wanted = desired(requested(body), body, "here")
    assert wanted.ledger is not None
    created = {
        action.topic: action.partitions
        for action in diff(wanted, Observed(source_partitions=2))
        if isinstance(action, CreateTopic)
    }
    assert created == {
        TopicName.parse(RETRY): 2,
        TopicName.parse(DEAD_LETTER): 3,
        wanted.ledger.name: 0,
    }


def test_records_of_sequences_are_written_by_consumers_into_a_topic_like_a_ledger(
    policy: MakeBody, requested: MakeRequest
) -> None:
    body = policy(
        subscriptionType="Key_Shared",
        ordering="PerKey",
        consumerRoles=["fulfilment"],
        deadLetter={"sequenced": True, "partitions": 3},
    )
    wanted = desired(requested(body), body, "here")
    assert wanted.ledger is not None
    assert wanted.sequences is not None
    assert str(wanted.sequences.name) == f"{DEAD_LETTER}-SEQUENCES"
    assert wanted.sequences.subscription == wanted.ledger.subscription
    assert wanted.sequences.policies == wanted.ledger.policies
    may = {(str(g.topic), g.role): set(g.actions) for g in wanted.grants}
    assert may[f"{DEAD_LETTER}-SEQUENCES", "fulfilment"] == {"produce", "consume"}
    assert (f"{DEAD_LETTER}-SEQUENCES", "replayer") not in may
    created = {
        action.topic: action.partitions
        for action in diff(wanted, Observed(source_partitions=2))
        if isinstance(action, CreateTopic)
    }
    assert created[wanted.sequences.name] == 0
    assert codec.decode(codec.encode(wanted.policy)).sequenced
