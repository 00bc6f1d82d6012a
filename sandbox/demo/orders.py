"""The places of the orders, from the logs of the two programs and from the broker.

Called by the stories, for their progress and for the account at the end. This module does not use
redrive: the account must not depend on the product that it checks.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pulsar

from sandbox.demo.account import Account
from sandbox.sandbox import Sandbox

_RECEIVE_TIMEOUT_MS = 60_000


@dataclass(frozen=True)
class Logs:
    """The three lists of ids, in files of one folder, so that an account can be repeated.

    Attributes:
        folder: of the files.
    """

    folder: Path

    @property
    def produced(self) -> Path:
        """The producer's log: each id that the broker confirmed, one a line."""
        return self.folder / "produced.log"

    @property
    def handled(self) -> Path:
        """The consumer's log: each handling, a JSON object a line."""
        return self.folder / "handled.jsonl"

    @property
    def dead(self) -> Path:
        """The ids in the dead-letter topic, one a line."""
        return self.folder / "dead.log"

    def count_produced(self) -> int:
        """Return the number of ids that the broker has confirmed."""
        return len(_ids(self.produced))

    def outcomes(self) -> Counter[str]:
        """Count the handlings by outcome: `done`, or the name of the error."""
        return Counter(handling["outcome"] for handling in self._handlings())

    def gaps(self) -> dict[str, list[float]]:
        """Return the seconds between the handlings of each order that was handled repeatedly.

        The handler must log its time.
        """
        times = defaultdict(list)
        for handling in self._handlings():
            times[handling["id"]].append(float(handling["time"]))
        return {
            order: [later - earlier for earlier, later in pairwise(at)]
            for order, at in times.items()
            if len(at) > 1
        }

    def account(self) -> Account:
        """Return the account of the three lists."""
        return Account.of(
            produced=_ids(self.produced),
            done=[handled["id"] for handled in self._handlings() if handled["outcome"] == "done"],
            dead=_ids(self.dead),
        )

    def _handlings(self) -> Iterator[dict[str, str]]:
        if self.handled.exists():
            # The last line may be half written.
            for line in self.handled.read_text(encoding="utf-8").split("\n")[:-1]:
                yield json.loads(line)


def dead(sandbox: Sandbox, topic: str, subscription: str, count: int) -> list[str]:
    """Return the ids of *count* messages of *topic*, which stay unacknowledged.

    Raises:
        pulsar.Timeout: the topic has fewer.
    """
    client = pulsar.Client(
        sandbox.pulsar.service_url,
        authentication=pulsar.AuthenticationToken(sandbox.pulsar.token("superuser")),
        logger=pulsar.ConsoleLogger(pulsar.LoggerLevel.Error),
    )
    try:
        consumer = client.subscribe(
            f"persistent://{topic}", subscription, pulsar.ConsumerType.Shared
        )
        return [consumer.receive(_RECEIVE_TIMEOUT_MS).partition_key() for _ in range(count)]
    finally:
        client.close()


def _ids(log: Path) -> list[str]:
    return log.read_text(encoding="ascii").split() if log.exists() else []
