"""How a call to a broker is made: with credentials in force, and not where no answer will come."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from redrive.admin.access import Credentials
from redrive.admin.answer_limits import USUAL, CallTurns
from redrive.admin.breaker import Breaker
from redrive.admin.errors import AuthenticationFailedError, unexpected
from redrive.admin.http import CALLS_AT_A_TIME, Call, Http, Way

T = TypeVar("T")


class Calls:
    """Makes calls to one broker; see `client.Admin` for the arguments."""

    def __init__(
        self, http: Http, admin_url: str, credentials: Credentials, breaker: Breaker | None = None
    ) -> None:
        self._http = http
        self._breaker = breaker
        self._admin_url = admin_url
        self._credentials = credentials
        self._turns = CallTurns(CALLS_AT_A_TIME)

    def is_for(self, admin_url: str, credentials: Credentials) -> bool:
        """Whether this client calls that broker with those credentials."""
        return admin_url == self._admin_url and credentials is self._credentials

    async def _get(self, does: str, path: str, read: Callable[[Any], T], longest: int = USUAL) -> T:
        return await self._ask(Call(does, "GET", path, longest=longest), read)

    async def _ask(self, call: Call, read: Callable[[Any], T], *, probe: bool = False) -> T:
        """Send *call* and *read* the answer; one of another form is not a broker's."""
        answer = await self._send(call, probe=probe)
        try:
            return read(answer)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            # Not its content: another host may have given it, see `http`.
            raise unexpected(call.does, "JSON of another form") from error

    async def _send(self, call: Call, *, probe: bool = False) -> Any:  # noqa: ANN401  JSON
        """Make *call*, once more if the broker refuses credentials that have changed since."""

        async def send() -> Any:  # noqa: ANN401  JSON
            access = self._credentials.held
            try:
                return await self._http.send(call, Way(self._admin_url, access, self._turns))
            except AuthenticationFailedError:
                renewed = await self._credentials.renewed(access)
                if renewed is None:
                    raise
            return await self._http.send(call, Way(self._admin_url, renewed, self._turns))

        return await (send() if self._breaker is None else self._breaker.guard(send, probe=probe))
