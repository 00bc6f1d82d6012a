"""The demo's account: every id in exactly one place, or the account does not balance."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandbox.demo.account import Account

ids = st.frozensets(st.integers(0, 999).map("order-{:06}".format), min_size=1)


@given(ids, st.data())
def test_account_with_each_id_once_balances(produced: frozenset[str], data: st.DataObject) -> None:
    """Any split of the ids into done ones and dead letters balances."""
    resting = data.draw(st.frozensets(st.sampled_from(sorted(produced))))
    account = Account.of(produced=produced, done=produced - resting, dead=resting)
    assert account.balanced
    assert account.faults == {}


@given(ids, st.data())
def test_id_missing_from_handler_log_is_lost(produced: frozenset[str], data: st.DataObject) -> None:
    """An id that is neither done nor a dead letter is named."""
    missing = data.draw(st.sampled_from(sorted(produced)))
    account = Account.of(produced=produced, done=produced - {missing}, dead=[])
    assert not account.balanced
    assert account.faults == {"lost": {missing}}


@given(ids, st.data())
def test_id_missing_from_producer_log_is_unknown(
    produced: frozenset[str], data: st.DataObject
) -> None:
    """An id handled but never produced is named."""
    missing = data.draw(st.sampled_from(sorted(produced)))
    account = Account.of(produced=produced - {missing}, done=produced, dead=[])
    assert not account.balanced
    assert account.faults.get("never produced", frozenset()) == {missing}


def test_id_done_twice_is_named() -> None:
    """A message processed twice unbalances the account even though no id is missing."""
    account = Account.of(produced=["a", "b"], done=["a", "b", "a"], dead=[])
    assert account.faults == {"processed more than once": {"a"}}


def test_id_done_and_still_a_dead_letter_is_named() -> None:
    """A dead letter replayed but not acknowledged would be replayed again."""
    account = Account.of(produced=["a", "b"], done=["a", "b"], dead=["b"])
    assert account.faults == {"processed, and still a dead letter": {"b"}}


@pytest.mark.parametrize("resting", [[], ["a"]])
def test_empty_account_never_balances(resting: list[str]) -> None:
    """An empty log is a demo that did not run."""
    assert not Account.of(produced=[], done=[], dead=resting).balanced
