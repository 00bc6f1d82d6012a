"""How a call to a broker can fail, each way with its condition reason."""

from __future__ import annotations

import json
from typing import ClassVar

from redrive.errors import RedriveError, Requeue
from redrive.reasons import Reason


class AdminError(RedriveError):
    """The broker failed at, or refused, a call to its admin API.

    Attributes:
        may_be_done: whether the broker may have done what it was asked, or be doing it.
        meets_all: whether other calls to this broker, with the same credentials, would meet it too.
    """

    may_be_done: ClassVar[bool] = False
    meets_all: ClassVar[bool] = False


class BrokerRefusedError(AdminError):
    """The broker does not do what was asked, for a reason that only its answer tells.

    Asked again it will say the same, in most cases.
    """

    reason = Reason.BROKER_REFUSED


class BrokerUnreachableError(AdminError):
    """Nothing answers at the admin URL, or not in time."""

    reason = Reason.BROKER_UNREACHABLE
    may_be_done = True
    meets_all = True


class BrokerDownError(BrokerUnreachableError):
    """The broker did not answer for a while; only probes are sent until one is answered."""

    @property
    def requeue(self) -> Requeue:
        """Return the time at which an object is reconciled again: after a successful probe."""
        return Requeue.ON_CHANGE


class AdminUrlInvalidError(AdminError):
    """The admin URL, or one that the broker redirects to, can't be called."""

    reason = Reason.ADMIN_URL_INVALID


class RedirectRefusedError(AdminError):
    """The broker redirects to an address that the connection does not name."""

    reason = Reason.REDIRECT_REFUSED


class UnexpectedAnswerError(AdminError):
    """Something answers, but not as Pulsar's admin API does."""

    reason = Reason.UNEXPECTED_ANSWER
    may_be_done = True


class AuthenticationFailedError(AdminError):
    """The broker does not accept the token (401)."""

    reason = Reason.AUTHENTICATION_FAILED
    meets_all = True


class CertificateRefusedError(AdminError):
    """The broker, or an issuer, shows a certificate that is not trusted or is for another host."""

    reason = Reason.CERTIFICATE_REFUSED


class IssuerFailedError(AdminError):
    """The issuer of OAuth 2.0 tokens gives none, for now or because it was asked wrongly."""

    reason = Reason.ISSUER_FAILED


class AdminForbiddenError(AdminError):
    """The token is good, but its role lacks a right (403)."""

    reason = Reason.FORBIDDEN


class AdminNotFoundError(AdminError):
    """What the call is about does not exist (404)."""

    reason = Reason.NOT_FOUND


class AdminConflictError(AdminError):
    """It exists already, or is being changed by another client (409).

    The first is the answer to a call that was sent again on another connection, too.
    """

    reason = Reason.BROKER_CONFLICT
    may_be_done = True


class BrokerFailedError(AdminError):
    """The broker itself failed (5xx), or limits the rate of calls (429)."""

    reason = Reason.BROKER_FAILED
    may_be_done = True
    meets_all = True


class UnsupportedError(AdminError):
    """This broker does not know the call (405)."""

    reason = Reason.UNSUPPORTED


_RAISE = "raise {} of the Pulsar namespace, or of the brokers where it sets none"
_BY_SETTING: tuple[tuple[str, Reason, str], ...] = (
    ("maximum number of topics", Reason.LIMIT_REACHED, _RAISE.format("maxTopicsPerNamespace")),
    (
        "maximum number of subscriptions",
        Reason.LIMIT_REACHED,
        _RAISE.format("maxSubscriptionsPerTopic")
        + "; each reader of a topic counts as a subscription",
    ),
    ("max producers limit", Reason.LIMIT_REACHED, _RAISE.format("maxProducersPerTopic")),
    (
        "Encryption is required",
        Reason.ENCRYPTION_REQUIRED,
        "switch encryptionRequired of the Pulsar namespace off: a Replay has no keys",
    ),
    (
        "already terminated",
        Reason.TOPIC_TERMINATED,
        "handle its messages, then delete it; the operator creates its own topics again",
    ),
)
"""Words of the broker, and the setting that they are about."""


def refused_by_setting(problem: str, said: str) -> AdminError | None:
    """Return the error of a refusal that a setting causes; None for any other.

    Args:
        problem: what is wrong, in words.
        said: the words of the broker.
    """
    for words, reason, remedy in _BY_SETTING:
        if words in said:
            return AdminError(problem, got=_one_line(said), remedy=remedy, reason=reason)
    return None


_KINDS: dict[int, type[AdminError]] = {
    401: AuthenticationFailedError,
    403: AdminForbiddenError,
    404: AdminNotFoundError,
    405: UnsupportedError,
    409: AdminConflictError,
    429: BrokerFailedError,
}
_REMEDIES = {
    AuthenticationFailedError: "give the connection credentials that are valid and not expired",
    AdminForbiddenError: "use the token of a role that administers the tenant",
    AdminNotFoundError: "create it, or correct the name",
    BrokerFailedError: "it is tried again; look into the broker's log if it stays",
}


_OF_GATEWAYS = {502, 503, 504}
_LACKS_RIGHT = ("Unauthorized to ", "Don't have permission to ")


def error_for(call: str, status: int, answer: str) -> AdminError:
    """Name the failure of *call* by its HTTP *status* and the body of the broker's *answer*."""
    said = _reason(answer)
    found = f"{status} {_size(answer) if said is None else _one_line(said)}".rstrip()
    if status in _OF_GATEWAYS and said is None:
        return BrokerUnreachableError(
            f"the broker did not answer to {call}, says what stands before it",
            got=found,
            remedy="check that the broker runs, and that its gateway or load balancer finds it",
        )
    problem = f"the broker refused to {call}"
    if said is not None and (by_setting := refused_by_setting(problem, f"{status} {said}")):
        return by_setting
    kind = _KINDS.get(status, BrokerFailedError if status >= 500 else BrokerRefusedError)  # noqa: PLR2004
    if said is not None and said.lstrip().startswith(_LACKS_RIGHT):
        # Some calls answer 401 where others answer 403: the token is good, a right is missing.
        kind = AdminForbiddenError
    return kind(
        problem,
        got=found,
        remedy=_REMEDIES.get(kind, "it is tried again; see the answer for what to fix"),
    )


def unexpected(call: str, got: str) -> UnexpectedAnswerError:
    """Name an answer to *call*, given as a success, that Pulsar would not give: *got* tells of it.

    It never repeats the answer: the owner of `adminURL` could else read, in a status, what only the
    operator can reach.
    """
    return UnexpectedAnswerError(
        f"what answers when asked to {call} is not Pulsar's admin API",
        got=got,
        remedy="check adminURL: it is where the admin REST API answers, without /admin/v2",
    )


def _one_line(said: str) -> str:
    words = " ".join(said.split())[:300]
    # Whatever answers there may say anything, and this ends up in logs and conditions.
    return "".join(c if c.isprintable() else "\ufffd" for c in words)


def _size(answer: str) -> str:
    return f"and {len(answer)} characters that are no error of Pulsar's" if answer else ""


def _reason(answer: str) -> str | None:
    """Return the reason of an error as Pulsar writes it, `{"reason": …}`; None for all else."""
    try:
        document = json.loads(answer)
    except (ValueError, RecursionError):
        return None
    match document:
        case {"reason": str(said)} if len(document) == 1:
            return said
    return None
