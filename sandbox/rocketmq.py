"""A real RocketMQ: name server, brokers and a proxy with ACL 2.0, each in a Java of its own.

Called by the tests and the demo that need one; the sandbox starts none. Topics and groups are not
created on use.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import socket
import struct
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar, cast

from redrive.admin.access import Access
from redrive.admin.rocketmq import Master, RocketMQAdmin, RocketMQReply, RocketMQSession
from sandbox import builds, toolchain
from sandbox.process import Processes, free_port

CLUSTER = "shop-cluster"
ADMIN = "admin"
NAME_SERVER = "rocketmq-namesrv"
PROXY = "rocketmq-proxy"
_AUTH = "org.apache.rocketmq.auth"
_START_SECONDS = 180.0
_CLUSTER_INFO, _PUT_USER, _PUT_ACL = 106, 3001, 3006
_T = TypeVar("_T")
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

    @property
    def admin(self) -> RocketMQAdmin:
        """The administration of the cluster as the user `ADMIN`."""
        return RocketMQAdmin([self.name_server], Access(signing_key=(ADMIN, self.secret)))


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
    file = _configuration(folder, _lines(settings))
    _start(NAME_SERVER, [main, "-c", str(file)], folder, ("-Xms32m", "-Xmx96m"), processes)


def start_broker(
    cluster: RocketMQ,
    name: str,
    processes: Processes,
    settings: Mapping[str, object] = MappingProxyType({}),
) -> None:
    """Start a master, without waiting until it answers."""
    folder = cluster.state / name
    # Each thread that stores messages keeps a buffer of 4 MiB.
    memory = ("-Xms64m", "-Xmx192m", "-XX:MaxDirectMemorySize=512m")
    main = "org.apache.rocketmq.broker.BrokerStartup"
    file = _configuration(folder, _lines({**_settings(cluster, name, folder), **settings}))
    _start(name, [main, "-c", str(file)], folder, memory, processes)


def start_proxy(cluster: RocketMQ, processes: Processes) -> str:
    """Start a proxy for gRPC clients, wait until it listens, and return its address.

    Raises:
        SandboxError: it ended or did not listen in time.
    """
    folder, port = cluster.state / PROXY, free_port()
    settings = _access(cluster, "org.apache.rocketmq.proxy.auth.Proxy") | {
        "rocketMQClusterName": CLUSTER,
        "namesrvAddr": cluster.name_server,
        "grpcServerPort": port,
        "remotingListenPort": free_port(),
        "localServeAddr": "127.0.0.1",
        "enableAclRpcHookForClusterMode": True,  # it signs its own calls
    }
    file = _configuration(folder, json.dumps(settings))
    main = "org.apache.rocketmq.proxy.ProxyStartup"
    memory = ("-Xms64m", "-Xmx192m", "-XX:MaxDirectMemorySize=128m")
    _start(PROXY, [main, "-pc", str(file), "-pm", "cluster"], folder, memory, processes)
    processes.wait_until(PROXY, partial(_listens, port), seconds=_START_SECONDS)
    return f"127.0.0.1:{port}"


def _configuration(folder: Path, text: str) -> Path:
    """Write the file of a server, which only its owner can read."""
    folder.mkdir(mode=0o700, exist_ok=True)
    file = folder / "server.conf"
    file.touch(mode=0o600)
    file.write_text(text)
    return file


def _lines(settings: Mapping[str, object]) -> str:
    return "".join(f"{key}={value}\n" for key, value in settings.items())


def _start(
    name: str, program: list[str], folder: Path, memory: tuple[str, ...], processes: Processes
) -> None:
    java = str(toolchain.java_home() / "bin" / "java")
    home = [f"-Duser.home={folder}", f"-Drocketmq.home.dir={folder}"]
    command = [java, *memory, *_JAVA_OPTIONS, *home, "-cp", f"{builds.rocketmq()}/*", *program]
    # The proxy reads its home from the environment.
    processes.start(name, command, cwd=folder, env={"RMQ_PROXY_HOME": str(folder)})


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
        **_access(cluster, f"{_AUTH}.{{}}.provider.Local"),
        "authConfigPath": folder / "auth",
        "initAuthenticationUser": json.dumps({"username": ADMIN, "password": cluster.secret}),
        # By default a broker reserves gigabytes, and refuses writes to a disk that is 90 % full.
        "mappedFileSizeCommitLog": 64 * 2**20,
        "mappedFileSizeConsumeQueue": 600_000,
        "maxHashSlotNum": 50_000,
        "maxIndexNum": 200_000,
        "diskMaxUsedSpaceRatio": 95,
    }


def _access(cluster: RocketMQ, metadata: str) -> dict[str, object]:
    """Return the settings of ACL 2.0, with the package of the providers of users and rights."""
    settings: dict[str, object] = {
        "innerClientAuthenticationCredentials": json.dumps(
            {"accessKey": ADMIN, "secretKey": cluster.secret}
        )
    }
    for subject in ("authentication", "authorization"):
        kind = subject.capitalize()
        settings |= {
            f"{subject}Enabled": "true",
            f"{subject}Provider": f"{_AUTH}.{subject}.provider.Default{kind}Provider",
            f"{subject}MetadataProvider": f"{metadata.format(subject)}{kind}MetadataProvider",
        }
    return settings


def _listens(port: int) -> bool:
    with socket.socket() as link:
        return link.connect_ex(("127.0.0.1", port)) == 0


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


async def call(
    session: RocketMQSession,
    master: Master,
    code: int,
    body: bytes = b"",
    **fields: Any,  # noqa: ANN401  values of any type are written as text
) -> RocketMQReply:
    """Send a call that redrive does not make."""
    return await session._call(master, cast("Any", code), "test", body, **fields)  # noqa: SLF001


async def create_user(
    session: RocketMQSession, master: Master, name: str, kind: str = "Normal", secret: str = ""
) -> str:
    """Create a user, without rights unless it is a `Super` user, and return its secret key."""
    secret = secret or secrets.token_hex(16)
    user = {"username": name, "password": secret, "userType": kind, "userStatus": "enable"}
    await call(session, master, _PUT_USER, json.dumps(user).encode(), username=name)
    return secret


async def allow(
    session: RocketMQSession, master: Master, user: str, rights: Mapping[str, list[str]]
) -> None:
    """Give a user rights: actions by resource, such as `Topic:orders`."""
    entries = [
        {"resource": resource, "actions": actions, "decision": "Allow"}
        for resource, actions in rights.items()
    ]
    subject = f"User:{user}"
    acl = {"subject": subject, "policies": [{"policyType": "Custom", "entries": entries}]}
    await call(session, master, _PUT_ACL, json.dumps(acl).encode(), subject=subject)


def at_master(cluster: RocketMQ, work: Callable[[RocketMQSession, Master], Awaitable[_T]]) -> _T:
    """Return the result of *work* at the only master, with a session of the administrator."""

    async def run() -> _T:
        async with cluster.admin.session() as session:
            (master,) = await session.masters()
            return await work(session, master)

    return asyncio.run(run())
