"""What was stored before the API changed its form works on, or says what to edit; then it does."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from sandbox import chart
from sandbox.sandbox import Sandbox
from tests.integration.chart.test_upgrade import PREVIOUS, shop, start, values
from tests.integration.provision.conftest import Shop

pytestmark = pytest.mark.xdist_group("own sandbox")

__all__ = ["shop"]  # the fixture

SECONDS = 180
KEY_SHARED = {"subscriptionType": "Key_Shared"}
# Sizes are above the default quota of the broker, 10 GiB, which it compares with too.
OLD: dict[str, dict[str, Any]] = {
    "plain": {},
    "ordered": {**KEY_SHARED, "delayLadder": {"ordered": "5s"}},
    "discards": {"deadLetter": {"enabled": False}},
    "keeps": {"deadLetter": {"enabled": True}},
    "sized": {
        "deadLetter": {"retention": {"megabytes": 12288}, "backlogQuota": {"megabytes": 11264}}
    },
    "short": {"deadLetter": {"retention": {"time": "30s"}}},
    "tight": {"deadLetter": {"retention": {"megabytes": 512}, "backlogQuota": {"megabytes": 512}}},
    "twice": {"consumerRoles": ["fulfilment", "fulfilment"]},
}
"""Policies of the release before: name → spec."""
EDITED: dict[str, dict[str, Any]] = {
    "ordered": {**KEY_SHARED, "delayLadder": {"fixed": "5s"}, "ordering": "PerKey"},
    "discards": {"deadLetter": {"mode": "Discard"}},
    "sized": {
        "deadLetter": {"retention": {"size": "12288Mi"}, "backlogQuota": {"size": "11264Mi"}}
    },
    "short": {"deadLetter": {"retention": {"time": "1m"}}},
    "tight": {"deadLetter": {"retention": {"size": "12Gi"}, "backlogQuota": {"size": "11Gi"}}},
    "twice": {"consumerRoles": ["fulfilment"]},
}
"""The same, after the edits that their conditions ask for."""
EDITS = {
    "ordered": "by delayLadder.fixed: 5s, and give ordering: PerKey",
    "discards": "replace deadLetter.enabled by deadLetter.mode: Discard",
    "sized": "replace deadLetter.retention.megabytes by deadLetter.retention.size: 12288Mi; "
    "replace deadLetter.backlogQuota.megabytes by deadLetter.backlogQuota.size: 11264Mi",
}
REFUSED = {
    "short": "got '30s'; use 1m or more, or leave it out for no limit of time",
    "tight": "raise retention.size, or lower backlogQuota.size",
}


def said(body: dict[str, Any], kind: str) -> str:
    """The message of a condition; empty where it is not there."""
    return next((c["message"] for c in body["status"]["conditions"] if c["type"] == kind), "")


def wait_for_new_schemas(shop: Shop, policy: str) -> None:
    """Until then the API server drops fields of a status that were not there before."""
    deadline = time.monotonic() + SECONDS
    status = json.dumps({"status": {"namingScheme": "pulsar"}})
    patch = "--subresource=status", "--type=merge", f"--patch={status}", "--dry-run=server"
    while '"namingScheme"' not in shop.kubectl("patch", "retrypolicy", policy, *patch, "-ojson"):
        assert time.monotonic() < deadline, "the API server keeps the schemas of before"
        time.sleep(0.2)


def test_each_object_of_the_old_form_works_or_says_its_edit(sandbox: Sandbox, shop: Shop) -> None:
    cluster, release = sandbox.cluster, shop.namespace
    before = {
        **values(shop),
        "image": {"repository": "sandbox"},
        "replay": {"image": "job", "application": "local:///replay.py"},
    }
    chart.install(cluster, "redrive", release, before, PREVIOUS)
    shop.secret("pulsar-admin", token=shop.token(shop.role))
    topics = [f"persistent://{shop.tenant}/*/*"]
    shop.connection(allow=None, allowedTopics=topics, allowedRoles=["fulfilment"])
    shop.policies({name: {"subscription": name, **spec} for name, spec in OLD.items()})

    chart.install(cluster, "redrive", release, values(shop))
    wait_for_new_schemas(shop, min(OLD))
    start(sandbox, shop)
    connection = shop.ready("main", "brokerconnection")
    edit = said(connection, "DeprecatedFields").partition("by allow: ")[2]
    assert json.loads(edit) == [
        {"topics": topics, "roles": ["fulfilment"], "adopt": False, "delete": True}
    ]
    for name in OLD.keys() - REFUSED.keys():
        body = shop.ready(name)
        found = said(body, "DeprecatedFields")
        assert bool(found) is (name in EDITS)
        assert EDITS.get(name, "") in found
    for name, way in REFUSED.items():
        assert way in said(shop.reaches(name, "InvalidSpec"), "Ready")
    working = shop.topics()

    new = {"topics": topics, "roles": ["fulfilment"], "delete": True}
    shop.connection(allow=[new])
    assert not said(shop.ready("main", "brokerconnection"), "DeprecatedFields")
    shop.policies({name: {"subscription": name, **spec} for name, spec in EDITED.items()})
    for name in OLD:
        assert not said(shop.ready(name), "DeprecatedFields")
    after = shop.topics()
    assert {topic: after[topic] for topic in working} == working
    assert {topic.rpartition("-")[0] for topic in after.keys() - working.keys()} == {
        shop.topic(f"orders-{name}") for name in REFUSED
    }
    shop.policies({name: {"subscription": name} for name in OLD})  # without what is old or new
    for name in OLD:
        shop.ready(name)
    # Not before: one that ran meanwhile wrote statuses under the schemas of before.
    for name in OLD.keys() - REFUSED.keys():
        assert shop.get("retrypolicy", name)["status"]["namingScheme"] == "pulsar"
