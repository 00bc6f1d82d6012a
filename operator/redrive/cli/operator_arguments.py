"""Arguments of `redrive operator`.

Imports nothing that an extra installs, so that `--help` works wherever `redrive` is installed.
"""

from __future__ import annotations

import argparse
import secrets
import socket
from collections.abc import Sequence
from pathlib import Path

from redrive.kube import logs
from redrive.kube.resources import Key


def parse(arguments: Sequence[str], program: str) -> argparse.Namespace:
    """Read the arguments of `redrive operator`; exit with code 2 where they are invalid.

    Args:
        arguments: those after the name of the command.
        program: name of the command in its help.
    """
    parser = argparse.ArgumentParser(
        prog=program,
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
        "--job-service-account",
        default="redrive-job",
        metavar="NAME",
        help="ServiceAccount of Replays with engine Job, in the namespace of each Replay "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--job-max-messages",
        type=int,
        default=10_000,
        metavar="N",
        help="highest number of dead letters for which engine Auto takes a Job "
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
    return parser.parse_args(arguments)


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
