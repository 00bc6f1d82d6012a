"""The end of a policy: what it made at the broker stays (Retain), and an Event tells so.

Messages may wait in the retry topic and rest in the dead-letter topic, and consumers may still be
at work; so nothing is deleted, and since the broker is not asked, a deletion never hangs.
"""

from __future__ import annotations

from redrive.cluster import resources
from redrive.cluster.errors import NotFoundError
from redrive.cluster.resources import Body, Key
from redrive.cluster.status import Publisher

FINALIZER = "redrive.io/retain"
RETAINED = "Retained"
"""Reason of an Event: the policy is gone, what it made at the broker is not."""


async def hold(body: Body, out: Publisher) -> Body:
    """Have the API server wait for `retire` before it deletes the policy; return it as it is then.

    Raises:
        ConflictError: somebody else has changed it meanwhile.
    """
    finalizers = body["metadata"].get("finalizers", [])
    if FINALIZER in finalizers:
        return body
    return await _set_finalizers(body, [*finalizers, FINALIZER], out)


async def retire(body: Body, out: Publisher) -> None:
    """Let a policy go that is being deleted, and tell what stays.

    Raises:
        ConflictError: somebody else has changed it meanwhile.
    """
    finalizers = body["metadata"].get("finalizers", [])
    if FINALIZER not in finalizers:
        return
    try:
        rest = [name for name in finalizers if name != FINALIZER]
        await _set_finalizers(body, rest, out)
    except NotFoundError:
        return  # somebody else has let it go
    made = body.get("status") or {}
    if "retryTopic" in made:
        # Told once it is true: a conflict above would tell it again with every attempt. A crash in
        # between tells it never.
        topics = " and ".join(made[f] for f in ("retryTopic", "deadLetterTopic") if f in made)
        await out.tell(
            body,
            RETAINED,
            f"{topics} stay at the broker, with their "
            "messages, subscriptions and grants; delete them by hand once they are not needed",
        )


async def _set_finalizers(body: Body, names: list[str], out: Publisher) -> Body:
    # The list is replaced as a whole: only if nobody has changed the object since it was read.
    version = body["metadata"]["resourceVersion"]
    patch = {"metadata": {"finalizers": names, "resourceVersion": version}}
    after = await out.kubernetes.patch(resources.POLICIES, Key.of(body), patch)
    out.table.renew(after)
    return after
