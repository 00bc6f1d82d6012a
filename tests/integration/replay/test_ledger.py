"""The topic of a ledger: what is taken away leaves nothing, and what is deleted is put back."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from http.client import HTTPConnection
from typing import Any

import pytest

from redrive.replay.ledger import Ledger, read
from redrive.replay.records import Header, header_key
from sandbox.pulsar import SUPERUSER
from tests.support import compaction

ProvisionPolicy = Callable[..., Any]
pytestmark = pytest.mark.usefixtures("replay_token")


def test_compaction_leaves_nothing_of_a_record_that_was_taken_away(
    provision_policy: ProvisionPolicy,
) -> None:
    provisioned = provision_policy()
    url, topic = provisioned.broker.service_url, provisioned.policy.ledger_topic
    with Ledger.open(url, topic, "first") as ledger:
        for uid in ("one", "two"):
            ledger.write(header_key(uid), Header("shop/again", 0).to_json())
        ledger.write(header_key("two"), None)
    assert compaction.compact(provisioned.broker, topic) == 2
    with Ledger.open(url, topic, "second") as ledger:
        assert ledger.records.headers.keys() == {"one"}
        ledger.write(header_key("one"), None)
    assert compaction.compact(provisioned.broker, topic) == 1
    # It ends, though the last record is gone.
    assert read(provisioned.client, topic).owner == "second"
    with Ledger.open(url, topic, "third") as ledger:
        assert ledger.records.headers.keys() == set()
        assert ledger.records.owner == "third"


def test_the_records_stay_in_their_cluster(provision_policy: ProvisionPolicy) -> None:
    """They tell of entries by ids that those of another cluster have, too."""
    provisioned = provision_policy()
    broker, topic = provisioned.broker, provisioned.policy.ledger_topic
    with Ledger.open(broker.service_url, topic, "first") as ledger:
        stored = ledger.write(header_key("one"), Header("shop/again", 0).to_json())
    path = str(topic).replace("://", "/")
    entry = f"{path}/ledger/{stored.ledger_id()}/entry/{stored.entry_id()}"
    bearer = {"Authorization": f"Bearer {broker.token(SUPERUSER)}"}
    with closing(HTTPConnection(broker.address, broker.admin_port, timeout=30)) as connection:
        connection.request("GET", f"/admin/v2/{entry}", headers=bearer)
        assert connection.getresponse().headers["X-Pulsar-replicated-to"] == "__local__"
