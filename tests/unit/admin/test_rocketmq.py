"""Answers of hostile servers to the client of RocketMQ; `tests/contract` has those of real ones."""

from __future__ import annotations

import asyncio
import itertools
import json
import ssl
import struct
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from inspect import iscoroutinefunction
from typing import Any
from unittest.mock import Mock

import pytest
import trustme

from redrive.admin import connector, rocketmq
from redrive.admin.access import Access, tls_context
from redrive.admin.connector import Dialer
from redrive.admin.errors import AdminError, BrokerRefusedError
from redrive.admin.guards import Fence
from redrive.admin.rocketmq import (
    MAX_FRAME,
    MAX_FRAMES,
    MAX_MASTERS,
    MAX_OFFSET,
    Master,
    RocketMQAdmin,
    RocketMQSession,
)
from redrive.errors import RedriveError
from redrive.provision.groups import DesiredGroup, MasterState, diff_group
from redrive.reasons import Reason
from tests.unit.admin.test_answers import numbers, variants

Answer = Callable[[dict[str, Any]], bytes]
"""Bytes that a server sends after a call with this header."""


def frame(body: bytes = b"", **header: object) -> bytes:
    text = json.dumps({"code": 0, "flag": 1, **header}).encode()
    return struct.pack(">II", 4 + len(text) + len(body), len(text)) + text + body


@asynccontextmanager
async def serving(answer: Answer, tls: ssl.SSLContext | None = None) -> AsyncIterator[str]:
    """Yield the address of a server that answers each call by *answer*."""
    connections = set[asyncio.Task[None]]()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            while length := int.from_bytes(await reader.read(4), "big"):
                text = await reader.readexactly(length)
                size = int.from_bytes(text[1:4], "big")
                writer.write(answer(json.loads(text[4 : 4 + size])))
            writer.close()
            await writer.wait_closed()

    def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.add(asyncio.create_task(serve(reader, writer)))

    server = await asyncio.start_server(connected, "127.0.0.1", 0, ssl=tls)
    async with server:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        await asyncio.gather(*connections)  # the client closes them


def listing(address: str, cluster: str = "one") -> bytes:
    """A list of one master, in the form of the broker's JSON library."""
    brokers = f'{{"a":{{"brokerAddrs":{{0:"{address}",1:"10.0.0.1:1"}}}}}}'
    return f'{{"brokerAddrTable":{brokers},"clusterAddrTable":{{"{cluster}":["a"]}}}}'.encode()


async def refusal(answer: Answer, **settings: Any) -> RedriveError:  # noqa: ANN401
    """Return the error of a list of the masters by a server."""
    async with serving(answer) as address:
        admin = RocketMQAdmin([address], Access(), **settings)
        with pytest.raises(RedriveError) as refused:
            async with admin.session() as session:
                await session.masters()
    return refused.value


@pytest.mark.parametrize(
    "sent",
    [
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        struct.pack(">I", MAX_FRAME + 1),
        struct.pack(">II", 8, 4) + b"null",
        struct.pack(">II", 8, 60) + b"{}{}",
        struct.pack(">II", 8, 1 << 24 | 4) + b"{}{}",
        struct.pack(">II", 8, 4) + b"[[[[",
    ],
)
async def test_server_of_another_protocol_is_unreachable(sent: bytes) -> None:
    def answer(_: dict[str, Any]) -> bytes:
        return sent

    async with serving(answer) as address:
        admin = RocketMQAdmin([address], Access())
        with pytest.raises(AdminError) as refused:
            async with asyncio.timeout(30), admin.session() as session:
                await session.masters()
    assert refused.value.reason is Reason.BROKER_UNREACHABLE


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1:99999",
        "a..b:1",
        f"{'a' * 64}.b:1",
        ".b:1",
        "xn--\u0430..:1",
        "\ud800:1",
        "[:::]:1",
    ],
)
async def test_invalid_address_is_unreachable(address: str) -> None:
    async with RocketMQAdmin([], Access()).session() as session:
        with pytest.raises(AdminError) as refused:
            await session.topic(Master("a", address), "orders")
    assert refused.value.reason is Reason.BROKER_UNREACHABLE


async def test_second_name_server_is_used_if_the_first_is_down() -> None:
    def answer(header: dict[str, Any]) -> bytes:
        return frame(listing("127.0.0.1:10911"), opaque=header["opaque"])

    async with serving(answer) as address:
        admin = RocketMQAdmin(["127.0.0.1:1", address], Access())
        async with admin.session() as session:
            assert await session.masters() == (Master("a", "127.0.0.1:10911"),)


async def test_master_that_is_not_listed_is_unreachable() -> None:
    brokers = {
        name: {"brokerAddrs": {number: "127.0.0.1:10911"}}
        for name, number in (("a", "0"), ("slave-only", "1"))
    }
    names = ["slave-only", "without-addresses", "a"]
    table = {"brokerAddrTable": brokers, "clusterAddrTable": {"one": names}}

    def answer(header: dict[str, Any]) -> bytes:
        return frame(json.dumps(table).encode(), opaque=header["opaque"])

    async with serving(answer) as address, RocketMQAdmin([address], Access()).session() as session:
        listed, *others = await session.masters(["a", "gone"])
        assert listed == Master("a", "127.0.0.1:10911")
        assert others == [Master(name, "") for name in ("gone", "slave-only", "without-addresses")]
        for master in others:
            with pytest.raises(RedriveError, match=f"got '{master.name}'") as refused:
                await session.has_consumers(master, "g")
            assert refused.value.reason is Reason.BROKER_UNREACHABLE


@pytest.mark.parametrize("host", ["localhost", "other.example"])
async def test_certificate_must_be_for_the_host_of_the_address(host: str) -> None:
    authority, server = trustme.CA(), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert(host).configure_cert(server)
    access = Access(tls=tls_context(ca=authority.cert_pem.bytes().decode()))

    def answer(header: dict[str, Any]) -> bytes:
        return frame(listing("localhost:1"), opaque=header["opaque"])

    async with serving(answer, server) as address:
        name = address.replace("127.0.0.1", "localhost")
        async with RocketMQAdmin([name], access).session() as session:
            if host == "localhost":
                assert await session.masters() == (Master("a", "localhost:1"),)
            else:
                with pytest.raises(AdminError) as refused:
                    await session.masters()
                assert refused.value.reason is Reason.CERTIFICATE_REFUSED


async def test_calls_of_the_server_are_skipped() -> None:
    def answer(header: dict[str, Any]) -> bytes:
        number = header["opaque"]
        others = frame(opaque=number, flag=0), frame(opaque=number + 7)
        return b"".join(others) + frame(listing("127.0.0.1:1"), opaque=number)

    async with (
        serving(answer) as address,
        RocketMQAdmin([address], Access()).session() as session,
    ):
        assert len(await session.masters()) == 1


async def test_frames_before_the_answer_are_limited() -> None:
    def answer(header: dict[str, Any]) -> bytes:
        number = header["opaque"]
        return MAX_FRAMES * frame(opaque=number, flag=0) + frame(listing("a:1"), opaque=number)

    assert (await refusal(answer)).reason is Reason.BROKER_UNREACHABLE


async def test_cluster_with_too_many_masters_is_refused() -> None:
    names = json.dumps([f"m{number}" for number in range(MAX_MASTERS + 1)]).encode()
    body = listing("127.0.0.1:1").replace(b'["a"]', names)
    error = await refusal(lambda h: frame(body, opaque=h["opaque"]))
    assert (error.reason, str(MAX_MASTERS) in str(error)) == (Reason.LIMIT_EXCEEDED, True)


@pytest.mark.parametrize(
    "address", ["10.1.2.3:10911", "metadata.internal:80", "127.0.0.1", "127.0.0.1:x", ":1"]
)
async def test_signed_calls_go_to_named_hosts_only(address: str) -> None:
    error = await refusal(lambda h: frame(listing(address), opaque=h["opaque"]))
    assert error.reason is Reason.REDIRECT_REFUSED


@pytest.mark.parametrize("text", ["\\u2028", "\\u202e", "\\n\\u001b[2J"])
async def test_names_of_a_cluster_are_shown_as_printable_text(text: str) -> None:
    def answer(header: dict[str, Any]) -> bytes:
        return frame(body.replace(b"NAME", text.encode()), opaque=header["opaque"])

    body = listing("127.0.0.1:1").replace(b'"a"', b'"NAME"')
    async with (
        serving(answer) as address,
        RocketMQAdmin([address], Access()).session() as session,
    ):
        ((name, _),) = await session.masters()
    body = listing("NAME:1")
    elsewhere = await refusal(answer, broker_hosts=["*"])
    assert elsewhere.reason is Reason.REDIRECT_REFUSED
    body = listing("127.0.0.1:1", "NAME").replace(b'["a"]', b"[]")
    assert all(map(str.isprintable, (name, str(elsewhere), str(await refusal(answer)))))


async def test_answers_are_parsed_in_the_share_of_their_namespace(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def answer(header: dict[str, Any]) -> bytes:
        return frame(listing("127.0.0.1:1"), opaque=header["opaque"])

    async def masters(namespace: str) -> None:
        admin = RocketMQAdmin([address], Access(), dialer=dialer, namespace=namespace)
        async with admin.session() as session:
            await session.masters()

    dialer = Dialer()
    async with serving(answer) as address:
        monkeypatch.setattr(time, "thread_time", itertools.count().__next__)
        await masters("hostile")
        assert dialer.shares.pause_of("hostile") > 1
        late = asyncio.create_task(masters("hostile"))
        await masters("shop")
        assert not late.done()
        late.cancel()
        await asyncio.wait([late])


async def test_records_are_decrypted_in_the_share_of_their_namespace(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    authority, server = trustme.CA(), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("localhost").configure_cert(server)
    access, dialer = Access(tls=tls_context(ca=authority.cert_pem.bytes().decode())), Dialer()
    waits = Mock(wraps=dialer.shares.wait)
    monkeypatch.setattr(dialer.shares, "wait", waits)

    def answer(header: dict[str, Any]) -> bytes:
        return frame(b"{}" * 2**15, opaque=header["opaque"])

    async with serving(answer, server) as address:
        name = address.replace("127.0.0.1", "localhost")
        admin = RocketMQAdmin([name], access, dialer=dialer, namespace="hostile")
        monkeypatch.setattr(time, "thread_time", itertools.count(step=0.01).__next__)
        async with asyncio.timeout(60), admin.session() as session:
            assert await session.group(Master("a", name), "g") == {}
    assert {call.args[0] for call in waits.call_args_list} == {"hostile"}
    assert "resume" in {call.args[1].__name__ for call in waits.call_args_list}


async def test_sessions_of_a_namespace_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connector, "SESSIONS_OF_NAMESPACE", 2)
    monkeypatch.setattr(connector, "SESSIONS_OF_CONNECTION", 1)
    dialer, end = Dialer(), asyncio.Event()

    async def hold(namespace: str, name: str, until: asyncio.Event) -> None:
        admin = RocketMQAdmin([], Access(), dialer=dialer, namespace=namespace, name=name)
        async with admin.session():
            await until.wait()

    free = asyncio.Event()
    free.set()
    first = asyncio.create_task(hold("hostile", "down", end))
    same = asyncio.create_task(hold("hostile", "down", free))
    await hold("hostile", "other", free)
    second = asyncio.create_task(hold("hostile", "other", end))
    third = asyncio.create_task(hold("hostile", "third", free))
    await hold("shop", "down", free)
    assert not any(task.done() for task in (first, same, second, third))
    end.set()
    await asyncio.gather(first, same, second, third)


async def test_session_keeps_few_connections_and_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(header: dict[str, Any]) -> bytes:
        return frame(b"{}", opaque=header["opaque"])

    monkeypatch.setattr(rocketmq, "MAX_LINKS", 1)
    opened = Mock(wraps=(dialer := Dialer()).open)
    monkeypatch.setattr(dialer, "open", opened)
    async with (
        serving(answer) as one,
        serving(answer) as other,
        RocketMQAdmin([], Access(), dialer=dialer).session() as session,
    ):
        for address in (one, one, other, one):
            assert await session.group(Master("a", address), "g") == {}
        monkeypatch.setattr(rocketmq, "_IDLE_SECONDS", -1)  # its server may have closed it
        assert await session.group(Master("a", one), "g") == {}
    assert [call.args[0] for call in opened.call_args_list] == [one, other, one, one]
    monkeypatch.setattr(rocketmq, "SESSION_SECONDS", 0)
    with pytest.raises(AdminError) as late:
        async with RocketMQAdmin([], Access()).session():
            await asyncio.sleep(60)
    assert late.value.reason is Reason.BROKER_UNREACHABLE


async def test_broker_hosts_may_be_patterns() -> None:
    def answer(header: dict[str, Any]) -> bytes:
        return frame(listing("broker-1.rocketmq.svc:10911"), opaque=header["opaque"])

    hosts = ["broker-*.rocketmq.svc"]
    async with (
        serving(answer) as address,
        RocketMQAdmin([address], Access(), broker_hosts=hosts).session() as session,
    ):
        assert len(await session.masters()) == 1


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"", Reason.UNEXPECTED_ANSWER),
        (b"[]", Reason.UNEXPECTED_ANSWER),
        (b"\xff", Reason.UNEXPECTED_ANSWER),
        (b'{"clusterAddrTable":{"one":3},"brokerAddrTable":{}}', Reason.BROKER_UNREACHABLE),
        (
            b'{"clusterAddrTable":{"one":["a"]},"brokerAddrTable":{"a":3}}',
            Reason.BROKER_UNREACHABLE,
        ),
        (
            b'{"clusterAddrTable":{"one":["a"],"two":[]},"brokerAddrTable":{}}',
            Reason.BROKER_UNREACHABLE,
        ),
    ],
)
async def test_malformed_list_of_brokers_is_refused(body: bytes, reason: Reason) -> None:
    error = await refusal(lambda h: frame(body, opaque=h["opaque"]))
    assert error.reason is reason


@pytest.mark.parametrize("number", [-1, 1.5, True, "1e9", MAX_OFFSET + 1, None, "٣"])
async def test_number_out_of_bounds_is_refused(number: object) -> None:
    def answer(header: dict[str, Any]) -> bytes:
        return frame(opaque=header["opaque"], extFields={"offset": number})

    async with (
        serving(answer) as address,
        RocketMQAdmin([address], Access()).session() as session,
    ):
        with pytest.raises(AdminError) as refused:
            await session.count(Master("a", address), "orders", 1)
    assert refused.value.reason is Reason.UNEXPECTED_ANSWER


async def test_write_needs_the_lease() -> None:
    calls: list[int] = []

    def answer(header: dict[str, Any]) -> bytes:
        calls.append(header["code"])
        return frame(b"{}", opaque=header["opaque"])

    async with serving(answer) as address:
        admin = RocketMQAdmin([address], Access(), fence=Fence(lambda: 0.0))
        async with admin.session() as session:
            master = Master("a", address)
            assert await session.group(master, "g") == {}
            with pytest.raises(RedriveError) as refused:
                await session.put_group(master, {"groupName": "g"})
    assert refused.value.reason is Reason.LEASE_NOT_RENEWED
    assert calls == [352]


@pytest.mark.parametrize(
    ("code", "remark", "reason"),
    [
        (16, "User:ghost is not found.", Reason.AUTHENTICATION_FAILED),
        (16, "User:ghost has no permission to access Group:g", Reason.FORBIDDEN),
        (2, "busy", Reason.BROKER_FAILED),
        (1, "line\none\x07", Reason.BROKER_REFUSED),
        (1, "[PC_SYNCHRONIZED]broker busy, start flow control for a while", Reason.BROKER_FAILED),
        (1, "create mapped file failed, server is busy or broken.", Reason.BROKER_FAILED),
        (1, "in-sync replicas not enough", Reason.BROKER_FAILED),
        (1, "broker unable to service, until 2026-11-30 16:00:00,000", Reason.BROKER_FAILED),
        (13, "the message is illegal", Reason.BROKER_REFUSED),
    ],
)
async def test_refusal_has_its_reason_and_one_line(code: int, remark: str, reason: Reason) -> None:
    error = await refusal(lambda h: frame(opaque=h["opaque"], code=code, remark=remark))
    assert error.reason is reason
    if isinstance(error, BrokerRefusedError):
        assert error.has_cause is (code != 1)
    assert "\n" not in str(error)
    assert "\x07" not in str(error)


async def _drift(session: RocketMQSession, master: Master) -> list[str]:
    """Return the actions of a policy whose group has any settings; they keep others."""
    want = DesiredGroup("g", {"groupName": "g", "retryMaxTimes": 16, "groupRetryPolicy": {}}, {})
    group = await session.group(master, "g")
    actions = list(diff_group(want, MasterState(master, group, {})))
    assert all(json.dumps(vars(action).get("settings")) for action in actions)
    return list(map(str, actions))


READS: dict[str, tuple[Callable[[RocketMQSession, Master], Awaitable[object]], dict[str, Any]]] = {
    "masters": (
        lambda s, _: s.masters(),
        {"brokerAddrTable": {"a": {"brokerAddrs": {"0": "127.0.0.1:1"}}},
         "clusterAddrTable": {"one": ["a"]}},
    ),
    "version": (lambda s, m: s.version(m), {"table": {"brokerVersionDesc": "V5_5_0"}}),
    "retention": (lambda s, m: s.retention(m), {}),
    "group": (_drift, {"groupName": "g", "retryMaxTimes": 16}),
    "has_consumers": (lambda s, m: s.has_consumers(m, "g"), {"consumerIdList": ["a"]}),
    "topic": (lambda s, m: s.topic(m, "t"), {"readQueueNums": 4, "writeQueueNums": 4, "perm": 6}),
    "messages": (
        lambda s, m: s.messages(m, "t"),
        {"readQueueNums": 2, "writeQueueNums": 2, "perm": 6, "offset": 7},
    ),
    "count": (lambda s, m: s.count(m, "t", 2), {"offset": 7}),
    "offsets": (lambda s, m: s.offsets(m, "t", 0), {"offset": 7}),
    "pull": (lambda s, m: s.pull(m, "t", 0, 0, "g"), {"nextBeginOffset": 7}),
}  # fmt: skip
"""Calls that read, with a valid answer each: its body, and the fields of its header."""


@pytest.mark.parametrize("name", READS)
async def test_hostile_answer_of_rocketmq_is_refused_or_bounded(name: str) -> None:
    call, valid = READS[name]
    refusals: list[dict[str, Any]] = [{"code": 17, "remark": ["x"]}, {"code": 1, "remark": 10**30},
                {"code": 16, "remark": "\ud800"}, {"code": 2, "remark": "\u202e"}]  # fmt: skip
    answers: list[tuple[bytes, dict[str, Any]]] = [
        (body, {"extFields": _fields(body)}) for body in variants(valid)
    ]
    answers += [(json.dumps(valid).encode(), refusal) for refusal in refusals]
    body, header = answers[0]

    def answer(asked: dict[str, Any]) -> bytes:
        return frame(body, opaque=asked["opaque"], **header)

    async with (
        serving(answer) as address,
        asyncio.timeout(60),
        RocketMQAdmin([address], Access()).session() as session,
    ):
        for body, header in answers:
            try:
                result = await call(session, Master("a", address))
                shown = repr(result)
            except RedriveError as error:
                shown, result = str(error), ()
            assert shown.isprintable(), (body, header)
            assert all(abs(number) < 2**63 for number in numbers(result)), body


def _fields(body: bytes) -> object:
    return None if b"1e999" in body else json.loads(body)


def test_every_reading_call_to_rocketmq_gets_hostile_answers() -> None:
    calls = {name for name, method in vars(RocketMQSession).items() if iscoroutinefunction(method)}
    writes = {name for name in calls if name.startswith(("put_", "delete_", "send"))}
    assert {name for name in calls - writes if not name.startswith("_")} == READS.keys()
