"""The entrypoint of the image gives a driver time to settle what is on its way."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ENTRYPOINT = Path(__file__).parents[3] / "images" / "replay-entrypoint.sh"
DRIVER = (
    "trap 'echo terminated; exit 9' TERM; echo begun; until [ -e end ]; do /bin/sleep 0.05; done; "
    "exit 7"
)


@contextmanager
def driver(folder: Path, grace: str) -> Iterator[subprocess.Popen[str]]:
    """Run a driver that ends when there is a file `end`, or by SIGTERM.

    Args:
        folder: of the test.
        grace: the command that takes as long as the driver has after SIGTERM.
    """
    sleep = folder / "sleep"
    sleep.write_text(f"#!/bin/sh\n{grace}\n")
    sleep.chmod(0o755)
    with subprocess.Popen(
        ["/bin/bash", ENTRYPOINT, "drain", "/bin/bash", "-c", DRIVER],
        cwd=folder,
        env={"PATH": f"{folder}:/usr/bin:/bin"},
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        yield process


def test_a_driver_that_ends_by_itself_gets_no_signal(tmp_path: Path) -> None:
    with driver(tmp_path, "touch asked; while [ -e asked ]; do /bin/sleep 0.05; done") as process:
        process.terminate()
        while not (tmp_path / "asked").exists():
            assert process.poll() is None
        process.terminate()  # once more does not shorten its time
        (tmp_path / "end").touch()
        assert process.wait(30) == 7
        (tmp_path / "asked").unlink()
        assert process.stdout is not None
        assert process.stdout.read() == ""


def test_a_driver_that_goes_on_gets_the_signal_in_the_end(tmp_path: Path) -> None:
    with driver(tmp_path, "true") as process:
        process.terminate()
        assert process.wait(30) == 9
        assert process.stdout is not None
        assert process.stdout.read() == "terminated\n"


def test_the_code_of_a_driver_is_that_of_its_container(tmp_path: Path) -> None:
    with driver(tmp_path, "false") as process:
        (tmp_path / "end").touch()
        assert process.wait(30) == 7
