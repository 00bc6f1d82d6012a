from __future__ import annotations

import pytest
import trustme
from cryptography.hazmat.primitives import serialization

from redrive.admin.http import Access, tls_context

AUTHORITY = trustme.CA()


def issued(name: str) -> tuple[bytes, bytes]:
    found = AUTHORITY.issue_cert(common_name=name)
    return found.cert_chain_pems[0].bytes(), found.private_key_pem.bytes()


def test_a_certificate_with_its_key_is_taken() -> None:
    certificate, key = issued("operator")
    made = tls_context(ca=AUTHORITY.cert_pem.bytes().decode(), certificate=certificate, key=key)
    assert made.check_hostname
    assert len(made.get_ca_certs()) == 1  # no other is trusted


def test_what_is_none_is_refused_without_showing_it() -> None:
    certificate, key = issued("operator")
    _, other = issued("another")
    protected = serialization.load_pem_private_key(key, None).private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.BestAvailableEncryption(b"hunter2"),
    )
    for wrong in (other, b"garbage", b"", protected):
        with pytest.raises(ValueError, match=r"^[\w ]+$"):
            tls_context(certificate=certificate, key=wrong)
    for nothing in ("", "\n", "garbage"):
        with pytest.raises(ValueError, match=r"^[\w :]+$"):
            tls_context(ca=nothing)


async def test_a_token_is_never_shown_and_never_changes() -> None:
    access = Access.bearer("hunter2")
    assert "hunter2" not in repr(access)
    assert access.held is access
    assert await access.renewed(access) is None


@pytest.mark.parametrize(
    ("pattern", "host", "named"),
    [
        ("broker-*.pulsar.svc", "broker-1.pulsar.svc", True),
        ("Broker-*.pulsar.svc", "broker-1.PULSAR.svc", True),
        ("broker-*.pulsar.svc", "broker-1.evil.pulsar.svc", False),
        ("broker-*", "broker-1.evil", False),
        ("*", "broker", True),
        ("*", "broker.evil", False),
        ("*a" * 60 + "b", "a" * 253, False),
    ],
)
def test_a_star_in_a_host_stands_for_anything_but_a_dot(
    pattern: str, host: str, *, named: bool
) -> None:
    assert Access(hosts=(pattern,)).may_go_to(host) is named
