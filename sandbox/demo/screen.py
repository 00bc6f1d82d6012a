"""The output of the demo: headings, a live table of the orders, and the account."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic, sleep

from rich.console import Console
from rich.live import Live
from rich.table import Table

from sandbox.demo.account import Account

Condition = Callable[["Counts"], bool]
"""A condition on the counts that the demo waits for."""

console = Console(highlight=False)
_REFRESH_SECONDS = 0.5
_IDS_SHOWN = 5


@dataclass(frozen=True)
class Counts:
    """The number of orders by place.

    Attributes:
        produced: confirmed to the producer.
        outcomes: handlings by outcome: `done`, or the name of the error.
        waiting: in the retry topic.
        dead: in the dead-letter topic.
    """

    produced: int
    outcomes: Counter[str]
    waiting: int
    dead: int

    @property
    def settled(self) -> bool:
        """True if every order is done or a dead letter."""
        return self.waiting == 0 and self.produced == self.outcomes["done"] + self.dead


def heading(text: str) -> None:
    """Print the heading of a step."""
    console.print(f"\n[bold cyan]{text}[/]")


def output(text: str) -> None:
    """Print the output of a command unchanged."""
    console.print(text.rstrip(), markup=False, soft_wrap=True)


def watch(read: Callable[[], Counts], until: Condition, *, seconds: float) -> bool:
    """Show the counts until *until* holds; return False after *seconds*."""
    deadline = monotonic() + seconds
    counts = read()
    with Live(_table(counts), console=console, refresh_per_second=4) as live:
        while not until(counts) and monotonic() < deadline:
            sleep(_REFRESH_SECONDS)
            counts = read()
            live.update(_table(counts))
    console.print()
    return until(counts)


def show_account(account: Account) -> None:
    """Show the account: the counts, and every id in a wrong place."""
    table = Table("account", "orders", title_justify="left")
    table.add_row("produced", f"{len(account.produced)}")
    table.add_row("processed once", f"{len(account.done)}")
    table.add_row("dead letters", f"{len(account.dead)}")
    for fault, ids in account.faults.items():
        shown = ", ".join(sorted(ids)[:_IDS_SHOWN])
        more = f" and {len(ids) - _IDS_SHOWN} more" if len(ids) > _IDS_SHOWN else ""
        table.add_row(f"[red]{fault}[/]", f"[red]{len(ids)}: {shown}{more}[/]")
    console.print(table)
    if account.balanced:
        console.print("[bold green]Balanced: none lost, none processed twice.[/]")
    else:
        console.print("[bold red]NOT balanced: see the ids above.[/]")


def _table(counts: Counts) -> Table:
    table = Table("produced", "processed", "waiting", "dead", "failed handlings so far")
    failures = ", ".join(
        f"{outcome} {count}"
        for outcome, count in sorted(counts.outcomes.items())
        if outcome != "done"
    )
    numbers = (counts.produced, counts.outcomes["done"], counts.waiting, counts.dead)
    table.add_row(*map(str, numbers), failures)
    return table
