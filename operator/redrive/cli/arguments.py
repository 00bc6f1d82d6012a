"""The arguments of each subcommand; called by `main`.

Imports nothing that an extra installs, so that `--help` works wherever `redrive` is installed.
"""

from __future__ import annotations

import argparse
import json
import secrets
import socket
from pathlib import Path
from typing import Any

from redrive.kube import logs
from redrive.kube.resources import Key


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
        help="where connections find files that they name: a PulsarConnection of namespace NS in "
        "DIR/NS, and nowhere else (default: nowhere)",
    )
    parser.add_argument(
        "--lease",
        type=_lease,
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
        "--replay-image",
        default="",
        metavar="IMAGE",
        help="container image of replay jobs: Spark, and redrive[replay] (default: none, and "
        "Replays are not run)",
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
        "--replay-job",
        type=_fields,
        default={},
        metavar="JSON",
        help="what connections leave out about the pods of replay jobs, such as "
        '{"executor": {"coreRequest": "100m"}} (default: nothing)',
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
    parser.set_defaults(subcommand="operator", extra="operator")


def _lease(text: str) -> Key:
    """Read `NAMESPACE/NAME`.

    Raises:
        ArgumentTypeError: it has another form; argparse prints the message.
    """
    namespace, _, name = text.partition("/")
    if not namespace or not name:
        raise argparse.ArgumentTypeError(f"not written NAMESPACE/NAME: {text!r}")
    return Key(namespace, name)


def _fields(text: str) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        ArgumentTypeError: it is none; argparse prints the message.
    """
    try:
        fields = json.loads(text)
    except ValueError:
        fields = None
    if not isinstance(fields, dict):
        raise argparse.ArgumentTypeError(f"not a JSON object: {text!r}")
    return fields


def _address(text: str) -> tuple[str, int]:
    """Read `ADDRESS:PORT`, the address of IPv6 in brackets.

    Raises:
        ArgumentTypeError: it has another form; argparse prints the message.
    """
    address, _, port = text.rpartition(":")
    if not address or not port.isdecimal():
        raise argparse.ArgumentTypeError(f"not written ADDRESS:PORT: {text!r}")
    return address.strip("[]"), int(port)
