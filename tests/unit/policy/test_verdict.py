from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from redrive.errors import InvalidSpecError, RedriveError
from redrive.policy.ladder import LEVELS, Ladder
from redrive.policy.model import Policy
from redrive.policy.naming import TopicName
from redrive.policy.verdict import (
    Dead,
    DeadLetter,
    DeadReason,
    Discard,
    FailureRules,
    HandlerCancelledError,
    HandlerTimeoutError,
    NotDoneError,
    Retry,
    RetryLater,
    after_error,
    after_expiry,
    after_failure,
)

policies = st.builds(
    Policy,
    topic=st.just(TopicName("shop", "prod", "orders")),
    subscription=st.just("billing"),
    max_retries=st.integers(0, 30) | st.integers(0, 1_000),
    ladder=st.from_type(Ladder),
    levels=st.from_type(Ladder).map(lambda ladder: Ladder(ladder.rungs)),
    dead_letters=st.booleans(),
)
counts = st.integers(0, 2_000)
delays = st.timedeltas(timedelta(seconds=1), timedelta(seconds=864_000))
levels = st.integers(-50, 50)
POLICY = Policy(TopicName("shop", "prod", "orders"), "billing")


@pytest.mark.parametrize("decide", [after_failure, after_expiry])
@given(policy=policies)
def test_failing_message_is_retried_then_dead_lettered(
    decide: Callable[[Policy, int], Retry | Dead | Discard], policy: Policy
) -> None:
    end = Dead if policy.dead_letters else Discard
    retries = []
    verdict = decide(policy, 0)
    while isinstance(verdict, Retry):
        retries.append(verdict)
        verdict = decide(policy, verdict.reconsume_times)
    assert [retry.reconsume_times for retry in retries] == list(range(1, policy.max_retries + 1))
    assert verdict == end(DeadReason.RETRIES_EXHAUSTED, policy.max_retries + 1)


@given(policies, counts)
def test_default_delay_is_the_next_rung(policy: Policy, had: int) -> None:
    match after_failure(policy, had):
        case Retry(delay=delay, reconsume_times=times):
            assert delay == policy.ladder.delay(had + 1)
            assert times == had + 1
        case (
            Dead(reason=reason, reconsume_times=times)
            | Discard(reason=reason, reconsume_times=times)
        ):
            assert had >= policy.max_retries
            assert (reason, times) == (DeadReason.RETRIES_EXHAUSTED, had + 1)


@given(policies, counts, delays | st.none(), levels | st.none())
def test_requested_delay_or_level_adds_no_retry(
    policy: Policy, had: int, delay: timedelta | None, level: int | None
) -> None:
    if delay is not None and level is not None:
        level = None
    verdict = after_failure(policy, had, delay=delay, level=level)
    assert isinstance(verdict, Dead | Discard) or verdict.reconsume_times <= policy.max_retries
    assert verdict.reconsume_times == had + 1


@given(delays, st.integers(0, 15))
def test_requested_delay_is_used_unchanged(delay: timedelta, had: int) -> None:
    assert after_failure(POLICY, had, delay=delay) == Retry(delay, had + 1)


@given(st.integers(1, 18), st.integers(0, 15))
def test_requested_level_ignores_the_ladder(level: int, had: int) -> None:
    policy = Policy(POLICY.topic, "s", ladder=Ladder.from_fixed("7s"))
    assert after_failure(policy, had, level=level) == Retry(LEVELS[level - 1], had + 1)


def test_requested_level_uses_the_levels_of_the_policy() -> None:
    policy = Policy(POLICY.topic, "s", levels=Ladder.from_delays(["7s", "9s"]))
    delays = [after_failure(policy, 0, level=level) for level in (0, 1, 2, 3)]
    assert delays == [Retry(timedelta(seconds=seconds), 1) for seconds in (1, 7, 9, 9)]


@given(policies, counts, st.floats(0, 1))
def test_jitter_applies_only_to_delays_of_the_ladder(policy: Policy, had: int, luck: float) -> None:
    match after_failure(policy, had, luck=luck):
        case Retry(delay=delay):
            assert delay == policy.ladder.delay(had + 1, luck)
            requested = timedelta(seconds=100)
            assert after_failure(policy, had, delay=requested, luck=luck) == Retry(
                requested, had + 1
            )
        case end:
            assert end == after_failure(policy, had)


@given(st.integers(min_value=18))
def test_requested_level_above_the_highest_is_the_highest(level: int) -> None:
    assert after_failure(POLICY, 0, level=level) == Retry(timedelta(hours=2), 1)


@given(policies, counts)
def test_requested_level_0_uses_the_ladder(policy: Policy, had: int) -> None:
    assert after_failure(policy, had, level=0) == after_failure(policy, had)


@given(policies, counts, st.integers(max_value=-1))
def test_requested_level_below_0_dead_letters_immediately(
    policy: Policy, had: int, level: int
) -> None:
    end = Dead if policy.dead_letters else Discard
    assert after_failure(policy, had, level=level) == end(DeadReason.REQUESTED, had + 1)


def test_requested_delay_and_level_together_are_refused() -> None:
    with pytest.raises(InvalidSpecError, match="not both; got 'delay=0:00:01, level=0'"):
        after_failure(POLICY, 0, delay=timedelta(seconds=1), level=0)


@pytest.mark.parametrize("seconds", [0, -1, 0.5, 864_001])
def test_requested_delay_out_of_range_is_refused(seconds: float) -> None:
    with pytest.raises(InvalidSpecError, match="the delay of a retry must be from 1 s to 864000 s"):
        after_failure(POLICY, 0, delay=timedelta(seconds=seconds))


# A tree of classes, so that a rule for one may cover others.
KINDS = [
    Exception, ValueError, UnicodeError, UnicodeDecodeError, OSError, ConnectionError,
    ConnectionResetError, TimeoutError, KeyError,
]  # fmt: skip

few_counts = st.integers(0, 1_100)
kinds = st.sampled_from(KINDS)
times = st.timedeltas(timedelta(), timedelta(days=30))


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


@given(policies, kinds, few_counts, times)
def test_no_rules_decide_as_the_policy(
    policy: Policy, kind: type[Exception], had: int, failing_for: timedelta
) -> None:
    verdict = after_error(
        policy, FailureRules(), kind.__new__(kind), reconsume_times=had, failing_for=failing_for
    )
    assert verdict == after_failure(policy, had)


@given(policies, rules(), kinds, few_counts, times)
def test_rules_add_no_retry_to_the_policy(
    policy: Policy, failure_rules: FailureRules, kind: type[Exception], had: int, since: timedelta
) -> None:
    verdict = after_error(
        policy, failure_rules, kind.__new__(kind), reconsume_times=had, failing_for=since
    )
    assert verdict.reconsume_times == had + 1
    if isinstance(verdict, Retry):
        assert verdict.reconsume_times <= policy.max_retries


@given(rules(), kinds, times)
def test_nearest_class_of_a_rule_decides(
    failure_rules: FailureRules, kind: type[Exception], since: timedelta
) -> None:
    failure_rules = FailureRules(failure_rules.dead_letter_on, failure_rules.retry_on)
    verdict = after_error(
        POLICY, failure_rules, kind.__new__(kind), reconsume_times=0, failing_for=since
    )

    named = [*failure_rules.dead_letter_on, *failure_rules.retry_on]
    covering = [
        candidate
        for candidate in named
        if isinstance(candidate, type) and issubclass(kind, candidate)
    ]
    # These classes have one base each: the deepest of those that cover it is the nearest.
    nearest = max(covering, key=lambda c: len(c.__mro__), default=None)
    if nearest in failure_rules.retry_on:
        assert isinstance(verdict, Retry)
    else:
        assert verdict == Dead(DeadReason.NOT_RETRYABLE, 1)


@given(rules(), kinds, times)
def test_retry_after_the_deadline_is_not_made(
    failure_rules: FailureRules, kind: type[Exception], since: timedelta
) -> None:
    verdict = after_error(
        POLICY, failure_rules, kind.__new__(kind), reconsume_times=3, failing_for=since
    )
    if isinstance(verdict, Retry) and failure_rules.deadline is not None:
        assert since + verdict.delay <= failure_rules.deadline
    if verdict == Dead(DeadReason.DEADLINE_EXCEEDED, 4):
        unbounded = FailureRules(
            failure_rules.dead_letter_on, failure_rules.retry_on, failure_rules.delays
        )
        retry = after_error(
            POLICY, unbounded, kind.__new__(kind), reconsume_times=3, failing_for=since
        )
        assert isinstance(retry, Retry)
        assert failure_rules.deadline is not None
        assert since + retry.delay > failure_rules.deadline


def test_retry_at_the_deadline_is_made() -> None:
    rule = FailureRules(deadline=timedelta(seconds=10))  # the third rung is 10 s
    after = [
        after_error(POLICY, rule, ValueError(), reconsume_times=2, failing_for=failing_for)
        for failing_for in (timedelta(), timedelta(microseconds=1))
    ]
    assert after == [
        Retry(timedelta(seconds=10), 3),
        Dead(DeadReason.DEADLINE_EXCEEDED, 3),
    ]


def test_delay_of_nearest_class_replaces_the_ladder() -> None:
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


class Refused(Exception):  # noqa: N818 - as a client names it
    """An exception of a client of a service."""


def caused(error: Exception, *causes: Exception) -> Exception:
    """Return *error*, raised from the first of *causes*, which was raised from the next."""
    error.__cause__ = caused(*causes) if causes else None
    return error


def verdict_of(rule: FailureRules, error: Exception) -> Retry | Dead | Discard:
    return after_error(POLICY, rule, error, reconsume_times=0, failing_for=timedelta())


NOT_RETRYABLE = Dead(DeadReason.NOT_RETRYABLE, 1)
RULE = FailureRules(dead_letter_on=(ValueError,), delays={ConnectionError: 30})


@pytest.mark.parametrize(
    ("error", "dies"),
    [
        (caused(Refused(), ValueError()), True),
        (caused(Refused(), Refused(), UnicodeError()), True),
        (caused(Refused(), ConnectionError()), False),
        (caused(ConnectionError(), Refused()), False),
        (ExceptionGroup("", [ConnectionError(), ValueError()]), True),
        (ExceptionGroup("", [ConnectionError(), ExceptionGroup("", [ValueError()])]), True),
        (ExceptionGroup("", [ConnectionError(), Refused()]), False),
        (caused(Refused(), ExceptionGroup("", [caused(Refused(), ValueError())])), True),
    ],
)
def test_rule_applies_to_causes_and_group_members(error: Exception, *, dies: bool) -> None:
    assert (verdict_of(RULE, error) == NOT_RETRYABLE) == dies


def test_rule_for_exception_precedes_rules_for_its_cause() -> None:
    rule = FailureRules(dead_letter_on=(ValueError,), retry_on=(Refused,))
    assert isinstance(verdict_of(rule, caused(Refused(), ValueError())), Retry)
    assert verdict_of(rule, caused(ValueError(), Refused())) == NOT_RETRYABLE
    assert verdict_of(rule, KeyError()) == NOT_RETRYABLE


def test_implicit_context_of_an_exception_is_ignored() -> None:
    error = Refused()
    error.__context__ = ValueError()
    assert isinstance(verdict_of(RULE, error), Retry)


def test_circular_causes_end_the_search() -> None:
    one, two = Refused(), Refused()
    one.__cause__, two.__cause__ = two, one
    assert isinstance(verdict_of(RULE, one), Retry)


def test_group_of_exceptions_uses_the_longest_delay() -> None:
    rule = FailureRules(delays={ConnectionError: 30, TimeoutError: timedelta(minutes=1)})
    group = ExceptionGroup("", [TimeoutError(), ConnectionError(), KeyError()])
    assert verdict_of(rule, group) == Retry(timedelta(minutes=1), 1)
    assert verdict_of(rule, caused(Refused(), ConnectionError())) == Retry(timedelta(seconds=30), 1)


def test_predicate_rule_precedes_class_rules() -> None:
    def is_gone(error: BaseException) -> bool:
        return "410" in str(error)

    rule = FailureRules(dead_letter_on=(is_gone,), retry_on=(OSError,), delays={is_gone: 5})
    assert verdict_of(rule, OSError("410")) == NOT_RETRYABLE
    assert verdict_of(rule, caused(Refused(), OSError("410"))) == NOT_RETRYABLE
    assert isinstance(verdict_of(rule, OSError("503")), Retry)
    assert rule.delay(OSError("410")) == timedelta(seconds=5)


def test_request_inside_a_group_is_honoured() -> None:
    later = ExceptionGroup("", [RetryLater(20), ExceptionGroup("", [RetryLater(60), KeyError()])])
    assert verdict_of(RULE, later) == Retry(timedelta(seconds=60), 1)
    dead = ExceptionGroup("", [RetryLater(20), DeadLetter("no")])
    assert verdict_of(RULE, dead) == Dead(DeadReason.REQUESTED, 1)


@pytest.mark.parametrize("kind", [NotDoneError, HandlerCancelledError, HandlerTimeoutError])
def test_failure_that_no_handler_raises_is_retried_unless_named(kind: type[RedriveError]) -> None:
    error = kind("failed", remedy="wait")
    for rules in (
        FailureRules(retry_on=(ConnectionError,)),
        FailureRules(retry_on=(OSError,)),
        FailureRules(dead_letter_on=(OSError, RedriveError)),
    ):
        assert isinstance(verdict_of(rules, error), Retry)
    for named in (kind, Exception):
        rules = FailureRules(dead_letter_on=(named,), retry_on=(ConnectionError,))
        assert verdict_of(rules, error) == NOT_RETRYABLE


@pytest.mark.parametrize(
    ("rules", "dies"),
    [
        ({"retry_on": (ConnectionError,)}, False),
        ({"retry_on": (HandlerTimeoutError,)}, False),
        ({"retry_on": (ValueError,), "dead_letter_on": (TimeoutError,)}, True),
        ({"retry_on": (ValueError,), "dead_letter_on": (HandlerTimeoutError,)}, True),
        ({"retry_on": (), "dead_letter_on": (Exception,)}, True),
        ({"retry_on": (), "dead_letter_on": (lambda error: "slow" in str(error),)}, True),
    ],
)
def test_handler_timeout_is_dead_lettered_only_if_named(
    rules: dict[str, Any], *, dies: bool
) -> None:
    verdict = verdict_of(FailureRules(**rules), HandlerTimeoutError("slow", remedy="wait"))
    assert isinstance(verdict, Dead) is dies
    other = verdict_of(FailureRules(retry_on=(ConnectionError,)), TimeoutError())
    assert isinstance(other, Dead)


class AsyncRule:
    """A rule whose result would have to be awaited."""

    async def __call__(self, _: object) -> bool:
        return False


OUT_OF_RANGE = "the delay after KeyError must be from 1 s"


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"dead_letter_on": ValueError}, "; got .+; "),
        ({"dead_letter_on": [ValueError]}, "; got .+; "),
        (
            {"dead_letter_on": (KeyError,), "retry_on": (KeyError, OSError)},
            "either retried or dead-lettered; got 'KeyError'",
        ),
        ({"retry_on": ("ValueError",)}, "; got .+; "),
        ({"retry_on": (int,)}, "; got .+; "),
        ({"delays": {ValueError: "30s"}}, "; got .+; "),
        ({"delays": {ValueError: float("nan")}}, "; got .+; "),
        ({"delays": {ValueError: True}}, "; got .+; "),
        ({"delays": [ValueError]}, "; got .+; "),
        ({"delays": {KeyError: timedelta(0)}}, OUT_OF_RANGE),
        ({"delays": {KeyError: timedelta(seconds=864_001)}}, OUT_OF_RANGE),
        ({"retry_on": (asyncio.sleep,)}, "a function of an exception"),
        ({"retry_on": (AsyncRule(),)}, "a function of an exception"),
        ({"deadline": float("inf")}, "; got .+; "),
        ({"deadline": "1h"}, "; got .+; "),
        ({"deadline": 0}, "must be positive.*; got .+; "),
        ({"deadline": timedelta(0)}, "must be positive"),
        ({"deadline": timedelta(seconds=-1)}, "must be positive"),
    ],
)
def test_invalid_rule_is_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidSpecError, match=message):
        FailureRules(**wrong)
