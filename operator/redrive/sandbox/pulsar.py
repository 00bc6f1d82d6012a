"""A real Pulsar, standalone, that checks tokens and rights as one in production does.

Called by `redrive.sandbox.sandbox`. Topics and subscriptions are never created by merely using
them, so whoever forgets to create one, or to grant a right, fails here too.
"""

from __future__ import annotations

import http.client
import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING

import jwt

from redrive.sandbox import builds, toolchain
from redrive.sandbox.process import free_port
from redrive.sandbox.steps import step

if TYPE_CHECKING:
    from pathlib import Path

    from redrive.sandbox.process import Processes

NAME = "pulsar"
SUPERUSER = "superuser"
_TOKEN_PLUGIN = "org.apache.pulsar.client.impl.auth.AuthenticationToken"  # noqa: S105 - a class
_TOKEN_PROVIDER = "org.apache.pulsar.broker.authentication.AuthenticationProviderToken"  # noqa: S105
_START_SECONDS = 180.0


@dataclass(frozen=True)
class Broker:
    """A running broker.

    Args:
        state: the sandbox's directory.
        port: of the binary protocol, on 127.0.0.1.
        admin_port: of the admin REST interface, on 127.0.0.1.
    """

    state: Path
    port: int
    admin_port: int

    @property
    def service_url(self) -> str:
        """What clients connect to."""
        return f"pulsar://127.0.0.1:{self.port}"

    @property
    def admin_url(self) -> str:
        """Where the admin REST interface is."""
        return f"http://127.0.0.1:{self.admin_port}"

    def token(self, role: str) -> str:
        """A token, signed with the broker's key, whose bearer acts as *role*.

        The role `SUPERUSER` may do everything; any other only what it was granted.
        """
        return jwt.encode({"sub": role}, _key_file(self.state).read_bytes(), algorithm="HS256")

    def token_file(self, role: str) -> Path:
        """A file, readable by its owner only, that holds a token of *role*."""
        file = self.state / "tokens" / role
        file.parent.mkdir(mode=0o700, exist_ok=True)
        file.touch(mode=0o600)
        file.write_text(self.token(role))
        return file


def start(state: Path, processes: Processes) -> Broker:
    """Start a broker whose data are under *state*; it is ready when this returns.

    Raises:
        SandboxError: it ended or did not answer in time.
    """
    home, java_home = builds.pulsar(), toolchain.java_home()
    folder = state / NAME
    folder.mkdir(mode=0o700)
    broker = Broker(state, free_port(), free_port())
    _key_file(state).touch(mode=0o600)
    _key_file(state).write_bytes(secrets.token_bytes(32))
    configuration = folder / "standalone.conf"
    stock = (home / "conf" / "standalone.conf").read_text()
    ours = "".join(f"{key}={value}\n" for key, value in _settings(broker).items())
    configuration.write_text(f"{stock}\n{ours}")  # the last line about a key counts
    command = [str(home / "bin" / "pulsar"), "standalone", "--no-stream-storage",
               "--no-functions-worker", f"--metadata-dir={folder / 'metadata'}",
               f"--bookkeeper-dir={folder / 'bookkeeper'}",
               f"--bookkeeper-port={free_port()}"]  # fmt: skip
    env = {
        "JAVA_HOME": str(java_home),
        "PULSAR_STANDALONE_CONF": str(configuration),
        "PULSAR_LOG_DIR": str(folder / "logs"),
        "PULSAR_MEM": "-Xms256m -Xmx1g -XX:MaxDirectMemorySize=1g",
    }
    with step("start Pulsar"):
        processes.start(NAME, command, env=env, cwd=folder)
        processes.wait_until(NAME, lambda: _answers(broker), seconds=_START_SECONDS)
    return broker


def _settings(broker: Broker) -> dict[str, object]:
    superuser = broker.token_file(SUPERUSER)
    return {
        "brokerServicePort": broker.port,
        "webServicePort": broker.admin_port,
        "bindAddress": "127.0.0.1",
        "advertisedAddress": "127.0.0.1",
        "authenticationEnabled": "true",
        "authenticationProviders": _TOKEN_PROVIDER,
        "tokenSecretKey": _key_file(broker.state).as_uri(),
        "authorizationEnabled": "true",
        "superUserRoles": SUPERUSER,
        "brokerClientAuthenticationPlugin": _TOKEN_PLUGIN,
        "brokerClientAuthenticationParameters": superuser.as_uri(),
        "allowAutoTopicCreation": "false",
        "allowAutoSubscriptionCreation": "false",
    }


def _key_file(state: Path) -> Path:
    return state / NAME / "token-key"


def _answers(broker: Broker) -> bool:
    """Whether the broker passes a message to itself and has made its first namespace."""
    return all(_status(broker, f"/admin/v2/{path}") == http.client.OK
               for path in ("brokers/health", "namespaces/public/default"))  # fmt: skip


def _status(broker: Broker, path: str) -> int | None:
    connection = http.client.HTTPConnection("127.0.0.1", broker.admin_port, timeout=10)
    try:
        connection.request("GET", path, headers={"Authorization": f"Bearer {broker.token(SUPERUSER)}"})
        return connection.getresponse().status
    except (OSError, http.client.HTTPException):
        return None  # not yet
    finally:
        connection.close()
