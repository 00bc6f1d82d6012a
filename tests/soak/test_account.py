"""The account of a soak reports exactly the faults."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.soak.account import Account, Disturbance, Stored
from tests.soak.journal import BURST, plan

WELL, RETRIED, DIES = 0, 81, 92  # handled at once, after one failure, never


def begin(at: float, message: Stored, redeliveries: int = 0) -> dict[str, Any]:
    return {
        "what": "begin", "at": at, "id": message.id, "origin": message.origin,
        "attempt": message.failed + 1, "number": message.number, "redeliveries": redeliveries,
    }  # fmt: skip


def end(at: float, message: Stored, *, ok: bool = True) -> dict[str, Any]:
    return {"what": "end", "at": at, "id": message.id, "ok": ok}


def moved(at: float, message: Stored, copy: Stored) -> dict[str, Any]:
    return {
        "what": "event", "at": at, "name": "redrive.retried", "id": message.id, "new": copy.id
    }  # fmt: skip


def wrong(account: Account) -> dict[str, int]:
    account.check()
    names = ("lost", "doubled", "invented", "repeated", "copied", "misplanned")
    return {name: len(getattr(account, name)) for name in names if getattr(account, name)}


SOURCE = Stored("1:0", "1:0", WELL)
FAILED = Stored("1:1", "1:1", RETRIED)
COPY = Stored("2:0", "1:1", RETRIED, failed=1, published=12.0)


def test_what_goes_well_is_in_order() -> None:
    account = Account([SOURCE, FAILED], [COPY], [])
    lines = [begin(10, SOURCE), end(10, SOURCE), begin(11, FAILED), end(11, FAILED, ok=False)]
    account.add("a", [*lines, moved(12, FAILED, COPY)])
    account.add("b", [begin(20, COPY), end(21, COPY)])
    assert wrong(account) == {}


def test_what_was_never_handled_is_lost() -> None:
    assert wrong(Account([SOURCE], [], [])) == {"lost": 1, "misplanned": 2}


def test_a_copy_of_which_nothing_failed_is_invented() -> None:
    account = Account([SOURCE], [Stored("2:0", "1:0", WELL, failed=1)], [])
    account.add("a", [begin(10, SOURCE), end(10, SOURCE)])
    account.add("b", [begin(11, account.retried[0]), end(11, account.retried[0])])
    assert wrong(account) == {"doubled": 1, "invented": 1, "misplanned": 1}


def test_copy_of_another_message_is_lost_and_invented() -> None:
    other = replace(COPY, number=WELL)  # the origin is right, and the content is not
    account = Account([SOURCE, FAILED], [other], [])
    account.add("a", [begin(10, SOURCE), end(10, SOURCE)])
    account.add("a", [begin(11, FAILED), end(11, FAILED, ok=False), moved(12, FAILED, other)])
    account.add("b", [begin(20, other), end(21, other)])
    assert wrong(account) == {"lost": 1, "doubled": 1, "invented": 1}


def test_second_copy_of_one_failure_is_explained_by_nothing() -> None:
    again = replace(COPY, id="2:1", published=23.0)
    rate = Disturbance("publish rate", 11, 25, redelivers=True, unanswered=True, settles=30)
    account = Account([FAILED], [COPY, again], [], disturbances=[rate])
    account.add("a", [begin(10, FAILED), end(11, FAILED, ok=False), moved(12, FAILED, COPY)])
    account.add("b", [begin(20, COPY), end(21, COPY), begin(30, again), end(31, again)])
    assert wrong(account) == {"doubled": 1}
    assert account.explained == {"publish rate": 1}  # the missing receipt is, the copy is not


UNLOAD = Disturbance("unload", 11, 13, redelivers=True, unanswered=True, settles=5, loads=True)


@pytest.mark.parametrize(
    ("sent", "published", "disturbance", "doubled"),
    [
        (("redrive-1", 7), 13.5, UNLOAD, 0),
        (
            ("redrive-1", 7),
            COPY.published,
            replace(UNLOAD, start=12.5),
            0,
        ),  # sent again by the client
        (("redrive-1", 8), 13.5, UNLOAD, 1),
        (("redrive-2", 7), 13.5, UNLOAD, 1),
        (None, 13.5, UNLOAD, 1),
        (("redrive-1", 7), 13.5, replace(UNLOAD, loads=False), 1),
        (("redrive-1", 7), 13.5, replace(UNLOAD, start=30, end=31), 1),
    ],
)
def test_only_the_same_sequence_id_proves_a_fault_of_the_broker(
    sent: tuple[str, int] | None, published: float, disturbance: Disturbance, doubled: int
) -> None:
    copy = replace(COPY, sent=("redrive-1", 7))
    again = replace(COPY, id="2:1", published=published, sent=sent)
    account = Account([FAILED], [copy, again], [], disturbances=[disturbance])
    account.add("a", [begin(10, FAILED), end(11, FAILED, ok=False), moved(12, FAILED, COPY)])
    account.add("b", [begin(20, COPY), end(21, COPY), begin(30, again), end(31, again)])
    account.check()
    assert (len(account.doubled), len(account.stored_twice)) == (doubled, 1 - doubled)


def test_second_copy_of_a_second_failure_is_in_order() -> None:
    again = replace(COPY, id="2:1", published=16.0)
    killed = Disturbance("killed consumer", 12, 13, "a", redelivers=True, forgets=0.5)
    account = Account([FAILED], [COPY, again], [], disturbances=[killed])
    account.add("a", [begin(10, FAILED), end(11, FAILED, ok=False), moved(11.9, FAILED, COPY)])
    account.add("b", [begin(14, FAILED), end(15, FAILED, ok=False), moved(16, FAILED, again)])
    account.add("b", [begin(20, COPY), end(21, COPY), begin(22, again), end(23, again)])
    assert wrong(account) == {}


def test_receipt_without_id_does_not_stand_for_a_copy() -> None:
    unload = Disturbance("unload", 11.5, 11.7, redelivers=True, unanswered=True, settles=5)
    account = Account([FAILED], [], [], disturbances=[unload])
    receipt = moved(12, FAILED, replace(COPY, id=""))
    account.add("a", [begin(11, FAILED), end(11, FAILED, ok=False), receipt])
    assert wrong(account) == {"lost": 1, "misplanned": 2}


def test_each_message_of_a_burst_fails_and_some_die() -> None:
    plans = [plan(BURST + number) for number in range(8)]
    assert [its.failures for its in plans] == [1, 1, 1, 2, 1, 3, 1, 4]
    assert [its.dies for its in plans] == [False] * 7 + [True]


def test_a_receipt_is_of_one_stored_copy() -> None:
    account = Account([FAILED], [], [])
    lines = [begin(10, FAILED), end(11, FAILED, ok=False), moved(12, FAILED, COPY)]
    account.add("a", lines)
    assert wrong(account) == {"lost": 1, "invented": 1, "misplanned": 2}


def test_receipt_of_an_earlier_send_names_no_copy() -> None:
    unload = Disturbance("unload", 11.5, 11.7, unanswered=True, settles=5)
    receipt = moved(12, FAILED, replace(COPY, id=""))
    for disturbances, expected in (([unload], {}), ([], {"copied": 1})):
        account = Account([FAILED], [COPY], [], disturbances=disturbances)
        account.add("a", [begin(11, FAILED), end(11, FAILED, ok=False), receipt])
        account.add("b", [begin(20, COPY), end(21, COPY)])
        assert wrong(account) == expected
        assert account.without_id == 1


def test_a_dead_letter_is_planned() -> None:
    dies = Stored("1:0", "1:0", DIES)
    dead = Stored("3:0", "1:0", DIES, failed=1)
    account = Account([dies], [], [dead])
    lines = [begin(10, dies), end(11, dies, ok=False), moved(12, dies, dead)]
    account.add("a", lines)
    assert wrong(account) == {"misplanned": 1}  # it had one attempt, instead of four


def test_repetition_is_explained_by_a_disturbance_of_the_first() -> None:
    killed = Disturbance("killed consumer", 11, 12, "a", redelivers=True, forgets=0.5)
    for first, second, disturbance, expected in (
        ([begin(10, SOURCE)], 13, killed, {}),
        ([begin(10, SOURCE), end(10.8, SOURCE)], 13, killed, {}),
        ([begin(10, SOURCE), end(10.2, SOURCE)], 13, killed, {"repeated": 1}),
        ([begin(12.5, SOURCE)], 13, killed, {"repeated": 1}),
        ([begin(10, SOURCE)], 10.5, killed, {"repeated": 1}),
        ([begin(10, SOURCE)], 13, replace(killed, process=None), {}),
        ([begin(10, SOURCE)], 13, replace(killed, process="b"), {"repeated": 1}),
        ([begin(10, SOURCE)], 13, replace(killed, redelivers=False), {"repeated": 1}),
        (
            [begin(10, SOURCE), end(11.5, SOURCE)],
            13,
            replace(killed, forgets=None),
            {"repeated": 1},
        ),
    ):
        account = Account([SOURCE], [], [], disturbances=[disturbance])
        account.add("a", first)
        account.add("b", [begin(second, SOURCE), end(second, SOURCE)])
        assert wrong(account) == expected
        assert account.repetitions == 1


def test_message_that_waited_in_a_queue_may_be_handled_twice() -> None:
    unload = Disturbance("unload", 20, 21, redelivers=True, settles=5)
    for published, disturbance, expected in (
        (19, unload, {}),
        (26, unload, {}),
        (27, unload, {"repeated": 1}),
        (19, replace(unload, process="a"), {"repeated": 1}),  # its queue ends with it
        (19, replace(unload, redelivers=False), {"repeated": 1}),
        (19, replace(unload, start=90, end=91), {"repeated": 1}),
    ):
        message = replace(SOURCE, published=published)
        account = Account([message], [], [], disturbances=[disturbance])
        account.add("a", [begin(80, message), end(81, message)])
        account.add("b", [begin(120, message), end(121, message)])
        assert wrong(account) == expected


def test_cursor_move_between_load_and_kill_may_be_forgotten() -> None:
    first, second = SOURCE, Stored("1:1", "1:1", WELL)
    unload = Disturbance("unload", 40, 41, redelivers=True, settles=5)
    killed = Disturbance("killed broker", 50, 60, forgets=11, crashes=True)
    for passed, disturbances, expected in (
        (42, [unload, killed], {}),
        (42, [killed], {"repeated": 1}),
        (42, [unload, replace(killed, crashes=False)], {"repeated": 1}),
        (42, [unload, replace(killed, start=58)], {"repeated": 1}),
        (39, [unload, killed], {"repeated": 1}),  # it was stored by the unload
        (51, [unload, killed], {"repeated": 1}),  # as one behind the cursor
    ):
        account = Account([first, second], [], [], disturbances=disturbances)
        lines = [begin(10, second), end(11, second), begin(12, first), end(passed, first)]
        account.add("a", lines)
        account.add("b", [begin(61, second), end(62, second)])
        assert wrong(account) == expected


def test_retry_of_two_consumers_at_once_was_dispatched_twice() -> None:
    for second, process, redeliveries, expected in (
        (20.2, "b", 0, {}),
        (20.2, "b", 1, {"repeated": 1}),
        (25.0, "b", 0, {"repeated": 1}),
        (20.2, "a", 0, {"repeated": 1}),
    ):
        account = Account([FAILED], [COPY], [])
        account.add("a", [begin(10, FAILED), end(11, FAILED, ok=False), moved(12, FAILED, COPY)])
        account.add("a", [begin(20, COPY), end(21, COPY)])
        account.add(process, [begin(second, COPY, redeliveries), end(26, COPY)])
        assert wrong(account) == expected


def test_message_delivered_during_a_request_may_come_again() -> None:
    for requested, began, redeliveries, expected in (
        (19.9, 23, 1, {}),
        (19.9, 23, 0, {"repeated": 1}),  # the broker did not deliver it again
        (20.1, 23, 1, {"repeated": 1}),
        (4.0, 23, 1, {"repeated": 1}),
    ):
        account = Account([SOURCE], [], [])
        request = {"what": "request", "at": requested}
        account.add("a", [request, begin(20, SOURCE), end(21, SOURCE)])
        account.add("b", [begin(began, SOURCE, redeliveries), end(24, SOURCE)])
        assert wrong(account) == expected


def test_copy_without_receipt_is_explained_by_a_broken_send() -> None:
    for start, expected in ((11.0, {}), (60.0, {"copied": 1})):
        killed = Disturbance("killed consumer", start, start + 1, "a", unanswered=True)
        account = Account([FAILED], [COPY], [], disturbances=[killed])
        account.add("a", [begin(10, FAILED), end(11, FAILED, ok=False)])
        account.add("b", [begin(20, COPY), end(21, COPY)])
        assert wrong(account) == expected
        assert account.without_receipt == 1
