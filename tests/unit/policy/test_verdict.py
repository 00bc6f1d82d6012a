from __future__ import annotations

from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from redrive.errors import InvalidSpecError
from redrive.policy.ladder import LEVELS, Ladder
from redrive.policy.model import Policy
from redrive.policy.naming import TopicName
from redrive.policy.verdict import Dead, DeadReason, Discard, Retry, after_failure

policies = st.from_type(Policy)
counts = st.integers(0, 2_000)
delays = st.timedeltas(timedelta(seconds=1), timedelta(seconds=864_000))
levels = st.integers(-50, 50)
POLICY = Policy(TopicName("shop", "prod", "orders"), "billing")


@given(policies)
def test_a_message_that_always_fails_is_retried_n_times_and_then_dies(policy: Policy) -> None:
    end = Dead if policy.dead_letters else Discard
    retries = []
    verdict = after_failure(policy, 0)
    while isinstance(verdict, Retry):
        retries.append(verdict)
        verdict = after_failure(policy, verdict.reconsume_times)
    assert [retry.reconsume_times for retry in retries] == list(range(1, policy.max_retries + 1))
    assert verdict == end(DeadReason.RETRIES_EXHAUSTED, policy.max_retries + 1)


@given(policies, counts)
def test_level_increment_takes_the_ladders_next_rung(policy: Policy, had: int) -> None:
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


def test_after_sixteen_failed_retries_the_seventeenth_failure_is_the_end() -> None:
    assert isinstance(after_failure(POLICY, 15), Retry)
    assert after_failure(POLICY, 16) == Dead(DeadReason.RETRIES_EXHAUSTED, 17)


def test_with_no_retries_the_first_failure_is_the_end() -> None:
    none = Policy(POLICY.topic, POLICY.subscription, max_retries=0)
    assert after_failure(none, 0) == Dead(DeadReason.RETRIES_EXHAUSTED, 1)


@given(policies, counts, delays | st.none(), levels | st.none())
def test_no_request_gets_a_message_more_retries_than_the_policy_allows(
    policy: Policy, had: int, delay: timedelta | None, level: int | None
) -> None:
    if delay is not None and level is not None:
        level = None
    verdict = after_failure(policy, had, delay=delay, level=level)
    assert isinstance(verdict, Dead | Discard) or verdict.reconsume_times <= policy.max_retries
    assert verdict.reconsume_times == had + 1


@given(delays, st.integers(0, 15))
def test_an_arbitrary_delay_is_taken_as_it_is(delay: timedelta, had: int) -> None:
    assert after_failure(POLICY, had, delay=delay) == Retry(delay, had + 1)


@given(st.integers(1, 18), st.integers(0, 15))
def test_level_k_is_the_kth_level_whatever_the_ladder_says(level: int, had: int) -> None:
    policy = Policy(POLICY.topic, "s", ladder=Ladder.from_fixed("7s"))
    assert after_failure(policy, had, level=level) == Retry(LEVELS[level - 1], had + 1)


def test_a_policy_may_define_what_the_levels_mean() -> None:
    policy = Policy(POLICY.topic, "s", levels=Ladder.from_delays(["7s", "9s"]))
    delays = [after_failure(policy, 0, level=level) for level in (0, 1, 2, 3)]
    assert delays == [Retry(timedelta(seconds=seconds), 1) for seconds in (1, 7, 9, 9)]


@given(policies, counts, st.floats(0, 1))
def test_luck_shortens_the_ladders_delay_and_no_other(
    policy: Policy, had: int, luck: float
) -> None:
    match after_failure(policy, had, luck=luck):
        case Retry(delay=delay):
            assert delay == policy.ladder.delay(had + 1, luck)
            asked = timedelta(seconds=100)
            assert after_failure(policy, had, delay=asked, luck=luck) == Retry(asked, had + 1)
        case end:
            assert end == after_failure(policy, had)


@given(st.integers(min_value=18))
def test_a_level_above_the_highest_means_the_highest(level: int) -> None:
    assert after_failure(POLICY, 0, level=level) == Retry(timedelta(hours=2), 1)


@given(policies, counts)
def test_level_zero_leaves_it_to_the_ladder(policy: Policy, had: int) -> None:
    assert after_failure(policy, had, level=0) == after_failure(policy, had)


@given(policies, counts, st.integers(max_value=-1))
def test_a_level_below_zero_means_the_dead_letter_topic_now(
    policy: Policy, had: int, level: int
) -> None:
    end = Dead if policy.dead_letters else Discard
    assert after_failure(policy, had, level=level) == end(DeadReason.REQUESTED, had + 1)


def test_a_delay_and_a_level_together_are_refused() -> None:
    with pytest.raises(InvalidSpecError, match="not by both; got 'delay=0:00:01, level=0'"):
        after_failure(POLICY, 0, delay=timedelta(seconds=1), level=0)


@pytest.mark.parametrize("seconds", [0, -1, 0.5, 864_001])
def test_a_delay_that_no_broker_can_be_asked_for_is_refused(seconds: float) -> None:
    with pytest.raises(InvalidSpecError, match="the delay of a retry must be from 1 s to 864000 s"):
        after_failure(POLICY, 0, delay=timedelta(seconds=seconds))
