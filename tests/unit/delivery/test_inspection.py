"""Address and credentials of an inspection."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import certifi
import pulsar
import pytest

from redrive import CrashLog
from redrive.delivery.inspection import access
from redrive.errors import InvalidSpecError


@pytest.mark.parametrize("token", ["secret", lambda: "secret"])
def test_access_has_the_address_of_the_client(
    token: str | Callable[[], str], tmp_path: Path
) -> None:
    with closing(pulsar.Client("pulsar://one:1,two:2")) as client:
        url, shown = access(client, CrashLog(tmp_path, token=token))
    assert (url, shown.method, shown.token(), shown.tls) == (
        "pulsar://one:1,two:2",
        "token",
        "secret",
        None,
    )


def test_access_without_credentials_shows_none(tmp_path: Path) -> None:
    with closing(pulsar.Client("pulsar://one:1")) as client:
        _, shown = access(client, CrashLog(tmp_path))
    assert (shown.method, shown.token()) == ("", "")


def test_access_trusts_the_authorities_of_the_client(tmp_path: Path) -> None:
    with closing(
        pulsar.Client("pulsar+ssl://one:1", tls_trust_certs_file_path=certifi.where())
    ) as client:
        _, shown = access(client, CrashLog(tmp_path, token=str))
        assert shown.tls is not None
        assert shown.tls.check_hostname
        assert shown.tls.get_ca_certs()
        with pytest.raises(FileNotFoundError):
            access(client, CrashLog(tmp_path, certificate=(tmp_path / "none", tmp_path / "none")))


def test_crash_log_with_token_and_certificate_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidSpecError, match="token= and certificate= may be set; got 'both'"):
        CrashLog(tmp_path, token=str, certificate=("crt", "key"))
