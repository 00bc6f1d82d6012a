"""Each method of the client, in the client's own words; and no secret in a message."""

from __future__ import annotations

import json

import pytest

from redrive.auth.method import Plugin, SourceAuthentication
from redrive.spark.options import (
    PARAMETERS,
    PLUGIN,
    InvalidAuthenticationError,
    authentication_of_options,
)

PACKAGE = "org.apache.pulsar.client.impl.auth."


def read(plugin: str, parameters: str) -> SourceAuthentication:
    return authentication_of_options({PLUGIN: plugin, PARAMETERS: parameters})


def test_nothing_is_no_authentication() -> None:
    assert authentication_of_options({}) == SourceAuthentication()
    assert read("AuthenticationDisabled", "") == SourceAuthentication()


def test_a_token_stands_in_the_option_or_in_a_file() -> None:
    assert read(f"{PACKAGE}AuthenticationToken", "token:abc").token == "abc"  # noqa: S105
    found = read("AuthenticationToken", "file:///var/run/token")
    assert (found.token, found.files) == (None, {"token": "/var/run/token"})


def test_a_certificate_and_its_key_are_files() -> None:
    found = read(f"{PACKAGE}AuthenticationTls", "tlsCertFile:/a/tls.crt,tlsKeyFile:/a/tls.key")
    assert found.plugin is Plugin.TLS
    assert found.files == {"certificate": "/a/tls.crt", "key": "/a/tls.key"}


def test_a_client_of_an_issuer_has_its_secret_in_a_file() -> None:
    said = {
        "type": "client_credentials",
        "issuerUrl": "https://issuer",
        "privateKey": "file:///a/client.json",
        "audience": "pulsar",
    }
    found = read(f"{PACKAGE}oauth2.AuthenticationOAuth2", json.dumps(said))
    assert found.plugin is Plugin.OAUTH2
    assert found.files == {"client": "/a/client.json"}
    assert found.issuer == {"issuerUrl": "https://issuer", "audience": "pulsar"}


@pytest.mark.parametrize(
    ("plugin", "parameters"),
    [
        ("AuthenticationToken", "s3cret"),  # Spark would show it
        ("AuthenticationToken", "token:"),
        ("AuthenticationToken", "token: s3cr€t"),
        ("AuthenticationTls", "tlsCertFile:/a/s3cret"),
        ("AuthenticationOAuth2", "s3cret"),
        ("AuthenticationOAuth2", '["s3cret"]'),
        ("AuthenticationOAuth2", '{"issuerUrl": "https://i", "privateKey": "data:;base64,s3cret"}'),
        ("AuthenticationBasic", '{"userId": "a", "password": "s3cret"}'),
    ],
)
def test_anything_else_is_refused_and_not_shown(plugin: str, parameters: str) -> None:
    with pytest.raises(InvalidAuthenticationError) as error:
        read(plugin, parameters)
    assert "s3cr" not in str(error.value)


def test_parameters_without_a_method_are_refused() -> None:
    with pytest.raises(InvalidAuthenticationError, match="is given without"):
        authentication_of_options({PARAMETERS: "token:s3cret"})


def test_a_token_is_not_shown() -> None:
    assert "s3cret" not in repr(read("AuthenticationToken", "token:s3cret"))
