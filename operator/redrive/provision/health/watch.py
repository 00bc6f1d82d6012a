"""Looks at the topics of every ready policy once a minute, and at once when that is requested.

Made by `handlers`, beside the controllers. For each connection one task asks the broker, all that
lead to one broker at most ten times a second: with more policies than that is enough for, a look
comes later than every minute.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

from redrive.admin.errors import AdminError, AdminNotFoundError
from redrive.api.replay import FINAL
from redrive.api.retrypolicy import Backlog
from redrive.errors import RedriveError
from redrive.kube import resources, status
from redrive.kube.cache import needs_reconcile
from redrive.kube.connections import broker_of, connection_of
from redrive.kube.context import Context
from redrive.kube.resources import Body, Key
from redrive.kube.status import StatusWarning
from redrive.provision.health import backlog
from redrive.provision.health.checks import REASONS, THRESHOLDS, Thresholds
from redrive.provision.health.findings import Findings, Reading
from redrive.provision.health.gauges import Gauges
from redrive.provision.health.reader import Reader
from redrive.provision.rate_limit import RateLimits
from redrive.provision.resolve import resolve

INTERVAL_SECONDS = 60.0
CALLS_PER_SECOND = 10.0
TICK_SECONDS = 1.0
AT_A_TIME = 20
"""After so many policies, those that are new or requested come first again."""
REST_SECONDS = 15.0
"""A broker that fails is left alone for so long."""

logger = logging.getLogger(__name__)


class Health:
    """Reads the topics of all ready policies; must be made in a running event loop.

    It writes `status.backlog`, which nothing else does, and no condition: a reconcile, enqueued
    when a warning came or went, takes them from here.

    Args:
        enqueue: has a policy reconciled.
        interval: how many seconds lie between two looks at a topic, at least.
        limits: from where on a check warns.
    """

    def __init__(
        self,
        ctx: Context,
        enqueue: Callable[[Key], None],
        interval: float = INTERVAL_SECONDS,
        limits: Thresholds = THRESHOLDS,
    ) -> None:
        self._ctx = ctx
        self._enqueue = enqueue
        self._interval = interval
        self._limits = limits
        self._gauges = Gauges(ctx.clock)
        self._looked: dict[str, float] = {}
        self._requested: set[str] = set()
        self._findings: dict[str, Findings] = {}
        self._paces = RateLimits(1 / CALLS_PER_SECOND)
        self._readers: dict[tuple[Key, str | None], Reader] = {}
        self._walks: dict[Key, asyncio.Task[None]] = {}
        ctx.policies.listen(self._policy_changed)
        ctx.replays.listen(self._replay_changed)
        self._task = asyncio.create_task(self._watch(), name="health")

    async def stop(self) -> None:
        """End all looks, and wait until they have ended."""
        tasks = [self._task, *self._walks.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def warnings(self, body: Body) -> tuple[StatusWarning, ...]:
        """Return the warnings about a policy's topics, by the last look at them.

        Before the first one, these are its conditions: a restart ends no warning.
        """
        findings = self._findings.get(_uid(body))
        return _published(body) if findings is None else findings.warnings

    def request(self, body: Body) -> None:
        """Have a policy's topics read at once, and its backlog written even if unchanged."""
        self._requested.add(_uid(body))

    def _policy_changed(self, _key: Key, before: Body | None, after: Body | None) -> None:
        if after is None or not status.is_ready(after):
            return
        if needs_reconcile(before, after) or not status.is_ready(before or {}):
            self.request(after)

    def _replay_changed(self, key: Key, before: Body | None, after: Body | None) -> None:
        if after is None or _is_final(before or {}) or not _is_final(after):
            return
        policy = self._ctx.policies.get(Key(key.namespace, after["spec"]["policyRef"]["name"]))
        if policy is not None:
            self.request(policy)

    async def _watch(self) -> None:
        while True:
            try:
                self._begin_walks()
            except Exception:
                logger.exception("health: finding the policies to look at failed")
            await asyncio.sleep(min(TICK_SECONDS, self._interval))

    def _begin_walks(self) -> None:
        ready = [body for body in self._ctx.policies if status.is_ready(body)]
        self._forget(ready)
        for connection, due in self._due(ready).items():
            if connection not in self._walks:
                self._walks[connection] = asyncio.create_task(
                    self._walk(connection, due[:AT_A_TIME]), name=f"health {connection}"
                )

    def _due(self, ready: Sequence[Body]) -> Mapping[Key, list[Body]]:
        """Return what is to be looked at, by connection, what waits for longest first."""
        never = float("-inf")
        due = defaultdict(list)

        def since(body: Body) -> float:
            uid = _uid(body)
            return never if uid in self._requested else self._looked.get(uid, never)

        for body in sorted(ready, key=since):
            if since(body) + self._interval <= _now():
                due[connection_of(body)].append(body)
        return due

    def _forget(self, ready: Sequence[Body]) -> None:
        """Drop what is known of policies that are gone, and show no figures of unready ones."""
        self._gauges.keep({Key.of(body) for body in ready})
        there = {_uid(body) for body in self._ctx.policies}
        for known in (self._looked, self._findings):
            for uid in known.keys() - there:
                del known[uid]
        self._requested &= there
        connections = [Key.of(body) for body in self._ctx.connections]
        for key in self._readers.keys() - {self._at(connection) for connection in connections}:
            del self._readers[key]

    def _at(self, connection: Key) -> tuple[Key, str | None]:
        return connection, broker_of(connection, self._ctx.connections)

    async def _walk(self, connection: Key, due: Sequence[Body]) -> None:
        at = self._at(connection)
        reader = self._readers.setdefault(at, Reader(self._interval, self._paces.of(at[1])))
        reader.tidy()
        try:
            for body in due:
                self._looked[_uid(body)] = _now()
                if not await self._is_answered(body, reader):
                    await asyncio.sleep(REST_SECONDS)
                    return
        finally:
            del self._walks[connection]

    async def _is_answered(self, body: Body, reader: Reader) -> bool:
        """Look at one policy; return whether it makes sense to go on to the next."""
        try:
            await self._look(body, reader)
        except AdminNotFoundError as error:
            # The rounds find that as drift, and say what they do about it.
            logger.info("RetryPolicy %s: no statistics: %s", Key.of(body), error)
        except RedriveError as error:
            logger.warning("RetryPolicy %s: no statistics: %s", Key.of(body), error)
            return not isinstance(error, AdminError)
        except Exception:
            logger.exception("RetryPolicy %s: reading statistics failed", Key.of(body))
        return True

    async def _look(self, body: Body, reader: Reader) -> None:
        """Read the topics of one policy."""
        requested = _uid(body) in self._requested
        self._requested.discard(_uid(body))
        asked = resolve(body, self._ctx)
        policy = asked.policy
        connection = await self._ctx.brokers.resolve(asked.spec.connection_ref, asked.key.namespace)
        admin = connection.admin
        reading = Reading(
            policy=policy,
            begun=self._ctx.clock(),
            seconds=_now(),
            requested=requested,
            source=await reader.read(admin, policy.topic),
            retry=await reader.read(admin, policy.retry_topic, fresh=True),
            dead_letter=(
                await reader.read(admin, policy.dead_letter_topic, oldest=True, fresh=True)
                if policy.dead_letters
                else {}
            ),
        )
        latest = self._ctx.policies.get(asked.key)
        if latest is not None and _uid(latest) == _uid(body):
            await self._publish(latest, reading)

    async def _publish(self, body: Body, reading: Reading) -> None:
        """Pass on what is new: warnings to a reconcile, figures to metrics and the status."""
        key, uid = Key.of(body), _uid(body)
        findings = Findings.of(reading, self._findings.get(uid), self.warnings(body), self._limits)
        self._findings[uid] = findings
        if set(findings.warnings) != set(_published(body)):
            self._enqueue(key)
        found = reading.backlog
        self._gauges.show(key, reading.policy, found, findings.deliveries)
        written = backlog.written_in(body.get("status") or {})
        if reading.requested or backlog.is_worth_writing(written, found):
            await self._write(key, found)

    async def _write(self, policy: Key, found: Backlog) -> None:
        after = await self._ctx.kubernetes.patch_status(
            resources.POLICIES, policy, backlog.to_patch(found)
        )
        self._ctx.policies.renew(after)


def _is_final(replay: Body) -> bool:
    return (replay.get("status") or {}).get("phase") in FINAL


def _published(body: Body) -> tuple[StatusWarning, ...]:
    """Return what a policy's conditions say of its topics' health."""
    found = (status.find(body, reason) for reason in sorted(REASONS))
    return tuple(StatusWarning(c.type, c.message) for c in found if c is not None)


def _uid(body: Body) -> str:
    uid: str = body["metadata"]["uid"]
    return uid


def _now() -> float:
    return asyncio.get_running_loop().time()
