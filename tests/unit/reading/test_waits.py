"""Which errors a run waits out, and which end it at once."""

from __future__ import annotations

import pulsar
import pytest

from redrive.admin import errors as admin
from redrive.errors import RedriveError
from redrive.messages import NotSentError, SchemaNotFoundError
from redrive.reading import broker
from redrive.reading.broker import ReplayRoleRefusedError
from redrive.replay.ledger import FencedError, LedgerUnavailableError


def caused(kind: type[RedriveError], cause: type[Exception] | None = None) -> RedriveError:
    error = kind("it does not work", remedy="look")
    error.__cause__ = cause("by this") if cause else None
    return error


@pytest.mark.parametrize(
    "error",
    [
        caused(ReplayRoleRefusedError, pulsar.Timeout),
        caused(ReplayRoleRefusedError, pulsar.ConnectError),
        caused(ReplayRoleRefusedError, pulsar.ProducerBusy),
        caused(NotSentError, pulsar.Timeout),
        caused(admin.BrokerUnreachableError),
        caused(admin.BrokerDownError),
        caused(admin.BrokerFailedError),
        caused(admin.BrokerRefusedError),
        caused(admin.AdminConflictError),
    ],
    ids=repr,
)
def test_a_broker_that_is_away_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, error: RedriveError
) -> None:
    monkeypatch.setattr("time.sleep", lambda _: None)
    answers = [error, error, None]

    def call() -> str:
        if answer := answers.pop(0):
            raise answer
        return "there"

    assert broker.waited(call) == "there"


@pytest.mark.parametrize(
    "error",
    [
        caused(ReplayRoleRefusedError, pulsar.AuthorizationError),
        caused(ReplayRoleRefusedError, pulsar.ConsumerBusy),
        caused(ReplayRoleRefusedError, pulsar.TopicNotFound),
        caused(SchemaNotFoundError, pulsar.TopicNotFound),
        caused(FencedError, pulsar.ProducerFenced),
        caused(LedgerUnavailableError, pulsar.Timeout),  # it has waited already
        caused(admin.AdminForbiddenError),
        caused(admin.AuthenticationFailedError),
        caused(admin.AdminNotFoundError),
    ],
    ids=repr,
)
def test_what_no_time_cures_is_raised_at_once(error: RedriveError) -> None:
    calls = []

    def call() -> None:
        calls.append(1)
        raise error

    with pytest.raises(type(error)):
        broker.waited(call)
    assert len(calls) == 1


def test_a_call_that_is_interrupted_is_not_repeated() -> None:
    def call() -> None:
        raise pulsar.Interrupted

    with pytest.raises(pulsar.Interrupted):
        broker.opened("look", "consume", call)
