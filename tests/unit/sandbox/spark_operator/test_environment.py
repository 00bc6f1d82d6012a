from __future__ import annotations

from collections.abc import Callable

import pytest

from sandbox.spark_operator.environment import Data, Source, references, resolve
from sandbox.spark_operator.errors import MissingConfigError, RefusedError
from sandbox.spark_operator.objects import Application

SECRET = Source("secret", "pulsar")
CONFIG = Source("configmap", "settings")
DATA = Data({SECRET: {"token": "s3cret"}, CONFIG: {"LEVEL": "info", "A.B": "dotted"}})

TOKEN_REF = {"name": "TOKEN", "valueFrom": {"secretKeyRef": {"name": "pulsar", "key": "token"}}}


def test_every_way_to_name_a_secret_or_a_config_map_is_found(
    application: Callable[..., Application],
) -> None:
    app = application(
        driver={
            "env": [
                TOKEN_REF,
                {"name": "L", "valueFrom": {"configMapKeyRef": {"name": "one", "key": "k"}}},
            ],
            "envFrom": [{"configMapRef": {"name": "settings"}}, {"secretRef": {"name": "two"}}],
        },
        executor={"envSecretKeyRefs": {"T": {"name": "three", "key": "k"}}},
    )
    assert references(app) == {
        SECRET,
        CONFIG,
        Source("configmap", "one"),
        Source("secret", "two"),
        Source("secret", "three"),
    }


def test_values_come_from_the_object_its_secrets_and_its_config_maps(
    application: Callable[..., Application],
) -> None:
    app = application(
        driver={
            "env": [{"name": "PLAIN", "value": "v"}, {"name": "EMPTY"}, TOKEN_REF],
            "envVars": {"OLD": "way"},
            "envSecretKeyRefs": {"OLD_TOKEN": {"name": "pulsar", "key": "token"}},
            "envFrom": [{"prefix": "S_", "configMapRef": {"name": "settings"}}],
        }
    )
    assert resolve(app, DATA) == {
        "PLAIN": "v",
        "EMPTY": "",
        "TOKEN": "s3cret",
        "OLD": "way",
        "OLD_TOKEN": "s3cret",
        "S_LEVEL": "info",
        "S_A.B": "dotted",
    }


def test_the_more_explicit_way_wins(application: Callable[..., Application]) -> None:
    app = application(
        driver={
            "envFrom": [{"configMapRef": {"name": "settings"}}],
            "envVars": {"LEVEL": "from envVars", "TWICE": "from envVars"},
            "env": [{"name": "TWICE", "value": "first"}, {"name": "TWICE", "value": "last"}],
        }
    )
    resolved = resolve(app, DATA)
    assert (resolved["LEVEL"], resolved["TWICE"]) == ("from envVars", "last")


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("$(FIRST)/x", "one/x"),
        ("$$(FIRST)", "$(FIRST)"),
        ("$(UNKNOWN)", "$(UNKNOWN)"),
        ("$(LATER)", "$(LATER)"),
        ("$FIRST $", "$FIRST $"),
        ("$(FIRST", "$(FIRST"),
    ],
)
def test_a_value_may_refer_to_variables_before_it(
    application: Callable[..., Application], written: str, meant: str
) -> None:
    app = application(
        driver={
            "env": [
                {"name": "FIRST", "value": "one"},
                {"name": "IT", "value": written},
                {"name": "LATER", "value": "two"},
            ]
        }
    )
    assert resolve(app, DATA)["IT"] == meant


def test_a_value_out_of_a_secret_is_not_expanded(application: Callable[..., Application]) -> None:
    app = application(driver={"env": [{"name": "A", "value": "1"}, TOKEN_REF]})
    data = Data({SECRET: {"token": "$(A)"}})
    assert resolve(app, data) == {"A": "1", "TOKEN": "$(A)"}


@pytest.mark.parametrize(
    ("pod", "message"),
    [
        (
            {"env": [{"name": "T", "valueFrom": {"secretKeyRef": {"name": "no", "key": "k"}}}]},
            'secret "no" not found',
        ),
        (
            {"env": [{"name": "T", "valueFrom": {"secretKeyRef": {"name": "pulsar", "key": "k"}}}]},
            'couldn\'t find key k in secret "pulsar"',
        ),
        ({"envFrom": [{"configMapRef": {"name": "no"}}]}, 'configmap "no" not found'),
        ({"envSecretKeyRefs": {"T": {"name": "no", "key": "k"}}}, 'secret "no" not found'),
    ],
)
def test_what_is_missing_is_named(
    application: Callable[..., Application], pod: dict[str, object], message: str
) -> None:
    with pytest.raises(MissingConfigError) as raised:
        resolve(application(driver=pod), DATA)
    assert str(raised.value) == message


def test_what_is_optional_may_be_missing(application: Callable[..., Application]) -> None:
    ref = {"name": "no", "key": "k", "optional": True}
    app = application(
        driver={
            "env": [{"name": "T", "valueFrom": {"secretKeyRef": ref}}],
            "envFrom": [{"secretRef": {"name": "no", "optional": True}}],
        }
    )
    assert resolve(app, DATA) == {}


def test_executors_share_the_environment_of_the_driver(
    application: Callable[..., Application],
) -> None:
    app = application(
        driver={"env": [{"name": "BOTH", "value": "v"}, {"name": "D", "value": "d"}]},
        executor={"env": [{"name": "BOTH", "value": "v"}, {"name": "E", "value": "e"}]},
    )
    assert resolve(app, DATA) == {"BOTH": "v", "D": "d", "E": "e"}


def test_driver_and_executors_that_contradict_each_other_are_refused_without_showing_values(
    application: Callable[..., Application],
) -> None:
    app = application(
        driver={"env": [TOKEN_REF]}, executor={"env": [{"name": "TOKEN", "value": "other"}]}
    )
    with pytest.raises(RefusedError, match="different values of TOKEN") as raised:
        resolve(app, DATA)
    assert "s3cret" not in str(raised.value)
    assert "other" not in str(raised.value)


def test_data_never_shows_what_it_holds() -> None:
    assert "s3cret" not in repr(DATA)
