"""How the claim of one policy stands against those of others, as its spec and status show; pure.

Two policies that need the same are ordered by this before their age, so that a claim of which
nothing comes keeps none from working, and one that is fixed later takes nothing back by itself.
"""

from __future__ import annotations

import enum
import hashlib
from typing import Any

from redrive.api.conditions import STALLED
from redrive.api.retrypolicy import ManagementPolicy
from redrive.kube.resources import Body, Key
from redrive.provision.errors import NameCollisionError, ResourceConflictError

WAITS = frozenset({ResourceConflictError.reason, NameCollisionError.reason})
"""Reasons of a policy that waits for a rival to go."""
BROKER_DIGEST = "brokerDigest"
"""A field of a policy's status: at which broker it was provisioned last, as `digest_of` writes."""


def digest_of(broker: str) -> str:
    """Write a broker's address, which is for the connection's namespace alone, for all to see."""
    return hashlib.sha256(broker.encode()).hexdigest()[:32]


def proof_of(body: Body) -> tuple[Any, Any]:
    """Return through which connection, and at which broker, a RetryPolicy was provisioned last."""
    written = body.get("status") or {}
    return written.get("connection"), written.get(BROKER_DIGEST)


def is_proven(body: Body, connection: Key, broker: str) -> bool:
    """Whether a RetryPolicy was provisioned at *broker*, through *connection*, which it names.

    That takes rights in the Pulsar namespace of its topics, which never change. Until then its
    claim is a word of its own namespace, and so is the address of the broker.
    """
    return proof_of(body) == (str(connection), digest_of(broker))


class Standing(enum.Enum):
    """How a claim stands."""

    DEAD = enum.auto()
    """The policy only observes, or was stalled by something else than a rival from the start."""
    FAULTY = enum.auto()
    """The policy was provisioned, and is stalled by something else than a rival now."""
    OPEN = enum.auto()
    """The policy is new, or waits for a rival to go."""
    HELD = enum.auto()
    """The policy was provisioned, and waits for no rival since."""

    @classmethod
    def of(cls, body: Body) -> Standing:
        """Return how the claim of *body*, a RetryPolicy, stands."""
        if body["spec"].get("managementPolicy") == ManagementPolicy.OBSERVE:
            return cls.DEAD
        written = body.get("status") or {}
        held = "retryTopic" in written and "blockedBy" not in written
        if "deletionTimestamp" not in body["metadata"]:  # until it is gone, it may delete topics
            stalled = {c["reason"] for c in written.get("conditions") or () if c["type"] == STALLED}
            if stalled - WAITS:
                return cls.FAULTY if held else cls.DEAD
        return cls.HELD if held else cls.OPEN

    def towards(self, *, a_tenant: bool) -> Standing:
        """Return how the claim stands towards one of *a_tenant* of another namespace, or not.

        What stalls a policy for a moment, such as a token that has expired, must not be what others
        wait for. Within a namespace it gives way.
        """
        if self is not Standing.FAULTY:
            return self
        return Standing.HELD if a_tenant else Standing.DEAD

    def precedes(self, other: Standing, *, is_older: bool) -> bool:
        """Whether a claim that stands so comes before one that stands like *other*."""
        if self is Standing.DEAD:
            return False
        if self is other:
            return is_older
        return self is Standing.HELD
