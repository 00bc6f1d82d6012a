"""List all that the last Replay of a dead-letter topic could not move; changes nothing.

`python -m redrive.replay.refused SERVICE_URL DEAD_LETTER_TOPIC`, with credentials as for the audit.
The status of a Replay has the first hundred; the ledger has all, until the next Replay of the
policy begins. Each line has the id of an entry, as `select.ids` takes it, how many selected
messages it holds, why they can't be moved, and the Replay.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator

from redrive.policy import naming
from redrive.policy.naming import TopicName
from redrive.reading import broker
from redrive.replay import ledger
from redrive.replay.records import Records


def lines(records: Records) -> Iterator[str]:
    """Write each refused entry as a line, by partition and position; pure.

    Args:
        records: of the ledger. A plan that is not complete, as of a run that has just begun, has
            no part in it.
    """
    for uid, header in sorted(records.headers.items()):
        for of, plan in sorted(records.plans.get(uid, {}).items()):
            for entry, messages, cause in sorted(plan.refused):
                yield f"{entry}:{of.partition} {messages} {cause} {header.replay}"


def main(arguments: list[str]) -> None:
    """Print what was refused."""
    parser = argparse.ArgumentParser(prog="python -m redrive.replay.refused", description=__doc__)
    parser.add_argument("service_url")
    parser.add_argument("dead_letter_topic", type=TopicName.parse_whole)
    given = parser.parse_args(arguments)
    with broker.connect(given.service_url) as client:
        records = ledger.read(
            client, naming.ledger_topic(given.dead_letter_topic), ledger.mounted_key()
        )
    sys.stdout.writelines(f"{line}\n" for line in lines(records))


if __name__ == "__main__":
    main(sys.argv[1:])
