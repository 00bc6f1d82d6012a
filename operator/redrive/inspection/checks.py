"""Checks of an Inspection against its policy and its connection; pure.

Called by the controller before a launch and while a job runs, and by `redrive lint` for manifests.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from redrive.api.connection import BrokerConnectionSpec, Destination, InspectionIdentity
from redrive.api.inspection import InspectedMessages, InspectionSpec
from redrive.api.job import ConnectionJobs
from redrive.api.permissions import Consent
from redrive.api.rocketmq import RocketMQCluster, RocketMQInspection
from redrive.errors import RedriveError
from redrive.kube.resources import Key
from redrive.policy.model import Policy
from redrive.reasons import Reason
from redrive.replay.controller.checks import no_trust


class InspectionAccess(NamedTuple):
    """Access of jobs that a connection gives to Inspections of a namespace.

    Attributes:
        redirect_hosts: hosts that requests may be redirected to, see `Access.hosts`.
        jobs: limits of the job templates.
        reads_retries: True if messages that wait for a retry may be read.
        destinations: places for files.
        role: to which the policy grants its rights; empty without grants.
        field: of the spec of the connection, with its permissions.
        may_extend: True if that field can permit waiting retries and files.
    """

    identity: InspectionIdentity | RocketMQInspection
    redirect_hosts: tuple[str, ...] = ()
    jobs: ConnectionJobs | None = None
    reads_retries: bool = False
    destinations: tuple[Destination, ...] = ()
    role: str = ""
    field: str = "inspection"
    may_extend: bool = True


def pulsar_access(spec: BrokerConnectionSpec, through: Key) -> InspectionAccess:
    """Return the access that the connection *through* gives to jobs.

    Raises:
        RedriveError: it gives none.
    """
    identity, pulsar = spec.inspection, spec.pulsar
    if identity is None:
        raise _no_identity(through, "spec.inspection, with a role and its credentials")
    if pulsar.tls is not None and identity.tls is None:
        raise no_trust(through, "spec.pulsar.tls", "spec.inspection.tls")
    return InspectionAccess(
        identity,
        pulsar.redirect_hosts,
        spec.jobs,
        identity.retry_topics is Consent.ALLOWED,
        identity.destinations,
        identity.role,
    )


def rocketmq_access(cluster: RocketMQCluster, through: Key) -> InspectionAccess:
    """Return the access to a cluster that the connection *through* gives to jobs.

    Raises:
        RedriveError: it gives none.
    """
    if cluster.inspection is None:
        raise _no_identity(through, "spec.rocketmq.inspection, with an access key for jobs")
    if cluster.tls is not None and cluster.inspection.tls is None:
        raise no_trust(through, "spec.rocketmq.tls", "spec.rocketmq.inspection.tls", "Inspections")
    return InspectionAccess(cluster.inspection, field="rocketmq.inspection", may_extend=False)


def _no_identity(through: Key, field: str) -> RedriveError:
    return Reason.INSPECTION_IDENTITY_MISSING.error(
        f"the BrokerConnection {through} has no credentials for Inspections",
        remedy=f"give it {field}",
    )


def access_violations(
    spec: InspectionSpec, access: InspectionAccess, through: Key
) -> Iterator[RedriveError]:
    """Yield an error for each part of an Inspection that the connection does not permit."""
    if spec.source is InspectedMessages.RETRY and not access.reads_retries:
        permit = f"set its {access.field}.retryTopics to Allowed, or " if access.may_extend else ""
        yield Reason.RETRIES_NOT_INSPECTED.error(
            f"the BrokerConnection {through} does not permit to inspect waiting retries",
            remedy=f"{permit}inspect from: DeadLetter",
        )
    if spec.reveals and access.identity.clear_payloads is not Consent.ALLOWED:
        yield Reason.CLEAR_TEXT_NOT_PERMITTED.error(
            f"the BrokerConnection {through} does not permit Inspections in clear text",
            remedy=f"create another Inspection after its {access.field}.clearPayloads is Allowed, "
            "or one with payload: Masked",
        )
    names = [destination.name for destination in access.destinations]
    others = ", ".join(names)
    if spec.export is not None and spec.export.destination not in names:
        permit = f", or add it to its {access.field}.destinations" if access.may_extend else ""
        yield Reason.DESTINATION_NOT_FOUND.error(
            f"the BrokerConnection {through} names no such destination for files",
            got=spec.export.destination,
            remedy=f"{f'use one of {others}' if others else 'remove export'}{permit}",
        )


def dead_letters_are_discarded(source: InspectedMessages, policy: Policy) -> RedriveError | None:
    """Find an Inspection of dead letters whose policy keeps none."""
    if policy.dead_letters or source is InspectedMessages.RETRY:
        return None
    return Reason.DEAD_LETTERS_DISCARDED.error(
        "the RetryPolicy discards its dead letters, so none can be inspected",
        remedy="set its deadLetter.mode to Keep, or inspect from: Retry",
    )
