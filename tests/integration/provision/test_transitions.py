"""Some fields are changed, and changed back: what comes of it is what a new object gets."""

from __future__ import annotations

import pytest

from tests.integration.provision.conftest import MakeShop, Shop
from tests.support import transitions
from tests.support.transitions import cases, problems_of, some

SHARE = 30
"""One of so many fields is changed here, and each by `make chaos`."""


@pytest.fixture(scope="module")
def shop(make_shop: MakeShop) -> Shop:
    return transitions.prepared(make_shop())


def test_a_changed_field_ends_as_a_new_object_and_changed_back_as_if_it_never_had_been(
    shop: Shop,
) -> None:
    chosen = some(cases(shop), SHARE)
    assert {case.kind for case in chosen} == {"RetryPolicy", "BrokerConnection"}
    problems = problems_of(shop, chosen)
    assert not problems, "\n\n".join(problems)
