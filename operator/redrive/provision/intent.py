"""What redrive was about to create, and how it is named: in the status before it is done.

A topic is created with the properties that tell whose it is, in one call. A broker that is killed
during that call may keep a topic without partitions and lose its properties, and no answer comes.
Then the record tells the topic from one that was there before.

The naming scheme is on record before anything is done, because a connection may say another one at
the next look.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from redrive.admin.errors import AdminError
from redrive.api.naming import NAMING_SCHEME
from redrive.kube import resources
from redrive.kube.context import Context
from redrive.kube.resources import Body, Key
from redrive.policy.naming import Scheme
from redrive.provision.actions import Action, CreateTopic
from redrive.provision.ownership import CREATING, creating


async def record(planned: Sequence[Action], scheme: Scheme, body: Body, ctx: Context) -> Body:
    """Record which topics of *planned* are about to be created, as far as that can be lost.

    Args:
        planned: what is about to be done.
        scheme: what names the policy's topics.
        body: the RetryPolicy.
        ctx: what the watches have shown.

    Returns:
        The RetryPolicy as it is then.

    Raises:
        KubernetesError: it could not be recorded; nothing may be created then.
    """
    topics = [str(a.topic) for a in planned if isinstance(a, CreateTopic) and not a.partitions]
    fields: dict[str, Any] = {} if creating(body).issuperset(topics) else {CREATING: topics}
    if planned and (body.get("status") or {}).get(NAMING_SCHEME) != scheme:
        fields[NAMING_SCHEME] = str(scheme)
    return await _write(fields, body, ctx) if fields else body


async def clear(error: AdminError, body: Body, ctx: Context) -> None:
    """Forget what was recorded, if *error* says that nothing of it is still under way.

    A topic of that name may be created by others from then on.

    Raises:
        KubernetesError: it could not be written.
    """
    if creating(body) and not error.may_be_done:
        await _write({CREATING: None}, body, ctx)


async def _write(fields: Mapping[str, Any], body: Body, ctx: Context) -> Body:
    after = await ctx.kubernetes.patch_status(resources.POLICIES, Key.of(body), fields)
    ctx.policies.renew(after)
    return after
