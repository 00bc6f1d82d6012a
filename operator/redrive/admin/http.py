"""HTTP calls to a broker: credentials, addresses, bounded responses, metrics.

Number, outcome and duration of calls to brokers; counted by `http`.

Credentials of a call to a broker, and how its certificate is verified.

Made where credentials are read (`redrive.kube.credentials`, the replay job); used by `client` for
each call.

How long a broker's answer may be, how many long ones are read at a time, and what is parsed.

The owner of a BrokerConnection says what answers, and the operator is one process for all of them.
Parsed, an answer takes far more memory than its bytes: `[[],[],…]` twenty times as much. So only
calls whose answers grow with a namespace or a topic may have a long one, few of those are in memory
at a time and one of each connection, and what would be parsed to too many values is not parsed.

Where a broker's admin API answers, and where things lie below it, their names quoted.

One call to a broker's admin API, and its outcome: a value, or an `AdminError`.

Called by `client` alone. Neither the token nor a URL that the broker redirects to is ever part
of an error, nor what answers at any address, unless it answers with an error as a broker does: the
owner of `adminURL` could else read, in a status, what only the operator can reach. Credentials go
to the origin (scheme, host and port) of `adminURL`, and by redirects to the hosts that the
connection names.
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
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import (
    AbstractAsyncContextManager,
    AsyncExitStack,
    ExitStack,
    asynccontextmanager,
    contextmanager,
    nullcontext,
)
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any, NamedTuple, Protocol
from urllib.parse import quote

import aiohttp
from prometheus_client import Counter, Histogram
from yarl import URL

from redrive.admin.errors import (
    AdminUrlInvalidError,
    BrokerUnreachableError,
    CertificateRefusedError,
    IssuerFailedError,
    RedirectRefusedError,
    error_for,
    unexpected,
)
from redrive.admin.fair_slots import FairSlots
from redrive.admin.guards import Fence, FenceClosedError, guarding
from redrive.admin.proxies import proxy_for
from redrive.policy.naming import TopicName
from redrive.policy.values import Patterns

logger = logging.getLogger(__name__)

ADMIN_CALLS = Counter(
    "redrive_admin_calls",
    "Calls to brokers' admin APIs, by HTTP method and by what they were answered.",
    ["verb", "status"],
)
ADMIN_SECONDS = Histogram(
    "redrive_admin_call_duration_seconds",
    "Duration of calls to brokers' admin APIs, redirects included.",
    ["verb"],
    buckets=(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30),
)


@dataclass(frozen=True)
class Access:
    """Credentials as they go out; never shown.

    Attributes:
        headers: sent with every call.
        tls: how to speak TLS; None trusts the certificate authorities of this machine.
        hosts: hosts that they may be redirected to, beside the origin of the call's URL, as
            patterns in which `*` stands for any characters but a dot. Without a port, a pattern is
            for the port of the call's URL.
    """

    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    tls: ssl.SSLContext | None = field(default=None, repr=False)
    hosts: tuple[str, ...] = ()

    @classmethod
    def bearer(
        cls,
        token: str,
        tls: ssl.SSLContext | None = None,
        hosts: tuple[str, ...] = (),
    ) -> Access:
        """Act as the role of *token*."""
        return cls({"Authorization": f"Bearer {token}"}, tls, hosts)

    def may_go_to(self, target: URL, asked: URL) -> bool:
        """Return True if a call to *asked* may be redirected to *target* with these credentials.

        The scheme never changes, so what was sent over TLS is not sent without.
        """
        if same_origin(target, asked):
            return True
        if target.scheme != asked.scheme or not target.host:
            return False
        patterns = tuple(
            pattern.lower() if _PORT.search(pattern) else f"{pattern.lower()}:{asked.port}"
            for pattern in self.hosts
        )
        address = f"{target.host_subcomponent}:{target.port}"
        return Patterns(patterns, but=".").match(address.lower())

    @property
    def held(self) -> Access:
        """Return this: these credentials never change."""
        return self

    async def renewed(self, refused: Access) -> Access | None:  # noqa: ARG002  of the protocol
        """Return None: there are no others."""
        return None


class Credentials(Protocol):
    """Credentials that may change while they are in use."""

    @property
    def held(self) -> Access:
        """What to call with."""

    async def renewed(self, refused: Access) -> Access | None:
        """Return what to try after a broker has refused *refused* (401); None if nothing is new.

        Raises:
            RedriveError: they can't be read.
        """


def tls_context(
    *, ca: str | None = None, certificate: bytes | None = None, key: bytes | None = None
) -> ssl.SSLContext:
    """Return how to speak TLS; host names are verified, and nothing older than TLS 1.2 is spoken.

    Args:
        ca: certificates in PEM that are trusted in place of this machine's.
        certificate: of the client, in PEM, with its chain; with its *key*.
        key: in PEM, without a password.

    Raises:
        ValueError: one of them is no PEM, or the key is not that of the certificate.
    """
    if ca is not None and not ca.strip():
        raise ValueError("it is empty")  # the library would take this machine's
    try:
        made = ssl.create_default_context(cadata=ca)
        if certificate is not None and key is not None:
            with _file(certificate + b"\n" + key) as file:
                made.load_cert_chain(file, password=_no_password)
    except ssl.SSLError as error:
        raise ValueError(error.reason or "not PEM") from None
    return made


def _no_password() -> str:
    raise ValueError("the key is protected by a password")


@contextmanager
def _file(content: bytes) -> Iterator[str]:
    """Give *content* a path, for a library that reads files only: in memory where that is known."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("tls")
        try:
            path = Path(f"/proc/self/fd/{descriptor}")
            path.write_bytes(content)
            yield str(path)
        finally:
            os.close(descriptor)
    else:
        with NamedTemporaryFile() as file:  # readable by its owner only
            file.write(content)
            file.flush()
            yield file.name


_PORT = re.compile(r":[0-9]+\Z")


def same_origin(one: URL, other: URL) -> bool:
    """Return True if both have the same scheme, host and port."""
    return (one.scheme, (one.host or "").lower(), one.port) == (
        other.scheme,
        (other.host or "").lower(),
        other.port,
    )


SHORT_ANSWER = 64 * 2**10
"""In bytes: what is longer is read in turn. Of an error, the rest is not read."""
USUAL_ANSWER = 2**20
"""In bytes: the longest answer about one thing."""
LONG_ANSWER = 24 * 2**20
"""In bytes: the longest answer of all. Permissions on a hundred thousand topics take 15 MiB."""
LONG_ANSWERS_AT_A_TIME = 3
"""Answers of all connections that are longer than `SHORT_ANSWER` and are being read."""
LONG_ANSWERS_OF_NAMESPACE = 2
"""So many of those may be of connections of one namespace: another one finds room."""
LONG_ANSWER_SECONDS = 10.0
"""How long such an answer may take from there on, so that others get their turn."""
MOST_VALUES = 1_000_000
"""An answer with more values is not parsed: each takes about a hundred bytes."""
MOST_DIGITS = 20
"""A number of a broker has at most 64 bits."""


class AnswerTooLongError(Exception):
    """An answer is longer than that of a broker to the call."""


class CallTurns:
    """What the calls of one connection wait for.

    Attributes:
        calls: limits how many are made at a time, wherever they are redirected.
        long: limits how many have a long answer at a time.
        namespace: of the connection; those of each get an equal share of what all connections have.
    """

    def __init__(self, calls: int, namespace: str = "") -> None:
        self.namespace = namespace
        self.calls = asyncio.Semaphore(calls)
        self.long = asyncio.Semaphore(1)


async def read_bounded(
    parts: AsyncIterator[bytes], longest: int, *turns: AbstractAsyncContextManager[object]
) -> bytes:
    """Read an answer; one that is longer than `SHORT` waits for all *turns*.

    Raises:
        AnswerTooLongError: it has more than *longest* bytes; the rest is not read.
        TimeoutError: it is long, and took too long from its turn on.
    """
    found = bytearray()
    try:
        async with asyncio.timeout(None) as limit, AsyncExitStack() as held:
            async for part in parts:
                found += part
                if len(found) > longest:
                    raise AnswerTooLongError(f"an answer of more than {_size(longest)}")
                if turns and len(found) > SHORT_ANSWER:
                    for turn in turns:
                        await held.enter_async_context(turn)
                    turns = ()
                    limit.reschedule(asyncio.get_running_loop().time() + LONG_ANSWER_SECONDS)
    except TimeoutError as error:
        if not limit.expired():
            raise
        said = (
            f"no whole answer of more than {_size(SHORT_ANSWER)} within {LONG_ANSWER_SECONDS:g} s"
        )
        raise TimeoutError(said) from error
    return bytes(found)


async def read_beginning(parts: AsyncIterator[bytes]) -> bytes:
    """Read the first `SHORT` bytes of an answer, or a little more."""
    found = bytearray()
    async for part in parts:
        found += part
        if len(found) > SHORT_ANSWER:
            break
    return bytes(found)


def parse_answer(answer: bytes) -> Any:  # noqa: ANN401  JSON
    """Return the value of an answer that is JSON.

    Raises:
        ValueError: it is none, or of more values, longer numbers, or nested deeper, than any of a
            broker.
    """
    if sum(map(answer.count, (b",", b"[", b"{"))) > MOST_VALUES:  # those in texts count too
        raise ValueError(f"JSON of more than {MOST_VALUES} values")
    text = answer.decode(errors="replace")
    try:
        return json.loads(text, parse_int=_integer, parse_float=_finite, parse_constant=_finite)
    except ValueError:
        raise ValueError(f"{len(text)} characters that are no JSON") from None
    except RecursionError:
        raise ValueError("JSON that is nested too deeply") from None


def _integer(text: str) -> int:
    if len(text) > MOST_DIGITS:
        raise ValueError("a number of more than 64 bits")
    return int(text)


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError("a number that is not finite")
    return number


def _size(count: int) -> str:
    return f"{count / 2**20:g} MiB" if count >= 2**20 else f"{count / 2**10:g} KiB"


def quoted(text: str) -> str:
    """Quote *text* as one or more whole parts of a path: slashes stay."""
    return quote(text, safe="/")


def topic_path(topic: TopicName) -> str:
    """Return where a topic lies."""
    return f"persistent/{quoted(topic.namespace_name)}/{quote(topic.local, safe='')}"


def schema_path(topic: TopicName) -> str:
    """Return where the newest schema of a topic lies."""
    # The broker decodes the name twice.
    name = quote(quote(topic.local, safe=""), safe="")
    return f"schemas/{quoted(topic.namespace_name)}/{name}/schema"


def schemas_path(topic: TopicName) -> str:
    """Return where all versions of a topic's schema lie."""
    return f"{schema_path(topic)}s"


def subscription_path(topic: TopicName, name: str) -> str:
    """Return where a subscription of a topic lies."""
    # The broker decodes this part of the path twice.
    return f"{topic_path(topic)}/subscription/{quoted(quoted(name))}"


def permission_path(topic: TopicName, role: str) -> str:
    """Return where the rights of a role on a topic lie."""
    return f"{topic_path(topic)}/permissions/{quote(role, safe='')}"


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
        read: makes a value of the answer's JSON, in a thread if that is long; its exceptions mean
            that the answer is not a broker's. None returns the JSON.
    """

    does: str
    method: str
    path: str
    body: Any = None
    content_type: str = "application/json"
    seconds: float = WHOLE_SECONDS
    as_text: bool = False
    longest: int = USUAL_ANSWER
    read: Callable[[Any], Any] | None = None


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
        # Reading the environment takes half a millisecond in a pod of many Services.
        self._proxy_for = functools.lru_cache(maxsize=1_024)(proxy_for)
        self._free = FairSlots(CALLS_OF_ALL)
        self._long = FairSlots(LONG_ANSWERS_AT_A_TIME, LONG_ANSWERS_OF_NAMESPACE)
        self._parsing = FairSlots(1)

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
            # A few bytes may be compressed gigabytes.
            auto_decompress=False,
            headers={"Accept-Encoding": "identity"},
            timeout=TIMEOUT,
            trace_configs=[] if fence is None else [guarding(fence)],
        ) as session:
            yield cls(session)

    async def send(self, call: Call, way: Way) -> Any:  # noqa: ANN401  JSON
        """Make *call* and return what it reads of the answer, or its JSON or text.

        Raises:
            AdminError: the call failed; the subclass says how.
        """
        answer = await self._answer(call, way)
        if answer.status not in _SUCCESS:
            raise error_for(call.does, answer.status, answer.text)
        if call.as_text:
            return answer.text
        if len(answer.body) <= SHORT_ANSWER:
            return _value(call, answer.body)
        async with self._parsing.slot(way.turns.namespace):
            return await asyncio.to_thread(_value, call, answer.body)

    async def _answer(self, call: Call, way: Way) -> _Reply:
        """Return the broker's answer, and count it."""
        outcome, admin_url = "uncallable", way.admin_url
        try:
            with ADMIN_SECONDS.labels(call.method).time():
                url = URL(f"{admin_url.rstrip('/')}/admin/v2/{call.path}", encoded=True)
                answer = await self._follow(call, url, way)
            outcome = str(answer.status)
        except aiohttp.ClientConnectorCertificateError as error:  # a ValueError too
            outcome = "certificate refused"
            raise _refused(admin_url, error) from error
        except ValueError as error:  # some parts of an address are looked at only when it is called
            raise AdminUrlInvalidError(
                "adminURL, or an address that the broker redirects to, is none that can be called",
                got=admin_url,
                remedy="correct its host and port, or those that the broker advertises",
            ) from error
        except (aiohttp.ClientError, OSError) as error:
            outcome = "unreachable"
            raise BrokerUnreachableError(
                f"the broker's admin API does not answer at {admin_url}",
                got=transport_failure(error),
                remedy="check adminURL, and that the broker runs and can be reached from here",
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
            ADMIN_CALLS.labels(call.method, outcome).inc()
            logger.debug("%s: %s", call.does, outcome)
        return answer

    async def ask_issuer(
        self,
        method: str,
        url: str,
        form: Mapping[str, str] | None,
        tls: ssl.SSLContext | None,
        *,
        issuer: str,
    ) -> tuple[int, str]:
        """Return status and text of the answer of an issuer of tokens; redirects are not followed.

        Args:
            method: the HTTP method.
            url: the address; errors don't show it, as another service may have sent it.
            form: the fields to send; None sends nothing.
            tls: the TLS settings; None trusts the authorities of this machine.
            issuer: the URL of the issuer, as errors name it.

        Raises:
            CertificateRefusedError: it shows a certificate that is not trusted.
            IssuerFailedError: it does not answer.
        """
        try:
            address = URL(url)
            async with self._request(
                method, address, address.host or "", data=form, ssl=tls or True
            ) as response:
                read = read_bounded(response.content.iter_any(), SHORT_ANSWER)
                return response.status, (await read).decode(errors="replace")
        except aiohttp.ClientConnectorCertificateError as error:
            raise _refused(issuer, error) from error
        except (aiohttp.ClientError, OSError, ValueError, AnswerTooLongError) as error:
            too_long = isinstance(error, AnswerTooLongError)
            raise IssuerFailedError(
                f"the issuer of tokens does not answer at {issuer}",
                got=str(error) if too_long else transport_failure(error),
                remedy="check oauth2.issuerURL, and that it can be reached from here",
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
                way.turns.namespace,
                seconds=call.seconds,
                data=body,
                headers=headers,
                ssl=way.access.tls or True,
                turns=way.turns.calls,
            ) as response:
                if response.status not in _REDIRECTS or "Location" not in response.headers:
                    return await self._reply(response, call, way)
                target = url.join(URL(response.headers["Location"], encoded=True))
                if not way.access.may_go_to(target, asked):
                    raise _not_followed(call, "one to an address that the connection does not name")
                url = target
        raise _not_followed(call, f"more than {MAX_REDIRECTS} redirects")

    async def _reply(self, response: aiohttp.ClientResponse, call: Call, way: Way) -> _Reply:
        parts = response.content.iter_any()
        if response.status in _SUCCESS:
            room = self._long.slot(way.turns.namespace)
            body = await read_bounded(parts, call.longest, way.turns.long, room)
        else:
            body = await read_beginning(parts)
        return _Reply(response.status, body)

    @asynccontextmanager
    async def _request(
        self,
        method: str,
        url: URL,
        sharer: str,
        *,
        seconds: float = WHOLE_SECONDS,
        turns: AbstractAsyncContextManager[object] = nullcontext(),  # noqa: B008  it never changes
        **options: Any,  # noqa: ANN401  as the session takes them
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Wait for a turn, then send; yield the answer, to be read within the same *seconds*.

        Args:
            sharer: the namespace, or issuer, that the call counts for among all.

        Raises:
            TimeoutError: the time is over.
        """
        async with turns, self._room(sharer), _within(seconds):
            proxy = self._proxy_for(str(url.origin()))
            request = self._session.request(
                method, url, allow_redirects=False, proxy=proxy, **options
            )
            async with request as response:
                yield response

    @asynccontextmanager
    async def _room(self, sharer: str) -> AsyncIterator[None]:
        """Wait until there is room among the calls of all connections."""
        await self._free.acquire(sharer)
        with ExitStack() as held:
            held.callback(self._free.release, sharer)
            slow = asyncio.get_running_loop().call_later(SLOW_SECONDS, held.close)
            try:
                yield
            finally:
                slow.cancel()


def _value(call: Call, body: bytes) -> Any:  # noqa: ANN401  JSON
    """Return what *call* reads of an answer.

    Raises:
        AdminError: it is not a broker's.
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
        # Not its content: another host may have given it, see the top.
        raise unexpected(call.does, "JSON of another form") from error


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
        remedy="name the hosts of the cluster's brokers in the connection's redirectHosts, with "
        "their port if it is not that of adminURL, and use their scheme in adminURL; or give the "
        "address of a Pulsar proxy as adminURL",
    )


_FAILURES: tuple[tuple[type[Exception], str], ...] = (
    (aiohttp.ServerTimeoutError, "no answer in time"),
    (aiohttp.ClientConnectorDNSError, "the host name is not known"),
    (aiohttp.ClientProxyConnectionError, "the proxy that the environment names does not answer"),
    (aiohttp.ClientHttpProxyError, "the proxy that the environment names refuses the connection"),
    (aiohttp.ClientSSLError, "a connection without valid TLS"),
    (ssl.SSLError, "a connection without valid TLS"),
    (aiohttp.ServerDisconnectedError, "the connection was closed without an answer"),
    (aiohttp.ClientPayloadError, "an answer that is not complete, valid HTTP"),
    (aiohttp.ClientResponseError, "an answer that is not complete, valid HTTP"),
)


def transport_failure(error: Exception) -> str:
    """Name the kind of failure of a connection, without any text that the other side sent.

    Errors of the HTTP library repeat what they can't read: the owner of an address could read, in
    a status, the answer of a service that only the operator can reach.
    """
    for kind, name in _FAILURES:
        if isinstance(error, kind):
            return name
    if isinstance(error, OSError) and error.errno is not None:
        return os.strerror(error.errno)
    # The message of a time-out without a number is one of this module.
    return (isinstance(error, TimeoutError) and str(error)) or type(error).__name__


def _refused(url: str, error: aiohttp.ClientConnectorCertificateError) -> CertificateRefusedError:
    return CertificateRefusedError(
        f"the certificate shown at {url} is not trusted",
        got=str(error.certificate_error),
        remedy="give its authority in caRef, or the address that the certificate is for",
    )
