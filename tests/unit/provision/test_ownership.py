from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from redrive.kube.resources import Key
from redrive.policy.naming import TopicName
from redrive.provision.ownership import (
    TAKE_OVER_FROM,
    Granted,
    Owner,
    OwnershipRecord,
    named_in,
    rights,
)

TOPIC = TopicName("shop", "prod", "orders-fulfilment-RETRY")
roles = st.sampled_from(["a", "b", 'c "/{}'])
actions = st.frozensets(st.sampled_from(["produce", "consume", "functions"]), min_size=1)
granted = st.dictionaries(roles, actions)
records = st.builds(
    OwnershipRecord,
    owner=st.text(max_size=5),
    uid=st.text(max_size=5),
    source=st.text(max_size=5),
    created=st.booleans(),
    granted=granted,
    subscription=st.text(max_size=5),
    replaced=st.dictionaries(
        st.sampled_from(["messageTTL", "backlogQuotaMap"]), st.none() | st.integers() | st.just({})
    ),
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


OURS = Owner("here", Key("shop", "orders"), "uid-1", "orders/fulfilment")


def owned_by(owner: Owner) -> OwnershipRecord:
    return OwnershipRecord.of(OwnershipRecord().owned_by(owner).to_properties())


@pytest.mark.parametrize(
    ("owner", "ours"),
    [
        (OURS, True),
        (replace(OURS, uid="uid-0"), True),  # made again, for the same messages
        (replace(OURS, uid="", source=""), True),
        (replace(OURS, uid="uid-0", source="payroll/fulfilment"), False),
        (replace(OURS, uid="uid-0", source=""), False),
        (replace(OURS, cluster="there"), False),
        (replace(OURS, key=Key("shop", "other")), False),
        (replace(OURS, key=Key("other", "orders")), False),
    ],
)
def test_a_topic_is_that_of_one_object_or_of_the_same_policy_made_again(
    owner: Owner, *, ours: bool
) -> None:
    assert owned_by(owner).is_of(OURS) is ours
    assert owned_by(owner).may_pass_to(OURS, ()) is ours


@given(
    st.sampled_from(["here", "there"]),
    st.sampled_from(["shop", "other"]),
    st.sampled_from(["orders", "named", "unnamed"]),
    st.sampled_from(["uid-1", "uid-0"]),
    st.sampled_from(["orders/fulfilment", "payroll/fulfilment"]),
)
def test_a_topic_passes_to_a_policy_that_names_its_owner_and_never_to_another_namespace(
    cluster: str, namespace: str, name: str, uid: str, source: str
) -> None:
    record = owned_by(Owner(cluster, Key(namespace, name), uid, source))
    passes = record.may_pass_to(OURS, {"named", "orders"})
    assert passes is ((cluster, namespace) == ("here", "shop") and name != "unnamed")


def test_a_policy_names_those_it_takes_over_from_in_an_annotation() -> None:
    body: dict[str, dict[str, object]] = {"metadata": {}}
    assert named_in(body) == frozenset()
    body["metadata"]["annotations"] = {TAKE_OVER_FROM: " old, older,,"}
    assert named_in(body) == {"old", "older"}


@given(granted, granted, granted)
def test_rights_are_what_is_needed_beside_what_others_gave(
    needed: Granted, have: Granted, recorded: Granted
) -> None:
    change = rights(TOPIC, needed, have, recorded)
    given = {each.role: each.on(have.get(each.role, frozenset())) for each in change.changes}
    after = {**have, **given}
    for role in {*needed, *have, *recorded}:
        may, had = after.get(role, frozenset()), have.get(role, frozenset())
        need, ours = needed.get(role, frozenset()), recorded.get(role, frozenset())
        assert may == (had - ours) | need | (had & ours & need)
        assert change.after.get(role, frozenset()) == (ours & need) | (need - had)
        assert change.before.get(role, frozenset()) >= change.after.get(role, frozenset())


@given(granted, granted, granted)
def test_only_rights_that_differ_are_set(needed: Granted, have: Granted, recorded: Granted) -> None:
    for change in rights(TOPIC, needed, have, recorded).changes:
        may = have.get(change.role, frozenset())
        assert change.on(may) != may
