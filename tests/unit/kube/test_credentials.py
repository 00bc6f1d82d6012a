from __future__ import annotations

import asyncio
import ssl
from pathlib import Path
from typing import Any, cast

import pytest
from yarl import URL

from redrive.admin.errors import AdminError
from redrive.admin.http import Http
from redrive.api.connection import BrokerConnectionSpec
from redrive.api.model import parse_spec
from redrive.errors import RedriveError
from redrive.kube import credentials, resources
from redrive.kube.client import ReferenceNotFoundError, UnavailableError
from redrive.kube.credentials import (
    CACHE_SECONDS,
    MAX_PARSED,
    PAUSES,
    REFUSED_SECONDS,
    CredentialReader,
    KeptCredentials,
    Material,
    TlsFiles,
)
from redrive.kube.resources import Key
from redrive.reasons import Reason
from tests.support.crd_fields import SpecFields
from tests.support.fake_kubernetes import FakeKubernetes
from tests.support.reasons import raises


class Clock:
    """Seconds that pass when the test says so."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


class Secret:
    """A Secret that counts its reads, each of which takes some seconds."""

    def __init__(self, clock: Clock) -> None:
        self.material: Material | RedriveError = Material(token="one")  # noqa: S106
        self.reads = 0
        self.clock = clock
        self.slow = 0.0

    async def read(self) -> Material:
        self.reads += 1
        await asyncio.sleep(0)
        self.clock.now += self.slow
        if isinstance(self.material, RedriveError):
            raise self.material
        return self.material


GONE = ReferenceNotFoundError("there is no Secret", remedy="make one")
AWAY = UnavailableError("the Kubernetes API does not answer", remedy="wait")
ISSUER_FAILS = AdminError("the issuer gave no token", remedy="wait", reason=Reason.ISSUER_FAILED)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def secret(clock: Clock) -> Secret:
    return Secret(clock)


@pytest.fixture
def kept(secret: Secret, clock: Clock) -> KeptCredentials:
    return KeptCredentials(secret.read, clock)


def token(kept: KeptCredentials) -> str:
    return kept.held.headers["Authorization"]


async def test_thousand_users_cost_one_read_per_interval(
    kept: KeptCredentials, secret: Secret, clock: Clock
) -> None:
    for round_ in range(3):
        await asyncio.gather(*(kept.refresh() for _ in range(1000)))
        assert secret.reads == round_ + 1
        clock.now += CACHE_SECONDS


async def test_changed_secret_is_in_use_after_next_read(
    kept: KeptCredentials, secret: Secret, clock: Clock
) -> None:
    await kept.refresh()
    first = kept.held
    clock.now += CACHE_SECONDS
    await kept.refresh()
    assert kept.held is first
    secret.material = Material(token="two")  # noqa: S106
    clock.now += CACHE_SECONDS
    await kept.refresh()
    assert token(kept) == "Bearer two"


async def test_refused_credentials_are_read_again_once_for_all(
    kept: KeptCredentials, secret: Secret, clock: Clock
) -> None:
    await kept.refresh()
    refused = kept.held
    secret.material = Material(token="two")  # noqa: S106
    clock.now += REFUSED_SECONDS
    renewed = await asyncio.gather(*(kept.renewed(refused) for _ in range(50)))
    assert {access.headers["Authorization"] for access in renewed if access} == {"Bearer two"}
    assert None not in renewed
    assert secret.reads == 2


async def test_refused_credentials_are_read_once_per_second(
    kept: KeptCredentials, secret: Secret, clock: Clock
) -> None:
    await kept.refresh()
    clock.now += REFUSED_SECONDS
    for _ in range(100):
        assert await kept.renewed(kept.held) is None
    assert secret.reads == 2


async def test_unreadable_secret_is_raised_and_retried_in_a_second(
    kept: KeptCredentials, secret: Secret, clock: Clock
) -> None:
    secret.material = GONE
    for _ in range(10):
        with pytest.raises(ReferenceNotFoundError):
            await kept.refresh()
    assert secret.reads == 1
    secret.material = Material(token="one")  # noqa: S106
    clock.now += REFUSED_SECONDS
    await kept.refresh()
    assert token(kept) == "Bearer one"


async def test_expiring_token_is_replaced_before_its_end(
    kept: KeptCredentials, secret: Secret, clock: Clock
) -> None:
    secret.material = Material(token="one", lifetime=100)  # noqa: S106
    await kept.refresh()
    clock.now += 79
    await kept.refresh()
    assert secret.reads == 1
    clock.now += 2
    await kept.refresh()
    assert secret.reads == 2


async def test_late_read_failure_is_shared_by_all_waiters(
    kept: KeptCredentials, secret: Secret
) -> None:
    secret.material, secret.slow = AWAY, 30.0
    outcomes = await asyncio.gather(*(kept.refresh() for _ in range(50)), return_exceptions=True)
    assert outcomes == [AWAY] * 50
    assert secret.reads == 1


@pytest.mark.parametrize("material", [AWAY, Material(token="one")])  # noqa: S106
async def test_slow_read_after_refusal_is_shared_by_all_waiters(
    kept: KeptCredentials, secret: Secret, clock: Clock, material: Material | RedriveError
) -> None:
    await kept.refresh()
    clock.now += REFUSED_SECONDS
    secret.material, secret.slow = material, 30.0
    waiting = (kept.renewed(kept.held) for _ in range(50))
    outcomes = await asyncio.gather(*waiting, return_exceptions=True)
    assert outcomes == [material if isinstance(material, RedriveError) else None] * 50
    assert secret.reads == 2


async def test_read_slower_than_its_lifetime_is_shared(
    kept: KeptCredentials, secret: Secret
) -> None:
    secret.slow = CACHE_SECONDS + 1
    await asyncio.gather(*(kept.refresh() for _ in range(50)))
    assert secret.reads == 1


async def test_token_outlives_failing_issuer_until_its_expiry(
    kept: KeptCredentials, secret: Secret, clock: Clock
) -> None:
    secret.material = Material(token="one", lifetime=100)  # noqa: S106
    await kept.refresh()
    held = kept.held
    secret.material = ISSUER_FAILS
    clock.now += 99
    await kept.refresh()
    assert secret.reads == 2
    assert kept.held is held
    with raises(Reason.ISSUER_FAILED):  # a broker that refuses it is another matter
        await kept.renewed(held)
    clock.now += 1
    with raises(Reason.ISSUER_FAILED):
        await kept.refresh()


async def test_secret_stays_in_use_only_while_api_is_unavailable(
    kept: KeptCredentials, secret: Secret, clock: Clock
) -> None:
    await kept.refresh()
    secret.material = AWAY
    clock.now += 10 * CACHE_SECONDS
    await kept.refresh()
    assert token(kept) == "Bearer one"
    secret.material = GONE
    clock.now += REFUSED_SECONDS
    with pytest.raises(ReferenceNotFoundError):
        await kept.refresh()


async def test_valid_token_is_used_during_renewal(
    kept: KeptCredentials, secret: Secret, clock: Clock
) -> None:
    secret.material = Material(token="one", lifetime=100)  # noqa: S106
    await kept.refresh()
    secret.material, secret.slow = ISSUER_FAILS, 30.0
    clock.now += 81
    renewing = asyncio.create_task(kept.refresh())
    await asyncio.sleep(0)
    before = clock.now
    await kept.refresh()
    assert clock.now == before
    with raises(Reason.ISSUER_FAILED):  # its token has ended meanwhile
        await renewing


def spec(authentication: dict[str, Any]) -> BrokerConnectionSpec:
    return parse_spec(
        BrokerConnectionSpec,
        {
            "spec": {
                "pulsar": {
                    "serviceURL": "pulsar://pulsar:6650",
                    "adminURL": "http://pulsar:8080",
                    "authentication": authentication,
                },
                "allow": [],
            }
        },
    )


FILE = {"type": "Token", "token": {"file": "admin.token"}}


async def test_token_file_is_read_in_folder_of_namespace_only(
    tmp_path: Path,
) -> None:
    unused: Any = None  # neither Kubernetes nor a broker is asked
    reader = CredentialReader(unused, unused, tmp_path)
    (tmp_path / "shop").mkdir()
    (tmp_path / "shop" / "admin.token").write_text("the-token\n")
    assert await reader.read("shop", spec(FILE)) == Material(token="the-token")  # noqa: S106
    with raises(
        Reason.TOKEN_FILE_INVALID, match="cannot be read; got 'FileNotFoundError'; mount it"
    ):
        await reader.read("billing", spec(FILE))
    (tmp_path / "shop" / "admin.token").write_text("two\nlines")
    with raises(Reason.TOKEN_FILE_INVALID, match="has no token"):
        await reader.read("shop", spec(FILE))


async def test_token_file_without_folder_is_refused() -> None:
    unused: Any = None
    reader = CredentialReader(unused, unused, None)
    with raises(Reason.TOKEN_FILE_INVALID, match="no folder of credentials; start it with"):
        await reader.read("shop", spec(FILE))


async def test_no_authentication_reads_nothing_and_sends_no_token() -> None:
    unused: Any = None
    reader = CredentialReader(unused, unused, None)
    read = await reader.read("shop", spec({"type": "None"}))
    assert read == Material()

    async def again() -> Material:
        return read

    kept = KeptCredentials(again, hosts=("broker-*",))
    await kept.refresh()
    assert kept.held.headers == {}
    assert kept.held.may_go_to(URL("http://broker-1"), URL("http://main"))
    assert not kept.held.may_go_to(URL("http://broker-1.elsewhere"), URL("http://main"))


async def test_unchanged_tls_files_are_parsed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection reads its files again every second, and a parse blocks all connections."""
    parses = list[str | None]()

    def parse(*, ca: str | None, **_: object) -> ssl.SSLContext:
        parses.append(ca)
        if ca == "bad":
            raise ValueError(ca)
        return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)

    monkeypatch.setattr(credentials, "tls_context", parse)
    files = TlsFiles()
    first = await files.parse("shop", "good")
    assert await files.parse("billing", "good") is first
    for _ in range(2):
        with pytest.raises(ValueError, match="bad"):
            await files.parse("shop", "bad")
    assert parses == ["good", "bad"]
    for number in range(MAX_PARSED):
        await files.parse("shop", str(number))
    assert await files.parse("shop", "good") is not first


async def test_long_parses_leave_most_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    async def sleep(seconds: float) -> None:
        pauses.append(seconds)

    times, pauses = iter([0.0, 0.1, 0.2, 0.205]), list[float]()
    monkeypatch.setattr(asyncio, "sleep", sleep)
    files = TlsFiles(lambda: next(times))
    for ca in ("long", "short"):
        with pytest.raises(ValueError, match="not PEM"):
            await files.parse("shop", ca)
    assert pauses == [PAUSES * 0.1]


CREDENTIALS: list[dict[str, Any]] = [
    {"authentication": {"type": "Token", "token": {"secretRef": {"name": "theirs", "key": "k"}}}},
    {"authentication": {"type": "TLS", "tls": {"secretRef": {"name": "theirs"}}}},
    {
        "authentication": {
            "type": "OAuth2",
            "oauth2": {
                "issuerURL": "https://issuer",
                "clientID": "id",
                "clientSecret": {"secretRef": {"name": "theirs", "key": "k"}},
            },
        }
    },
    {
        "authentication": {"type": "None"},
        "tls": {"caRef": {"kind": "Secret", "name": "theirs", "key": "k"}},
    },
]


@pytest.mark.parametrize("credentials", CREDENTIALS)
async def test_operator_reads_only_the_namespace_of_the_connection(
    credentials: dict[str, Any],
) -> None:
    keys = list[Key]()
    api = FakeKubernetes()
    victim = {"metadata": {"namespace": "victim", "name": "theirs"}, "data": {"k": "c2VjcmV0"}}
    api.add(resources.SECRETS, victim)
    api.before = lambda _verb, _resource, key: keys.append(key)
    pulsar = {"serviceURL": "pulsar://p:6650", "adminURL": "https://p:8443", **credentials}
    spec = parse_spec(BrokerConnectionSpec, {"spec": {"pulsar": pulsar}})
    reader = CredentialReader(api, cast("Http", None), None)
    with pytest.raises(RedriveError):
        await reader.read("thief", spec)
    assert set(keys) == {Key("thief", "theirs")}


def test_no_reference_of_a_connection_has_a_namespace() -> None:
    references = [leaf for leaf in SpecFields("BrokerConnection").all if "Ref" in str(leaf)]
    assert references
    assert not [leaf for leaf in references if str(leaf).endswith("namespace")]
