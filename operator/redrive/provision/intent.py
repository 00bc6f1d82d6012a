"""What redrive was about to create, recorded in the status of a policy before it is done.

A topic is created with the properties that tell whose it is, in one call. A broker that is killed
during that call may keep a topic without partitions and lose its properties, and no answer comes.
Then the record tells the topic from one that was there before.
"""

from __future__ import annotations

from collections.abc import Iterable

from redrive.admin.errors import (
    AdminConflictError,
    AdminError,
    BrokerFailedError,
    BrokerUnreachableError,
    UnexpectedAnswerError,
)
from redrive.kube import resources
from redrive.kube.context import Context
from redrive.kube.resources import Body, Key
from redrive.provision.actions import Action, CreateTopic
from redrive.provision.ownership import CREATING, creating

_UNKNOWN = (
    AdminConflictError,
    BrokerFailedError,
    BrokerUnreachableError,
    UnexpectedAnswerError,
)
"""After these a broker may have done what it was asked, or be doing it.

That a topic exists already is the answer to a call that was sent again on another connection, too.
"""


async def record(planned: Iterable[Action], body: Body, ctx: Context) -> Body:
    """Record which topics of *planned* are about to be created, as far as that can be lost.

    Returns:
        The RetryPolicy as it is then.

    Raises:
        KubernetesError: it could not be recorded; nothing may be created then.
    """
    topics = [str(a.topic) for a in planned if isinstance(a, CreateTopic) and not a.partitions]
    if creating(body).issuperset(topics):
        return body
    return await _write(topics, body, ctx)


async def clear(error: AdminError, body: Body, ctx: Context) -> None:
    """Forget what was recorded, if *error* says that nothing of it is still under way.

    A topic of that name may be created by others from then on.

    Raises:
        KubernetesError: it could not be written.
    """
    if creating(body) and not isinstance(error, _UNKNOWN):
        await _write(None, body, ctx)


async def _write(topics: list[str] | None, body: Body, ctx: Context) -> Body:
    key = Key.of(body)
    after = await ctx.kubernetes.patch_status(resources.POLICIES, key, {CREATING: topics})
    ctx.policies.renew(after)
    return after
