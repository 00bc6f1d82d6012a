"""List of all messages that the last Replay of a dead-letter topic refused, without changes.

`python -m redrive.replay.refused SERVICE_URL DEAD_LETTER_TOPIC`, with the credentials of
docs/howto/audit.md. The status of a Replay has the first hundred. The ledger has all, until the
next Replay of the policy moves messages. Each line contains the id of an entry for `select.ids`,
the number of its selected messages, the cause, and the Replay.
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
    """Yield a line for each refused entry, by partition and position.

    Args:
        records: records of the ledger. Incomplete plans of runs that have just begun are ignored.
    """
    for uid, header in sorted(records.headers.items()):
        for source_range, plan in sorted(records.plans.get(uid, {}).items()):
            for entry, messages, cause in sorted(plan.refused):
                yield f"{entry}:{source_range.partition} {messages} {cause} {header.replay}"


def main(arguments: list[str]) -> None:
    """Print the refused messages."""
    parser = argparse.ArgumentParser(prog="python -m redrive.replay.refused", description=__doc__)
    parser.add_argument("service_url")
    parser.add_argument("dead_letter_topic", type=TopicName.parse_whole)
    options = parser.parse_args(arguments)
    with broker.connect(options.service_url) as client:
        records = ledger.read(
            client, naming.ledger_topic(options.dead_letter_topic), ledger.mounted_key()
        )
    sys.stdout.writelines(f"{line}\n" for line in lines(records))


if __name__ == "__main__":
    main(sys.argv[1:])
