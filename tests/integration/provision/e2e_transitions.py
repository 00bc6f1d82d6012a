"""A changed field has the same result as in a new object, and so has its reversal."""

from __future__ import annotations

import pytest

from tests.integration.provision.conftest import MakeShop, Shop
from tests.support import transitions
from tests.support.transitions import cases, problems_of, some

SHARE = 30
"""One of so many fields is changed here; `make chaos` changes all of them."""


@pytest.fixture(scope="module")
def shop(make_shop: MakeShop) -> Shop:
    return transitions.prepared(make_shop())


def test_changed_and_reverted_fields_have_results_of_new_objects(
    shop: Shop,
) -> None:
    chosen = some(cases(shop), SHARE)
    assert {case.kind for case in chosen} == {"RetryPolicy", "BrokerConnection"}
    problems = problems_of(shop, chosen)
    assert not problems, "\n\n".join(problems)
