"""HTTP calls to a broker: addresses, bounded responses, metrics.

The owner of a BrokerConnection chooses the server, and one operator process serves all connections.
So answers are bounded. Parsed, an answer takes far more memory than its bytes: `[[],[],…]` twenty
times as much. Only calls whose answers grow with a namespace or a topic may have a long one. Few
long answers are in memory at a time, and one of each connection. An answer with too many values is
not parsed.

Errors contain neither the token nor the URL of a redirect. They contain an answer only if it has
the form of a broker's error. Otherwise the owner of `adminURL` could read, in a status, data that
only the operator can reach. Credentials are sent to the origin (scheme, host and port) of
`adminURL`, and by redirects to the hosts that the connection allows.
"""

from __future__ import annotations

import asyncio
import functools
import json
import logging
import math
import os
import re
import ssl
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, ExitStack, asynccontextmanager
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, NamedTuple
from urllib.parse import quote

import aiohttp
from prometheus_client import Counter, Histogram
from yarl import URL

from redrive.admin.access import Access, tls_context
from redrive.admin.connector import connector, taking_turns
from redrive.admin.errors import AdminError, BrokerUnreachableError, error_for, unexpected
from redrive.admin.fair_slots import FairSlots, namespace_of_object
from redrive.admin.guards import Fence, guarding
from redrive.admin.proxies import proxy_for
from redrive.admin.shares import Shares, namespace_of_call
from redrive.errors import RedriveError
from redrive.policy.naming import TopicName
from redrive.reasons import Reason

logger = logging.getLogger(__name__)

ADMIN_CALLS = Counter(
    "redrive_admin_calls",
    "Calls to brokers' admin APIs, by HTTP method and result.",
    ["verb", "status"],
)
ADMIN_SECONDS = Histogram(
    "redrive_admin_call_duration_seconds",
    "Duration of calls to brokers' admin APIs, including redirects.",
    ["verb"],
    buckets=(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30),
)


SHORT_ANSWER = 64 * 2**10
"""Bytes of an answer that is read without waiting for a slot. Of an error only these are read."""
USUAL_ANSWER = 2**20
"""Maximum bytes of an answer about one object."""
LONG_ANSWER = 24 * 2**20
"""Maximum bytes of any answer. Permissions on a hundred thousand topics take 15 MiB."""
LONG_ANSWERS_AT_A_TIME = 3
"""Maximum concurrent answers longer than `SHORT_ANSWER`, of all connections."""
LONG_ANSWERS_OF_NAMESPACE = 2
"""Maximum of those for connections of one namespace, so that others find a free slot."""
LONG_ANSWER_SECONDS = 10.0
"""Maximum time for the rest of a long answer, because others wait for the slot."""
MOST_VALUES = 1_000_000
"""Maximum values of an answer that is parsed: each takes about a hundred bytes."""
MOST_DIGITS = 20
"""A broker's numbers have at most 64 bits."""
MOST_NESTED = 64
"""Maximum depth of values. The parser permits a thousand, and then fails to write them again."""


class AnswerTooLongError(Exception):
    """An answer exceeds the maximum of its call."""


class CallSlots:
    """Slots of one connection.

    Attributes:
        calls: limits concurrent calls, including redirected ones; the namespaces that use the
            connection have equal shares.
        long: limits concurrent long answers.
        namespace: of the connection; each namespace has an equal share of the slots of all.
    """

    def __init__(self, calls: int, namespace: str = "") -> None:
        self.namespace = namespace
        self.calls = FairSlots(calls)
        self.long = asyncio.Semaphore(1)


async def read_bounded(
    parts: AsyncIterator[bytes], longest: int, *slots: AbstractAsyncContextManager[object]
) -> bytes:
    """Read an answer; one that is longer than `SHORT_ANSWER` waits for all *slots*.

    Raises:
        AnswerTooLongError: it exceeds *longest* bytes; the rest is not read.
        TimeoutError: it is long, and took too long after it got its slots.
    """
    answer = bytearray()
    try:
        async with asyncio.timeout(None) as limit, AsyncExitStack() as held:
            async for part in parts:
                answer += part
                if len(answer) > longest:
                    raise AnswerTooLongError(f"an answer of more than {_size(longest)}")
                if slots and len(answer) > SHORT_ANSWER:
                    for slot in slots:
                        await held.enter_async_context(slot)
                    slots = ()
                    limit.reschedule(asyncio.get_running_loop().time() + LONG_ANSWER_SECONDS)
    except TimeoutError as error:
        if not limit.expired():
            raise
        message = (
            f"no whole answer of more than {_size(SHORT_ANSWER)} within {LONG_ANSWER_SECONDS:g} s"
        )
        raise TimeoutError(message) from error
    return bytes(answer)


async def read_beginning(parts: AsyncIterator[bytes]) -> bytes:
    """Read about the first `SHORT_ANSWER` bytes of an answer."""
    answer = bytearray()
    async for part in parts:
        answer += part
        if len(answer) > SHORT_ANSWER:
            break
    return bytes(answer)


def parse_answer(answer: bytes) -> Any:  # noqa: ANN401  JSON
    """Return the value of a JSON answer.

    Raises:
        ValueError: it is not JSON, or has more values, longer numbers or deeper nesting than an
            answer of a broker.
    """
    brackets = answer.count(b"[") + answer.count(b"{")  # counts those in texts, too
    if brackets + answer.count(b",") > MOST_VALUES:
        raise ValueError(f"JSON of more than {MOST_VALUES} values")
    text = answer.decode(errors="replace")
    try:
        value = json.loads(text, parse_int=_integer, parse_float=_finite, parse_constant=_finite)
        if _SURROGATE.search(answer):
            # Half of a pair is not text: to quote it in a path, or to log it, would fail.
            value = json.loads(json.dumps(value, ensure_ascii=False).encode(errors="replace"))
    except ValueError:
        raise ValueError(f"{len(text)} characters that are not JSON") from None
    except RecursionError:
        raise ValueError("JSON that is nested too deeply") from None
    if brackets > MOST_NESTED and _is_deep(value):
        raise ValueError(f"JSON that is nested more than {MOST_NESTED} deep")
    return value


_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
"""Beginning of an escape for a half of a surrogate pair."""


def _integer(text: str) -> int:
    if len(text) > MOST_DIGITS:
        raise ValueError("a number of more than 64 bits")
    return int(text)


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError("a number that is not finite")
    return number


def _is_deep(value: object) -> bool:
    """Return True if containers are nested more than `MOST_NESTED` deep."""
    level: list[Any] = [[value]]
    for _ in range(MOST_NESTED + 1):
        values = (v for held in level for v in (held.values() if type(held) is dict else held))
        level = [inner for inner in values if type(inner) in {dict, list}]
        if not level:
            return False
    return True


def _size(count: int) -> str:
    return f"{count / 2**20:g} MiB" if count >= 2**20 else f"{count / 2**10:g} KiB"


def quoted(text: str) -> str:
    """Quote *text* as parts of a path; slashes are kept."""
    return quote(text, safe="/")


def topic_path(topic: TopicName) -> str:
    """Return the path of a topic."""
    return f"persistent/{quoted(topic.namespace_name)}/{quote(topic.local, safe='')}"


def subscription_path(topic: TopicName, name: str) -> str:
    """Return the path of a subscription of a topic."""
    # The broker decodes this part of the path twice.
    return f"{topic_path(topic)}/subscription/{quoted(quoted(name))}"


def permission_path(topic: TopicName, role: str) -> str:
    """Return the path of the grants of a role on a topic."""
    return f"{topic_path(topic)}/permissions/{quote(role, safe='')}"


TIMEOUT = aiohttp.ClientTimeout(total=None, sock_connect=5, sock_read=30)
WHOLE_SECONDS = 60.0
"""Maximum time of a call to connect, to send and to read the whole answer.

Waiting for a slot does not count. With many policies and a slow broker that may take long, and the
broker would be regarded as silent.
"""
CALLS_AT_A_TIME = 20
"""Maximum concurrent calls of one connection; further calls wait, and no other connection."""
CALLS_OF_ALL = 100
"""Maximum concurrent quick calls of all connections. The answers to more would block the event loop
for seconds, and answered calls would time out."""
CALLS_OF_NAMESPACE = 500
"""Maximum concurrent calls for all connections of one namespace. Each has a socket, and connections
may be created without limit."""
SLOW_SECONDS = 1.0
"""A slower call releases its slot among all: a broker that hangs delays no other."""
MAX_REDIRECTS = 5
_REDIRECTS = {301, 302, 307, 308}
_SUCCESS = range(200, 300)


@dataclass(frozen=True)
class Call:
    """A call to the admin API.

    Attributes:
        does: the action in words: "create the topic …".
        path: path below `/admin/v2/`, already quoted.
        body: sent as JSON; None sends nothing.
        content_type: form of *body*, for paths that accept several forms of JSON.
        seconds: time-out, as `WHOLE_SECONDS`.
        as_text: True returns the answer as text; it is not JSON.
        longest: maximum bytes of the answer.
        optional: True returns None if the object does not exist.
        read: parses the JSON of the answer, in a thread if it is long. An exception means that the
            answer is not a broker's. None returns the JSON.
    """

    does: str
    method: str
    path: str
    body: Any = None
    content_type: str = "application/json"
    seconds: float = WHOLE_SECONDS
    as_text: bool = False
    longest: int = USUAL_ANSWER
    optional: bool = False
    read: Callable[[Any], Any] | None = None


class Endpoint(NamedTuple):
    """Address, credentials and call slots of one connection, or of its issuer of tokens.

    Attributes:
        url: URL of the broker's admin API, or of the issuer.
        access: credentials to send.
        slots: slots of its calls and of their long answers.
    """

    url: str
    access: Access
    slots: CallSlots


class _Reply(NamedTuple):
    """Answer of a broker."""

    status: int
    body: bytes

    @property
    def text(self) -> str:
        """Return the answer as text."""
        return self.body.decode(errors="replace")


class Http:
    """HTTP connections to brokers, shared by all clients; created by `open`."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session = session
        # Reading the environment takes half a millisecond in a pod with many Services.
        self._proxy_for = functools.lru_cache(maxsize=1_024)(proxy_for)
        self._free = FairSlots(CALLS_OF_ALL)
        self._open = FairSlots(sys.maxsize, CALLS_OF_NAMESPACE)
        self._long = FairSlots(LONG_ANSWERS_AT_A_TIME, LONG_ANSWERS_OF_NAMESPACE)
        self._parsing = FairSlots(1)

    @classmethod
    @asynccontextmanager
    async def open(cls, fence: Fence | None = None) -> AsyncIterator[Http]:
        """Open a pool of connections.

        Args:
            fence: must be open for each write; None allows all writes.
        """
        shares = Shares()
        async with aiohttp.ClientSession(
            connector=connector(shares),
            # Cookies of one connection's broker would be sent to another's.
            cookie_jar=aiohttp.DummyCookieJar(),
            # A few bytes may decompress to gigabytes.
            auto_decompress=False,
            headers={"Accept-Encoding": "identity"},
            timeout=TIMEOUT,
            trace_configs=[taking_turns(shares), *([] if fence is None else [guarding(fence)])],
        ) as session:
            yield cls(session)

    async def send(self, call: Call, endpoint: Endpoint) -> Any:  # noqa: ANN401  JSON
        """Send *call*, and return the parsed answer, its JSON or its text.

        Raises:
            AdminError: the call failed; the subclass has the cause.
        """
        answer = await self._answer(call, endpoint)
        if call.optional and answer.status == HTTPStatus.NOT_FOUND:
            return None
        if answer.status not in _SUCCESS:
            raise error_for(call.does, answer.status, answer.text)
        if call.as_text:
            return answer.text
        if len(answer.body) <= SHORT_ANSWER:
            return _value(call, answer.body)
        async with self._parsing.slot(endpoint.slots.namespace):
            return await asyncio.to_thread(_value, call, answer.body)

    async def _answer(self, call: Call, endpoint: Endpoint) -> _Reply:
        """Return the answer of the broker, and record metrics."""
        outcome, admin_url = "uncallable", endpoint.url
        try:
            with ADMIN_SECONDS.labels(call.method).time():
                url = URL(f"{admin_url.rstrip('/')}/admin/v2/{call.path}", encoded=True)
                answer = await self._follow(call, url, endpoint)
            outcome = str(answer.status)
        except aiohttp.ClientConnectorCertificateError as error:  # also a ValueError
            outcome = "certificate refused"
            raise _refused(admin_url, error) from error
        except ValueError as error:  # parts of an address are validated only by the call
            raise AdminError(
                "adminURL or a redirect of the broker is not a valid address",
                got=admin_url,
                remedy="correct its host and port, or those that the broker advertises",
                reason=Reason.ADMIN_URL_INVALID,
            ) from error
        except (aiohttp.ClientError, OSError) as error:
            outcome = "unreachable"
            raise BrokerUnreachableError(
                f"the broker's admin API does not answer at {admin_url}",
                got=transport_failure(error),
                remedy="check adminURL, and that the broker runs and can be reached from here",
            ) from None  # a traceback with an error of the proxy would show its password
        except AnswerTooLongError as error:
            outcome = "too long"
            raise unexpected(call.does, str(error)) from error
        except RedriveError as error:
            outcome = _NOT_SENT.get(error.reason, outcome)
            raise
        except asyncio.CancelledError:
            outcome = "cancelled"
            raise
        finally:
            ADMIN_CALLS.labels(call.method, outcome).inc()
            logger.debug("%s: %s", call.does, outcome)
        return answer

    async def ask_issuer(
        self, method: str, url: str, form: Mapping[str, str] | None, issuer: Endpoint
    ) -> tuple[int, str]:
        """Return status and text of a token issuer's answer; redirects are not followed.

        Args:
            method: the HTTP method.
            url: the address. Errors do not show it, because another service may have sent it.
            form: fields to send; None sends nothing.
            issuer: the issuer, whose URL errors show.

        Raises:
            AdminError: its certificate is not trusted, or it does not answer.
        """
        try:
            async with self._request(method, URL(url), issuer, data=form) as response:
                read = read_bounded(response.content.iter_any(), SHORT_ANSWER)
                return response.status, (await read).decode(errors="replace")
        except aiohttp.ClientConnectorCertificateError as error:
            raise _refused(issuer.url, error) from error
        except (aiohttp.ClientError, OSError, ValueError, AnswerTooLongError) as error:
            too_long = isinstance(error, AnswerTooLongError)
            raise AdminError(
                f"the issuer of tokens does not answer at {issuer.url}",
                got=str(error) if too_long else transport_failure(error),
                remedy="check oauth2.issuerURL, and that it can be reached from here",
                reason=Reason.ISSUER_FAILED,
            ) from None  # as in `_answer`

    async def _follow(self, call: Call, url: URL, endpoint: Endpoint) -> _Reply:
        """Send *call*, and follow redirects to the broker that serves the namespace.

        The HTTP library would drop the token at a redirect to another host.
        """
        # Without a content type a broker answers 415 to any PUT, even without a body.
        headers = {**endpoint.access.headers, "Content-Type": call.content_type}
        body = None if call.body is None else json.dumps(call.body)
        asked = url
        for _ in range(MAX_REDIRECTS):
            async with self._request(
                call.method, url, endpoint, seconds=call.seconds, data=body, headers=headers
            ) as response:
                if response.status not in _REDIRECTS or "Location" not in response.headers:
                    return await self._reply(response, call, endpoint)
                target = url.join(URL(response.headers["Location"], encoded=True))
                if not endpoint.access.may_go_to(target, asked):
                    raise _not_followed(call, "an address that the connection does not allow")
                url = target
        raise _not_followed(call, f"more than {MAX_REDIRECTS} redirects")

    async def _reply(
        self, response: aiohttp.ClientResponse, call: Call, endpoint: Endpoint
    ) -> _Reply:
        parts = response.content.iter_any()
        if response.status in _SUCCESS:
            shared = self._long.slot(endpoint.slots.namespace)
            body = await read_bounded(parts, call.longest, endpoint.slots.long, shared)
        else:
            body = await read_beginning(parts)
        return _Reply(response.status, body)

    @asynccontextmanager
    async def _request(
        self,
        method: str,
        url: URL,
        endpoint: Endpoint,
        *,
        seconds: float = WHOLE_SECONDS,
        **options: Any,  # noqa: ANN401  as the session takes them
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Wait for a slot, then send; yield the response, to be read within *seconds*.

        Raises:
            TimeoutError: the call timed out.
        """
        slots, tls = endpoint.slots, endpoint.access.tls
        if tls is None and url.scheme == "https":
            tls = default_tls()
        namespace = slots.namespace
        namespace_of_call.set(namespace)
        async with (
            slots.calls.slot(namespace_of_object.get()),
            self._open.slot(namespace),
            self._shared_slot(namespace),
            _within(seconds),
        ):
            proxy = self._proxy_for(str(url.origin()))
            request = self._session.request(
                method, url, allow_redirects=False, proxy=proxy, ssl=tls or True, **options
            )
            async with request as response:
                yield response

    @asynccontextmanager
    async def _shared_slot(self, namespace: str) -> AsyncIterator[None]:
        """Hold one of the slots of all connections, for at most `SLOW_SECONDS`."""
        await self._free.acquire(namespace)
        with ExitStack() as held:
            held.callback(self._free.release, namespace)
            slow = asyncio.get_running_loop().call_later(SLOW_SECONDS, held.close)
            try:
                yield
            finally:
                slow.cancel()


@functools.cache
def default_tls() -> ssl.SSLContext:
    """Return TLS settings that trust the authorities of this machine."""
    return tls_context()


def _value(call: Call, body: bytes) -> Any:  # noqa: ANN401  JSON
    """Return the parsed answer of *call*.

    Raises:
        AdminError: it is not an answer of a broker.
    """
    try:
        document = parse_answer(body) if body else None
    except ValueError as error:
        raise unexpected(call.does, str(error)) from error
    if call.read is None:
        return document
    try:
        return call.read(document)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        # Without its content: it may come from another host, see the top.
        raise unexpected(call.does, "JSON of another form") from error


@asynccontextmanager
async def _within(seconds: float) -> AsyncIterator[None]:
    """Cancel the block after *seconds*, with an error that names them."""
    try:
        async with asyncio.timeout(seconds) as limit:
            yield
    except TimeoutError as error:
        if not limit.expired():
            raise
        raise TimeoutError(f"no whole answer within {seconds:g} s") from error


def _not_followed(call: Call, got: str) -> AdminError:
    return AdminError(
        f"a redirect was not followed: {call.does}",
        got=got,
        remedy="add the hosts of the cluster's brokers to the connection's redirectHosts, with "
        "their port if it differs from that of adminURL, and use their scheme in adminURL; or use "
        "the address of a Pulsar proxy as adminURL",
        reason=Reason.REDIRECT_REFUSED,
    )


_NOT_SENT: Mapping[str, str] = {
    Reason.LEASE_NOT_RENEWED: "fenced",
    Reason.REDIRECT_REFUSED: "redirect refused",
}
"""Outcome in the metrics by the reason of an error; without one, the address is unusable."""

_FAILURES: tuple[tuple[type[Exception], str], ...] = (
    (aiohttp.ServerTimeoutError, "no answer in time"),
    (aiohttp.ClientConnectorDNSError, "the host name is unknown"),
    (aiohttp.ClientProxyConnectionError, "the proxy of the environment does not answer"),
    (aiohttp.ClientHttpProxyError, "the proxy of the environment refuses the connection"),
    (aiohttp.ClientSSLError, "a connection without valid TLS"),
    (ssl.SSLError, "a connection without valid TLS"),
    (aiohttp.ServerDisconnectedError, "the connection was closed without an answer"),
    (aiohttp.ClientPayloadError, "an answer that is not complete, valid HTTP"),
    (aiohttp.ClientResponseError, "an answer that is not complete, valid HTTP"),
)


def transport_failure(error: Exception) -> str:
    """Return the kind of a connection failure, without any text from the other side.

    Errors of the HTTP library repeat unreadable input: the owner of an address could read, in a
    status, the answer of a service that only the operator can reach.
    """
    for kind, name in _FAILURES:
        if isinstance(error, kind):
            return name
    if isinstance(error, OSError) and error.errno is not None:
        return os.strerror(error.errno)
    # The message of a time-out without a number comes from this module.
    return (isinstance(error, TimeoutError) and str(error)) or type(error).__name__


def without_request(error: BaseException) -> BaseException | str:
    """Return *error*, or its kind if it shows the headers of a request, such as a password."""
    return transport_failure(error) if isinstance(error, aiohttp.ClientError) else error


def _refused(url: str, error: aiohttp.ClientConnectorCertificateError) -> AdminError:
    return AdminError(
        f"the certificate of {url} is not trusted",
        got=str(error.certificate_error),
        remedy="set its authority in caRef, or use the address of the certificate",
        reason=Reason.CERTIFICATE_REFUSED,
    )
