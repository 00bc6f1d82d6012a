"""Where the orders are, as told by the two programs' logs and by the broker.

Called by `story`, while it goes on and for the account at its end. Nothing here uses redrive: an
account must not rest on what it is to prove.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pulsar

from sandbox.demo.account import Account
from sandbox.sandbox import Sandbox

_RECEIVE_TIMEOUT_MS = 60_000


@dataclass(frozen=True)
class Logs:
    """The three lists of ids, in files of one folder, so that an account can be made again.

    Attributes:
        folder: where they are.
    """

    folder: Path

    @property
    def produced(self) -> Path:
        """Return where the producer logs each id that the broker confirmed, a line each."""
        return self.folder / "produced.log"

    @property
    def handled(self) -> Path:
        """Return where the consumer logs each handling, a JSON object a line."""
        return self.folder / "handled.jsonl"

    @property
    def resting(self) -> Path:
        """Return where the ids found in the dead-letter topic are noted, a line each."""
        return self.folder / "resting.log"

    def count_produced(self) -> int:
        """Count the ids that the broker confirmed so far."""
        return len(_ids(self.produced))

    def outcomes(self) -> Counter[str]:
        """Count the handlings so far by outcome: `done`, or what they failed with."""
        return Counter(handling["outcome"] for handling in self._handlings())

    def account(self) -> Account:
        """Compare the three."""
        return Account.of(
            produced=_ids(self.produced),
            done=[handled["id"] for handled in self._handlings() if handled["outcome"] == "done"],
            resting=_ids(self.resting),
        )

    def _handlings(self) -> Iterator[dict[str, str]]:
        if self.handled.exists():
            # The last line may be half written.
            for line in self.handled.read_text(encoding="utf-8").split("\n")[:-1]:
                yield json.loads(line)


def resting(sandbox: Sandbox, topic: str, subscription: str, count: int) -> list[str]:
    """Receive the ids of *count* messages of *topic* and hand them back, unacknowledged.

    Raises:
        pulsar.Timeout: there are fewer.
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
