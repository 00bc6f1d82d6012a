"""The steps of the demo, in order, in a sandbox where redrive is installed.

Called by ``python -m sandbox.demo`` and, with fewer orders, by the end-to-end test.
"""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass
from time import gmtime, monotonic, sleep, strftime
from typing import ClassVar

import jwt

from sandbox import chart
from sandbox.demo import orders, screen, shop
from sandbox.demo.account import Account
from sandbox.demo.stage import NAMESPACE, TIMEOUT_SECONDS, Stage
from sandbox.errors import SandboxError
from sandbox.sandbox import Sandbox

RETRY_TOPIC, DEAD_LETTER_TOPIC = f"{shop.TOPIC}-fulfilment-RETRY", f"{shop.TOPIC}-fulfilment-DLQ"
_POLL_SECONDS = 0.5


@dataclass(frozen=True)
class Story(Stage):
    """One run of the demo of Pulsar."""

    EXAMPLE: ClassVar[str] = shop.EXAMPLE.name
    sandbox: Sandbox

    def play(self) -> Account:
        """Run all steps and return the account of the orders.

        Raises:
            SandboxError: a step failed, or did not end in time.
        """
        self.declare()
        self.fail()
        self.replay()
        self.replay_by_a_job()
        return self.settle()

    def declare(self) -> None:
        """Apply the connection and the policy; show the topics that the operator creates."""
        screen.heading(
            "2. A policy is applied: retries after 1, 2 and 4 seconds, then dead letters"
        )
        shop.open_shop(self.sandbox)
        chart.prepare_replays(self.sandbox.cluster, NAMESPACE)
        for name in ("1-connection.yaml", "2-policy.yaml"):
            self.apply(name)
        self.wait("condition=Ready", "rpol/orders-fulfilment")
        screen.output(self.kubectl("get", "bconn,rpol"))
        self._show_topology()

    def fail(self) -> None:
        """Send the orders while the warehouse is down."""
        screen.heading(f"3. {self.count} orders, while the warehouse is down")
        shop.start_consumer(self.sandbox, log=self.logs.handled, warehouse=self.warehouse)
        shop.start_producer(self.sandbox, log=self.logs.produced, orders=self.count)
        self.watch(
            "each order is processed or a dead letter",
            lambda counts: counts.produced == self.count and counts.settled,
        )

    def replay(self) -> None:
        """Bring the warehouse back and replay the dead letters of its outage."""
        screen.heading("4. The warehouse is back: its dead letters are replayed")
        self.warehouse.touch()
        self.apply("3-replay.yaml")
        self.wait("jsonpath={.status.sparkApplication}", "replay/after-the-outage")
        screen.console.print(f"the job's token is of the role [bold]{self._replay_role()}[/]")
        self.watch(
            "the replayed orders are processed",
            # Counted after the Replay is completed: earlier counts may be settled, too.
            lambda _: self.has_replayed("after-the-outage") and self.counts().settled,
        )
        self._refresh_backlog()
        screen.output(self.kubectl("get", "rpol,replay"))

    def replay_by_a_job(self) -> None:
        """Replay dead letters by a Job, without Spark; they die again."""
        screen.heading("5. Two malformed orders are replayed by a Job, without Spark")
        before, begun = self.counts().dead, monotonic()
        self.apply("5-replay-by-a-job.yaml")
        self.wait("jsonpath={.status.completionTime}", "replay/by-a-job")
        screen.console.print(f"completed {monotonic() - begun:.1f} s after it was created")
        self.watch(
            "they are dead letters again",
            lambda counts: self.has_replayed("by-a-job") and counts.dead == before,
        )
        self._refresh_backlog()
        screen.output(self.kubectl("get", "rpol,replay,job"))

    def settle(self) -> Account:
        """Stop the consumer and return the account."""
        screen.heading("6. The account: the producer's log, the handler's log, the dead letters")
        self.sandbox.processes.stop("consumer")
        count = shop.backlog(self.sandbox, DEAD_LETTER_TOPIC, "redrive")
        ids = orders.dead(self.sandbox, DEAD_LETTER_TOPIC, "redrive", count)
        self.logs.dead.write_text("".join(f"{order}\n" for order in ids), encoding="ascii")
        return self.logs.account()

    def _show_topology(self) -> None:
        shown = self.sandbox.pulsar.request("GET", "/admin/v2/namespaces/shop/prod")
        shown.check("show the namespace")
        granted = json.loads(shown.body)["auth_policies"]["destination_auth"]
        for topic in (shop.TOPIC, RETRY_TOPIC, DEAD_LETTER_TOPIC):
            rights = granted.get(f"persistent://{topic}", {}).items()
            screen.output(
                f"{topic}\n"
                f"    subscription {', '.join(shop.subscriptions(self.sandbox, topic))}; "
                + "; ".join(f"{role}: {', '.join(sorted(may))}" for role, may in rights)
            )

    def counts(self) -> screen.Counts:
        """Count the orders by place."""
        return screen.Counts(
            produced=self.logs.count_produced(),
            outcomes=self.logs.outcomes(),
            waiting=shop.backlog(self.sandbox, RETRY_TOPIC, shop.SUBSCRIPTION),
            dead=shop.backlog(self.sandbox, DEAD_LETTER_TOPIC, "redrive"),
        )

    def manifest(self, name: str) -> str:
        """Return a manifest of the example with the addresses of this sandbox."""
        return shop.manifest(self.sandbox, name)

    def _refresh_backlog(self) -> None:
        """Request a new reading of the policy's backlog, and wait until its status shows it."""
        policy, now = "rpol/orders-fulfilment", strftime("%Y-%m-%dT%H:%M:%SZ", gmtime())
        requested = f"redrive.io/reconcile-requested-at={now}"
        self.kubectl("annotate", "--overwrite", policy, requested)
        deadline = monotonic() + TIMEOUT_SECONDS
        path = "jsonpath={.status.backlog.observedTime}"
        while (observed := self.kubectl("get", policy, "-o", path)) < now:
            if monotonic() > deadline:
                raise SandboxError(
                    f"it took more than {TIMEOUT_SECONDS:.0f} s to read the policy's backlog",
                    got=f"status.backlog.observedTime: {observed}",
                    remedy=f"see the logs in {self.sandbox.state / 'logs'}",
                )
            sleep(_POLL_SECONDS)

    def _replay_role(self) -> str:
        """Return the role of the token that the SparkApplication mounts.

        Raises:
            SandboxError: it mounts another token than the replay role's.
        """
        name = self.kubectl(
            "get", "replay/after-the-outage", "-o", "jsonpath={.status.sparkApplication}"
        )
        application = self.kubectl(
            "get", f"sparkapplications.sparkoperator.k8s.io/{name}", "-o", "json"
        )
        roles = {
            self._role_of(source["secret"]["name"], item["key"])
            for volume in json.loads(application)["spec"]["driver"]["template"]["spec"]["volumes"]
            for source in volume["projected"]["sources"]
            for item in source["secret"]["items"]
            if item["path"].startswith("credentials/")
        }
        if roles != {shop.REPLAYER} or "pulsar-admin" in application:
            raise SandboxError(
                "the replay job must have the replay role's token and no other",
                got=", ".join(sorted(roles)),
                remedy="this is a bug in redrive, please report it",
            )
        return shop.REPLAYER

    def _role_of(self, secret: str, key: str) -> str:
        data = self.kubectl("get", f"secret/{secret}", "-o", f"jsonpath={{.data.{key}}}")
        claims = jwt.decode(base64.b64decode(data), options={"verify_signature": False})
        return str(claims["sub"])
