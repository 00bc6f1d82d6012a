from __future__ import annotations

from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from redrive.errors import InvalidSpecError
from redrive.policy.failure import FailureRules, after_error
from redrive.policy.model import Policy
from redrive.policy.naming import TopicName
from redrive.policy.verdict import Dead, DeadReason, Retry, after_failure

POLICY = Policy(TopicName("shop", "prod", "orders"), "billing")
# A tree of classes, so that a rule for one may cover others.
KINDS = [
    Exception, ValueError, UnicodeError, UnicodeDecodeError, OSError, ConnectionError,
    ConnectionResetError, TimeoutError, KeyError,
]  # fmt: skip

policies = st.from_type(Policy)
counts = st.integers(0, 1_100)
kinds = st.sampled_from(KINDS)
times = st.timedeltas(timedelta(), timedelta(days=30))
delays = st.timedeltas(timedelta(seconds=1), timedelta(seconds=864_000))


@st.composite
def rules(draw: st.DrawFn) -> FailureRules:
    named = draw(st.lists(kinds, unique=True))
    cut = draw(st.integers(0, len(named)))
    return FailureRules(
        dead_letter_on=tuple(named[:cut]),
        retry_on=tuple(named[cut:]),
        delays=draw(st.dictionaries(kinds, delays)),
        deadline=draw(st.none() | times.filter(bool)),
    )


@given(policies, kinds, counts, times)
def test_without_rules_every_exception_is_retried_as_the_policy_says(
    policy: Policy, kind: type[Exception], had: int, failing_for: timedelta
) -> None:
    verdict = after_error(
        policy, FailureRules(), kind.__new__(kind), reconsume_times=had, failing_for=failing_for
    )
    assert verdict == after_failure(policy, had)


@given(policies, rules(), kinds, counts, times)
def test_no_rule_gets_a_message_more_retries_than_the_policy_allows(
    policy: Policy, given_rules: FailureRules, kind: type[Exception], had: int, since: timedelta
) -> None:
    verdict = after_error(
        policy, given_rules, kind.__new__(kind), reconsume_times=had, failing_for=since
    )
    assert verdict.reconsume_times == had + 1
    if isinstance(verdict, Retry):
        assert verdict.reconsume_times <= policy.max_retries


@given(rules(), kinds, times)
def test_the_nearest_named_class_decides_and_none_means_dead(
    given_rules: FailureRules, kind: type[Exception], since: timedelta
) -> None:
    given_rules = FailureRules(given_rules.dead_letter_on, given_rules.retry_on)
    verdict = after_error(
        POLICY, given_rules, kind.__new__(kind), reconsume_times=0, failing_for=since
    )

    named = [*given_rules.dead_letter_on, *given_rules.retry_on]
    covering = [candidate for candidate in named if issubclass(kind, candidate)]
    # These classes have one base each: the deepest of those that cover it is the nearest.
    nearest = max(covering, key=lambda c: len(c.__mro__), default=None)
    if nearest in given_rules.retry_on:
        assert isinstance(verdict, Retry)
    else:
        assert verdict == Dead(DeadReason.NOT_RETRYABLE, 1)


@given(rules(), kinds, times)
def test_no_retry_is_made_that_would_come_after_the_deadline(
    given_rules: FailureRules, kind: type[Exception], since: timedelta
) -> None:
    verdict = after_error(
        POLICY, given_rules, kind.__new__(kind), reconsume_times=3, failing_for=since
    )
    if isinstance(verdict, Retry) and given_rules.deadline is not None:
        assert since + verdict.delay <= given_rules.deadline
    if verdict == Dead(DeadReason.DEADLINE_EXCEEDED, 4):
        unbounded = FailureRules(
            given_rules.dead_letter_on, given_rules.retry_on, given_rules.delays
        )
        retry = after_error(
            POLICY, unbounded, kind.__new__(kind), reconsume_times=3, failing_for=since
        )
        assert isinstance(retry, Retry)
        assert given_rules.deadline is not None
        assert since + retry.delay > given_rules.deadline


def test_a_retry_may_come_at_the_deadline_itself() -> None:
    rule = FailureRules(deadline=timedelta(seconds=10))  # the third rung is 10 s
    after = [
        after_error(POLICY, rule, ValueError(), reconsume_times=2, failing_for=failing_for)
        for failing_for in (timedelta(), timedelta(microseconds=1))
    ]
    assert after == [
        Retry(timedelta(seconds=10), 3),
        Dead(DeadReason.DEADLINE_EXCEEDED, 3),
    ]


def test_the_delay_of_the_nearest_class_is_taken_instead_of_the_ladders() -> None:
    rule = FailureRules(
        delays={OSError: timedelta(minutes=1), ConnectionError: timedelta(seconds=3)}
    )
    waits = {
        kind: after_error(
            POLICY, rule, kind.__new__(kind), reconsume_times=1, failing_for=timedelta()
        )
        for kind in (OSError, ConnectionResetError, ValueError)
    }
    assert waits == {
        OSError: Retry(timedelta(minutes=1), 2),
        ConnectionResetError: Retry(timedelta(seconds=3), 2),
        ValueError: Retry(timedelta(seconds=5), 2),
    }


def test_a_class_that_is_both_retried_and_dead_lettered_is_refused() -> None:
    with pytest.raises(InvalidSpecError, match="either retried or dead-lettered; got 'KeyError'"):
        FailureRules(dead_letter_on=(KeyError,), retry_on=(KeyError, OSError))


@pytest.mark.parametrize("seconds", [0, 864_001])
def test_a_delay_that_no_broker_can_be_asked_for_is_refused(seconds: int) -> None:
    with pytest.raises(InvalidSpecError, match="the delay after KeyError must be from 1 s"):
        FailureRules(delays={KeyError: timedelta(seconds=seconds)})


@pytest.mark.parametrize("seconds", [0, -1])
def test_a_deadline_that_is_over_before_it_begins_is_refused(seconds: int) -> None:
    with pytest.raises(InvalidSpecError, match="a positive time"):
        FailureRules(deadline=timedelta(seconds=seconds))
