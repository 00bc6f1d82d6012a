"""The command `redrive`, and its arguments.

`redrive SUBCOMMAND …`: reads the arguments and runs a subcommand.

The arguments of each subcommand; called by `main`.

Imports nothing that an extra installs, so that `--help` works wherever `redrive` is installed.
"""

from __future__ import annotations

import argparse
import importlib
import secrets
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from redrive import __version__
from redrive.errors import RedriveError
from redrive.kube import logs
from redrive.kube.resources import Key


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
    add_operator(parser.add_subparsers(required=True, metavar="SUBCOMMAND"))
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


def add_operator(subcommands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand `operator`."""
    parser = subcommands.add_parser(
        "operator",
        help="provision policies and run replays, until stopped",
        description="Provisions RetryPolicies and runs Replays until it is stopped. Uses the "
        "cluster it runs in, unless KUBECONFIG names another.",
    )
    parser.add_argument(
        "--cluster-id",
        default="",
        metavar="ID",
        help="tells this cluster from others that use the same brokers, in the marks on topics "
        "(default: the uid of the namespace kube-system, if it may be read)",
    )
    parser.add_argument(
        "--credentials",
        type=Path,
        metavar="DIR",
        help="where connections find files that they name: a BrokerConnection of namespace NS in "
        "DIR/NS, and nowhere else (default: nowhere)",
    )
    parser.add_argument(
        "--lease",
        type=_key,
        metavar="NAMESPACE/NAME",
        help="act only while holding this Lease, so that several operators may be started "
        "(default: act at once; there must be one only)",
    )
    parser.add_argument(
        "--identity",
        default=f"{socket.gethostname()}-{secrets.token_hex(4)}",
        metavar="NAME",
        help="holder of the Lease: a name that no two operators have at a time, such as that of a "
        "pod (default: the host's, with something random)",
    )
    parser.add_argument(
        "--namespace",
        action="append",
        default=[],
        metavar="NS",
        help="serve this Kubernetes namespace; may be repeated (default: all namespaces)",
    )
    parser.add_argument(
        "--replay-template",
        type=_key,
        metavar="NAMESPACE/NAME",
        help="PodTemplate whose container has the image of replay jobs: Spark, and "
        "redrive[replay]; read before each launch (default: none, and Replays are not run)",
    )
    parser.add_argument(
        "--replay-application",
        default="local:///opt/redrive/replay.py",
        metavar="URL",
        help="where the replay job lies in that image (default: %(default)s)",
    )
    parser.add_argument(
        "--replay-service-account",
        default="redrive-replay",
        metavar="NAME",
        help="ServiceAccount of the drivers of replay jobs, in the namespace of each Replay "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--job-templates",
        type=Path,
        metavar="FILE",
        help="job templates, as YAML: an object of templates by name, read again when it changes "
        "(default: the template `default` alone)",
    )
    parser.add_argument(
        "--max-executors",
        type=int,
        default=1_000,
        metavar="N",
        help="highest number of executors of a Replay, whatever its template permits "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--replay-launcher",
        action="append",
        default=[],
        choices=("Kubeflow", "Apache"),
        help="a Spark operator that may run replay jobs, if it is installed; may be repeated "
        "(default: Kubeflow)",
    )
    parser.add_argument(
        "--listen",
        type=_address,
        metavar="ADDRESS:PORT",
        help="serve /metrics, /livez and /readyz there, for example on 0.0.0.0:8080 "
        "(default: not at all)",
    )
    parser.add_argument(
        "--log-format",
        choices=logs.FORMATS,
        default="text",
        help="json: an object in each line, with the identity of what it is about "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--log-level",
        choices=logs.LEVELS,
        default="info",
        help="leave out less severe entries; debug adds each reconcile and each call to a broker "
        "(default: %(default)s)",
    )
    parser.set_defaults(subcommand="operator", extra="operator")


def _key(text: str) -> Key:
    """Read `NAMESPACE/NAME`.

    Raises:
        ArgumentTypeError: it has another form; argparse prints the message.
    """
    namespace, _, name = text.partition("/")
    if not namespace or not name:
        raise argparse.ArgumentTypeError(f"not written NAMESPACE/NAME: {text!r}")
    return Key(namespace, name)


def _address(text: str) -> tuple[str, int]:
    """Read `ADDRESS:PORT`, the address of IPv6 in brackets.

    Raises:
        ArgumentTypeError: it has another form; argparse prints the message.
    """
    address, _, port = text.rpartition(":")
    if not address or not port.isdecimal():
        raise argparse.ArgumentTypeError(f"not written ADDRESS:PORT: {text!r}")
    return address.strip("[]"), int(port)
