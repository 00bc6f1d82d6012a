"""What the status of a Replay shows of an error that came through Py4J."""

from __future__ import annotations

import pytest

from redrive.replay.job.progress import cause_of

CALL = "An error occurred while calling z:org.apache.spark.api.python.PythonRDD.collectAndServe.\n"
ABORTED = (
    ": org.apache.spark.SparkException: Job aborted due to stage failure: Task 0 in stage 3.0 "
    "failed 4 times, most recent failure: Lost task 0.3 in stage 3.0 (TID 9) (10.0.0.7 executor "
    "1): "
)
JAVA = "\tat org.apache.spark.api.python.BasePythonRunner$ReaderIterator.read(P.scala:1)\n"
DRIVER = (
    "\nDriver stacktrace:\n\tat org.apache.spark.scheduler.DAGScheduler.abortStage(D.scala:1)\n"
)


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("the ledger is lost\nsecond line", "the ledger is lost"),
        ("", ""),
        pytest.param(
            CALL
            + ABORTED
            + "org.apache.spark.SparkException: Python worker exited unexpectedly (crashed)\n"
            + JAVA
            + "Caused by: java.io.EOFException\n"
            + JAVA
            + DRIVER,
            "Python worker exited unexpectedly (crashed)",
            id="a worker that was killed",
        ),
        pytest.param(
            CALL
            + ABORTED
            + "org.apache.spark.api.python.PythonException: Traceback (most recent call last):\n"
            + '  File "worker.py", line 1, in main\n    process()\n'
            + "redrive.reading.reader.SourceSilentError: the broker has delivered nothing\n\n"
            + JAVA
            + DRIVER,
            "SourceSilentError: the broker has delivered nothing",
            id="an exception in Python",
        ),
        pytest.param(
            CALL + ABORTED + "ExecutorLostFailure (executor 1 exited caused by one of the running "
            "tasks) Reason: The executor with id 1 exited with exit code 137(SIGKILL)." + DRIVER,
            "ExecutorLostFailure (executor 1 exited caused by one of the running tasks) Reason: "
            "The executor with id 1 exited with exit code 137(SIGKILL).",
            id="an executor that was killed",
        ),
        pytest.param(
            CALL + ": java.lang.OutOfMemoryError: Java heap space\n" + JAVA,
            "OutOfMemoryError: Java heap space",
            id="no task",
        ),
    ],
)
def test_cause_of_error_is_not_its_first_line(text: str, cause: str) -> None:
    assert cause_of(text) == cause
