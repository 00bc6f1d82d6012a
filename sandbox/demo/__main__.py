"""``python -m sandbox.demo [BROKER]``, called by ``make demo``.

The exit status is 0 if the account balances, and 1 if it does not or a step failed.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from pathlib import Path

from sandbox import installation, rocketmq
from sandbox.demo import screen
from sandbox.demo.account import Account
from sandbox.demo.orders import Logs
from sandbox.demo.rocketmq import RocketMQStory
from sandbox.demo.story import Story
from sandbox.errors import SandboxError
from sandbox.sandbox import KubernetesSandbox, Sandbox
from sandbox.steps import step

_EXAMPLES = {"pulsar": Story.EXAMPLE, "rocketmq": RocketMQStory.EXAMPLE}
_ORDERS = {"pulsar": 1_000, "rocketmq": 50}
_DATA = {
    "pulsar": ("kubernetes", "pulsar", "tokens"),
    "rocketmq": ("kubernetes", "broker-a", rocketmq.NAME_SERVER, rocketmq.PROXY),
}
"""Folders that a demo deletes at its end."""
_NEXT = """
Where to look next:
  examples/{example:16}  the manifests and programs of this demo
  make sandbox               the same components, left running for you
  README.md                  a quick start for your own cluster"""


def main(arguments: list[str] | None = None) -> int:
    """Run the demo, or repeat the account of an earlier run; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m sandbox.demo")
    parser.add_argument("broker", nargs="?", choices=list(_EXAMPLES), default="pulsar")
    parser.add_argument("--orders", type=int, help=f"default: {_ORDERS}")
    parser.add_argument(
        "--account",
        type=Path,
        metavar="DIR",
        help="only repeat the account, from the logs in DIR",
    )
    options = parser.parse_args(arguments)
    if options.account is not None:
        return _close(Logs(options.account).account())
    state = Path(tempfile.mkdtemp(prefix="redrive-demo-")) / "sandbox"
    try:
        screen.heading(f"1. A sandbox: {options.broker}, a Kubernetes API server, redrive")
        account = _play(state, options.broker, options.orders)
    except SandboxError as error:
        screen.console.print(f"error: {error}", style="red", markup=False)
        screen.console.print(f"Logs: {state / 'logs'}")
        return 1
    for data in _DATA[options.broker]:
        shutil.rmtree(state / data)
    status = _close(account)
    screen.output(_NEXT.format(example=_EXAMPLES[options.broker]))
    screen.output(f"\nThe logs of this run are in {state}")
    return status


def _play(state: Path, broker: str, orders: int | None) -> Account:
    """Start what the demo of a broker needs, run it, and return its account."""
    count = orders or _ORDERS[broker]
    if broker == "pulsar":
        with Sandbox.start(state) as sandbox:
            installation.install(sandbox)
            return Story(sandbox, count).play()
    with KubernetesSandbox.start(state) as control_plane:
        installation.install(control_plane)
        return rocketmq_story(control_plane, count).play()


def rocketmq_story(sandbox: KubernetesSandbox, count: int) -> RocketMQStory:
    """Start RocketMQ, which a sandbox does not have, and return its demo."""
    with step("start RocketMQ"):
        cluster = rocketmq.start(sandbox.state, sandbox.processes)
        proxy = rocketmq.start_proxy(cluster, sandbox.processes)
    return RocketMQStory(sandbox, count, cluster, proxy)


def _close(account: Account) -> int:
    screen.show_account(account)
    return 0 if account.balanced else 1


if __name__ == "__main__":
    sys.exit(main())
