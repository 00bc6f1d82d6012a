"""What a dry run shows is bounded, and adds up."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from redrive.api.replay import ReplayStatus
from redrive.policy.model import Policy, SubscriptionType
from redrive.policy.naming import TopicName
from redrive.reading.positions import EntryId, Position
from redrive.reading.ranges import Range
from redrive.replay.job.plan import PlannedRange, RunPreview, Scanned, Sighting, plan
from redrive.replay.records import Account, Records
from redrive.replay.spec import Choice, ReplayJob

UID = "uid-1"
POLICY = Policy(TopicName("shop", "prod", "orders"), "fulfilment")
ORDERED = replace(POLICY, subscription_type=SubscriptionType.KEY_SHARED, ordered=True)


def sighting(entry: int, cause: str = "", **more: object) -> Sighting:
    fields = {
        "position": Position(7, entry, 0),
        "batch_size": 1,
        "first_chunk": None,
        "encrypted": False,
        "unreadable": False,
        "schema_version": None,
        "cause": cause,
        "size": 100,
        "replays": 0,
        "selected": True,
        **more,
    }
    return Sighting(**fields)  # type: ignore[arg-type]


def planned(*seen: Sighting, first: int = 0) -> PlannedRange:
    of = Range(0, 7, first, first + 9_999)
    return plan(of, seen, lambda version: "SchemaNotFound" if version == 5 else "")


def preview_of(
    *ranges: PlannedRange, slots: int = 2, rate: float | None = None, policy: Policy = POLICY
) -> RunPreview:
    records = Records()
    records.plans[UID] = {each.range: each.plan for each in ranges}
    job = ReplayJob("shop", "a", UID, policy, "pulsar://p", "http://p", None, rate_limit=rate)
    return RunPreview.of(Account.of(UID, records), ranges, job, slots)


def test_unevaluated_messages_are_counted_and_not_planned() -> None:
    of = planned(
        sighting(0),
        sighting(1, selected=False, evaluated=False),
        sighting(2, selected=False),
        sighting(3, selected=False, evaluated=False),
    )
    account = preview_of(of).account
    assert (account.scanned, account.matched, account.unevaluated, account.left) == (4, 1, 2, 1)
    assert account.to_status()["unevaluated"] == 2
    assert (Scanned.of(of) + Scanned.of(of)).unevaluated == 4


def test_batch_with_an_unevaluated_message_is_refused_in_part() -> None:
    of = planned(
        sighting(0, batch_size=2),
        sighting(0, position=Position(7, 0, 1), batch_size=2, selected=False, evaluated=False),
    )
    account = preview_of(of).account
    assert (account.matched, account.unevaluated, account.refused) == (1, 1, 1)
    assert [each.cause for each in account.refusals] == ["PartOfBatch"]


def test_unevaluated_messages_behind_a_limit_do_not_count() -> None:
    seen = [sighting(at, selected=at < 3, evaluated=at < 3) for at in range(5)]
    seen[0] = sighting(0, selected=False, evaluated=False)
    limited = plan(Range(0, 7, 0, 9_999), seen, lambda _: "", Choice(limit=1))
    assert (limited.plan.matched, limited.plan.unevaluated) == (1, 1)


def test_what_would_be_moved_and_what_not_is_counted_by_cause() -> None:
    first = planned(
        sighting(0, "TimeoutError"),
        sighting(1, "ValueError", selected=False),
        sighting(2, "TimeoutError", encrypted=True),
        sighting(3),
    )
    second = planned(
        sighting(10_000, "TimeoutError"), sighting(10_001, schema_version=5), first=10_000
    )

    found = preview_of(first, second)

    account = found.account
    assert (account.scanned, account.matched, account.refused, account.left) == (6, 5, 2, 3)
    assert found.causes == {"TimeoutError": 2, "": 1}
    assert found.refused == {"Encrypted": 1, "SchemaNotFound": 1}
    assert found.samples == ("7:0:0:0", "7:3:0:0", "7:10000:0:0")
    shown = ReplayStatus.model_validate(found.to_status())
    assert shown.preview is not None
    assert shown.preview.causes[0].cause == "TimeoutError"


def test_a_status_holds_so_much_whatever_producers_have_written() -> None:
    ranges = [
        planned(
            *(sighting(first + entry, f"{entry}{'x' * 5_000}", size=2**20) for entry in range(500)),
            first=first,
        )
        for first in (0, 10_000)
    ]
    found = preview_of(*ranges)
    written = found.to_status()["preview"]
    assert len(written["causes"]) == 20
    assert len(written["samples"]) == 10
    assert max(len(each["cause"]) for each in written["causes"]) == 256
    ReplayStatus.model_validate(found.to_status())
    assert found.seconds == 50  # 1 000 MiB by two slots of 10 MiB a second
    assert preview_of(*ranges, slots=1).seconds == 100
    assert preview_of(*ranges, policy=ORDERED).seconds == 100, "one range after the other"


def test_what_scans_find_holds_so_much_whatever_producers_have_written() -> None:
    often = Counter(TimeoutError=10_000)
    found = Scanned()
    for first in range(0, 5_000, 100):
        rare = Counter({f"x{number}": 1 for number in range(first, first + 99)})
        found += Scanned(10_099, often + rare, Counter(Encrypted=1))
    assert found.messages == 50 * 10_099
    assert len(found.causes) == 100
    assert found.causes["TimeoutError"] == 500_000
    assert found.refused == {"Encrypted": 50}


def test_a_rate_that_is_limited_bounds_the_time() -> None:
    found = planned(*(sighting(entry) for entry in range(500)))
    assert preview_of(found).seconds == 1
    assert preview_of(found, rate=10.0).seconds == 50


def test_a_limit_takes_the_first_ones_whatever_came_late() -> None:
    """As a message in chunks that a reader has lost."""
    seen = [sighting(1), sighting(2), sighting(0)]
    found = plan(Range(0, 7, 0, 9_999), seen, lambda _version: "", Choice(limit=2))
    assert found.plan.selected == 0b11


def test_of_a_message_in_chunks_the_plan_notes_where_it_begins() -> None:
    found = planned(sighting(5, first_chunk=EntryId(6, 49_999)))
    assert found.plan.chunks == {5: EntryId(6, 49_999)}
