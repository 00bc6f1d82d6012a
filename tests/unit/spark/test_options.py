"""Options are understood or refused, with the nearest name that there is."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from redrive.errors import RedriveError
from redrive.policy.naming import TopicName
from redrive.spark import options
from redrive.spark.options import BATCH_OPTIONS, COLUMN_NAMES, InvalidOptionError

LEAST = {"service.url": "pulsar://pulsar:6650", "topic": "persistent://shop/prod/orders"}


def refused(**others: str) -> str:
    given = {name.replace("_", "."): value for name, value in others.items()}
    with pytest.raises(RedriveError) as error:
        options.read_options(LEAST | given, BATCH_OPTIONS)
    return str(error.value)


def test_what_is_left_out_has_the_defaults_of_the_jvm_connector() -> None:
    read = options.read_options(LEAST, BATCH_OPTIONS)
    assert read.topics.names == (TopicName("shop", "prod", "orders"),)
    assert read.columns == COLUMN_NAMES
    assert read.fail_on_data_loss
    assert (read.starting, read.ending, read.connection.admin_url) == (None, None, None)


def test_names_are_compared_as_spark_does() -> None:
    lower = {name.lower(): value for name, value in LEAST.items()} | {"failondataloss": "FALSE"}
    assert not options.read_options(lower, BATCH_OPTIONS).fail_on_data_loss


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("serviceurl", "service.url"),
        ("startingoffset", "startingOffsets"),
        ("failOnDataLos", "failOnDataLoss"),
        ("topicPattern", "topicsPattern"),
        ("pulsar.client.authParam", "pulsar.client.authParams"),
    ],
)
def test_an_unknown_option_is_refused_with_the_nearest_and_without_its_value(
    given: str, meant: str
) -> None:
    with pytest.raises(InvalidOptionError, match=rf"did you mean {meant}\?") as error:
        options.read_options(LEAST | {given: "s3cret"}, BATCH_OPTIONS)
    assert "s3cret" not in str(error.value)


@given(st.sampled_from(BATCH_OPTIONS), st.text(max_size=30))
def test_no_value_is_a_crash(name: str, value: str) -> None:
    try:
        options.read_options(LEAST | {name: value}, BATCH_OPTIONS)
    except RedriveError as error:
        assert "; " in str(error)  # noqa: PT017  most values are refused, some are not


def test_exactly_one_option_says_which_topics() -> None:
    assert "exactly one of topic, topics and topicsPattern" in refused(topics="a,b")
    with pytest.raises(InvalidOptionError, match="exactly one"):
        options.read_options({"service.url": "pulsar://p"}, BATCH_OPTIONS)


def test_short_names_are_those_of_the_default_namespace() -> None:
    names = options.read_options(
        {"service.url": "pulsar://p", "topics": "orders, persistent://shop/prod/bills,orders"},
        BATCH_OPTIONS,
    ).topics.names
    assert names == (TopicName("public", "default", "orders"), TopicName("shop", "prod", "bills"))


def test_a_pattern_needs_the_admin_api_and_lies_in_one_namespace() -> None:
    given = {"service.url": "pulsar://p", "topicsPattern": "persistent://shop/prod/orders-.*"}
    with pytest.raises(InvalidOptionError, match="topicsPattern needs"):
        options.read_options(given, BATCH_OPTIONS)
    found = options.read_options(given | {"admin.url": "http://p:8080"}, BATCH_OPTIONS).topics
    assert found.namespace == "shop/prod"
    assert found.pattern is not None
    assert found.pattern.fullmatch("persistent://shop/prod/orders-eu")
    for wrong in ("persistent://shop/.*/orders", "persistent://shop/prod/(", "persistent://.*"):
        with pytest.raises(InvalidOptionError, match="topicsPattern is"):
            options.read_options(given | {"topicsPattern": wrong}, BATCH_OPTIONS)


def test_columns_are_chosen_by_name_and_in_order() -> None:
    assert options.read_options(LEAST | {"columns": "__ENTRY, value"}, BATCH_OPTIONS).columns == (
        "__entry",
        "value",
    )
    assert "got ['key']" in refused(columns="value,key")
    assert "one twice" in refused(columns="value,value")
