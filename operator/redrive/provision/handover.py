"""A policy that gives its topics to the one of its name in another cluster, as for blue and green.

Called by `reconcile` for a policy with the annotation. Only the owner can do that: a policy in
another cluster can't take topics by itself.
"""

from __future__ import annotations

import logging
from dataclasses import replace

from redrive.api.conditions import Reason
from redrive.kube import status
from redrive.kube.context import Context
from redrive.kube.resources import Body
from redrive.kube.status import StatusWarning
from redrive.provision.actions import Mark, in_words
from redrive.provision.admission_checks import ADMISSION
from redrive.provision.apply import apply
from redrive.provision.desired import owner_of
from redrive.provision.facts import Request
from redrive.provision.outcome import Outcome
from redrive.provision.ownership import HAND_OVER_TO, OwnershipRecord

HANDED_OVER = Reason("HandedOver")
"""Condition and reason: another cluster's policy has the topics, and nothing is done here."""

logger = logging.getLogger(__name__)


def receiver_of(body: Body, own: str) -> str:
    """Return the id of the cluster that a RetryPolicy hands its topics over to; empty for none.

    Args:
        body: the RetryPolicy.
        own: the id of this cluster.
    """
    named: str = (body["metadata"].get("annotations") or {}).get(HAND_OVER_TO, "").strip()
    return "" if named == own else named


async def hand_over(cluster: str, request: Request, ctx: Context) -> Outcome:
    """Make what belongs to a policy the topics of its namesake in another cluster.

    A crash in between leaves fewer topics for the next call.

    Raises:
        RedriveError: not now, or its connection does not allow it.
    """
    ADMISSION.check(request)
    owner = owner_of(request, ctx.settings.cluster_id)
    # Its uid is for that cluster to write; it is known by its name and what it retries.
    receiver = replace(owner, cluster=cluster, uid="")
    connection = await ctx.brokers.resolve(request.spec.connection_ref, request.key.namespace)
    namespace = await connection.admin.namespace(request.policy.topic.namespace_name)
    marks = []
    for topic in request.spec.all_topics:
        if not namespace.exists(topic):
            continue
        partitioned = str(topic) in namespace.partitioned
        found = (await connection.admin.metadata(topic, partitioned=partitioned)).properties
        record = OwnershipRecord.of(found)
        if record.is_of(owner):
            marks.append(Mark(topic, record.owned_by(receiver).changes(found)))
    with connection.admin.granting(request.policy.topic.namespace_name) as grant:
        await apply(marks, connection.admin, grant, ctx.kubernetes)
    if marks:
        logger.info("RetryPolicy %s: %s", request.key, in_words(marks))
    told = (
        f"by the annotation {HAND_OVER_TO} its topics belong to RetryPolicy {receiver}, and "
        "nothing is done for it here; delete it once that one is Ready"
    )
    return Outcome(
        (*status.paused(HANDED_OVER, told)[:1], status.warning(StatusWarning(HANDED_OVER, told)))
    )
