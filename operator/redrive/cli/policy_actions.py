"""Commands that act on a RetryPolicy by an annotation.

`reconcile`, `ignore-outage`, `dead-letter` and `unload`: the operator reads the annotation, and
consumers get their part with the ConfigMap.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import closing
from datetime import datetime, timedelta
from typing import TypeVar

import click

from redrive.api import Body
from redrive.api.annotations import (
    MAX_REQUESTS,
    DeadLetterRequest,
    dead_letter_annotation,
    dead_letter_requests,
)
from redrive.cli.cluster import CONFLICT, Cluster, ClusterError
from redrive.cli.frame import NOT_FINISHED, Seconds, WriteFlags, policy_argument, write_options
from redrive.cli.output import age, now, say, written
from redrive.errors import RedriveError
from redrive.kube import resources
from redrive.policy.envelope import ORIGIN_FORM

REFRESH_SECONDS = 15.0
"""Time in which the operator has to read the figures of one policy."""

MAX_CONFLICTS = 10
_Result = TypeVar("_Result")


@click.command()
@policy_argument
@click.option("--pause", is_flag=True, help="Stop the operator's work on the policy.")
@click.option("--resume", is_flag=True, help="Restart it.")
@write_options
def reconcile(policy: str, flags: WriteFlags, *, pause: bool, resume: bool) -> None:
    """Have the operator reconcile a policy now, or pause and resume its work on the policy."""
    if pause and resume:
        raise click.UsageError("--pause and --resume exclude each other")
    cluster = Cluster(flags)
    body = cluster.get(resources.POLICIES, cluster.namespace, policy)
    if resources.is_paused(body) and not (pause or resume):
        hint = flags.hint("reconcile", policy, "--resume")
        raise RedriveError("the policy is paused, and is not reconciled", remedy=f"run: {hint}")
    if pause or resume:
        annotation = {resources.PAUSE: "true" if pause else None}
    else:
        annotation = {resources.RECONCILE_REQUESTED_AT: written(now())}
    after = _annotate(cluster, body, annotation, flags.dry_run)
    flags.show(after, "paused" if pause else "resumed" if resume else "reconcile requested")
    if not (pause or resume or flags.dry_run):
        say(f"See the result: {flags.hint('status', policy, '--refresh')}")


def _annotate(
    cluster: Cluster,
    policy: Body,
    annotation: Mapping[str, str | None],
    dry_run: str | None = None,
    *,
    only_as_read: bool = False,
) -> Body:
    """Set an annotation of a policy, and the one that names the caller; None removes it.

    Args:
        only_as_read: True to refuse it, with the reason `CONFLICT`, if the policy was changed since
            it was read: for a value that depends on the former one.
    """
    metadata: dict[str, object] = {
        "annotations": {**annotation, resources.REQUESTED_BY: cluster.user}
    }
    if only_as_read:
        metadata["resourceVersion"] = policy["metadata"]["resourceVersion"]
    return cluster.patch(resources.POLICIES, policy, {"metadata": metadata}, dry_run=dry_run)


@click.command()
@policy_argument
@click.option("--for", "seconds", type=Seconds(), metavar="TIME", help="Time until it ends: 1h.")
@click.option("--stop", is_flag=True, help="End it now.")
@write_options
def ignore_outage(policy: str, seconds: float | None, flags: WriteFlags, *, stop: bool) -> None:
    """Have consumers retry in spite of an open outage breaker, for a time.

    Consumers read it with their ConfigMap, in a pod within about two minutes. Failures use up
    retries meanwhile.
    """
    if stop is (seconds is not None):
        raise click.UsageError("choose one of --for and --stop")
    cluster = Cluster(flags)
    body = cluster.get(resources.POLICIES, cluster.namespace, policy)
    if not stop:
        _check_active(body, flags)
    end = None if seconds is None else written(now() + timedelta(seconds=seconds))
    after = _annotate(cluster, body, {resources.IGNORE_OUTAGES_UNTIL: end}, flags.dry_run)
    flags.show(after, "pauses for outages again" if stop else f"ignores outages until {end}")


class Origin(click.ParamType[str]):
    """The id that a message was first produced with, such as `4711:3:0`."""

    name = "origin"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> str:
        """Check an id."""
        text = str(value)
        if not ORIGIN_FORM.fullmatch(text):
            self.fail(f"{text!r} is no id of a message; write one like 4711:3:0", param, ctx)
        return text


@click.command()
@policy_argument
@click.option(
    "--origin", "origins", type=Origin(), multiple=True, metavar="ID", help="Message; repeatable."
)
@click.option(
    "--for",
    "seconds",
    type=Seconds(),
    default="4h",
    show_default=True,
    metavar="TIME",
    help="Time until the request ends.",
)
@click.option("--stop", is_flag=True, help="Withdraw the requests, or those of --origin.")
@write_options
def dead_letter(
    policy: str, origins: tuple[str, ...], seconds: float, flags: WriteFlags, *, stop: bool
) -> None:
    """Have consumers dead-letter a message at its next failure, which frees its key.

    ID is the origin of the message: peek --waiting shows it, and consumers log it. It is
    dead-lettered with the reason Requested, and messages of its key continue. A message that is
    handled stays handled. The request ends after --for, because a replayed dead letter has the
    same origin.

    Consumers in Python with a policy file read it with their ConfigMap, in a pod within about two
    minutes.
    """
    if not (origins or stop):
        raise click.UsageError("name the message with --origin, or withdraw requests with --stop")
    cluster, at = Cluster(flags), now()
    end = at + timedelta(seconds=seconds)

    def change() -> tuple[Body, int]:
        body = cluster.get(resources.POLICIES, cluster.namespace, policy)
        requests = _requests(body, at)
        if stop:
            for origin in origins or tuple(requests):
                requests.pop(origin, None)
        else:
            _check_keeps_dead_letters(body)
            _check_active(body, flags)
            requests |= {origin: DeadLetterRequest(origin, end) for origin in origins}
        _check_number(len(requests), policy, flags)
        annotation = {resources.DEAD_LETTER_NOW: dead_letter_annotation(requests.values())}
        after = _annotate(cluster, body, annotation, flags.dry_run, only_as_read=True)
        return after, len(requests)

    after, count = without_conflict(change)
    remaining_text = f"{count} requests are left" if count else "no request is left"
    requested_text = f"dead-letters {', '.join(origins)} at the next failure"
    flags.show(after, remaining_text if stop else requested_text)
    if not stop and flags.dry_run is None:
        say(f"ends at {written(end)}; withdraw it: {flags.hint('dead-letter', policy, '--stop')}")


def _requests(policy: Body, at: datetime) -> dict[str, DeadLetterRequest]:
    """Return the requests of a policy that have not ended, by origin."""
    annotations = policy["metadata"].get("annotations") or {}
    text = annotations.get(resources.DEAD_LETTER_NOW) or ""
    return {request.origin: request for request in dead_letter_requests(text, at)}


def _check_number(count: int, policy: str, flags: WriteFlags) -> None:
    """Pass if a policy may have as many requests.

    Raises:
        RedriveError: it may not.
    """
    if count > MAX_REQUESTS:
        hint = flags.hint("dead-letter", policy, "--stop")
        raise RedriveError(
            f"a policy has at most {MAX_REQUESTS} requests",
            got=count,
            remedy=f"wait until others have ended, or withdraw them: {hint}",
        )


def _check_keeps_dead_letters(policy: Body) -> None:
    """Pass if a policy keeps dead letters.

    Raises:
        RedriveError: it discards them.
    """
    if ((policy["spec"].get("deadLetter") or {}).get("mode") or "Keep") == "Discard":
        raise RedriveError(
            "the policy discards dead letters: the message would be lost",
            got="deadLetter.mode Discard",
            remedy="have the handler discard it, or set deadLetter.mode to Keep",
        )


def _check_active(policy: Body, flags: WriteFlags) -> None:
    """Pass if the operator works on a policy.

    Raises:
        RedriveError: it is paused, or only observed.
    """
    metadata, spec = policy["metadata"], policy["spec"]
    if resources.is_paused(policy):
        raise RedriveError(
            "the policy is paused, so the operator does not carry out the request",
            remedy=f"run: {flags.hint('reconcile', metadata['name'], '--resume')}",
        )
    if spec.get("managementPolicy") == "Observe":
        raise RedriveError(
            "the operator only observes the policy",
            got="managementPolicy Observe",
            remedy="set it to Manage",
        )


@click.command()
@policy_argument
@click.option(
    "--timeout",
    "seconds",
    type=Seconds(),
    default="60s",
    show_default=True,
    metavar="TIME",
    help="Give up after this time: exit 4.",
)
@write_options
def unload(policy: str, seconds: float, flags: WriteFlags) -> int:
    """Have the broker load the retry topic again: the remedy of RetriesOverdue.

    The operator unloads the topic, by its own rights. Consumers reconnect, and messages that they
    handle at that moment are delivered again.
    """
    cluster = Cluster(flags)
    body = cluster.get(resources.POLICIES, cluster.namespace, policy)
    _check_active(body, flags)
    request_time = written(now())
    after = _annotate(cluster, body, {resources.UNLOAD_REQUESTED_AT: request_time}, flags.dry_run)
    if flags.dry_run is not None:
        flags.show(after, "")
        return 0

    def result_of(policy: Body) -> Body:
        result: Body = (policy.get("status") or {}).get("unload") or {}
        return result if result.get("requestTime") == request_time else {}

    unloaded = awaited(cluster, after, seconds, result_of)
    if unloaded is None:
        say(f"no result within {age(seconds)}; see the policy: {flags.hint('status', policy)}")
        return NOT_FINISHED
    if error := result_of(unloaded).get("error"):
        raise RedriveError(
            "the retry topic was not unloaded",
            got=error,
            remedy="give the operator's role the right, or unload it with pulsar-admin",
        )
    flags.show(after, "unloaded the retry topic")
    return 0


def refreshed(cluster: Cluster, policy: Body) -> Body:
    """Have the operator read the figures of a policy now; return the policy with them.

    If the operator does not read them in time, as for a policy that is not Ready, say so, and
    return the policy as it was.
    """

    def observed(policy: Body) -> object:
        return ((policy.get("status") or {}).get("backlog") or {}).get("observedTime")

    before = observed(policy)
    requested = _annotate(cluster, policy, {resources.RECONCILE_REQUESTED_AT: written(now())})
    after = awaited(
        cluster, requested, REFRESH_SECONDS, lambda policy: observed(policy) not in {None, before}
    )
    if after is None:
        say("the operator did not read the figures in time; these are older ones")
    return after or policy


def without_conflict(change: Callable[[], _Result]) -> _Result:
    """Return the result of *change*, which reads an object and writes it.

    It is repeated if the object was changed in between.

    Raises:
        ClusterError: the object changes all the time, or *change* has failed.
    """
    for _ in range(MAX_CONFLICTS):
        try:
            return change()
        except ClusterError as error:
            if error.reason != CONFLICT:
                raise
    return change()


def awaited(
    cluster: Cluster, policy: Body, seconds: float, holds: Callable[[Body], object]
) -> Body | None:
    """Wait until *holds* returns True of a policy; return the policy, None if it takes longer."""
    start = time.monotonic()
    with closing(cluster.states(resources.POLICIES, policy)) as states:
        for state in states:
            (body,) = state.objects
            if holds(body):
                return body
            if time.monotonic() - start > seconds:
                break
    return None
