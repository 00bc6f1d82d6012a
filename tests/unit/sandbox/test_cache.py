from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from sandbox import CHECKOUT, cache


@pytest.fixture(autouse=True)
def cache_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    root = tmp_path / "cache"
    monkeypatch.setenv("REDRIVE_CACHE", str(root))
    return root


def builder(body: str) -> subprocess.Popen[bytes]:
    """Another process that makes the artifact ``thing`` with *body*, given ``target``."""
    program = textwrap.dedent(f"""
        import pathlib, time
        from sandbox import cache
        def make(target):
            {body}
        cache.artifact("thing", make, doing="make a thing")
    """)
    environment = {**os.environ, "PYTHONPATH": str(CHECKOUT)}
    return subprocess.Popen([sys.executable, "-c", program], env=environment)


def write_whole(target: Path) -> None:
    (target / "content").write_text("whole")


def must_not_run(_target: Path) -> None:
    pytest.fail("it was made a second time")


def test_an_artifact_is_made_once_and_found_afterwards() -> None:
    made = cache.artifact("thing", write_whole, doing="make a thing")
    assert (made / "content").read_text() == "whole"
    assert cache.artifact("thing", must_not_run, doing="make a thing") == made


def test_a_build_that_was_killed_halfway_is_started_afresh(cache_root: Path) -> None:
    half = cache_root / "unfinished" / "thing" / "half"
    killed = builder("(target / 'half').touch(); time.sleep(60)")
    while not half.exists():
        assert killed.poll() is None
        time.sleep(0.01)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    assert not (cache_root / "thing").exists()

    made = cache.artifact("thing", write_whole, doing="make a thing")

    assert [file.name for file in made.iterdir()] == ["content"]


def test_a_build_that_failed_is_not_used_and_may_succeed_later(cache_root: Path) -> None:
    def fail(target: Path) -> None:
        write_whole(target)
        message = "the compiler said no"
        raise ValueError(message)

    with pytest.raises(ValueError, match="the compiler said no"):
        cache.artifact("thing", fail, doing="make a thing")
    assert not (cache_root / "thing").exists()
    assert cache.artifact("thing", write_whole, doing="make a thing").is_dir()


def test_of_several_runs_one_builds_and_the_others_wait_for_it(
    cache_root: Path, tmp_path: Path
) -> None:
    journal = tmp_path / "journal"
    body = f"pathlib.Path({str(journal)!r}).open('a').write('built\\n'); time.sleep(0.5)"
    runs = [builder(body) for _ in range(3)]
    assert [run.wait() for run in runs] == [0, 0, 0]
    assert journal.read_text() == "built\n"
    assert (cache_root / "thing").is_dir()


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"REDRIVE_CACHE": "/a", "XDG_CACHE_HOME": "/b", "HOME": "/c"}, "/a"),
        ({"XDG_CACHE_HOME": "/b", "HOME": "/c"}, "/b/redrive"),
        ({"HOME": "/c"}, "/c/.cache/redrive"),
    ],
)
def test_the_cache_is_where_the_user_wants_it(
    environment: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("REDRIVE_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert cache.root() == Path(expected)
