"""The broker calls for policies, made by a bare script in the best order."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import aiohttp

AT_ONCE = 20
"""The number of connections that the operator opens to a broker."""

_STAYS = {
    "inactiveTopicDeleteMode": "delete_when_no_subscriptions",
    "maxInactiveDurationSeconds": 60,
    "deleteWhileInactive": False,
}
_EARLIEST = {"ledgerId": -1, "entryId": -1, "partitionIndex": -1}


class Request(NamedTuple):
    """A call below `/admin/v2/`."""

    method: str
    path: str
    body: Any = None


def creates(topics: Iterable[str]) -> list[Request]:
    """Return the calls that create topics without partitions, named `tenant/namespace/name`."""
    return [Request("PUT", f"persistent/{topic}", {}) for topic in topics]


def subscribes(topics: Iterable[str], subscription: str) -> list[Request]:
    """Return the calls that create a subscription on each of *topics*, from its first message."""
    return [
        Request("PUT", f"persistent/{topic}/subscription/{subscription}", _EARLIEST)
        for topic in topics
    ]


def sources(topics: Sequence[str]) -> list[list[Request]]:
    """Return the calls that create source topics, with a subscription that keeps them."""
    return [creates(topics), subscribes(topics, "fulfilment")]


def provisions(topics: Sequence[str], role: str) -> list[list[Request]]:
    """Return the phases of calls that create retry and dead-letter topics of source *topics*."""
    retries = [f"{topic}-fulfilment-RETRY" for topic in topics]
    dead_letters = [f"{topic}-fulfilment-DLQ" for topic in topics]
    both = [*retries, *dead_letters]
    grants = [(topic, ["consume", "produce"]) for topic in retries]
    grants += [(topic, ["produce"]) for topic in dead_letters]
    return [
        creates(both),
        [
            *(Request("POST", f"persistent/{t}/deduplicationEnabled", body=True) for t in both),
            *(Request("POST", f"persistent/{t}/messageTTL?messageTTL=0") for t in both),
            *(Request("POST", f"persistent/{t}/inactiveTopicPolicies", _STAYS) for t in both),
        ],
        [
            Request(
                "POST",
                "namespaces/grantPermissionsOnTopics",
                [
                    {"topic": f"persistent://{topic}", "role": role, "actions": actions}
                    for topic, actions in grants
                ],
            )
        ],
        [*subscribes(retries, "fulfilment"), *subscribes(dead_letters, "redrive")],
    ]


async def run(phases: Iterable[Sequence[Request]], admin_url: str, token: str) -> float:
    """Make all calls, those of a phase concurrently; return the seconds."""
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
    connector = aiohttp.TCPConnector(limit=AT_ONCE)
    began = time.monotonic()
    async with aiohttp.ClientSession(headers=headers, connector=connector) as session:

        async def send(request: Request) -> None:
            url = f"{admin_url}/admin/v2/{request.path}"
            body = None if request.body is None else json.dumps(request.body)
            async with session.request(request.method, url, data=body) as answer:
                assert answer.ok, f"{request}: {answer.status} {await answer.text()}"

        for phase in phases:
            await asyncio.gather(*map(send, phase))
    return time.monotonic() - began
