"""What a policy may leave to its connection: the fields that both have, stated once."""

from __future__ import annotations

import enum
from typing import Annotated, Self

from pydantic import AfterValidator, Strict, WithJsonSchema

from redrive.api.choosing import one_of
from redrive.api.ladder import DelayLadder, Levels
from redrive.api.model import ApiModel
from redrive.api.naming import DefaultNaming
from redrive.api.outage import OutageBreakerSpec
from redrive.api.rules import refusing
from redrive.policy.model import MAX_RETRIES_LIMIT, check_max_retries
from redrive.policy.naming import Scheme

# Bounds rather than a rule: only so does the API server show the number it refuses.
MaxRetries = Annotated[
    int,
    Strict(),
    WithJsonSchema({"type": "integer", "minimum": 0, "maximum": MAX_RETRIES_LIMIT}),
    AfterValidator(refusing(check_max_retries)),
]


class DeletionPolicy(enum.StrEnum):
    """What becomes of what redrive made at the broker when a policy is deleted."""

    RETAIN = "Retain"
    REVOKE_GRANTS = "RevokeGrants"
    DELETE_IF_EMPTY = "DeleteIfEmpty"
    DELETE = "Delete"

    @property
    def deletes_topics(self) -> bool:
        """Whether topics go, with what they hold or if they are empty."""
        return self in {DeletionPolicy.DELETE_IF_EMPTY, DeletionPolicy.DELETE}


class Choices(ApiModel):
    """How policies treat failed messages where they leave it out."""

    max_retries: MaxRetries | None = None
    """How often a failed message is retried after its first delivery, 0 to 1000: with 3 a message
    is handled at most 4 times, then it is a dead letter. Left out: what the connection's
    `policyDefaults` say, else 16."""

    # No default in the schema: a default choice would stay beside the one a user makes later.
    delay_ladder: DelayLadder | None = None
    """The delay before each retry: exactly one of preset, delays, fixed and exponential. Left out:
    what the connection's `policyDefaults` say, else the preset `tdmq`."""

    delay_levels: Levels | None = None
    """What consumers mean by `level=k`: the k-th of these delays, from 1; a higher level means the
    last. 1 to 100 of them, each from 1s to 10d. Left out: what the connection's `policyDefaults`
    say, else the 18 levels `1s 5s 10s 30s`, 1m to 10m by the minute, `20m 30m 1h 2h`."""

    deletion_policy: (
        Annotated[
            DeletionPolicy,
            *one_of(
                DeletionPolicy,
                "deletionPolicy says what becomes of topics when a policy is deleted",
                "use one of Retain, RevokeGrants, DeleteIfEmpty, Delete",
            ),
        ]
        | None
    ) = None
    """What a deletion of the policy does at the broker. `Retain`: nothing. `RevokeGrants`: it takes
    back the rights that redrive granted, and nothing else. `Delete`: it deletes the topics that
    redrive made with all their messages, and restores those that were there before.
    `DeleteIfEmpty`: the same, but what holds messages stays as it is. While clients are connected
    these two wait, at most 10 minutes. Left out: what the connection's `policyDefaults` say, else
    Retain."""

    outage_breaker: OutageBreakerSpec | None = None
    """Has consumers in Python pause while what they depend on is down, so that an outage uses up no
    retries; `{}` for the defaults, `{mode: Never}` for none in spite of the connection's
    `policyDefaults`. The annotation `redrive.io/ignore-outages: "true"` has them go
    on. Left out: what the connection's `policyDefaults` say, else they don't pause."""

    def completed(self, defaults: Choices | None) -> Self:
        """Return this with what it leaves out taken from *defaults*."""
        if defaults is None:
            return self
        left_out = (name for name in Choices.model_fields if getattr(self, name) is None)
        return self.model_copy(update={name: getattr(defaults, name) for name in left_out})


class PolicyDefaults(Choices):
    """What policies of a connection leave out."""

    naming: DefaultNaming | None = None
    """How topics are named. Left out: by the scheme `pulsar`."""

    @property
    def scheme(self) -> Scheme:
        """Return the naming scheme of policies that leave it out."""
        named = None if self.naming is None else self.naming.scheme
        return named or Scheme.PULSAR
