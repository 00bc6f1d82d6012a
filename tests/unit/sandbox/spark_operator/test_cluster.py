from __future__ import annotations

from sandbox.spark_operator.cluster import PodState


def test_the_state_of_a_pod_holds_its_owner_its_run_and_its_end() -> None:
    pod = {
        "metadata": {
            "ownerReferences": [{"uid": "1"}],
            "labels": {"spark-app-selector": "spark-7"},
        },
        "status": {
            "phase": "Failed",
            "containerStatuses": [{"state": {"terminated": {"exitCode": 1, "reason": "Error"}}}],
        },
    }
    assert PodState.read(pod) == PodState(("1",), "Failed", "spark-7", 1, "Error")


def test_a_pod_that_no_node_has_taken_has_neither() -> None:
    assert PodState.read({"metadata": {}, "status": {"phase": "Pending"}}) == PodState(
        (), "Pending", "", None, ""
    )


def test_a_pod_that_was_evicted_says_so() -> None:
    pod = {"metadata": {}, "status": {"phase": "Failed", "reason": "Evicted"}}
    assert PodState.read(pod).reason == "Evicted"
