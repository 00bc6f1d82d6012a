"""A SparkApplication that a user deletes while its Replay runs; `make test` deletes a Job."""

from __future__ import annotations

import pytest

from tests.support.replay_shop import SECONDS, Shop, shop

__all__ = ["shop"]


@pytest.mark.timeout(2 * SECONDS + 60)
def test_deleted_application_is_relaunched_and_moves_once(shop: Shop) -> None:
    shop.declare()
    shop.bury(6, "WarehouseDown")
    shop.replay("again", engine="Spark", rateLimit={"messages": 1})  # so that one sees it run
    name = shop.reaches("again", "Running")["sparkApplication"]
    before = shop.applications()[0]["metadata"]["uid"]
    shop.kubectl("delete", "sparkapp", name)

    status = shop.reaches("again", "Completed")

    (application,) = shop.applications()
    assert application["metadata"]["uid"] != before
    counts = status["run"]["counts"]
    assert (counts["matched"], counts["moved"]) == (6, 6)
    assert shop.replayed() == ["WarehouseDown"] * 6
