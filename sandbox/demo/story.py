"""The steps of the demo, in order, in a sandbox where redrive is installed.

Called by ``python -m sandbox.demo`` and, with fewer orders, by the end-to-end test.
"""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass
from pathlib import Path
from time import gmtime, monotonic, sleep, strftime

import jwt

from sandbox import chart
from sandbox.demo import orders, screen, shop
from sandbox.demo.account import Account
from sandbox.errors import SandboxError
from sandbox.sandbox import Sandbox

RETRY_TOPIC, DEAD_LETTER_TOPIC = f"{shop.TOPIC}-fulfilment-RETRY", f"{shop.TOPIC}-fulfilment-DLQ"
_TIMEOUT_SECONDS = 180.0
_POLL_SECONDS = 0.5


@dataclass(frozen=True)
class Story:
    """One run of the demo.

    Attributes:
        sandbox: redrive runs in it, without a shop yet.
        count: the number of orders to send.
    """

    sandbox: Sandbox
    count: int

    @property
    def logs(self) -> orders.Logs:
        """The logs of the two programs."""
        return orders.Logs(self.sandbox.state)

    @property
    def _warehouse(self) -> Path:
        return self.sandbox.state / "warehouse.up"

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
        chart.prepare_replays(self.sandbox.cluster, shop.NAMESPACE)
        for name in ("1-connection.yaml", "2-policy.yaml"):
            self._apply(name)
        self._kubectl(
            "wait",
            "--for=condition=Ready",
            "rpol/orders-fulfilment",
            f"--timeout={_TIMEOUT_SECONDS:.0f}s",
        )
        screen.output(self._kubectl("get", "bconn,rpol"))
        self._show_topology()

    def fail(self) -> None:
        """Send the orders while the warehouse is down."""
        screen.heading(f"3. {self.count} orders, while the warehouse is down")
        shop.start_consumer(self.sandbox, log=self.logs.handled, warehouse=self._warehouse)
        shop.start_producer(self.sandbox, log=self.logs.produced, orders=self.count)
        self._watch(
            "each order is processed or a dead letter",
            lambda counts: counts.produced == self.count and counts.settled,
        )

    def replay(self) -> None:
        """Bring the warehouse back and replay the dead letters of its outage."""
        screen.heading("4. The warehouse is back: its dead letters are replayed")
        self._warehouse.touch()
        self._apply("3-replay.yaml")
        self._kubectl(
            "wait", "--for=jsonpath={.status.sparkApplication}", "replay/after-the-outage",
            f"--timeout={_TIMEOUT_SECONDS:.0f}s",
        )  # fmt: skip
        screen.console.print(f"the job's token is of the role [bold]{self._replay_role()}[/]")
        self._watch(
            "the replayed orders are processed",
            # Counted after the Replay is completed: earlier counts may be settled, too.
            lambda _: self._has_replayed("after-the-outage") and self._counts().settled,
        )
        self._refresh_backlog()
        screen.output(self._kubectl("get", "rpol,replay"))

    def replay_by_a_job(self) -> None:
        """Replay dead letters by a Job, without Spark; they die again."""
        screen.heading("5. Two malformed orders are replayed by a Job, without Spark")
        before, begun = self._counts().dead, monotonic()
        self._apply("5-replay-by-a-job.yaml")
        self._kubectl(
            "wait", "--for=jsonpath={.status.completionTime}", "replay/by-a-job",
            f"--timeout={_TIMEOUT_SECONDS:.0f}s",
        )  # fmt: skip
        screen.console.print(f"completed {monotonic() - begun:.1f} s after it was created")
        self._watch(
            "they are dead letters again",
            lambda counts: self._has_replayed("by-a-job") and counts.dead == before,
        )
        self._refresh_backlog()
        screen.output(self._kubectl("get", "rpol,replay,job"))

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

    def _watch(self, goal: str, until: screen.Condition) -> None:
        if not screen.watch(self._counts, until, seconds=_TIMEOUT_SECONDS):
            raise SandboxError(
                f"it took more than {_TIMEOUT_SECONDS:.0f} s until {goal}",
                got=str(self._counts()),
                remedy=f"see the logs in {self.sandbox.state / 'logs'}",
            )

    def _counts(self) -> screen.Counts:
        for program in ("consumer", "producer"):
            self._check_alive(program)
        return screen.Counts(
            produced=self.logs.count_produced(),
            outcomes=self.logs.outcomes(),
            waiting=shop.backlog(self.sandbox, RETRY_TOPIC, shop.SUBSCRIPTION),
            dead=shop.backlog(self.sandbox, DEAD_LETTER_TOPIC, "redrive"),
        )

    def _check_alive(self, program: str) -> None:
        finished = program == "producer" and self.logs.count_produced() == self.count
        if not finished and not self.sandbox.processes.alive(program):
            raise SandboxError(
                f"the {program} ended early",
                remedy=f"see {self.sandbox.processes.log(program)}",
            )

    def _refresh_backlog(self) -> None:
        """Request a new reading of the policy's backlog, and wait until its status shows it."""
        policy, now = "rpol/orders-fulfilment", strftime("%Y-%m-%dT%H:%M:%SZ", gmtime())
        requested = f"redrive.io/reconcile-requested-at={now}"
        self._kubectl("annotate", "--overwrite", policy, requested)
        deadline = monotonic() + _TIMEOUT_SECONDS
        path = "jsonpath={.status.backlog.observedTime}"
        while (observed := self._kubectl("get", policy, "-o", path)) < now:
            if monotonic() > deadline:
                raise SandboxError(
                    f"it took more than {_TIMEOUT_SECONDS:.0f} s to read the policy's backlog",
                    got=f"status.backlog.observedTime: {observed}",
                    remedy=f"see the logs in {self.sandbox.state / 'logs'}",
                )
            sleep(_POLL_SECONDS)

    def _has_replayed(self, name: str) -> bool:
        """Return True if a Replay is complete.

        Raises:
            SandboxError: it has failed.
        """
        true = 'jsonpath={.status.conditions[?(@.status=="True")].type}'
        conditions = self._kubectl("get", f"replay/{name}", "-o", true).split()
        if "Failed" in conditions:
            raise SandboxError(
                "the replay failed",
                got=self._kubectl("get", f"replay/{name}", "-o", "jsonpath={.status}"),
                remedy=f"see the logs in {self.sandbox.state / 'logs'}",
            )
        return "Complete" in conditions

    def _replay_role(self) -> str:
        """Return the role of the token that the SparkApplication mounts.

        Raises:
            SandboxError: it mounts another token than the replay role's.
        """
        name = self._kubectl(
            "get", "replay/after-the-outage", "-o", "jsonpath={.status.sparkApplication}"
        )
        application = self._kubectl(
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
        data = self._kubectl("get", f"secret/{secret}", "-o", f"jsonpath={{.data.{key}}}")
        claims = jwt.decode(base64.b64decode(data), options={"verify_signature": False})
        return str(claims["sub"])

    def _apply(self, name: str) -> None:
        screen.console.print(f"kubectl apply -f examples/01-first-policy/{name}")
        self._kubectl("apply", "-f", "-", text=shop.manifest(self.sandbox, name))

    def _kubectl(self, *args: str, text: str | None = None) -> str:
        return self.sandbox.cluster.kubectl("-n", shop.NAMESPACE, *args, input=text)
