"""The tutorial without a broker, block by block, and the table of ladders."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from redrive.policy.values import parse_duration
from release.ladders import seconds_until_dead
from tests.support.documented import FIRST_CONSUMER, ROOT, Block, blocks

INSTALL = "1. Install the library"  # by `tests/e2e/e2e_package.py`
ON_A_BROKER = "On a broker"  # the example of each guide of consumers, which other tests run
FILES = {
    "2. Write a handler": "handler.py",
    "3. Run it": "run.py",
    "6. Keep it as a test": "test_handler.py",
}
EDITS = {
    "4. Dead-letter at once what no retry fixes": r"^consumer\.run\(handle\)\n",
    "5. Change the ladder": r"^policy = Policy\((?s:.+?)^\)\n",
}


def test_first_consumer_prints_what_the_page_shows(tmp_path: Path) -> None:
    """Files are saved, changed and run; each shown output is compared."""
    output = ""
    shown = 0
    for block in blocks(FIRST_CONSUMER):
        if block.heading in {INSTALL, ON_A_BROKER}:
            continue
        match block.language:
            case "python":
                save(tmp_path, block)
            case "sh":
                output = run(tmp_path, block.text)
            case "text":
                assert output == block.text
                shown += 1
    assert shown == 3
    assert output == "attempt 3: shipped for the warehouse\n"


def test_ladder_page_shows_the_time_until_a_message_is_dead() -> None:
    page = (ROOT / "docs/howto/choose-a-ladder.md").read_text("utf-8")
    rows = re.findall(r"^\| `(\{.+?\}+)`[^|]* \| (.+) \|$", page, re.MULTILINE)
    assert len(rows) == 5
    for manifest, times in rows:
        sums = seconds_until_dead(manifest)
        for retries, shown in zip((3, 5, 10, 16), times.split(" | "), strict=True):
            time = parse_duration(shown.replace("min", "m").replace(" ", ""))
            assert time.total_seconds() == sums[retries - 1], manifest


def save(folder: Path, block: Block) -> None:
    """Write the file of a section, or make the change that it describes."""
    if block.heading in FILES:
        (folder / FILES[block.heading]).write_text(block.text, "utf-8")
        return
    file = folder / "run.py"
    changed, count = re.subn(
        EDITS[block.heading], block.text, file.read_text("utf-8"), flags=re.MULTILINE
    )
    assert count == 1
    file.write_text(changed, "utf-8")


def run(folder: Path, commands: str) -> str:
    """Return the output of *commands*, in which `python3` has the library installed."""
    programs = folder / "bin"
    programs.mkdir(exist_ok=True)
    link = programs / "python3"
    link.unlink(missing_ok=True)
    link.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n', "utf-8")
    link.chmod(0o755)
    done = subprocess.run(
        ["/bin/sh", "-euc", commands],
        cwd=folder,
        env=os.environ | {"PATH": f"{programs}:{os.environ['PATH']}"},
        check=True,
        text=True,
        stdout=subprocess.PIPE,
    )
    return done.stdout
