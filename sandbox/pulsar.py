"""A real standalone Pulsar with authentication and authorization as in production.

Called by `sandbox.sandbox`. Topics and subscriptions are not created on use, so code that does not
create one, or does not grant a right, fails here too.
"""

from __future__ import annotations

import http.client
import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from types import MappingProxyType

import jwt
import psutil
import trustme
from cryptography.hazmat.primitives import serialization

from sandbox import builds, java, toolchain, versions
from sandbox.errors import SandboxError
from sandbox.process import Processes, free_port

NAME = "pulsar"
SUPERUSER = "superuser"
_TOKEN_PLUGIN = "org.apache.pulsar.client.impl.auth.AuthenticationToken"  # noqa: S105 - a class
_TOKEN_PROVIDER = "org.apache.pulsar.broker.authentication.AuthenticationProviderToken"  # noqa: S105
_TLS_PROVIDER = "org.apache.pulsar.broker.authentication.AuthenticationProviderTls"
_BOOKIES = b"/ledgers/available/"
_START_SECONDS = 180.0


@dataclass(frozen=True)
class Answer:
    """An answer of the admin REST interface: an HTTP status, a body, often JSON, and headers.

    Names of headers are in lower case.
    """

    status: int
    body: str
    headers: Mapping[str, str]

    def check(self, action: str) -> None:
        """Raise an error if the broker refused the request.

        Args:
            action: of the request, for the message, such as ``create the topic``.

        Raises:
            SandboxError: the broker refused.
        """
        if self.status >= HTTPStatus.BAD_REQUEST:
            raise SandboxError(
                f"the broker refused to {action}",
                got=f"{self.status} {self.body}",
                remedy="see logs/pulsar.log of the sandbox",
            )


@dataclass(frozen=True)
class Broker:
    """A running broker.

    Args:
        state: the sandbox's directory.
        port: of the binary protocol.
        admin_port: of the admin REST interface.
        admin_tls_port: of the same with TLS.
        tls_port: of the binary protocol with TLS.
        address: of this machine, on which it listens.
        version: the release, one of `versions.PULSARS`.
        full_jit: as in `launch`.
    """

    state: Path
    port: int
    admin_port: int
    admin_tls_port: int
    tls_port: int
    address: str = "127.0.0.1"
    version: str = versions.PULSAR
    full_jit: bool = False

    @property
    def service_url(self) -> str:
        """The service URL for clients."""
        return f"pulsar://{self.address}:{self.port}"

    @property
    def service_tls_url(self) -> str:
        """The service URL with TLS. A client with a `certificate` needs no token."""
        return f"pulsar+ssl://{self.address}:{self.tls_port}"

    @property
    def admin_url(self) -> str:
        """The URL of the admin REST interface."""
        return f"http://{self.address}:{self.admin_port}"

    @property
    def admin_tls_url(self) -> str:
        """The URL of the admin REST interface with TLS; a `certificate` replaces the token."""
        return f"https://127.0.0.1:{self.admin_tls_port}"

    @property
    def token_key(self) -> Path:
        """The file of the key that signs tokens, in the form for `pulsar tokens create`."""
        return _key_file(self.state)

    @property
    def authority(self) -> str:
        """The broker's certificate authority in PEM."""
        return _authority_file(self.state).read_text()

    def certificate(self, role: str) -> tuple[str, str]:
        """Return a new client certificate of *role*, and its key, in PEM."""
        authority = trustme.CA.from_pem(
            _authority_file(self.state).read_bytes(), _authority_key_file(self.state).read_bytes()
        )
        # Java refuses a certificate without an alternative name.
        issued = authority.issue_cert("localhost", common_name=role)
        chain = b"".join(pem.bytes() for pem in issued.cert_chain_pems)
        return chain.decode(), issued.private_key_pem.bytes().decode()

    def token(self, role: str) -> str:
        """Return a token of *role*, signed with the broker's key.

        The role `SUPERUSER` has all permissions; another one has those that were granted to it.
        """
        return jwt.encode({"sub": role}, _key_file(self.state).read_bytes(), algorithm="HS256")

    def token_file(self, role: str) -> Path:
        """Write and return a file with a token of *role*, readable by its owner only."""
        file = self.state / "tokens" / role
        file.parent.mkdir(mode=0o700, exist_ok=True)
        file.touch(mode=0o600)
        file.write_text(self.token(role))
        return file

    def request(
        self, method: str, path: str, body: object = None, *, token: str | None = None
    ) -> Answer:
        """Send a request to the admin REST interface, as the super-user by default.

        Args:
            method: such as ``PUT``.
            path: such as ``/admin/v2/tenants/shop``.
            body: sent as JSON.
            token: of another role; an empty one sends none.

        Raises:
            OSError: the broker is unreachable.
        """
        bearer = self.token(SUPERUSER) if token is None else token
        headers = {"Content-Type": "application/json"}  # without it the broker refuses every PUT
        if bearer:
            headers["Authorization"] = f"Bearer {bearer}"
        connection = http.client.HTTPConnection(self.address, self.admin_port, timeout=30)
        try:
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            response = connection.getresponse()
            received = {name.lower(): value for name, value in response.getheaders()}
            return Answer(response.status, response.read().decode(), received)
        finally:
            connection.close()

    def create_namespace(self, tenant: str, namespace: str) -> None:
        """Create the namespace, and its tenant if that is missing.

        Raises:
            SandboxError: the broker refused, or the namespace already exists.
        """
        answer = self.request(
            "PUT", f"/admin/v2/tenants/{tenant}", {"allowedClusters": ["standalone"]}
        )
        if answer.status != HTTPStatus.CONFLICT:
            answer.check(f"create the tenant {tenant}")
        name = f"{tenant}/{namespace}"
        self.request("PUT", f"/admin/v2/namespaces/{name}").check(f"create the namespace {name}")


def launch(  # noqa: PLR0913  arguments of one broker
    state: Path,
    processes: Processes,
    version: str = versions.PULSAR,
    *,
    address: str = "127.0.0.1",
    settings: Mapping[str, object] = MappingProxyType({}),
    full_jit: bool = False,
) -> Broker:
    """Start a broker with its data under *state*, without waiting until it answers.

    Args:
        state: the sandbox's directory.
        processes: where it is started.
        version: the release, one of `versions.PULSARS`.
        address: of this machine; pods of a node cannot reach the default.
        settings: of its configuration, overriding the sandbox's.
        full_jit: use Java's optimizing compiler as a server does, for measurements. The start takes
            longer, and the full speed is reached after minutes.
    """
    folder = state / NAME
    folder.mkdir(mode=0o700)
    ports = free_port(), free_port(), free_port(), free_port()
    broker = Broker(state, *ports, address, version, full_jit)
    _write_identity(state)
    _key_file(state).touch(mode=0o600)
    _key_file(state).write_bytes(secrets.token_bytes(32))
    stock = (builds.pulsar(version) / "conf" / "standalone.conf").read_text()
    ours = "".join(f"{key}={value}\n" for key, value in {**_settings(broker), **settings}.items())
    _configuration(state).write_text(f"{stock}\n{ours}")  # the last line of a key counts
    start(broker, processes)
    return broker


def start(broker: Broker, processes: Processes) -> None:
    """Start or restart *broker*, without waiting until it answers."""
    home, folder = builds.pulsar(broker.version), broker.state / NAME
    command = [str(home / "bin" / "pulsar"), "standalone", "--no-stream-storage",
               "--no-functions-worker", f"--metadata-dir={folder / 'metadata'}",
               f"--bookkeeper-dir={folder / 'bookkeeper'}"]  # fmt: skip
    env = {
        "JAVA_HOME": str(toolchain.java_home()),
        "PULSAR_STANDALONE_CONF": str(_configuration(broker.state)),
        "PULSAR_LOG_DIR": str(folder / "logs"),
        "PULSAR_MEM": "-Xms256m -Xmx1g -XX:MaxDirectMemorySize=1g",
        # For a short life on a small machine: half of the processor time until it is ready, and a
        # third of the memory, compared with the settings for a server.
        "PULSAR_GC": "-XX:+UseSerialGC",
        "PULSAR_EXTRA_OPTS": "" if broker.full_jit else "-XX:TieredStopAtLevel=1",
    }
    processes.start(NAME, command, env=env, cwd=folder)


def forget_bookie(broker: Broker) -> None:
    """Remove the registration of the bookie from the metadata store of a killed *broker*.

    A restarted bookie that finds its old registration may remove it and register again repeatedly,
    so that the broker has a bookie for only some milliseconds at a time.
    """
    with java.virtual_machine(broker.version) as gateway:
        store = gateway.jvm.org.rocksdb.RocksDB.open(str(broker.state / NAME / "metadata"))
        try:
            keys = store.newIterator()
            keys.seek(_BOOKIES)
            while keys.isValid() and (key := bytes(keys.key())).startswith(_BOOKIES):
                store.delete(key)
                keys.next()
            keys.close()
        finally:
            store.close()


def wait(broker: Broker, processes: Processes) -> None:
    """Wait until *broker* passes its health check, has a namespace, and can write to a ledger.

    Raises:
        SandboxError: it ended or did not answer in time.
    """
    paths = ("/admin/v2/brokers/health", "/admin/v2/namespaces/public/default")
    processes.wait_until(
        NAME,
        lambda: all(_status(broker, path) == HTTPStatus.OK for path in paths) and _writes(broker),
        seconds=_START_SECONDS,
    )


def _settings(broker: Broker) -> dict[str, object]:
    superuser, folder = broker.token_file(SUPERUSER), broker.state / NAME
    return {
        "brokerServicePort": broker.port,
        "webServicePort": broker.admin_port,
        "webServicePortTls": broker.admin_tls_port,
        "brokerServicePortTls": broker.tls_port,
        "tlsCertificateFilePath": folder / "broker.crt",
        "tlsKeyFilePath": folder / "broker.key",
        "tlsTrustCertsFilePath": _authority_file(broker.state),
        "bindAddress": broker.address,
        "advertisedAddress": broker.address,
        "listeningInterface": _loopback(),  # of the bookie, which chooses a port
        "authenticationEnabled": "true",
        "authenticationProviders": f"{_TOKEN_PROVIDER},{_TLS_PROVIDER}",
        "tokenSecretKey": _key_file(broker.state).as_uri(),
        "authorizationEnabled": "true",
        "superUserRoles": SUPERUSER,
        "brokerClientAuthenticationPlugin": _TOKEN_PLUGIN,
        "brokerClientAuthenticationParameters": superuser.as_uri(),
        # The broker visits every topic a hundred times a second by default: with thousands of
        # topics this occupies one processor.
        "managedLedgerCacheEvictionFrequency": 1,
        # By default a bookie with five failed writes in a minute is avoided for half an hour. This
        # broker has only one.
        "bookkeeperClientHealthCheckEnabled": "false",
        # By default a topic without subscription, producer and consumer is deleted after one or two
        # minutes: too soon for a slow test, and for a user who tries redrive by hand.
        "brokerDeleteInactiveTopicsMaxInactiveDurationSeconds": 24 * 3600,
        "allowAutoTopicCreation": "false",
        "allowAutoSubscriptionCreation": "false",
    }


def _loopback() -> str:
    """Return the name of the network interface of 127.0.0.1, such as ``lo`` or ``lo0``."""
    for interface, addresses in psutil.net_if_addrs().items():
        if any(address.address == "127.0.0.1" for address in addresses):
            return interface
    raise SandboxError("no network interface has the address 127.0.0.1", remedy="bring it up")


def _configuration(state: Path) -> Path:
    return state / NAME / "standalone.conf"


def _write_identity(state: Path) -> None:
    """Write a certificate authority and the broker's certificate."""
    authority = trustme.CA()
    broker = authority.issue_cert("127.0.0.1", "localhost")
    folder = state / NAME
    for file, content in (
        (_authority_file(state), authority.cert_pem.bytes()),
        (_authority_key_file(state), authority.private_key_pem.bytes()),
        (folder / "broker.crt", b"".join(pem.bytes() for pem in broker.cert_chain_pems)),
        (folder / "broker.key", _pkcs8(broker.private_key_pem.bytes())),
    ):
        file.touch(mode=0o600)
        file.write_bytes(content)


def _pkcs8(key: bytes) -> bytes:
    """Return *key* in PKCS #8, the only form that Pulsar reads."""
    return serialization.load_pem_private_key(key, password=None).private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )


def _authority_file(state: Path) -> Path:
    return state / NAME / "authority.crt"


def _authority_key_file(state: Path) -> Path:
    return state / NAME / "authority.key"


def _key_file(state: Path) -> Path:
    return state / NAME / "token-key"


def _writes(broker: Broker) -> bool:
    """Return True if a new topic gets a ledger: a restarted broker may answer before its bookie."""
    path = f"/admin/v2/persistent/public/default/probe-{secrets.token_hex(4)}"
    made = _status(broker, path, "PUT") == HTTPStatus.NO_CONTENT
    return _status(broker, path, "DELETE") == HTTPStatus.NO_CONTENT and made


def _status(broker: Broker, path: str, method: str = "GET") -> int | None:
    try:
        return broker.request(method, path).status
    except (OSError, http.client.HTTPException):
        return None  # not yet
