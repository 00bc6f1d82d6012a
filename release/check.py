"""`make release-check`: all checks before a release, one after the other, and a table of results.

Called as `python -m release.check`. It runs `make` for each check, with the output in a file of its
own. A failed check does not stop the next ones. The exit status is 1 if any failed.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from release import CHECKOUT
from sandbox import versions

_SUMMARY = re.compile(
    r"^[= ]*(\d+ (?:passed|failed|skipped|error).* in [\d.]+s.*?)[= ]*$", re.MULTILINE
)


@dataclass(frozen=True)
class Check:
    """A target of make, with its arguments.

    Attributes:
        needs: an environment variable without which the check is skipped; empty for none.
    """

    arguments: tuple[str, ...]
    needs: str = ""

    def __str__(self) -> str:
        return " ".join(self.arguments)


@dataclass(frozen=True)
class Result:
    """The result of a check.

    Attributes:
        status: `passed`, `failed` or `skipped`.
        summary: the last line in which pytest counts the tests, or the reason for skipping them.
    """

    check: Check
    status: str
    minutes: float
    summary: str


CHECKS = (
    Check(("test",)),
    Check(("test", "TESTS=tests/unit --hypothesis-profile=explore")),
    Check(("e2e",)),
    Check(("mutants",)),
    Check(("chaos",)),
    *(Check(("soak", f"SOAK=--pulsar={pulsar}")) for pulsar in versions.PULSARS),
    Check(("bench",)),
    Check(("e2e-node",), needs="KUBECONFIG"),
)


def run(
    check: Check, log: Path, environment: Mapping[str, str], make: Sequence[str] = ("make",)
) -> Result:
    """Run *check*, with its output in *log*."""
    if check.needs and not environment.get(check.needs):
        return Result(check, "skipped", 0, f"{check.needs} is not set")
    started = time.monotonic()
    with log.open("wb") as output:
        done = subprocess.run(  # noqa: S603 - make of this checkout
            [*make, *check.arguments],
            cwd=CHECKOUT,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            check=False,
        )
    counts = _SUMMARY.findall(log.read_text("utf-8", errors="replace"))
    return Result(
        check,
        "failed" if done.returncode else "passed",
        (time.monotonic() - started) / 60,
        counts[-1] if counts else f"make ended with {done.returncode}",
    )


def table(results: Iterable[Result]) -> str:
    """Return *results* as a table in Markdown."""
    rows = (f"| {r.check} | {r.status} | {r.minutes:.1f} | {r.summary} |" for r in results)
    return "\n".join(("| check | result | minutes | tests |", "|---|---|---|---|", *rows))


def main() -> int:
    """Run all checks, and print their results; return 1 if any failed."""
    folder = Path(tempfile.mkdtemp(prefix="redrive-release-check-"))
    results: list[Result] = []
    for number, check in enumerate(CHECKS, start=1):
        log = folder / f"{number}-{check.arguments[0]}.log"
        print(f"make {check}: output in {log}", file=sys.stderr, flush=True)
        results.append(run(check, log, os.environ))
        print(f"  {results[-1].status}: {results[-1].summary}", file=sys.stderr, flush=True)
    print(table(results))
    return int(any(result.status == "failed" for result in results))


if __name__ == "__main__":
    sys.exit(main())
