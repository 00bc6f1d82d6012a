"""Errors of calls to a broker, each with its condition reason."""

from __future__ import annotations

import json
import re

from redrive.errors import RedriveError, Requeue
from redrive.reasons import Reason


class AdminError(RedriveError):
    """The broker refused a call to its admin API, or the call failed."""

    @property
    def may_be_done(self) -> bool:
        """Return True if the broker may have executed the call, or may still be executing it."""
        return self.reason in _MAY_BE_DONE

    @property
    def meets_all(self) -> bool:
        """Return True if other calls to this broker with the same credentials would fail, too."""
        return self.reason in _MEETS_ALL


_MAY_BE_DONE = {
    Reason.BROKER_UNREACHABLE,
    Reason.UNEXPECTED_ANSWER,
    Reason.BROKER_CONFLICT,
    Reason.BROKER_FAILED,
}
_MEETS_ALL = {Reason.BROKER_UNREACHABLE, Reason.AUTHENTICATION_FAILED, Reason.BROKER_FAILED}


class BrokerRefusedError(AdminError):
    """The broker refused a call, for a reason in its answer; mostly permanent.

    Attributes:
        has_cause: False if the code of the answer names no cause, so that it may be transient.
    """

    reason = Reason.BROKER_REFUSED
    has_cause: bool = True


class BrokerUnreachableError(AdminError):
    """The admin URL does not answer, or not in time."""

    reason = Reason.BROKER_UNREACHABLE


class BrokerDownError(BrokerUnreachableError):
    """The broker did not answer for some time; only probes are sent until one is answered."""

    requeue = Requeue.ON_CHANGE  # after a successful probe


class AuthenticationFailedError(AdminError):
    """The broker rejects the credentials (401)."""

    reason = Reason.AUTHENTICATION_FAILED


class AdminForbiddenError(AdminError):
    """The credentials are valid, but the role lacks a permission (403)."""

    reason = Reason.FORBIDDEN


class AdminNotFoundError(AdminError):
    """The object of the call does not exist (404)."""

    reason = Reason.NOT_FOUND


class AdminConflictError(AdminError):
    """The object already exists, or another client is changing it (409).

    The former may also be the answer to a call that was sent again on another connection.
    """

    reason = Reason.BROKER_CONFLICT


class BrokerFailedError(AdminError):
    """The broker failed (5xx), or limits the rate of calls (429)."""

    reason = Reason.BROKER_FAILED


class UnsupportedError(AdminError):
    """The broker does not support the call (405)."""

    reason = Reason.UNSUPPORTED


def without_words(reason: str, message: str) -> str:
    """Return the message of a condition without the answer of a broker or issuer in it.

    The answer may differ at each call, while the condition is the same.

    Args:
        reason: reason of the condition.
        message: its message, with the text of an error of this module.
    """
    return _ANSWER.sub("; got …; ", message, count=1) if reason in _HAS_WORDS else message


_ANSWER = re.compile(r"""; got (?:'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"); """)
"""Text of an answer in an error, as `repr` writes it."""
_BY_LIMIT = {
    "maximum number of subscriptions": "maxSubscriptionsPerTopic (a reader has one, too)",
    "max producers limit": "maxProducersPerTopic",
    "Topic reached max consumers limit": "maxConsumersPerTopic",
    "Subscription reached max consumers limit": "maxConsumersPerSubscription",
    "maximum message size": "maxMessageSize",
}
_SAME_ADDRESS = {
    "max same address producers limit": "maxSameAddressProducersPerTopic",
    "max same address consumers limit": "maxSameAddressConsumersPerTopic",
}
_RAISE = (
    "raise {} where it is set: at the topic (pulsar-admin topicPolicies), at its Pulsar namespace, "
    "or in the configuration of the brokers"
)
_TERMINATED = "process its messages, then delete it; the operator recreates its own topics"
_ALLOW_TYPE = (
    "allow this type in subscriptionTypesEnabled of the topic, of its Pulsar namespace, or of the "
    "brokers if neither sets it; readers need Exclusive"
)
_ALLOW_PLAIN = (
    "disable encryptionRequired of the Pulsar namespace, or encryptionRequireOnProducer of the "
    "brokers: a Replay has no keys"
)
_BY_SETTING: tuple[tuple[str, Reason, str], ...] = (
    ("maximum number of topics", Reason.LIMIT_REACHED,
     "raise maxTopicsPerNamespace of the Pulsar namespace, or of the brokers where it sets none"),
    *((words, Reason.LIMIT_REACHED, _RAISE.format(limit)) for words, limit in _BY_LIMIT.items()),
    *((words, Reason.LIMIT_REACHED, f"raise {limit} in the configuration of the brokers")
      for words, limit in _SAME_ADDRESS.items()),
    ("sub type!", Reason.SUBSCRIPTION_TYPE_NOT_ALLOWED, _ALLOW_TYPE),
    ("Encryption is required", Reason.ENCRYPTION_REQUIRED, _ALLOW_PLAIN),
    ("already terminated", Reason.TOPIC_TERMINATED, _TERMINATED),
    ("TopicTerminated", Reason.TOPIC_TERMINATED, _TERMINATED),  # of the client
)  # fmt: skip
"""Words in the broker's answer, and the setting that causes them."""


def refused_by_setting(problem: str, answer: str) -> AdminError | None:
    """Return the error of a refusal that a setting causes; None for any other.

    Args:
        problem: the problem, for the message.
        answer: reason in the broker's answer.
    """
    for words, reason, remedy in _BY_SETTING:
        if words in answer:
            return AdminError(problem, got=one_line(answer), remedy=remedy, reason=reason)
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
    AuthenticationFailedError: "use credentials that are valid and not expired",
    AdminForbiddenError: "use the token of a role that administers the tenant",
    AdminNotFoundError: "create it, or correct the name",
    BrokerFailedError: "the operator retries; if it persists, check the broker's log",
}


_HAS_WORDS = {
    *(kind.reason for kind in _KINDS.values()),
    *(reason for _, reason, _ in _BY_SETTING),
    Reason.BROKER_REFUSED,
    Reason.BROKER_UNREACHABLE,
    Reason.UNEXPECTED_ANSWER,
    Reason.ISSUER_FAILED,
}
"""Reasons of errors with an answer."""
_OF_GATEWAYS = {502, 503, 504}
_LACKS_RIGHT = ("Unauthorized to ", "Don't have permission to ")


def error_for(call: str, status: int, answer: str) -> AdminError:
    """Return the error of *call* from its HTTP *status* and the body of the broker's *answer*."""
    reason = _reason(answer)
    got = f"{status} {_size(answer) if reason is None else one_line(reason)}".rstrip()
    if status in _OF_GATEWAYS and reason is None:
        return BrokerUnreachableError(
            f"gateway or load balancer reports that the broker did not answer: {call}",
            got=got,
            remedy="check that the broker runs, and that its gateway or load balancer reaches it",
        )
    problem = f"the broker refused to {call}"
    if reason is not None and (by_setting := refused_by_setting(problem, f"{status} {reason}")):
        return by_setting
    kind = _KINDS.get(status, BrokerFailedError if status >= 500 else BrokerRefusedError)  # noqa: PLR2004
    if reason is not None and reason.lstrip().startswith(_LACKS_RIGHT):
        # Some calls answer 401 for a missing permission, where others answer 403.
        kind = AdminForbiddenError
    return kind(
        problem,
        got=got,
        remedy=_REMEDIES.get(kind, "the operator retries; correct the cause in the answer"),
    )


def unexpected(call: str, got: str) -> AdminError:
    """Return the error of an answer to *call* that Pulsar would not give; *got* describes it.

    It never repeats the answer: otherwise the owner of `adminURL` could read, in a status, data
    that only the operator can reach.
    """
    return AdminError(
        f'adminURL does not lead to a Pulsar admin API: unexpected response to "{call}"',
        got=got,
        remedy="correct adminURL: the address of the admin REST API, without /admin/v2",
        reason=Reason.UNEXPECTED_ANSWER,
    )


def unexpected_answer(address: str, got: str) -> AdminError:
    """Return the error of an answer that RocketMQ would not give; *got* describes it."""
    return AdminError(
        f"{address} is not a server of RocketMQ: unexpected answer",
        got=got,
        remedy="correct the addresses of the connection",
        reason=Reason.UNEXPECTED_ANSWER,
    )


def without_master(broker: str, call: str) -> AdminError:
    """Return the error of *call* to the master of a broker of RocketMQ, which is not listed."""
    return BrokerUnreachableError(
        f"the name servers list no master of a broker: {call}",
        got=broker,
        remedy="start it; if it was removed permanently, remove it from status.masters of policies",
    )


_BUSY, _NO_PERMISSION = frozenset({2, 14}), 16
"""Codes of answers to calls that a broker has not executed: it is busy or out of disk space, or the
user has no right."""
_NO_CAUSE, _PASSES = 1, re.compile("busy|in-sync replicas not enough|unable to service")
"""Code of an answer without a cause, and its remarks if a broker refuses all for a while."""
_MISSING = frozenset({17, 26, 206})
"""Codes of answers about a missing topic or group, and a group without consumers."""


def rocketmq_refusal(problem: str, code: int, remark: str) -> AdminError:
    """Return the error of a call that a server of RocketMQ refused with a *code* and a *remark*."""
    got = one_line(f"{code} {remark}")
    if code in _MISSING:
        return AdminNotFoundError(problem, got=got, remedy="create it, or correct the name")
    if code == _NO_PERMISSION and "no permission" in remark:
        return AdminForbiddenError(
            problem, got=got, remedy="allow the user of the access key to do it, by its ACL"
        )
    if code == _NO_PERMISSION:  # an unknown user, or another secret key
        return AuthenticationFailedError(
            problem, got=got, remedy="use an access key that the broker accepts"
        )
    if code in _BUSY or (code == _NO_CAUSE and _PASSES.search(remark)):
        return BrokerFailedError(problem, got=got, remedy="No action needed: the operator retries")
    remedy = "the operator retries; correct the cause in the answer"
    error = BrokerRefusedError(problem, got=got, remedy=remedy)
    error.has_cause = code != _NO_CAUSE
    return error


def one_line(text: str) -> str:
    """Return the beginning of a text of a broker, which logs and conditions can show."""
    words = " ".join(text.split())[:300]
    return "".join(c if c.isprintable() else "\ufffd" for c in words)


def _size(answer: str) -> str:
    return f"and {len(answer)} characters that are not an error of Pulsar" if answer else ""


def _reason(answer: str) -> str | None:
    """Return the reason of an error as Pulsar writes it, `{"reason": …}`; None for others."""
    try:
        document = json.loads(answer)
    except (ValueError, RecursionError):
        return None
    match document:
        case {"reason": str(reason)} if len(document) == 1:
            return reason
    return None
