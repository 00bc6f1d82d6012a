"""What the demo shows: headings, a live table of where the orders are, the closing account."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic, sleep

from rich.console import Console
from rich.live import Live
from rich.table import Table

from sandbox.demo.account import Account

Wish = Callable[["Counts"], bool]
"""Whether counts are as expected."""

console = Console(highlight=False)
_REFRESH_SECONDS = 0.5
_IDS_SHOWN = 5


@dataclass(frozen=True)
class Counts:
    """Where the orders are at one moment.

    Attributes:
        produced: confirmed to the producer.
        outcomes: handlings so far, by outcome: `done`, or what they failed with.
        waiting: in the retry topic.
        dead: in the dead-letter topic.
    """

    produced: int
    outcomes: Counter[str]
    waiting: int
    dead: int

    @property
    def settled(self) -> bool:
        """Whether nothing is under way."""
        return self.waiting == 0 and self.produced == self.outcomes["done"] + self.dead


def heading(text: str) -> None:
    """Begin an act."""
    console.print(f"\n[bold cyan]{text}[/]")


def output(text: str) -> None:
    """Show what a command printed, as it is."""
    console.print(text.rstrip(), markup=False, soft_wrap=True)


def watch(look: Callable[[], Counts], until: Wish, *, seconds: float) -> bool:
    """Show the counts until they are as wished; return whether they came to be so in time."""
    deadline = monotonic() + seconds
    counts = look()
    with Live(_table(counts), console=console, refresh_per_second=4) as live:
        while not until(counts) and monotonic() < deadline:
            sleep(_REFRESH_SECONDS)
            counts = look()
            live.update(_table(counts))
    console.print()
    return until(counts)


def show_account(account: Account) -> None:
    """Close the demo: the counts, and every id that is out of place."""
    table = Table("account", "orders", title_justify="left")
    table.add_row("produced", f"{len(account.produced)}")
    table.add_row("processed once", f"{len(account.done)}")
    table.add_row("resting as dead letters", f"{len(account.resting)}")
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
