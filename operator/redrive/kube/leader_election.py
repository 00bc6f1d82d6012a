"""Leader election: of several operators the holder of a Lease acts, and a fence stops the others.

A standby only reads the Lease, every `RENEW_SECONDS`. It takes over when the record has not changed
for the duration of a lease by its own clock, so clocks may differ. The leader's writes pass a
fence, which closes earlier: it counts from the *beginning* of the last renewal. When another
operator takes over, the former leader's process refuses all writes that it has not sent. If a Lease
or its holder is changed manually, the state of the former holder is unknown, so a standby waits as
long.

A remaining case is a write that was sent before the fence closed and that arrives more than
`LEASE_SECONDS - FENCE_SECONDS` later. The next reconcile of any operator corrects every such write;
it cannot lose a message. The deletion of a policy waits for such writes, see
`redrive.provision.finalize`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import datetime
from typing import Any

from redrive.admin.guards import Fence, elapsed
from redrive.api import Body
from redrive.errors import RedriveError
from redrive.kube import resources
from redrive.kube.client import ConflictError, Kubernetes, KubernetesError, NotFoundError
from redrive.kube.observability import LEASE, LEASE_HELD, Liveness
from redrive.kube.resources import Key
from redrive.reasons import Reason

LEASE_SECONDS = 10
"""Time without a change of the record after which a standby takes over."""
RELEASED_SECONDS = 1
"""Lease duration in a released record, as Kubernetes components write it."""
FENCE_SECONDS = 7.0
"""Time for which the holder may write after the beginning of a renewal."""
RENEW_SECONDS = 2.0
CALL_SECONDS = 4.0
"""Time-out of a call about the Lease."""
PART = "lease"

logger = logging.getLogger(__name__)


class LeaderElector:
    """Participation of one operator in the election.

    Args:
        kubernetes: a client without a fence that nothing else uses.
        key: the Lease.
        identity: unique name of this operator, such as the name of its pod. After a restart under
            the same name it need not wait for its own lease to expire.
        clock: for the times in the record, which are for people.
        elapsed: monotonic seconds.
    """

    def __init__(  # noqa: PLR0913  dependencies
        self,
        kubernetes: Kubernetes,
        key: Key,
        identity: str,
        fence: Fence,
        *,
        clock: Callable[[], datetime],
        elapsed: Callable[[], float] = elapsed,
    ) -> None:
        self._kubernetes = kubernetes
        self._key = key
        self._identity = identity
        self._fence = fence
        self._clock = clock
        self._elapsed = elapsed
        self._record: Body | None = None
        self._seen_at = 0.0
        self._writer = ""  # last holder that has not released the lease, and may be writing

    async def try_to_take(self) -> bool:
        """Take the lease if it is free, expired or ours; return True if it is ours now.

        It is free if no holder was seen, or the last one released it.

        Raises:
            KubernetesError: the API server refuses, or does not answer.
        """
        try:
            self._see(await self._kubernetes.get(resources.LEASES, self._key))
        except NotFoundError:
            self._see(None)
        silence = self._elapsed() - self._seen_at
        if self._writer not in {"", self._identity} and silence < LEASE_SECONDS:
            return False
        try:
            await self._write(taken=self._writer != self._identity)
        except ConflictError:
            return False  # another operator was faster
        return True

    async def renew(self) -> None:
        """Renew our lease.

        Raises:
            RedriveError: another operator holds it; the fence is closed.
            KubernetesError: the renewal failed for now.
        """
        try:
            await self._write(taken=False)
        except (ConflictError, NotFoundError):
            # The object changed or was deleted, or the answer to our own write was lost.
            if not await self.try_to_take():
                self._fence.open_until(float("-inf"))
                raise Reason.LEASE_LOST.error(
                    "another operator has taken the lease",
                    got=self._holder(),
                    remedy="No action needed: this operator exits, and is a standby after its "
                    "restart",
                ) from None

    async def release(self) -> None:
        """Release the lease, so that a standby need not wait for it to expire."""
        self._fence.open_until(float("-inf"))
        if self._holder() != self._identity:
            return  # another operator has taken it
        released = {"holderIdentity": "", "leaseDurationSeconds": RELEASED_SECONDS}
        try:
            await self._patch(released)
        except ConflictError:  # after a renewal whose answer was not awaited
            self._see(await self._kubernetes.get(resources.LEASES, self._key))
            if self._holder() == self._identity:
                await self._patch(released)

    async def _write(self, *, taken: bool) -> None:
        """Write our identity into the record, unless it has changed since it was read."""
        began = self._elapsed()
        now = self._clock().strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        spec: dict[str, Any] = {
            "holderIdentity": self._identity,
            "leaseDurationSeconds": LEASE_SECONDS,
            "renewTime": now,
        }
        if self._record is None:
            await self._create(spec | {"acquireTime": now, "leaseTransitions": 0})
        else:
            if taken:
                transitions = _transitions(self._record) + 1
                spec |= {"acquireTime": now, "leaseTransitions": transitions}
            await self._patch(spec)
        self._writer = self._identity
        self._fence.open_until(began + FENCE_SECONDS)

    async def _create(self, spec: Body) -> None:
        body = {**resources.LEASES.typed, "metadata": self._key._asdict(), "spec": spec}
        self._see(await self._kubernetes.create(resources.LEASES, body))

    async def _patch(self, spec: Body) -> None:
        if self._record is None:
            return
        version = self._record["metadata"]["resourceVersion"]
        patch = {"metadata": {"resourceVersion": version}, "spec": spec}
        self._see(await self._kubernetes.patch(resources.LEASES, self._key, patch))

    def _see(self, record: Body | None) -> None:
        if _version(record) != _version(self._record):
            self._seen_at = self._elapsed()
        self._record = record
        spec, holder = _spec(record), self._holder()
        if record is not None:
            LEASE.transitions = _transitions(record)
        if holder == self._identity:
            # Possibly edited manually: the holder before may still be writing.
            self._writer = self._writer or holder
        elif holder:
            self._writer = holder
        elif spec.get("leaseDurationSeconds") == RELEASED_SECONDS:
            self._writer = ""

    def _holder(self) -> str:
        holder = _spec(self._record).get("holderIdentity")
        return holder if isinstance(holder, str) else ""


def _spec(record: Body | None) -> Body:
    return (record or {}).get("spec") or {}


def _transitions(record: Body) -> int:
    """Return the number of leader changes; 0 if the record, which others may edit, has none."""
    transitions = _spec(record).get("leaseTransitions")
    return transitions if isinstance(transitions, int) else 0


def _version(record: Body | None) -> str:
    return "" if record is None else str(record["metadata"]["resourceVersion"])


@asynccontextmanager
async def leading(
    key: Key, identity: str, health: Liveness, clock: Callable[[], datetime]
) -> AsyncIterator[Fence]:
    """Wait for the lease, hold it while the block runs, then release it; yield its fence.

    A standby is ready: it can take over at once.

    Raises:
        RedriveError: another operator took the lease; the block was cancelled.
    """
    fence = Fence()
    async with Kubernetes.connect() as kubernetes:
        elector = LeaderElector(kubernetes, key, identity, fence, clock=clock)
        await _take(elector, health, key)
        LEASE_HELD.set_function(fence.is_open)
        async with holding(elector, health):
            yield fence


async def _take(elector: LeaderElector, health: Liveness, key: Key) -> None:
    standing_by = False
    while True:
        health.beat(PART)
        try:
            async with asyncio.timeout(CALL_SECONDS):
                if await elector.try_to_take():
                    return
        except (KubernetesError, TimeoutError) as error:
            logger.warning("the lease %s cannot be read: %s", key, error or "no answer in time")
        else:
            health.ready = True
            if not standing_by:
                logger.info("redrive is a standby: another operator holds the lease %s", key)
            standing_by = True
        await asyncio.sleep(RENEW_SECONDS)


@asynccontextmanager
async def holding(elector: LeaderElector, health: Liveness) -> AsyncIterator[None]:
    """Renew the lease while the block runs, then release it; cancel the block if it is lost."""
    block = asyncio.current_task()
    assert block is not None  # noqa: S101  every coroutine runs in a task

    def end_block(_: object) -> None:
        block.cancel()

    renewal = asyncio.create_task(_renew(elector, health), name=PART)
    # Also if the task is cancelled or fails: otherwise the lease would not be renewed.
    renewal.add_done_callback(end_block)
    try:
        yield
    except asyncio.CancelledError:
        if not renewal.done():
            raise
        loss = _loss(renewal)
        logger.error("lease lost: %s", loss)  # noqa: TRY400  not a bug
        raise loss from None
    finally:
        renewal.remove_done_callback(end_block)
        renewal.cancel()
        await asyncio.gather(renewal, return_exceptions=True)
        await _release(elector)


def _loss(renewal: asyncio.Task[None]) -> RedriveError:
    """Return the reason for which the renewal ended."""
    error = None if renewal.cancelled() else renewal.exception()
    if isinstance(error, RedriveError):
        return error
    return Reason.LEASE_LOST.error(
        "the renewal of the lease ended",
        got=error or "a cancellation",
        remedy="No action needed: this operator exits, and is a standby after its restart",
    )


async def _renew(elector: LeaderElector, health: Liveness) -> None:
    while True:
        health.beat(PART)
        await asyncio.sleep(RENEW_SECONDS)
        try:
            async with asyncio.timeout(CALL_SECONDS):
                await elector.renew()
        except (KubernetesError, TimeoutError) as error:
            logger.warning("the lease was not renewed: %s", error or "no answer in time")


async def _release(elector: LeaderElector) -> None:
    try:
        async with asyncio.timeout(CALL_SECONDS):
            await elector.release()
    except (KubernetesError, TimeoutError) as error:
        logger.warning("lease was not released and will expire: %s", error or "no answer in time")
