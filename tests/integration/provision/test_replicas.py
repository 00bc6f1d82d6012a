"""Two operators of one release: one acts; when it dies or freezes the other does, and it alone."""

from __future__ import annotations

import http.client
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Event, Thread

import pytest

from redrive.api import Body
from sandbox import installation
from sandbox.sandbox import Sandbox
from tests.integration.provision.conftest import SECONDS, MakeShop, Shop
from tests.support.operator_replicas import NAMES, StartReplica, start_replica

pytestmark = pytest.mark.xdist_group("own sandbox")

__all__ = ["start_replica"]

POLICIES = 12


class Door(ThreadingHTTPServer):
    """Stands before the broker's admin API, and notes what is written.

    Of the writes only the first few get through until it is opened, so that whoever writes can be
    caught in the midst of it.
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
        behind = http.client.HTTPConnection("127.0.0.1", self.server.broker, timeout=30)
        passed = {k: v for k, v in self.headers.items() if k != "Accept-Encoding"}
        behind.request(self.command, self.path, body, passed)
        answer = behind.getresponse()
        content = answer.read()
        behind.close()
        self.send_response(answer.status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    do_GET = do_PUT = do_POST = do_DELETE = _pass  # noqa: N815  as the library calls them

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture
def door(shop: Shop) -> Iterator[Door]:
    with Door(shop.broker.admin_port) as door:
        Thread(target=door.serve_forever, daemon=True).start()
        yield door
        door.shutdown()


@pytest.fixture
def shop(make_shop: MakeShop) -> Shop:
    return make_shop()


def test_when_the_one_that_acts_is_killed_the_other_goes_on_within_20_s(
    start_replica: StartReplica, shop: Shop
) -> None:
    one = start_replica(NAMES[0], "redrive serves")
    two = start_replica(NAMES[1], "redrive stands by")
    shop.create_topic(shop.topic("orders"))
    shop.connection()

    one.process.kill()
    shop.policy()
    assert two.takes_over() < 20
    shop.ready()


def test_one_that_was_stopped_past_its_lease_writes_nothing_more_and_ends(
    start_replica: StartReplica, shop: Shop, door: Door
) -> None:
    one = start_replica(NAMES[0], "redrive serves")
    two = start_replica(NAMES[1], "redrive stands by")
    shop.create_topic(shop.topic("orders"))
    shop.connection(adminURL=f"http://127.0.0.1:{door.server_port}")
    names = [f"p{number}" for number in range(POLICIES)]
    shop.policies({name: {"subscription": name} for name in names})
    door.wait_for_writes(POLICIES)

    one.process.suspend()  # in the midst of its work
    half_done = len(door.writes)
    door.opened.set()
    two.takes_over()
    for name in names:
        shop.ready(name)
    two.process.suspend()  # what is written from here on is by the other
    objects = at_rest(shop)
    done = len(door.writes)
    assert done > half_done

    one.process.resume()
    one.process.wait(timeout=SECONDS)
    assert (door.writes[done:], written(shop)) == ([], objects)
    two.process.resume()
    # It had a lot to write still, and was kept from it.
    assert "nothing is written, for the lease was not renewed in time" in one.logged()
    assert "lease lost: another operator has taken the lease" in one.logged()


def at_rest(shop: Shop) -> dict[str, Body]:
    """What was written, once all that was sent has arrived."""
    deadline = time.monotonic() + SECONDS
    before = written(shop)
    while True:
        time.sleep(2)
        after = written(shop)
        if after == before:
            return after
        assert time.monotonic() < deadline, "objects still change"
        before = after


def written(shop: Shop) -> dict[str, Body]:
    """All that an operator writes in the shop's namespace, by uid."""
    return {
        item["metadata"]["uid"]: item
        for kind in ("retrypolicy", "brokerconnection", "configmap", "event")
        for item in shop.cluster.objects.list(kind, shop.namespace)
    }


def test_operator_restart_provisions_new_policies_only(
    make_shop: MakeShop, sandbox: Sandbox
) -> None:
    shop = make_shop()
    shop.connection()
    for name in ("orders", "others"):
        shop.create_topic(shop.topic(name))
    shop.policy(delayLadder={"fixed": "1m"})  # of 1 s some brokers would have a warning
    settled = shop.ready()
    shop.told("orders", "Provisioned")
    sandbox.processes.stop(installation.OPERATOR)
    shop.policy("others", topic=shop.topic("others"))
    installation.start_operator(sandbox)
    shop.ready("others")
    conditions = settled["status"]["conditions"]
    assert shop.get("retrypolicy", "orders")["status"]["conditions"] == conditions
    assert shop.event_reasons("orders") == [("Normal", "Provisioned")]
