"""Each field is changed, and changed back; the result equals that of a new object."""

from __future__ import annotations

import pytest

from tests.integration.provision.conftest import MakeShop, Shop
from tests.support import transitions
from tests.support.transitions import cases, problems_of


@pytest.fixture(scope="module")
def shop(make_shop: MakeShop) -> Shop:
    return transitions.prepared(make_shop())


@pytest.mark.timeout(1_200)  # over 300 objects, on two busy cores
def test_changed_fields_end_as_in_a_new_object(
    shop: Shop,
) -> None:
    problems = problems_of(shop, cases(shop))
    assert not problems, "\n\n".join(problems)
