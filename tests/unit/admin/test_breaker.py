from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from redrive.admin.errors import BrokerDownError, BrokerFailedError, BrokerUnreachableError
from redrive.admin.guards import FAILURES, Breaker

START = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
SILENT = BrokerUnreachableError("no answer", remedy="wait")


class Broker:
    """A broker behind a breaker; each call takes a minute."""

    def __init__(self) -> None:
        self.calls = 0
        self.states: list[bool] = []
        self._now = START
        self.breaker = Breaker(
            "http://broker:8080",
            lambda: self._now,
            lambda: self.states.append(self.breaker.is_open),
        )

    async def call(self, fails: Exception | None = None, *, probe: bool = False) -> object:
        async def answer() -> str:
            self.calls += 1
            self._now += timedelta(minutes=1)
            if fails is not None:
                raise fails
            return "answer"

        return await self.breaker.guard(answer, probe=probe)

    async def fall_silent(self) -> None:
        for _ in range(FAILURES):
            with pytest.raises(BrokerUnreachableError):
                await self.call(SILENT)


async def test_answers_and_refusals_pass() -> None:
    broker = Broker()
    assert await broker.call() == "answer"
    for _ in range(2 * FAILURES):
        with pytest.raises(BrokerFailedError):
            await broker.call(BrokerFailedError("500", remedy="wait"))
    assert (broker.states, broker.calls) == ([], 2 * FAILURES + 1)


async def test_a_few_calls_in_a_row_without_an_answer_open_it() -> None:
    broker = Broker()
    for _ in range(3):
        for _ in range(FAILURES - 1):
            with pytest.raises(BrokerUnreachableError, match="no answer"):
                await broker.call(SILENT)
        assert await broker.call() == "answer"
    assert not broker.states
    await broker.fall_silent()
    assert broker.states == [True]


async def test_while_it_is_open_nothing_goes_out_and_the_error_tells_since_when() -> None:
    broker = Broker()
    await broker.fall_silent()
    messages: set[str] = set()
    for probe in (False, True, False):
        with pytest.raises(BrokerDownError) as raised:
            await broker.call(SILENT, probe=probe)
        messages.add(str(raised.value))
    assert broker.calls == FAILURES + 1
    (message,) = messages
    assert "http://broker:8080 has not answered since 2026-01-02T03:05:05Z; check" in message


REFUSED = BrokerFailedError("503", remedy="wait")


@pytest.mark.parametrize("probed", [None, REFUSED], ids=["success", "refusal"])
async def test_a_probe_that_is_answered_closes_it(probed: Exception | None) -> None:
    broker = Broker()
    await broker.fall_silent()
    if probed is None:
        await broker.call(probe=True)
    else:
        with pytest.raises(BrokerFailedError):
            await broker.call(probed, probe=True)
    assert broker.states == [True, False]
    assert await broker.call() == "answer"
    with pytest.raises(BrokerUnreachableError, match="no answer"):
        await broker.call(SILENT)
