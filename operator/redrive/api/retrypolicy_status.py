"""What a RetryPolicy shows: the operator's words about it."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from redrive.api.choices import DeletionPolicy
from redrive.api.conditions import Conditions, Timestamp
from redrive.api.model import StatusModel
from redrive.api.naming import SchemeField
from redrive.api.rules import Rule


class Backlog(StatusModel):
    """Messages that the policy's subscriptions have not acknowledged."""

    retry: Annotated[int, Field(ge=0)]
    """How many messages wait in the retry topic for their next attempt, due or not."""

    dead_letter: Annotated[int, Field(ge=0)] | None = None
    """How many messages rest in the dead-letter topic; not there where they are discarded."""

    oldest_dead_letter: Timestamp | None = None
    """When the one that rests for longest came there; not there while there is none."""

    observed_at: Timestamp | None = None
    """When these figures were read from the broker. Left out by operators before it was there."""


class RetryPolicyStatus(StatusModel):
    """What the operator made of the policy."""

    observed_generation: int | None = None
    """The `metadata.generation` that this status is about."""

    conditions: Conditions = ()
    """Ready: topics, subscriptions, grants and the ConfigMap are as the policy asks. Reconciling
    and Stalled are there only while true."""

    warnings: Annotated[str, Field(max_length=1024)] | None = None
    """The types of the conditions that need attention although the object is ready, separated by
    commas; not there while there is none."""

    retry_topic: str | None = None
    """Full name of the topic where messages wait for their next attempt."""

    dead_letter_topic: str | None = None
    """Full name of the topic where messages rest that have used up their attempts; not there
    where they are discarded."""

    ledger_topic: str | None = None
    """Full name of the topic that records which dead letters replays have moved; not there where
    no replay can run."""

    sequences_topic: str | None = None
    """Full name of the topic that records which keys have dead letters; not there where their
    sequence is not kept."""

    config_map: str | None = None
    """The ConfigMap, in the policy's namespace, that consumers mount; its key is `policy.json`."""

    naming_scheme: (
        Annotated[
            SchemeField,
            Rule(
                "self == oldSelf",
                "the naming scheme of a policy is on record, and can't change",
                "look at the policy again: another operator has recorded it",
            ),
        ]
        | None
    ) = None
    """The scheme that names the policy's topics, from before the first of them is created. It never
    changes."""

    deletion_policy: DeletionPolicy | None = None
    """What a deletion does at the broker: what the policy says, or its connection, or Retain."""

    max_retries: int | None = None
    """How often a failed message is retried: what the policy says, or its connection, or 16."""

    blocked_by: str | None = None
    """The RetryPolicy, as `namespace/name`, that this one waits for: it has what this one needs.
    Left out where there is none."""

    connection: str | None = None
    """The PulsarConnection, as `namespace/name`, through which the topics were last found as the
    policy asks."""

    broker_digest: Annotated[str, Field(max_length=32)] | None = None
    """A digest of that connection's `adminUrl` at the time. Towards other namespaces the policy
    claims its topics at that broker only."""

    creating: tuple[str, ...] | None = None
    """Topics that redrive was about to create when it last wrote this. Left out once they are
    there."""

    planned_changes: (
        Annotated[tuple[Annotated[str, Field(max_length=512)], ...], Field(max_length=32)] | None
    ) = None
    """With `managementPolicy: Observe`: what redrive would have done, one step each, the first 32
    of them."""

    backlog: Backlog | None = None
    """What waits in these topics. It is read about once a minute, and at once when a Replay of the
    policy ends, the policy becomes Ready or a reconcile is requested; small changes are written
    every ten minutes, unchanged figures every hour."""
