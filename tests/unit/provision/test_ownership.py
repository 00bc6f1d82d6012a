from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from redrive.kube.resources import Key
from redrive.policy.naming import TopicName
from redrive.provision.ownership import Granted, Owner, OwnershipRecord, rights

TOPIC = TopicName("shop", "prod", "orders-fulfilment-RETRY")
roles = st.sampled_from(["a", "b", 'c "/{}'])
actions = st.frozensets(st.sampled_from(["produce", "consume", "functions"]), min_size=1)
granted = st.dictionaries(roles, actions)
records = st.builds(
    OwnershipRecord,
    owner=st.text(max_size=5),
    created=st.booleans(),
    granted=granted,
    subscription=st.text(max_size=5),
)


@given(records)
def test_a_record_is_read_as_it_was_written(record: OwnershipRecord) -> None:
    assert OwnershipRecord.of(record.to_properties()) == record


@given(records, records)
def test_the_changes_between_two_records_lead_from_the_one_to_the_other(
    before: OwnershipRecord, after: OwnershipRecord
) -> None:
    properties = before.to_properties() | {"x": "y"}
    changes = after.changes(properties)
    assert OwnershipRecord.of(properties | changes) == after
    assert "x" not in changes
    assert after.changes(properties | changes) == {}


@pytest.mark.parametrize("text", ["no json", "[]", "3", '{"a": 3}', '{"a": null}', "null"])
def test_a_record_of_grants_that_somebody_else_wrote_tells_nothing(text: str) -> None:
    assert OwnershipRecord.of({"redrive.io/granted": text}) == OwnershipRecord()


def test_an_owner_is_read_as_it_was_written_and_nothing_else_is_one() -> None:
    owner = Owner("a/b", Key("shop", "orders"))
    assert Owner.parse(str(owner)) == owner
    for text in ("", "shop/orders", "/shop/orders", "here//orders", "by hand"):
        assert Owner.parse(text) is None


@given(granted, granted, granted)
def test_rights_are_what_is_needed_beside_what_others_gave(
    needed: Granted, have: Granted, recorded: Granted
) -> None:
    change = rights(TOPIC, needed, have, recorded)
    after = {**have, **{grant.role: grant.actions for grant in change.grants}}
    for role in {*needed, *have, *recorded}:
        may, had = after.get(role, frozenset()), have.get(role, frozenset())
        need, ours = needed.get(role, frozenset()), recorded.get(role, frozenset())
        assert may == (had - ours) | need | (had & ours & need)
        assert change.after.get(role, frozenset()) == (ours & need) | (need - had)
        assert change.before.get(role, frozenset()) >= change.after.get(role, frozenset())


@given(granted, granted, granted)
def test_only_rights_that_differ_are_set(needed: Granted, have: Granted, recorded: Granted) -> None:
    for grant in rights(TOPIC, needed, have, recorded).grants:
        assert grant.actions != have.get(grant.role, frozenset())
