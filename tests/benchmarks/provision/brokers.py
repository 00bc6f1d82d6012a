"""Serve stand-ins for many brokers in this process, and print their addresses."""

from __future__ import annotations

import asyncio
import json
import sys
from contextlib import AsyncExitStack

from tests.support.fake_admin import FakeBroker, Namespace, Topic

POLICIES_OF_A_NAMESPACE = 1_000
"""The grants of 2,900 policies fill the record in which a broker stores those of a namespace."""


def namespace(policy: int) -> str:
    """Return the Pulsar namespace of the policy of this number at a broker."""
    return f"shop/prod-{policy // POLICIES_OF_A_NAMESPACE}"


async def serve(brokers: int, policies: int) -> None:
    """Serve this number of brokers, each with the source topics of its policies, until killed."""
    async with AsyncExitStack() as stack:
        urls = []
        for _ in range(brokers):
            broker = await stack.enter_async_context(FakeBroker.serving())
            broker.tenants = {"shop": []}
            for number in range(policies):
                topics = broker.namespaces.setdefault(namespace(number), Namespace()).topics
                topics[f"orders-{number}"] = Topic(0, {})
            urls.append(broker.url)
        print(json.dumps(urls), flush=True)  # noqa: T201  read by the parent process
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(serve(*map(int, sys.argv[1:])))
