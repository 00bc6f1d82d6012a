"""Two operators of one release: a leader that freezes writes nothing after it wakes."""

from __future__ import annotations

import http.client
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Event, Thread

import pytest

from redrive.api import Body
from tests.integration.provision.conftest import SECONDS, MakeShop, Shop
from tests.support.installed_operator import NAMES, StartReplica, start_replica

__all__ = ["start_replica"]

POLICIES = 12


class Door(ThreadingHTTPServer):
    """A proxy of the broker's admin API that records writes.

    It forwards only the first writes until it is opened, so that a test can stop an operator that
    has not finished its writes.
    """

    def __init__(self, broker: int) -> None:
        super().__init__(("127.0.0.1", 0), _Porter)
        self.broker = broker
        self.writes: list[str] = []
        self.opened = Event()

    def wait_for_writes(self, count: int) -> None:
        deadline = time.monotonic() + SECONDS
        while len(self.writes) < count:
            assert time.monotonic() < deadline, f"no more than {len(self.writes)} writes"
            time.sleep(0.01)


class _Porter(BaseHTTPRequestHandler):
    server: Door

    def _pass(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.command != "GET":
            self.server.writes.append(f"{self.command} {self.path}")
            if len(self.server.writes) > POLICIES:
                self.server.opened.wait(180)
        broker = http.client.HTTPConnection("127.0.0.1", self.server.broker, timeout=30)
        headers = {k: v for k, v in self.headers.items() if k != "Accept-Encoding"}
        broker.request(self.command, self.path, body, headers)
        answer = broker.getresponse()
        content = answer.read()
        broker.close()
        self.send_response(answer.status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    do_GET = do_PUT = do_POST = do_DELETE = _pass  # noqa: N815  names of the library

    def log_message(self, *_: object) -> None:
        """Log nothing."""


@pytest.fixture
def door(shop: Shop) -> Iterator[Door]:
    with Door(shop.broker.admin_port) as door:
        Thread(target=door.serve_forever, daemon=True).start()
        yield door
        door.shutdown()


@pytest.fixture
def shop(make_shop: MakeShop) -> Shop:
    return make_shop()


def test_leader_frozen_past_its_lease_writes_nothing_and_exits(
    start_replica: StartReplica, shop: Shop, door: Door
) -> None:
    leader = start_replica(NAMES[0], "redrive serves")
    successor = start_replica(NAMES[1], "redrive is a standby")
    shop.create_topic(shop.topic("orders"))
    shop.connection(adminURL=f"http://127.0.0.1:{door.server_port}")
    names = [f"p{number}" for number in range(POLICIES)]
    shop.policies({name: {"subscription": name} for name in names})
    door.wait_for_writes(POLICIES)

    leader.process.suspend()  # before its last writes
    writes_before = len(door.writes)
    door.opened.set()
    successor.takes_over()
    for name in names:
        shop.ready(name)
    successor.process.suspend()  # from here on only the former leader can write
    objects = stable_objects(shop)
    writes = len(door.writes)
    assert writes > writes_before

    leader.process.resume()
    leader.process.wait(timeout=SECONDS)
    assert (door.writes[writes:], objects_of(shop)) == ([], objects)
    successor.process.resume()
    # It had more to write, and was prevented.
    assert "write refused: the lease of this operator expired" in leader.logged()
    assert "lease lost: another operator has taken the lease" in leader.logged()


def stable_objects(shop: Shop) -> dict[str, Body]:
    """Return the objects of the namespace, once they no longer change."""
    deadline = time.monotonic() + SECONDS
    before = objects_of(shop)
    while True:
        time.sleep(2)
        after = objects_of(shop)
        if after == before:
            return after
        assert time.monotonic() < deadline, "objects still change"
        before = after


def objects_of(shop: Shop) -> dict[str, Body]:
    """All objects that an operator writes in the shop's namespace, by uid."""
    return {
        item["metadata"]["uid"]: item
        for kind in ("retrypolicy", "brokerconnection", "configmap", "event")
        for item in shop.cluster.objects.list(kind, shop.namespace)
    }
