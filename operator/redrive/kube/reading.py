"""The first look at a cluster: waits for what is just starting, does without what is forbidden.

Called by `Context.open` and by `follow`, before the watches begin.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from redrive.kube.errors import ForbiddenError, UnavailableError

RETRY_SECONDS = 1.0
T = TypeVar("T")

logger = logging.getLogger(__name__)


async def patiently(read: Callable[[], Awaitable[T]]) -> T:
    """Read something, waiting for an API server that is just starting too."""
    while True:
        try:
            return await read()
        except UnavailableError as error:
            logger.warning("%s", error)
            await asyncio.sleep(RETRY_SECONDS)


async def allowed(reads: Sequence[Callable[[], Awaitable[T]]]) -> list[T | None]:
    """Make *reads*, one for each namespace; None stands for what a forbidden one brought.

    Who deletes a namespace deletes the Role in it too. The others have to be served all the same.

    Raises:
        ForbiddenError: all are forbidden.
        KubernetesError: one failed otherwise.
    """
    found: list[T | None] = []
    forbidden: list[ForbiddenError] = []
    for read in reads:
        try:
            found.append(await patiently(read))
        except ForbiddenError as refusal:
            forbidden.append(refusal)
            found.append(None)
    if len(forbidden) == len(found):
        raise forbidden[0]
    for error in forbidden:
        logger.warning("left out for now: %s", error)
    return found
