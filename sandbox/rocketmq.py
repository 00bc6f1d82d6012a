"""A real RocketMQ: a name server and brokers with ACL 2.0, each in a Java of its own.

Called by the tests that need one; the sandbox starts none. Topics and groups are not created on
use.
"""

from __future__ import annotations

import json
import secrets
import socket
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType

from sandbox import builds, toolchain
from sandbox.process import Processes, free_port

CLUSTER = "shop-cluster"
ADMIN = "admin"
NAME_SERVER = "rocketmq-namesrv"
_AUTH = "org.apache.rocketmq.auth"
_START_SECONDS = 180.0
_CLUSTER_INFO = 106
_OPENED = ("java.nio", "java.lang", "java.util", "jdk.internal.ref", "sun.nio.ch")
_JAVA_OPTIONS = [
    "-XX:+UseSerialGC",
    "-XX:TieredStopAtLevel=1",
    *(f"--add-opens=java.base/{package}=ALL-UNNAMED" for package in _OPENED),
    "--add-exports=java.base/jdk.internal.ref=ALL-UNNAMED",
]


@dataclass(frozen=True)
class RocketMQ:
    """A running cluster.

    Args:
        state: the directory of its data and configuration.
        port: of the name server.
        secret: secret key of the user `ADMIN`, who may do everything.
        brokers: name of each master and its port.
    """

    state: Path
    port: int
    secret: str
    brokers: Mapping[str, int]

    @property
    def name_server(self) -> str:
        """The address of the name server."""
        return f"127.0.0.1:{self.port}"


def start(
    state: Path,
    processes: Processes,
    masters: tuple[str, ...] = ("broker-a",),
    settings: Mapping[str, object] = MappingProxyType({}),
) -> RocketMQ:
    """Start a cluster with its data under *state*, and wait until its masters are registered.

    Args:
        state: an empty directory.
        processes: where they are started.
        masters: names of the masters.
        settings: of the brokers, overriding those of the sandbox.

    Raises:
        SandboxError: a server ended or did not answer in time.
    """
    ports = {name: _port() for name in masters}
    cluster = RocketMQ(state, free_port(), secrets.token_hex(16), ports)
    start_name_server(cluster, processes)
    for name in masters:
        start_broker(cluster, name, processes, settings)
    for name in masters:
        processes.wait_until(name, partial(_is_registered, cluster, name), seconds=_START_SECONDS)
    return cluster


def start_name_server(cluster: RocketMQ, processes: Processes) -> None:
    """Start the name server, without waiting until it answers."""
    folder = cluster.state / NAME_SERVER
    settings = {"listenPort": cluster.port, "bindAddress": "127.0.0.1"}
    main = "org.apache.rocketmq.namesrv.NamesrvStartup"
    _start(NAME_SERVER, main, folder, settings, ("-Xms32m", "-Xmx96m"), processes)


def start_broker(
    cluster: RocketMQ,
    name: str,
    processes: Processes,
    settings: Mapping[str, object] = MappingProxyType({}),
) -> None:
    """Start a master, without waiting until it answers."""
    folder = cluster.state / name
    memory = ("-Xms64m", "-Xmx192m", "-XX:MaxDirectMemorySize=192m")
    main = "org.apache.rocketmq.broker.BrokerStartup"
    ours = {**_settings(cluster, name, folder), **settings}
    _start(name, main, folder, ours, memory, processes)


def _start(  # noqa: PLR0913, PLR0917  arguments of one process
    name: str,
    main: str,
    folder: Path,
    settings: Mapping[str, object],
    memory: tuple[str, ...],
    processes: Processes,
) -> None:
    folder.mkdir(mode=0o700, exist_ok=True)
    file = folder / "server.conf"
    file.touch(mode=0o600)
    file.write_text("".join(f"{key}={value}\n" for key, value in settings.items()))
    java = str(toolchain.java_home() / "bin" / "java")
    home = [f"-Duser.home={folder}", f"-Drocketmq.home.dir={folder}"]
    command = [java, *memory, *_JAVA_OPTIONS, *home, "-cp", f"{builds.rocketmq()}/*", main]
    processes.start(name, [*command, "-c", str(file)], cwd=folder)


def _settings(cluster: RocketMQ, name: str, folder: Path) -> dict[str, object]:
    return {
        "brokerClusterName": CLUSTER,
        "brokerName": name,
        "brokerId": 0,
        "brokerIP1": "127.0.0.1",
        "listenPort": cluster.brokers[name],
        "haListenPort": cluster.brokers[name] - 1,
        "bindAddress": "127.0.0.1",
        "namesrvAddr": cluster.name_server,
        "storePathRootDir": folder / "store",
        "storePathCommitLog": folder / "store" / "commitlog",
        "autoCreateTopicEnable": "false",
        "autoCreateSubscriptionGroup": "false",
        "authenticationEnabled": "true",
        "authenticationProvider": f"{_AUTH}.authentication.provider.DefaultAuthenticationProvider",
        "authenticationMetadataProvider": (
            f"{_AUTH}.authentication.provider.LocalAuthenticationMetadataProvider"
        ),
        "authorizationEnabled": "true",
        "authorizationProvider": f"{_AUTH}.authorization.provider.DefaultAuthorizationProvider",
        "authorizationMetadataProvider": (
            f"{_AUTH}.authorization.provider.LocalAuthorizationMetadataProvider"
        ),
        "authConfigPath": folder / "auth",
        "initAuthenticationUser": json.dumps({"username": ADMIN, "password": cluster.secret}),
        "innerClientAuthenticationCredentials": json.dumps(
            {"accessKey": ADMIN, "secretKey": cluster.secret}
        ),
        # By default a broker reserves gigabytes, and refuses writes to a disk that is 90 % full.
        "mappedFileSizeCommitLog": 64 * 2**20,
        "mappedFileSizeConsumeQueue": 600_000,
        "maxHashSlotNum": 50_000,
        "maxIndexNum": 200_000,
        "diskMaxUsedSpaceRatio": 95,
    }


def _port() -> int:
    """Return a port after two that are free as well: a broker listens at all three."""
    ports = [free_port() for _ in range(3)]
    while ports[2] - ports[0] != 2:  # noqa: PLR2004  another process took one in between
        ports = [*ports[1:], free_port()]
    return ports[2]


def _is_registered(cluster: RocketMQ, name: str) -> bool:
    """Return True if the name server lists a master: it answers calls since then."""
    header = json.dumps({"code": _CLUSTER_INFO, "flag": 0, "opaque": 1}).encode()
    try:
        with socket.create_connection(("127.0.0.1", cluster.port), timeout=10) as link:
            link.sendall(struct.pack(">II", 4 + len(header), len(header)) + header)
            with link.makefile("rb") as answer:
                listed = answer.read(int.from_bytes(answer.read(4), "big"))
    except OSError:
        return False
    return f'"brokerName":"{name}"'.encode() in listed
