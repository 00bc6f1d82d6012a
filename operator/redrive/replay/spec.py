"""`ReplayJob`: all that the operator tells a replay job, as its one argument. Pure.

It holds no secret: arguments show in process lists and in the Spark UI. The credentials of the
replay role are files that driver and executors mount. `BrokerAccess`, in the environment variable
`ACCESS_VARIABLE`, says which, so that each process of a job knows.
"""

from __future__ import annotations

import enum
import json
from dataclasses import asdict, dataclass

from redrive.errors import InvalidSpecError
from redrive.policy import codec
from redrive.policy.model import Policy
from redrive.policy.naming import TopicName

ACCESS_VARIABLE = "REDRIVE_PULSAR_ACCESS"
"""Holds a `BrokerAccess`, as `encode` writes it."""
MESSAGES_PER_SECOND = 2_000
"""The messages that one task of a job moves in a second at least, on a broker with nothing else to
do; estimates of a run's time count with it."""


class Method(enum.StrEnum):
    """How a job proves who it is."""

    TOKEN = "token"  # noqa: S105  a method
    TLS = "tls"
    OAUTH2 = "oauth2"
    NONE = "none"


@dataclass(frozen=True)
class BrokerAccess:
    """Who a job is for the broker, without any secret: those lie in files.

    Attributes:
        folder: what is mounted lies below it: `credentials/`, with the files `token`, `tls.crt` and
            `tls.key`, or `client-secret`; `ca/ca.crt` and `issuer-ca/ca.crt`, if others than the
            authorities of the image are trusted.
        redirect_hosts: where else than to the host of `adminUrl` they may go, see `Access.hosts`.
        issuer_url: of OAuth 2.0, like what follows; None where the method is another.
    """

    method: Method
    folder: str
    redirect_hosts: tuple[str, ...] = ()
    issuer_url: str | None = None
    client_id: str | None = None
    audience: str | None = None
    scope: str | None = None

    def encode(self) -> str:
        """Write it as JSON, without a dollar sign: see `ReplayJob.encode`."""
        return _without_dollars(json.dumps(asdict(self), ensure_ascii=False))

    @classmethod
    def decode(cls, text: str) -> BrokerAccess:
        """Read what `encode` wrote.

        Raises:
            InvalidSpecError: *text* is something else.
        """
        try:
            fields = json.loads(text)
            fields["method"] = Method(fields["method"])
            return cls(**fields | {"redirect_hosts": tuple(fields["redirect_hosts"])})
        except (ValueError, KeyError, TypeError) as error:
            raise InvalidSpecError(
                f"the environment variable {ACCESS_VARIABLE} does not say how to reach the broker",
                got=repr(error),
                remedy="start the job by a Replay; run the same version of operator and image",
            ) from error


@dataclass(frozen=True)
class Choice:
    """Which dead letters to take, besides by SQL: those for which all holds that is given.

    Attributes:
        ids: one of these, as `ledger:entry`, with `:partition` and `:index` or without; empty takes
            any, like *keys*.
        keys: with one of these.
        since: published then or later, in milliseconds since 1970; None takes any, like *until*.
        until: published before.
        limit: at most so many, the first ones.
        max_replays: of what is taken, a message that was replayed so often before is refused; None
            for any number.
        discards: whether to acknowledge, without moving it, what is taken and no client can show.
    """

    ids: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()
    since: int | None = None
    until: int | None = None
    limit: int | None = None
    max_replays: int | None = None
    discards: bool = False


EVERYTHING = Choice()


@dataclass(frozen=True)
class ReplayJob:
    """One run.

    Attributes:
        namespace: that of the Replay.
        name: that of the Replay.
        uid: the Replay's; it makes a repeated run of this Replay known to the broker.
        where: the condition of the selection as its author wrote it; None is true for all.
        dry_run: whether to plan only.
        reason: why, in the words of the Replay's author; empty if it gives none.
        ticket: where that was decided; likewise.
        rate_limit: how many messages a second all tasks may send together; None for no limit.
        batch: whether messages are sent in batches.
        choice: the other parts of the selection.
        approval_above: how many messages it may move without approval; None for any number.
        target: where to move them; None for the retry topic.
        exactly_once: see `Route`.
        follow_for: how many seconds to look at what becomes of what was moved; None for none.
    """

    namespace: str
    name: str
    uid: str
    policy: Policy
    service_url: str
    admin_url: str
    where: str | None
    dry_run: bool = False
    reason: str = ""
    ticket: str = ""
    rate_limit: float | None = None
    choice: Choice = EVERYTHING
    approval_above: int | None = None
    target: TopicName | None = None
    exactly_once: bool = True
    follow_for: float | None = None
    batch: bool = False

    @property
    def destination(self) -> TopicName:
        """Return where dead letters are moved."""
        return self.target or self.policy.retry_topic

    def encode(self) -> str:
        """Write the job as JSON; equal jobs give equal text.

        It holds no dollar sign: in a container's arguments a kubelet puts the value of a variable,
        of a Secret too, in the place of `$(NAME)`, and selections are written by anybody.
        """
        written = json.dumps(
            {
                "namespace": self.namespace,
                "name": self.name,
                "uid": self.uid,
                "policy": codec.encode(self.policy),
                "serviceUrl": self.service_url,
                "adminUrl": self.admin_url,
                "where": self.where,
                "dryRun": self.dry_run,
                "reason": self.reason,
                "ticket": self.ticket,
                "rateLimit": self.rate_limit,
                "choice": asdict(self.choice),
                "approvalAbove": self.approval_above,
                "target": str(self.target) if self.target else None,
                "exactlyOnce": self.exactly_once,
                "followFor": self.follow_for,
                "batch": self.batch,
            },
            ensure_ascii=False,
        )
        return _without_dollars(written)

    @classmethod
    def decode(cls, text: str) -> ReplayJob:
        """Read what `encode` wrote.

        Raises:
            InvalidSpecError: *text* is something else.
        """
        try:
            document = json.loads(text)
            choice, target = document["choice"], document["target"]
            lists = {name: tuple(choice[name]) for name in ("ids", "keys")}
            return cls(
                namespace=document["namespace"],
                name=document["name"],
                uid=document["uid"],
                policy=codec.decode(document["policy"]),
                service_url=document["serviceUrl"],
                admin_url=document["adminUrl"],
                where=document["where"],
                dry_run=document["dryRun"],
                reason=document["reason"],
                ticket=document["ticket"],
                rate_limit=document["rateLimit"],
                choice=Choice(**choice | lists),
                approval_above=document["approvalAbove"],
                target=TopicName.parse_whole(target) if target else None,
                exactly_once=document["exactlyOnce"],
                follow_for=document["followFor"],
                batch=document["batch"],
            )
        except (ValueError, KeyError, TypeError) as error:
            raise InvalidSpecError(
                "a replay job takes one argument, the JSON document that the operator writes",
                got=repr(error),
                remedy="start it by a Replay; run the same version of operator and image",
            ) from error


def _without_dollars(written: str) -> str:
    return written.replace("$", "\\u0024")
