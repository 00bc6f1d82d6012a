"""The demo with fewer orders: the main journey end to end on real components."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from sandbox.demo import __main__ as demo
from sandbox.demo import screen
from sandbox.demo.account import Account
from sandbox.demo.orders import Logs
from sandbox.demo.story import Story
from sandbox.sandbox import Sandbox

ORDERS = 300
POLICY = "retrypolicy.redrive.io/orders-fulfilment"
# The demo has its own time limits, whose messages name the missing step.
pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def story(installed: Sandbox) -> Story:
    return Story(installed, ORDERS)


@pytest.fixture(scope="module")
def account(story: Story) -> Account:
    screen.console.record = True
    return story.play()


def test_every_order_is_accounted_for(account: Account) -> None:
    """No order is lost or processed twice; only malformed orders are dead letters."""
    assert account.faults == {}
    assert len(account.produced) == ORDERS
    malformed = {f"order-{n:06}" for n in range(ORDERS) if n % 100 < 2}
    assert account.dead == malformed
    assert account.done == account.produced - malformed


def test_policy_status_at_the_end_agrees_with_the_account(account: Account) -> None:
    shown = screen.console.export_text(clear=False).splitlines()
    last = max(n for n, line in enumerate(shown) if line.startswith(POLICY))
    header = next(line for line in reversed(shown[:last]) if line.startswith("NAME "))

    def column(title: str) -> str:
        at = header.index(title)
        return shown[last][at:].split()[0]

    assert (column("WAITING"), column("DEAD")) == ("0", f"{len(account.dead)}")


@pytest.mark.usefixtures("account")
@pytest.mark.parametrize(
    ("log", "fault"), [("handled.jsonl", "lost"), ("produced.log", "never produced")]
)
def test_an_id_missing_from_a_log_fails_the_demo(
    story: Story, tmp_path: Path, capsys: pytest.CaptureFixture[str], log: str, fault: str
) -> None:
    """The account of the same logs without one line names its id, with exit status 1."""
    for file in (story.logs.produced, story.logs.handled, story.logs.dead):
        shutil.copy(file, tmp_path)
    assert demo.main(["--account", str(tmp_path)]) == 0
    lines = (tmp_path / log).read_text(encoding="utf-8").splitlines(keepends=True)
    ends = [n for n, line in enumerate(lines) if log != "handled.jsonl" or '"done"' in line]
    del lines[ends[-1]]
    (tmp_path / log).write_text("".join(lines), encoding="utf-8")
    assert demo.main(["--account", str(tmp_path)]) == 1
    (missing,) = Logs(tmp_path).account().faults[fault]
    assert missing in capsys.readouterr().out
