"""One call to a broker's admin API, and its outcome: a value, or an `AdminError`.

Called by `client` alone. Neither the token nor a URL that the broker redirects to is ever part
of an error, nor what answers at any address, unless it answers with an error as a broker does: the
owner of `adminUrl` could else read, in a status, what only the operator can reach. Credentials go
to the host of `adminUrl`, and by redirects to those that the connection names.
"""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import aiohttp
from yarl import URL

from redrive.admin import answer_limits, metrics
from redrive.admin.access import Access
from redrive.admin.answer_limits import AnswerTooLongError, CallTurns
from redrive.admin.errors import (
    AdminUrlInvalidError,
    BrokerUnreachableError,
    CertificateRefusedError,
    IssuerFailedError,
    RedirectRefusedError,
    error_for,
    unexpected,
)
from redrive.admin.fence import Fence, FenceClosedError, guarding

TIMEOUT = aiohttp.ClientTimeout(total=None, sock_connect=5, sock_read=30)
WHOLE_SECONDS = 60.0
"""The longest that a call may take to connect, to send and to read the answer to its last byte.

The time that a call waits for its turn is not counted: with many policies and a slow broker it may
be long, and would be taken for a broker that is silent.
"""
CALLS_AT_A_TIME = 20
"""Of one connection; its other calls wait for their turn, and no other connection for them."""
CALLS_OF_ALL = 100
"""Of all connections, as far as they are quick: the answers to more would keep the event loop busy
for seconds, and calls would count as unanswered whose answers have come."""
SLOW_SECONDS = 1.0
"""A call that takes longer counts no more among those: a broker that hangs delays no other."""
MAX_REDIRECTS = 5
_REDIRECTS = {301, 302, 307, 308}
_SUCCESS = range(200, 300)


@dataclass(frozen=True)
class Call:
    """A call to be made.

    Attributes:
        does: what it does, in words: "create the topic …".
        path: below `/admin/v2/`, its parts already quoted.
        body: sent as JSON; None sends nothing.
        content_type: where a path takes more than one form of JSON, which one *body* has.
        seconds: how long it may take at most, as `WHOLE_SECONDS` says.
        as_text: whether the answer is no JSON, and is returned as it is.
        longest: how many bytes its answer may have.
    """

    does: str
    method: str
    path: str
    body: Any = None
    content_type: str = "application/json"
    seconds: float = WHOLE_SECONDS
    as_text: bool = False
    longest: int = answer_limits.USUAL


class Way(NamedTuple):
    """How a connection reaches its broker.

    Attributes:
        admin_url: where the broker's admin API answers.
        access: the credentials to show.
        turns: what its calls, and those of them with long answers, wait for.
    """

    admin_url: str
    access: Access
    turns: CallTurns


class _Reply(NamedTuple):
    """A broker's answer."""

    status: int
    body: bytes

    @property
    def text(self) -> str:
        """Return what it says."""
        return self.body.decode(errors="replace")


class Http:
    """HTTP connections to brokers, shared by all clients; made by `open`."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session = session
        self._free = asyncio.Semaphore(CALLS_OF_ALL)
        self._long = asyncio.Semaphore(answer_limits.LONG_AT_A_TIME)

    @classmethod
    @asynccontextmanager
    async def open(cls, fence: Fence | None = None) -> AsyncIterator[Http]:
        """Open a pool of connections.

        Args:
            fence: what every write has to pass; None lets all pass.
        """
        async with aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            # What one connection's broker sets would be sent to another's.
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=TIMEOUT,
            trace_configs=[] if fence is None else [guarding(fence)],
        ) as session:
            yield cls(session)

    async def send(self, call: Call, way: Way) -> Any:  # noqa: ANN401  JSON
        """Make *call* and return the JSON or text that the broker answers, None for no JSON.

        Raises:
            AdminError: the call failed; the subclass says how.
        """
        answer = await self._answer(call, way)
        if answer.status not in _SUCCESS:
            raise error_for(call.does, answer.status, answer.text)
        if call.as_text:
            return answer.text
        try:
            return answer_limits.parsed(answer.body) if answer.body else None
        except ValueError as error:
            raise unexpected(call.does, str(error)) from error

    async def _answer(self, call: Call, way: Way) -> _Reply:
        """Return the broker's answer, and count it."""
        outcome, admin_url = "uncallable", way.admin_url
        try:
            with metrics.SECONDS.labels(call.method).time():
                url = URL(f"{admin_url.rstrip('/')}/admin/v2/{call.path}", encoded=True)
                answer = await self._follow(call, url, way)
            outcome = str(answer.status)
        except aiohttp.ClientConnectorCertificateError as error:  # a ValueError too
            outcome = "certificate refused"
            raise _refused(admin_url, error) from error
        except ValueError as error:  # some parts of an address are looked at only when it is called
            raise AdminUrlInvalidError(
                "adminUrl, or an address that the broker redirects to, is none that can be called",
                got=admin_url,
                remedy="correct its host and port, or those that the broker advertises",
            ) from error
        except (aiohttp.ClientError, OSError) as error:
            outcome = "unreachable"
            raise BrokerUnreachableError(
                f"the broker's admin API does not answer at {admin_url}",
                got=str(error) or type(error).__name__,
                remedy="check adminUrl, and that the broker runs and can be reached from here",
            ) from error
        except AnswerTooLongError as error:
            outcome = "too long"
            raise unexpected(call.does, str(error)) from error
        except RedirectRefusedError:
            outcome = "redirect refused"
            raise
        except FenceClosedError:
            outcome = "fenced"
            raise
        except asyncio.CancelledError:
            outcome = "cancelled"
            raise
        finally:
            metrics.CALLS.labels(call.method, outcome).inc()
        return answer

    async def ask_issuer(
        self, method: str, url: str, form: Mapping[str, str] | None, tls: ssl.SSLContext | None
    ) -> tuple[int, str]:
        """Return status and text of what an issuer of tokens answers; redirects are not followed.

        Raises:
            CertificateRefusedError: it shows a certificate that is not trusted.
            IssuerFailedError: it does not answer.
        """
        try:
            async with self._request(method, URL(url), data=form, ssl=tls or True) as response:
                read = answer_limits.read(response.content.iter_any(), answer_limits.SHORT)
                return response.status, (await read).decode(errors="replace")
        except aiohttp.ClientConnectorCertificateError as error:
            raise _refused(url, error) from error
        except (aiohttp.ClientError, OSError, ValueError, AnswerTooLongError) as error:
            raise IssuerFailedError(
                f"the issuer of tokens does not answer at {url}",
                got=str(error) or type(error).__name__,
                remedy="check oauth2.issuerUrl, and that it can be reached from here",
            ) from error

    async def _follow(self, call: Call, url: URL, way: Way) -> _Reply:
        """Make *call*, following redirects to the broker that serves the namespace.

        The HTTP library would drop the token on the way to another host.
        """
        # Without a content type a broker answers 415 to a PUT, even to one without a body.
        headers = {**way.access.headers, "Content-Type": call.content_type}
        body = None if call.body is None else json.dumps(call.body)
        asked = url
        for _ in range(MAX_REDIRECTS):
            async with self._request(
                call.method,
                url,
                seconds=call.seconds,
                data=body,
                headers=headers,
                ssl=way.access.tls or True,
                turns=way.turns.calls,
            ) as response:
                if response.status not in _REDIRECTS or "Location" not in response.headers:
                    return await self._reply(response, call, way)
                target = url.join(URL(response.headers["Location"], encoded=True))
                if not may_follow(url, target):
                    raise _not_followed(call, "one from https to http")
                if target.host != asked.host and not way.access.may_go_to(target.host or ""):
                    raise _not_followed(call, "one to a host that the connection does not name")
                url = target
        raise _not_followed(call, f"more than {MAX_REDIRECTS} redirects")

    async def _reply(self, response: aiohttp.ClientResponse, call: Call, way: Way) -> _Reply:
        parts = response.content.iter_any()
        if response.status in _SUCCESS:
            body = await answer_limits.read(parts, call.longest, way.turns.long, self._long)
        else:
            body = await answer_limits.begin(parts)
        return _Reply(response.status, body)

    @asynccontextmanager
    async def _request(
        self,
        method: str,
        url: URL,
        *,
        seconds: float = WHOLE_SECONDS,
        turns: AbstractAsyncContextManager[object] = nullcontext(),  # noqa: B008  it never changes
        **options: Any,  # noqa: ANN401  as the session takes them
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Wait for a turn, then send; yield the answer, to be read within the same *seconds*.

        Raises:
            TimeoutError: the time is over.
        """
        async with turns, self._room(), _within(seconds):
            request = self._session.request(method, url, allow_redirects=False, **options)
            async with request as response:
                yield response

    @asynccontextmanager
    async def _room(self) -> AsyncIterator[None]:
        """Wait until there is room among the calls of all connections."""
        await self._free.acquire()
        with ExitStack() as held:
            held.callback(self._free.release)
            slow = asyncio.get_running_loop().call_later(SLOW_SECONDS, held.close)
            try:
                yield
            finally:
                slow.cancel()


@asynccontextmanager
async def _within(seconds: float) -> AsyncIterator[None]:
    """End the block after *seconds*, with an error that names them."""
    try:
        async with asyncio.timeout(seconds) as limit:
            yield
    except TimeoutError as error:
        if not limit.expired():
            raise
        raise TimeoutError(f"no whole answer within {seconds:g} s") from error


def _not_followed(call: Call, why: str) -> RedirectRefusedError:
    return RedirectRefusedError(
        f"a redirect was not followed when asked to {call.does}",
        got=why,
        remedy="name the hosts of the cluster's brokers in the connection's redirectHosts, or give "
        "the address of a Pulsar proxy as adminUrl",
    )


def _refused(url: str, error: aiohttp.ClientConnectorCertificateError) -> CertificateRefusedError:
    return CertificateRefusedError(
        f"the certificate shown at {url} is not trusted",
        got=str(error.certificate_error),
        remedy="give its authority in caRef, or the address that the certificate is for",
    )


def may_follow(origin: URL, target: URL) -> bool:
    """Whether a token that was sent to *origin* may go on to *target*: never from TLS to none."""
    return target.scheme == "https" or origin.scheme == "http"
