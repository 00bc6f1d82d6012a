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
    """Read the arguments of `redrive operator`; exit with code 2 if they are invalid.

    Args:
        arguments: those after the name of the command.
        program: name of the command in its help.
    """
    return parser(program).parse_args(arguments)


def parser(program: str) -> argparse.ArgumentParser:
    """Return the parser, from which the reference of the command line is generated too."""
    parser = argparse.ArgumentParser(
        prog=program,
        description="Provisions RetryPolicies and runs Replays until it is stopped. Uses the "
        "cluster in which it runs, or that of KUBECONFIG.",
    )
    add = parser.add_argument
    # fmt: off
    add("--cluster-id", default="", metavar="ID",
        help="ID of this cluster in the properties of topics, unique among clusters that use the "
        "same brokers (default: the uid of the namespace kube-system, if it may be read)")
    add("--credentials", type=Path, metavar="DIR",
        help="folder with token files: a BrokerConnection of namespace NS reads files in DIR/NS "
        "only (default: none)")
    add("--lease", type=_key, metavar="NAMESPACE/NAME",
        help="act only while holding this Lease, so that several operators can run "
        "(default: act without a Lease; only one operator may run then)")
    add("--identity", default=f"{socket.gethostname()}-{secrets.token_hex(4)}", metavar="NAME",
        help="holder of the Lease: a unique name, such as that of the pod "
        "(default: the host's name and a random suffix)")
    add("--namespace", action="append", default=[], type=_namespace, metavar="NS",
        help="serve this Kubernetes namespace; may be repeated (default: all namespaces)")
    add("--replay-template", type=_key, metavar="NAMESPACE/NAME",
        help="PodTemplate whose container has the image of replay jobs: Spark, and "
        "redrive[replay]; read before each launch (default: none; Replays do not run)")
    add("--replay-application", default="local:///opt/redrive/replay.py", metavar="URL",
        help="program of replay jobs in that image (default: %(default)s)")
    add("--replay-service-account", default="redrive-replay", metavar="NAME",
        help="ServiceAccount of the drivers of replay jobs, in the namespace of each Replay "
        "(default: %(default)s)")
    add("--job-service-account", default="redrive-job", metavar="NAME",
        help="ServiceAccount of Replays with engine Job, in the namespace of each Replay "
        "(default: %(default)s)")
    add("--inspection-service-account", default="redrive-inspection", metavar="NAME",
        help="ServiceAccount of Inspections, in the namespace of each one (default: %(default)s)")
    add("--clear-payloads", action="store_true",
        help="permit Inspections in clear text; only where an admission policy checks the verb "
        "`reveal` on inspections (default: refuse them)")
    add("--job-max-messages", type=int, default=10_000, metavar="N",
        help="highest number of dead letters for which engine Auto chooses a Job "
        "(default: %(default)s)")
    add("--job-templates", type=Path, metavar="FILE",
        help="job templates, as YAML: an object of templates by name, read again when it changes "
        "(default: the template `default` alone)")
    add("--max-executors", type=int, default=1_000, metavar="N",
        help="highest number of executors of a Replay, even if its template permits more "
        "(default: %(default)s)")
    add("--replay-launcher", action="append", default=[], choices=("Kubeflow", "Apache"),
        help="Spark operator that runs replay jobs if it is installed; may be repeated "
        "(default: Kubeflow)")
    add("--listen", type=_address, metavar="ADDRESS:PORT",
        help="serve /metrics, /livez and /readyz at this address, for example 0.0.0.0:8080 "
        "(default: not served)")
    add("--log-format", choices=logs.FORMATS, default="text",
        help="json: one object for each line, with the identity of its Kubernetes object "
        "(default: %(default)s)")
    add("--log-level", choices=logs.LEVELS, default="info",
        help="lowest level; debug adds each reconcile and each call to a broker "
        "(default: %(default)s)")
    # fmt: on
    return parser


def _namespace(text: str) -> str:
    """Return the name of a namespace; an empty one would stand for all namespaces.

    Raises:
        ArgumentTypeError: it is empty; argparse prints the message.
    """
    if not text:
        raise argparse.ArgumentTypeError("it is empty; leave it out to serve all namespaces")
    return text


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
