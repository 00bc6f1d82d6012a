from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from sandbox.spark_operator import command, mounts
from sandbox.spark_operator.environment import Data, Source
from sandbox.spark_operator.errors import MissingConfigError
from sandbox.spark_operator.objects import Application

MakeApplication = Callable[..., Application]
SECRET, CONFIG = Source("secret", "pulsar"), Source("configmap", "authority")
VOLUME = {
    "name": "access",
    "projected": {
        "sources": [
            {"secret": {"name": "pulsar", "items": [{"key": "token", "path": "own/token"}]}},
            {"configMap": {"name": "authority", "items": [{"key": "ca", "path": "ca.crt"}]}},
        ]
    },
}
MOUNTING = {"volumeMounts": [{"name": "access", "mountPath": "/etc/access", "readOnly": True}]}


@pytest.fixture
def mounting(application: MakeApplication) -> Application:
    """An application whose pods mount keys of a Secret and a ConfigMap."""
    return application(volumes=[VOLUME], driver=MOUNTING, executor=MOUNTING)


def test_keys_of_secrets_and_config_maps_are_mounted(mounting: Application) -> None:
    command.check(mounting)
    assert mounts.references(mounting) == {SECRET, CONFIG}
    data = Data({SECRET: {"token": "s3cret", "other": "x"}, CONFIG: {"ca": "PEM"}})
    assert mounts.files(mounting, data) == {
        "/etc/access/own/token": "s3cret",
        "/etc/access/ca.crt": "PEM",
    }


def test_a_missing_key_is_waited_for(mounting: Application) -> None:
    for data in (Data({}), Data({SECRET: {}, CONFIG: {"ca": "PEM"}})):
        with pytest.raises(MissingConfigError, match='"pulsar"'):
            mounts.files(mounting, data)


def test_values_of_the_environment_lead_to_what_is_mounted(mounting: Application) -> None:
    variables = {"ACCESS": '{"folder": "/etc/access"}', "PLAIN": "/etc"}
    assert mounts.environment(variables, mounting, Path("/pod")) == {
        "ACCESS": '{"folder": "/pod/etc/access"}',
        "PLAIN": "/etc",
    }
