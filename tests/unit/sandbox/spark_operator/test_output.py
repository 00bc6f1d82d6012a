from __future__ import annotations

from sandbox.spark_operator.output import LONGEST_CAUSE, Output, cause

LOG = "26/11/21 15:28:14 INFO SparkContext: Invoking stop() from shutdown hook"


def test_the_cause_is_the_exception_of_the_last_traceback() -> None:
    lines = [
        "Traceback (most recent call last):",
        '  File "job.py", line 1, in <module>',
        "KeyError: 'first'",
        "",
        "During handling of the above exception, another exception occurred:",
        "",
        "Traceback (most recent call last):",
        '  File "job.py", line 2, in <module>',
        "    raise ValueError",
        "pyspark.errors.AnalysisException: no column x;",
        "'Project ['x]",
        "+- Range (0, 10)",
        LOG,
    ]
    assert cause(lines) == "pyspark.errors.AnalysisException: no column x;"


def test_without_a_traceback_the_cause_is_the_last_line_that_spark_did_not_log() -> None:
    assert cause([LOG, "cannot open 'job.py': no such file", "", LOG]) == (
        "cannot open 'job.py': no such file"
    )


def test_a_driver_that_wrote_nothing_but_logs_has_no_cause() -> None:
    assert cause([LOG]) == ""


def test_a_long_cause_is_cut() -> None:
    assert len(cause(["x" * (2 * LONGEST_CAUSE)])) == LONGEST_CAUSE


def test_spark_runs_once_its_executor_started() -> None:
    output = Output()
    output.add(b"26/11/21 15:28:05 INFO SparkContext: Running Spark version 4.3.0")
    assert not output.running
    output.add(b"26/11/21 15:28:07 INFO Executor: Starting executor ID driver on host localhost")
    output.add(b"more")
    assert output.running


def test_bytes_that_are_no_text_do_no_harm() -> None:
    output = Output()
    output.add(b"\xff broken\r")
    assert output.cause == "\N{REPLACEMENT CHARACTER} broken"
