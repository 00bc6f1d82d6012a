from __future__ import annotations

import sys
from pathlib import Path

from release.check import CHECKS, Check, Result, run, table


def test_result_has_status_of_make_and_last_count(tmp_path: Path) -> None:
    two = "print('== 3 passed in 0.1s ==\\n=== 7 passed, 1 skipped in 2.00s (0:00:02) ===')"
    failing = "print('1 failed in 3.00s'); raise SystemExit(2)"
    for program, status, summary in (
        (two, "passed", "7 passed, 1 skipped in 2.00s (0:00:02)"),
        (failing, "failed", "1 failed in 3.00s"),
        ("raise SystemExit(2)", "failed", "make ended with 2"),
    ):
        result = run(Check(("test",)), tmp_path / "log", {}, (sys.executable, "-c", program))
        assert (result.status, result.summary) == (status, summary)


def test_check_without_its_environment_is_skipped(tmp_path: Path) -> None:
    result = run(Check(("e2e-node",), needs="KUBECONFIG"), tmp_path / "log", {})
    assert (result.status, result.summary) == ("skipped", "KUBECONFIG is not set")
    assert not (tmp_path / "log").exists()


def test_table_has_a_row_for_each_result() -> None:
    results = [Result(check, "passed", 1.25, "1 passed in 2.00s") for check in CHECKS]
    head, _, *rows = table(results).splitlines()
    assert head == "| check | result | minutes | tests |"
    assert rows[0] == "| test | passed | 1.2 | 1 passed in 2.00s |"
    assert len(rows) == len(CHECKS)


def test_checks_are_targets_of_the_makefile() -> None:
    makefile = (Path(__file__).parents[3] / "Makefile").read_text()
    for check in CHECKS:
        assert f"\n{check.arguments[0]}:" in makefile
