"""Applications that are stopped, changed or deleted, and a stand-in that stops or dies."""

from __future__ import annotations

import pytest

from tests.integration.spark_operator.conftest import StandIn, eventually, session

pytestmark = pytest.mark.xdist_group("control plane")

# Writes its argument and stays; without a Spark session it starts in a second.
STAYING = "import sys, time; print('STARTED', *sys.argv[1:], flush=True); time.sleep(600)"

# Keeps one of Spark's Python workers busy.
WORKING = """
import time
from pyspark.sql import SparkSession
spark = SparkSession.builder.getOrCreate()
def work(_):
    print("WORKS", flush=True)
    time.sleep(600)
spark.sparkContext.parallelize([0], 1).foreach(work)
"""


def started(stand_in: StandIn, name: str, text: str = "STARTED") -> int:
    """Wait until the driver wrote *text*, and return its first process."""
    eventually(lambda: text in stand_in.log(name))
    return stand_in.leader(name)


def test_deleting_the_object_ends_the_driver_and_its_workers(stand_in: StandIn) -> None:
    stand_in.create("deleted", WORKING)
    leader = started(stand_in, "deleted", "WORKS")
    assert len(session(leader)) >= 3
    # In the foreground the object stays, marked, until whatever it owns is gone.
    stand_in.kubectl("delete", "sparkapp", "deleted", "--cascade=foreground")
    eventually(lambda: not session(leader))
    eventually(lambda: not stand_in.files("deleted").exists())
    assert "deleted is FAIL" not in stand_in.processes.log("spark-operator").read_text()


def test_suspending_stops_the_driver_and_resuming_starts_another(stand_in: StandIn) -> None:
    stand_in.create("paused", STAYING, suspend=True)
    stand_in.wait("paused", "SUSPENDED")
    assert stand_in.log("paused") == ""
    stand_in.patch("paused", suspend=False)
    leader = started(stand_in, "paused")
    stand_in.patch("paused", suspend=True)
    suspended = stand_in.wait("paused", "SUSPENDED")
    assert "sparkApplicationId" not in suspended
    assert not session(leader)
    stand_in.kubectl("delete", "sparkapp", "paused")


def test_changed_spec_runs_the_application_again(stand_in: StandIn) -> None:
    stand_in.create("changed", STAYING, arguments=["one"])
    leader = started(stand_in, "changed", "STARTED one")
    stand_in.patch("changed", timeToLiveSeconds=3600)
    stand_in.patch("changed", arguments=["two"])
    started(stand_in, "changed", "STARTED two")
    assert not session(leader)
    assert stand_in.status("changed")["executionAttempts"] == 1
    stand_in.kubectl("delete", "sparkapp", "changed")


def test_recreated_object_runs_after_the_old_driver_has_ended(
    stand_in: StandIn,
) -> None:
    stand_in.create("again", STAYING, arguments=["one"])
    leader = started(stand_in, "again", "STARTED one")
    stand_in.kubectl("delete", "sparkapp", "again")
    stand_in.create("again", STAYING, arguments=["two"])
    started(stand_in, "again", "STARTED two")
    assert not session(leader)
    stand_in.kubectl("delete", "sparkapp", "again")


def test_driver_lost_with_the_stand_in_fails_and_runs_once(
    stand_in: StandIn,
) -> None:
    stand_in.create("orphan", STAYING)
    leader = started(stand_in, "orphan")
    stand_in.kill()
    stand_in.start()
    failed = stand_in.wait("orphan", "FAILED")
    assert failed["applicationState"]["errorMessage"] == "driver pod not found"
    assert failed["submissionAttempts"] == 1
    assert not session(leader)


def test_drivers_end_with_the_stand_in(stand_in: StandIn) -> None:
    stand_in.create("last", STAYING)
    leader = started(stand_in, "last")
    stand_in.stop()
    assert not session(leader)
    assert not stand_in.files("last").exists()
    stand_in.start()
    stand_in.wait("last", "FAILED")
