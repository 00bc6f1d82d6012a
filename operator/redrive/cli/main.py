"""`redrive SUBCOMMAND …`: reads the arguments and runs a subcommand."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from redrive.cli import operator
from redrive.errors import RedriveError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code.

    What a user can mend is one line on standard error and the code 1.
    """
    parser = argparse.ArgumentParser(
        prog="redrive", description="Retry and dead-letter topics for Apache Pulsar on Kubernetes."
    )
    operator.add_to(parser.add_subparsers(required=True, metavar="SUBCOMMAND"))
    options = parser.parse_args(arguments)
    try:
        options.run(options)
    except RedriveError as error:
        print(f"redrive: {error}", file=sys.stderr)  # noqa: T201  what a command answers
        return 1
    return 0
