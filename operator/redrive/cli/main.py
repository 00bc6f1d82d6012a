"""`redrive SUBCOMMAND …`: reads the arguments and runs a subcommand."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from typing import Any

from redrive import __version__
from redrive.cli import arguments
from redrive.errors import RedriveError


class MissingExtraError(RedriveError):
    """The subcommand needs packages that the installed extras of redrive do not include."""

    reason = "MissingExtra"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code.

    An error that the user can fix is one line on standard error, which begins with its reason, and
    the code 1.
    """
    parser = argparse.ArgumentParser(
        prog="redrive", description="Retry and dead-letter topics for Apache Pulsar on Kubernetes."
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    arguments.add_operator(parser.add_subparsers(required=True, metavar="SUBCOMMAND"))
    options = parser.parse_args(argv)
    try:
        _module_of(options).run(options)
    except RedriveError as error:
        print(f"redrive: {error.reason}: {error}", file=sys.stderr)  # noqa: T201  what a command answers
        return 1
    return 0


def _module_of(options: argparse.Namespace) -> Any:  # noqa: ANN401  a module
    """Import what runs the subcommand, and the packages of its extra with it.

    Raises:
        MissingExtraError: one of those packages is not installed.
    """
    try:
        return importlib.import_module(f"redrive.cli.{options.subcommand}")
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == "redrive":
            raise
        raise MissingExtraError(
            f"`redrive {options.subcommand}` needs redrive[{options.extra}]: "
            f"the module {error.name} is not installed",
            remedy=f"pip install 'redrive[{options.extra}]'",
        ) from error
