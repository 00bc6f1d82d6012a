"""Each field is changed, and changed back: what comes of it is what a new object gets."""

from __future__ import annotations

import pytest

from tests.integration.provision.conftest import MakeShop, Shop
from tests.support import transitions
from tests.support.transitions import cases, problems_of


@pytest.fixture(scope="module")
def shop(make_shop: MakeShop) -> Shop:
    return transitions.prepared(make_shop())


@pytest.mark.timeout(1_200)  # over 300 objects, at the pace of two busy cores
def test_every_changed_field_ends_as_a_new_object_and_changed_back_as_if_it_never_had_been(
    shop: Shop,
) -> None:
    problems = problems_of(shop, cases(shop))
    assert not problems, "\n\n".join(problems)
