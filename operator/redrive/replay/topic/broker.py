"""Connections to Pulsar with the replay role's token, which comes from the environment alone.

Used in the driver and in Spark's Python workers. Those are forked, and a client that is inherited
by a fork hangs: so each task opens its own, and closes it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import ClassVar

import pulsar

from redrive.admin.access import Access
from redrive.errors import RedriveError
from redrive.policy.naming import TopicName
from redrive.replay.spec import REDIRECT_HOSTS_VARIABLE, TOKEN_VARIABLE

UNPARTITIONED = -1
"""Stands for the index of a partition where a topic has none."""


class TokenMissingError(RedriveError):
    """The environment of the job holds no token."""

    reason: ClassVar[str] = "TokenMissing"


class ReplayRoleRefusedError(RedriveError):
    """The broker does not let the replay role do its work."""

    reason: ClassVar[str] = "ReplayRoleRefused"


def token() -> str:
    """Return the token to show to the broker.

    Raises:
        TokenMissingError: the environment holds none.
    """
    found = os.environ.get(TOKEN_VARIABLE, "")
    if not found:
        raise TokenMissingError(
            f"the environment variable {TOKEN_VARIABLE} is not set",
            remedy="give driver and executors the replay role's token in it",
        )
    return found


def access() -> Access:
    """Return the token as the admin API takes it, and to which hosts it may be redirected.

    Raises:
        TokenMissingError: the environment holds none.
    """
    hosts = os.environ.get(REDIRECT_HOSTS_VARIABLE, "").split(",")
    return Access.bearer(token(), hosts=tuple(filter(None, hosts)))


@contextmanager
def connect(service_url: str) -> Iterator[pulsar.Client]:
    """Open a client, and close it with all it has opened."""
    quiet = pulsar.ConsoleLogger(pulsar.LoggerLevel.Warn)
    client = pulsar.Client(
        service_url, authentication=pulsar.AuthenticationToken(token()), logger=quiet
    )
    try:
        yield client
    finally:
        client.close()


@contextmanager
def refusals(doing: str, right: str) -> Iterator[None]:
    """Name what the broker refused to do: *doing*, for which it asks for *right*."""
    try:
        yield
    except pulsar.PulsarException as error:
        raise ReplayRoleRefusedError(
            f"the broker refused to {doing}",
            got=str(error),
            remedy=f"check that it can be reached, and that the replay role may {right} there",
        ) from error


_FOR_GOOD = (
    pulsar.AuthenticationError,
    pulsar.AuthorizationError,
    pulsar.IncompatibleSchema,
    pulsar.InvalidTopicName,
    pulsar.NotAllowedError,
    pulsar.TopicNotFound,
    pulsar.TopicTerminated,
)


def may_pass(error: BaseException | None) -> bool:
    """Whether to try again: a broker that is restarted, or a name that is taken yet."""
    return isinstance(error, pulsar.PulsarException) and not isinstance(error, _FOR_GOOD)


def close(producer: pulsar.Producer) -> None:
    """Close *producer*, whatever the state of its connection."""
    with suppress(pulsar.PulsarException):
        producer.close()


def partition_of(topic: TopicName, index: int) -> TopicName:
    """Return the name to open: of one partition, or of the topic where it has none."""
    return topic if index == UNPARTITIONED else topic.partition(index)
