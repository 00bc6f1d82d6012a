"""A RetryPolicy → its whole spec, with what it leaves to its connection; the one place for that.

Used by all that reads policies, of every journey. Each generation of a policy is read once with
each generation of its connection.
"""

from __future__ import annotations

from redrive.api.choices import PolicyDefaults
from redrive.api.naming import kept_scheme
from redrive.api.parsing import parse_spec
from redrive.api.retrypolicy import RetryPolicySpec
from redrive.kube.cache import Cache
from redrive.kube.resources import Body, Key
from redrive.policy.model import Policy
from redrive.policy.naming import Scheme


def spec_of(body: Body, policies: Cache) -> RetryPolicySpec:
    """Read the spec of a RetryPolicy as it is written: what it leaves out is left out.

    Raises:
        InvalidSpecError: it can't be obeyed.
    """
    return policies.derive(_parsed, body)


def effective_spec(body: Body, policies: Cache, defaults: PolicyDefaults | None) -> RetryPolicySpec:
    """Read the whole spec of a RetryPolicy.

    Args:
        defaults: what its connection says of what it leaves out.

    Raises:
        InvalidSpecError: it can't be obeyed.
    """
    kept = scheme_kept_by(body)
    return policies.derive(_effective, body, spec_of(body, policies), defaults, kept)


def policy_of(body: Body, policies: Cache, spec: RetryPolicySpec) -> Policy:
    """Return what consumers and replays need of a RetryPolicy.

    Args:
        spec: the whole spec.

    Raises:
        InvalidSpecError: its values can't make a policy together.
    """
    return policies.derive(_policy, body, spec)


def names_no_scheme(body: Body) -> bool:
    """Whether a RetryPolicy leaves its naming scheme to its connection."""
    return "scheme" not in (body["spec"].get("naming") or {})


def scheme_kept_by(body: Body) -> Scheme | None:
    """Return the naming scheme that a RetryPolicy was provisioned with; None where it was not."""
    return kept_scheme(body.get("status") or {})


def _parsed(body: Body) -> RetryPolicySpec:
    return parse_spec(RetryPolicySpec, body)


def _effective(
    _: Body, spec: RetryPolicySpec, defaults: PolicyDefaults | None, kept: Scheme | None
) -> RetryPolicySpec:
    return spec.effective(defaults, kept)


def _policy(body: Body, spec: RetryPolicySpec) -> Policy:
    return spec.to_policy(str(Key.of(body)), body["metadata"]["generation"])
