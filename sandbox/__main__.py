"""``python -m sandbox``, called by ``make`` to prepare, start and stop a sandbox."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from sandbox import builds, installation, sandbox
from sandbox.errors import SandboxError


def main(arguments: list[str] | None = None) -> int:
    """Run one command. A failure is printed on standard error, and the exit status is 1."""
    parser = argparse.ArgumentParser(prog="python -m sandbox", description=__doc__)
    parser.add_argument(
        "--state", type=Path, default=sandbox.default_state(), help="default: %(default)s"
    )
    commands = parser.add_subparsers(required=True)
    for command in (prepare, up, down):
        summary = (command.__doc__ or "").splitlines()[0]
        commands.add_parser(command.__name__, help=summary).set_defaults(command=command)
    options = parser.parse_args(arguments)
    try:
        options.command(options.state)
    except SandboxError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def prepare(_state: Path) -> None:
    """Fetch and build the components of a sandbox and of the tests, without starting one."""
    builds.prepare()
    builds.promtool()
    builds.rocketmq()


def up(state: Path) -> None:
    """Start a sandbox with redrive and leave it running, or attach to one that already runs."""
    if sandbox.is_described(state):
        started = sandbox.Sandbox.attach(state)
    else:
        started = installation.start(state)
    print(_directions(started))


def down(state: Path) -> None:
    """Stop the sandbox and delete its state directory."""
    sandbox.remove(state)


def _directions(started: sandbox.Sandbox) -> str:
    superuser = started.pulsar.token_file("superuser")
    return "\n".join(
        (
            f"export KUBECONFIG={started.cluster.kubeconfig}",
            f"export PATH={builds.kubernetes()}:$PATH  # kubectl",
            f"export PULSAR_SERVICE_URL={started.pulsar.service_url}",
            f"export PULSAR_ADMIN_URL={started.pulsar.admin_url}",
            f"export PULSAR_TOKEN=$(cat {superuser})  # may do everything",
            f"# logs: {started.state / 'logs'}; stop with: make sandbox-down",
        )
    )


if __name__ == "__main__":
    sys.exit(main())
