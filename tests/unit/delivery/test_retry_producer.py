from __future__ import annotations

from datetime import timedelta
from typing import Any, cast

import pulsar
import pytest

from redrive import AsyncRetryProducer, RetryProducer
from redrive.errors import InvalidSpecError

CLIENT = cast("pulsar.Client", None)  # nobody gets as far as to use it


@pytest.mark.parametrize(
    ("choice", "wrong"),
    [
        ({"send_retries": -1}, "send_retries"),
        ({"timeout": timedelta()}, "time-out"),
        ({"in_flight": 0}, "at a time"),
    ],
)
async def test_what_no_producer_could_do_is_refused(choice: dict[str, Any], wrong: str) -> None:
    with pytest.raises(InvalidSpecError, match=wrong):
        RetryProducer(CLIENT, "orders", **choice)
    with pytest.raises(InvalidSpecError, match=wrong):
        async with AsyncRetryProducer(CLIENT, "orders", **choice):
            raise AssertionError


async def test_an_asynchronous_producer_sends_only_while_it_is_open() -> None:
    with pytest.raises(InvalidSpecError, match="async with"):
        await AsyncRetryProducer(CLIENT, "orders").send(b"x")
