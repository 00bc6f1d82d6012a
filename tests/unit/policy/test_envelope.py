from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from redrive.policy import envelope
from redrive.policy.envelope import Attempt, Cause
from redrive.policy.model import Policy
from redrive.policy.naming import TopicName
from redrive.policy.verdict import Dead, DeadReason, Retry

NOW = datetime(2026, 11, 21, 9, 0, tzinfo=UTC)
POLICY = Policy(TopicName("shop", "prod", "orders"), "billing")
OURS = {
    "RECONSUMETIMES", "REAL_TOPIC", "REAL_SUBSCRIPTION", "ORIGIN_MESSAGE_ID", "RETRY_TOPIC",
    "DELAY_TIME", "REDRIVE_CAUSE_TYPE", "REDRIVE_CAUSE_MESSAGE", "REDRIVE_FAILED_AT",
    "REDRIVE_CAUSE_FINGERPRINT", "REDRIVE_CAUSE_TRACE", "REDRIVE_ATTEMPT", "REDRIVE_SCHEMA_VERSION",
    "REDRIVE_CONSUMER", "REDRIVE_FIRST_FAILED_AT", "REDRIVE_DEAD_REASON", "REDRIVE_REPLAYS",
    "REDRIVE_REPLAY", "REDRIVE_FIRST_ID",
}  # fmt: skip

texts = st.text(max_size=30)
users = st.dictionaries(texts.filter(lambda key: key not in OURS), texts, max_size=5)
forged = st.dictionaries(st.sampled_from(sorted(OURS)), texts, max_size=5)
causes = st.builds(
    Cause, st.text(), st.text(), st.just(NOW), st.text(), st.integers(1, 1_000), trace=st.text()
)
retries = st.builds(
    Retry, st.timedeltas(timedelta(seconds=1), timedelta(days=10)), st.integers(1, 1_000)
)
verdicts = retries | st.builds(Dead, st.sampled_from(DeadReason), st.integers(1, 1_001))


def hop(
    properties: dict[str, str],
    verdict: Retry | Dead = Retry(timedelta(seconds=5), 1),  # noqa: B008 - a frozen value
    cause: Cause | None = None,
    message_id: str = "7:8:-1",
) -> dict[str, str]:
    attempt = Attempt.of(properties, message_id=message_id, retried=True)
    return envelope.for_hop(properties, attempt, policy=POLICY, verdict=verdict, cause=cause)


@given(users, forged, verdicts, causes | st.none())
def test_every_user_property_survives_each_hop(
    user: dict[str, str], ours: dict[str, str], verdict: Retry | Dead, cause: Cause | None
) -> None:
    sent = hop(user | ours, verdict, cause)
    assert {key: value for key, value in sent.items() if key not in OURS} == user


@given(users, forged, verdicts)
def test_a_hop_does_not_touch_the_properties_it_was_given(
    user: dict[str, str], ours: dict[str, str], verdict: Retry | Dead
) -> None:
    given_properties = user | ours
    before = dict(given_properties)
    hop(given_properties, verdict)
    envelope.for_replay(given_properties, replay="shop/fix", source="u@0:1:2:0")
    assert given_properties == before


@given(forged, verdicts)
def test_where_a_message_comes_from_is_written_by_the_policy_whatever_it_claims(
    ours: dict[str, str], verdict: Retry | Dead
) -> None:
    sent = hop(ours, verdict)
    assert sent["REAL_TOPIC"] == "persistent://shop/prod/orders"
    assert sent["REAL_SUBSCRIPTION"] == "billing"
    assert sent["RETRY_TOPIC"] == "persistent://shop/prod/orders-billing-RETRY"
    assert sent["RECONSUMETIMES"] == str(verdict.reconsume_times)


def test_the_origin_is_the_first_id_and_stays_through_every_hop() -> None:
    first = hop({}, message_id="1:2:3")
    second = hop(first, message_id="4:5:6")
    assert first["ORIGIN_MESSAGE_ID"] == second["ORIGIN_MESSAGE_ID"] == "1:2:3"
    assert (
        envelope.for_replay(second, replay="shop/fix", source="u@0:1:2:0")["ORIGIN_MESSAGE_ID"]
        == "1:2:3"
    )


@given(retries)
def test_the_delay_asked_for_travels_in_milliseconds(retry: Retry) -> None:
    sent = hop({}, retry)
    assert sent["DELAY_TIME"] == str(int(retry.delay / timedelta(milliseconds=1)))
    assert "REDRIVE_DEAD_REASON" not in sent


def test_a_dead_letter_tells_its_reason_and_no_delay() -> None:
    sent = hop(hop({}), Dead(DeadReason.REQUESTED, 2))
    assert sent["REDRIVE_DEAD_REASON"] == "Requested"
    assert "DELAY_TIME" not in sent


@given(causes, causes)
def test_the_cause_is_replaced_and_never_added_to(first: Cause, second: Cause) -> None:
    assert hop(hop({}, cause=first), cause=second) == hop({}, cause=second)


@given(causes)
def test_an_attempt_without_known_cause_does_not_keep_an_older_one(cause: Cause) -> None:
    assert hop(hop({}, cause=cause)) == hop({}) | {"REDRIVE_FIRST_FAILED_AT": NOW.isoformat()}


def test_the_first_failure_is_remembered_through_every_hop() -> None:
    first = hop({}, cause=Cause("E", "", NOW, "c", 1))
    later = hop(first, cause=Cause("E", "", NOW + timedelta(hours=2), "c", 2))
    attempt = Attempt.of(later, message_id="9:9:9", retried=True)
    assert attempt.first_failed_at == NOW
    assert attempt.failing_for(NOW + timedelta(hours=3)) == timedelta(hours=3)


def test_a_clock_that_is_behind_makes_no_failure_last_less_than_nothing() -> None:
    attempt = Attempt(1, "1:2:3", NOW)
    assert attempt.failing_for(NOW - timedelta(hours=1)) == timedelta()
    assert Attempt(0, "1:2:3", None).failing_for(NOW) == timedelta()


@given(forged)
def test_a_message_of_the_source_topic_has_failed_never_whatever_it_claims(
    ours: dict[str, str],
) -> None:
    attempt = Attempt.of(ours, message_id="1:2:3", retried=False)
    assert (attempt.number, attempt.reconsume_times, attempt.first_failed_at) == (1, 0, None)


@pytest.mark.parametrize(
    "origin", ["", "1:2:3\nmoved to nowhere", "x" * 129, "größe", "\x1b[2J", "a b"]
)
def test_an_origin_that_no_client_writes_is_replaced(origin: str) -> None:
    assert hop({"ORIGIN_MESSAGE_ID": origin}, message_id="1:2:3")["ORIGIN_MESSAGE_ID"] == "1:2:3"


@pytest.mark.parametrize("origin", ["5:0:-1", "5:0:3:7", "(5,0,-1,-1)", "AC110001:00002A9F.7-x_"])
def test_the_origins_of_all_clients_are_kept(origin: str) -> None:
    assert hop({"ORIGIN_MESSAGE_ID": origin})["ORIGIN_MESSAGE_ID"] == origin


@pytest.mark.parametrize("origin", ["5:0:-1", "7:8:-1"])
def test_first_id_tells_messages_of_one_origin_apart(origin: str) -> None:
    carried = {"ORIGIN_MESSAGE_ID": origin}
    one, other = (hop(carried, message_id=message_id) for message_id in ("7:8:-1", "7:9:-1"))
    assert one["ORIGIN_MESSAGE_ID"] == other["ORIGIN_MESSAGE_ID"] == origin
    assert (one["REDRIVE_FIRST_ID"], other["REDRIVE_FIRST_ID"]) == ("7:8:-1", "7:9:-1")
    assert hop(one, message_id="9:9:-1")["REDRIVE_FIRST_ID"] == "7:8:-1"
    replayed = envelope.for_replay(one, replay="shop/fix", source="u@0:1:2:0")
    assert hop(replayed, message_id="9:9:-1")["REDRIVE_FIRST_ID"] == "7:8:-1"


@pytest.mark.parametrize(("sequenced", "first_id"), [(False, "9:9:-1"), (True, "7:8:-1")])
def test_first_id_copied_to_the_source_topic_counts_for_no_message(
    sequenced: bool,  # noqa: FBT001 - a parameter
    first_id: str,
) -> None:
    copied = hop({}, message_id="7:8:-1")

    def of(properties: dict[str, str]) -> str:
        return Attempt.of(
            properties, message_id="9:9:-1", retried=False, sequenced=sequenced
        ).first_id

    assert of(copied) == "9:9:-1"
    assert of(envelope.for_replay(copied, replay="shop/fix", source="u@0:1:2:0")) == first_id


@given(texts)
def test_no_forged_moment_is_an_error(text: str) -> None:
    attempt = Attempt.of({"REDRIVE_FIRST_FAILED_AT": text}, message_id="1:2:3", retried=True)
    assert attempt.failing_for(NOW) >= timedelta()


def test_a_moment_without_time_zone_is_none() -> None:
    written = {"REDRIVE_FIRST_FAILED_AT": "2026-11-21T09:00:00"}
    assert Attempt.of(written, message_id="1:2:3", retried=True).first_failed_at is None


@given(users, forged, causes)
def test_the_next_attempt_is_told_of_this_one(
    user: dict[str, str], ours: dict[str, str], cause: Cause
) -> None:
    attempt = Attempt.of(hop(user | ours, cause=cause), message_id="9:9:9", retried=True)
    assert attempt.cause is not None
    assert attempt.cause.to_properties() == cause.to_properties()


def test_the_version_of_the_schema_is_the_source_topics_through_every_hop() -> None:
    first = Attempt.of({}, message_id="1:2:3", retried=False, schema_version=7)
    sent = envelope.for_hop(
        {}, first, policy=POLICY, verdict=Retry(timedelta(seconds=1), 1), cause=None
    )
    assert sent["REDRIVE_SCHEMA_VERSION"] == "7"
    # A Java consumer in between sends with the retry topic's own versions.
    assert Attempt.of(sent, message_id="4:5:6", retried=True, schema_version=0).schema_version == 7
    assert Attempt.of({}, message_id="4:5:6", retried=True, schema_version=0).schema_version is None
    replayed = envelope.for_replay(sent, replay="shop/fix", source="u@0:1:2:0")
    assert Attempt.of(replayed, message_id="7:8:9", retried=False).schema_version == 7


@given(texts)
def test_no_forged_version_is_an_error(text: str) -> None:
    attempt = Attempt.of({"REDRIVE_SCHEMA_VERSION": text}, message_id="1:2:3", retried=True)
    assert attempt.schema_version is None or attempt.schema_version >= 0


@given(st.integers(0, 999_999_999))
def test_a_count_is_read_as_it_was_written(count: int) -> None:
    assert envelope.reconsume_times({"RECONSUMETIMES": str(count)}) == count
    assert envelope.replays({"REDRIVE_REPLAYS": str(count)}) == count


@pytest.mark.parametrize("text", ["", "-1", "+1", " 1", "1 ", "1.0", "1e3", "٣", "x", "9" * 5_000])
def test_a_count_that_no_client_writes_is_none(text: str) -> None:
    assert envelope.reconsume_times({"RECONSUMETIMES": text}) == 0
    assert envelope.replays({"REDRIVE_REPLAYS": text}) == 0


@given(texts)
def test_no_forged_count_is_negative_or_an_error(text: str) -> None:
    assert envelope.reconsume_times({"RECONSUMETIMES": text}) >= 0


def test_a_message_without_properties_has_had_no_retry_and_no_replay() -> None:
    assert envelope.reconsume_times({}) == envelope.replays({}) == 0


@given(users, forged, causes)
def test_a_replay_begins_anew_and_keeps_origin_cause_and_user_properties(
    user: dict[str, str], ours: dict[str, str], cause: Cause
) -> None:
    dead = hop(user | ours, Dead(DeadReason.RETRIES_EXHAUSTED, 4), cause)
    sent = envelope.for_replay(dead, replay="shop/after-fix", source="u@0:1:2:0")
    assert envelope.reconsume_times(sent) == 0
    assert envelope.replays(sent) == envelope.replays(dead) + 1
    assert sent["REDRIVE_REPLAY"] == "shop/after-fix"
    assert sent.items() >= cause.to_properties().items()
    assert sent["ORIGIN_MESSAGE_ID"] == dead["ORIGIN_MESSAGE_ID"]
    assert sent.items() >= user.items()
    assert not {"DELAY_TIME", "REDRIVE_DEAD_REASON", "REDRIVE_FIRST_FAILED_AT"} & sent.keys()


def test_the_number_of_replays_survives_another_death() -> None:
    properties: dict[str, str] = {}
    for count in range(1, 4):
        dead = hop(properties, Dead(DeadReason.RETRIES_EXHAUSTED, 4))
        properties = envelope.for_replay(dead, replay=f"shop/run-{count}", source="u@0:1:2:0")
        assert envelope.replays(properties) == count
