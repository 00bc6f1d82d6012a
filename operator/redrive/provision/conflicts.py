"""Which policies want the same topic: an index over all of them, kept up to date by changes.

One (topic, subscription) has one policy, see `standing`; and two policies must not share a retry or
dead-letter topic, which derived names make possible: topic `orders-eu` with subscription `billing`
and topic `orders` with `eu-billing` meet in one name. So do all topics of a namespace that share
a subscription's name under a scheme that leaves the topic out. Nor may a name that is given be that
of another policy's source topic, which would be kept as if it held retries.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

from redrive.api.parsing import parse_spec
from redrive.api.retrypolicy import RetryPolicySpec
from redrive.errors import InvalidSpecError
from redrive.kube.cache import Cache, needs_reconcile
from redrive.kube.resources import Body, Key
from redrive.provision.standing import Standing


@dataclass(frozen=True)
class _Names:
    """The names of one policy.

    Attributes:
        claimed: what it is found by.
        met: what those claim that it meets. Two that retry the same topic do not meet for that.
    """

    claimed: frozenset[str] = frozenset()
    met: frozenset[str] = frozenset()


_NONE = _Names()


class Conflicts:
    """Every name that a policy claims → the policies that claim it, on whatever broker.

    Args:
        policies: all that there are.
        enqueue: called with each policy that lost or gained a rival, or whose rival has a new spec
            or stands otherwise: whether a rival may be obeyed, and at which broker, decides about
            others too.
    """

    def __init__(self, policies: Cache, enqueue: Callable[[Key], None]) -> None:
        self._enqueue = enqueue
        self._claimants: dict[str, set[Key]] = defaultdict(set)
        self._names: dict[Key, _Names] = {}
        for body in policies:
            self._claim(Key.of(body), _names(body))
        policies.listen(self._note)

    def rivals(self, key: Key) -> frozenset[Key]:
        """Return the policies that claim a name which *key* claims too, on whatever broker.

        Those whose source topic is a retry or dead-letter topic of *key* are among them, and those
        that its own source topic is one of.
        """
        met = self._names.get(key, _NONE).met
        return frozenset(other for name in met for other in self._claimants.get(name, ())) - {key}

    def _note(self, key: Key, before: Body | None, after: Body | None) -> None:
        if not needs_reconcile(before, after) and not _stands_otherwise(before, after):
            return
        rivals = self.rivals(key)
        self._claim(key, _NONE if after is None else _names(after))
        for rival in rivals | self.rivals(key):
            self._enqueue(rival)

    def _claim(self, key: Key, names: _Names) -> None:
        for name in self._names.pop(key, _NONE).claimed:
            self._claimants[name].discard(key)
            if not self._claimants[name]:
                del self._claimants[name]
        if names.claimed:
            self._names[key] = names
        for name in names.claimed:
            self._claimants[name].add(key)


def _stands_otherwise(before: Body | None, after: Body | None) -> bool:
    if before is None or after is None:
        return before is not after
    return Standing.of(before) is not Standing.of(after)


def _names(body: Body) -> _Names:
    """Return what a policy claims; one that can't be obeyed claims nothing.

    One that is being deleted still claims what it may be about to delete.
    """
    try:
        spec = parse_spec(RetryPolicySpec, body)
    except InvalidSpecError:
        return _NONE  # its own reconcile says so in its status
    # No topic has the name of an identity, or of a source.
    common = {f"{spec.topic}/{spec.subscription}", *map(str, spec.own_topics)}
    sources = {f"source of {topic}" for topic in spec.own_topics}
    return _Names(
        claimed=frozenset({*common, f"source of {spec.topic}"}),
        met=frozenset({*common, *sources, str(spec.topic)}),
    )
