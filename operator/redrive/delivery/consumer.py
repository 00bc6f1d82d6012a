"""`RetryConsumer`: what an application consumes with; the spine of the second journey.

receive → verdict → settle: a message comes from the source or the retry topic, the application
handles it, and if that fails, `policy.verdict` says what becomes of it and `settle` obeys.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import random
import socket
import threading
import uuid
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from types import TracebackType
from typing import Self, overload

import pulsar

from redrive.delivery.inbox import ConsumerStoppedError, Inbox
from redrive.delivery.producers import Producers
from redrive.delivery.settle import Settler, id_text
from redrive.delivery.subscribe import subscribe
from redrive.errors import InvalidSpecError
from redrive.policy import envelope
from redrive.policy.envelope import Cause
from redrive.policy.model import Policy
from redrive.policy.naming import TopicName
from redrive.policy.verdict import after_failure

_log = logging.getLogger(__name__)


class RetryConsumer:
    """Consumes a topic, retries later what failed, and lays aside what keeps failing.

    Every message is handled at least once, and is acknowledged only after it was handled or after
    the broker has stored it in the retry or dead-letter topic. So a crash, a lost connection or a
    send without receipt makes a message come again; none of them loses it.

    Use it as a context manager, within the life of *client*. All methods may be called from
    several threads; those that share a consumer share its messages.

    Args:
        client: connects as a role that the policy lists among its consumer roles.
        policy: see `load_policy`.
        name: names this consumer in the broker's statistics and in the cause of dead letters;
            by default the host's name and something random.

    Raises:
        SubscribeError: the broker refused one of the two subscriptions.
    """

    def __init__(self, client: pulsar.Client, policy: Policy, *, name: str | None = None) -> None:
        self.name = name or f"{socket.gethostname()}-{uuid.uuid4().hex[:8]}"
        self._policy = policy
        self._subscriptions = subscribe(client, policy, name=self.name)
        self._settler = Settler(policy, Producers(client, name=self.name))
        self._inbox = Inbox(list(self._subscriptions.values()))
        self._runs: dict[threading.Thread, threading.Event] = {}

    @overload
    def receive(self) -> pulsar.Message: ...
    @overload
    def receive(self, timeout: timedelta | None) -> pulsar.Message | None: ...
    def receive(self, timeout: timedelta | None = None) -> pulsar.Message | None:
        """Return the next message of the source or the retry topic, or None after *timeout*.

        The two topics take turns while both have messages.

        Raises:
            ConsumerStoppedError: `stop` or `close` was called.
            SubscriptionLostError: the client was closed.
        """
        return self._inbox.take(None if timeout is None else timeout.total_seconds())

    def acknowledge(self, message: pulsar.Message) -> None:
        """Settle *message* as handled. It may come again if the broker doesn't hear of this.

        Raises:
            InvalidSpecError: it is not a message of this consumer.
        """
        self._subscription(message).acknowledge(message)

    def reconsume_later(
        self,
        message: pulsar.Message,
        *,
        delay: timedelta | None = None,
        level: int | None = None,
        cause: BaseException | None = None,
    ) -> None:
        """Settle *message* as failed: it is retried later, or dead-lettered with retries used up.

        A policy with dead-lettering switched off discards it instead of dead-lettering it.

        With neither *delay* nor *level* the policy's ladder says how long to wait. On return the
        message is in the hands of the broker: either stored on its next hop and acknowledged, or,
        if that could not be had within some seconds, logged as an error and handed out again by
        `receive` after 5 s. In both cases the caller is done with it.

        Args:
            delay: wait this long, 1 s … 864 000 s.
            level: k waits as long as delay level k says, or the highest if k is above it;
                0 leaves it to the ladder; below 0 the message is dead-lettered now.
            cause: why it failed; its class and text travel with the message.

        Raises:
            InvalidSpecError: both were given, the delay is out of bounds, or the message is not
                one of this consumer. Nothing has been settled then.
        """
        subscription = self._subscription(message)
        verdict = after_failure(
            self._policy,
            self._retries(message),
            delay=delay,
            level=level,
            luck=random.random(),  # noqa: S311 - spreads load, keeps no secret
        )
        self._settler.settle(message, verdict, self._describe(cause), subscription=subscription)

    def run(self, handler: Callable[[pulsar.Message], object]) -> None:
        """Handle messages, one after another, until `stop` or `close` is called.

        A *handler* that returns, whatever it returns, has handled the message; one that raises an
        Exception has failed, and the message goes up the ladder with the exception as its cause.
        Anything else that ends it (KeyboardInterrupt, SystemExit) ends this method too, with the
        message unacknowledged. A handler neither acknowledges nor retries by itself.

        Raises:
            SubscriptionLostError: the client was closed.
        """
        with self._registered():
            while True:
                try:
                    message = self.receive()
                except ConsumerStoppedError:
                    return
                self._handle(message, handler)

    def stop(self) -> None:
        """Make every `run` return once its message in hand is settled; callable from a signal."""
        self._inbox.stop()

    def close(self) -> None:
        """Stop, wait until every `run` in another thread has ended, and leave the subscriptions.

        Messages received and not yet settled stay unacknowledged: the broker delivers them again.
        Not for signal handlers, nor for the handler of `run`: both call `stop`.
        """
        self.stop()
        for thread, ended in list(self._runs.items()):
            if thread is not threading.current_thread():
                ended.wait()
        with contextlib.ExitStack() as closing:
            closing.callback(self._settler.producers.close)
            closing.callback(self._inbox.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    @contextlib.contextmanager
    def _registered(self) -> Iterator[None]:
        ended = self._runs[threading.current_thread()] = threading.Event()
        try:
            yield
        finally:
            del self._runs[threading.current_thread()]
            ended.set()

    def _handle(self, message: pulsar.Message, handler: Callable[[pulsar.Message], object]) -> None:
        try:
            handler(message)
        except pulsar.Interrupted:
            raise  # the client's word for KeyboardInterrupt
        except Exception as error:  # noqa: BLE001 - whatever it is travels with the message
            _log.warning("the handler failed on %s", id_text(message.message_id()), exc_info=True)
            self.reconsume_later(message, cause=error)
        else:
            self.acknowledge(message)

    def _describe(self, cause: BaseException | None) -> Cause | None:
        if cause is None:
            return None
        now = datetime.now(UTC)  # noqa: TID251 - the attempt has just failed
        return Cause.from_error(cause, failed_at=now, consumer=self.name)

    def _retries(self, message: pulsar.Message) -> int:
        """Return how many retries *message* has had: on the source topic none, whatever it says."""
        if _topic(message) == self._policy.retry_topic:
            return envelope.reconsume_times(message.properties())
        return 0

    def _subscription(self, message: pulsar.Message) -> pulsar.Consumer:
        topic = _topic(message)
        if topic not in self._subscriptions:
            raise InvalidSpecError(
                "a message is settled by the consumer it came from",
                got=str(topic),
                remedy=f"this one consumes {' and '.join(map(str, self._subscriptions))}",
            )
        return self._subscriptions[topic]


def _topic(message: pulsar.Message) -> TopicName:
    # Set by the client from its subscription: no producer can forge it.
    return _whole(message.topic_name())


@functools.lru_cache
def _whole(name: str) -> TopicName:
    return TopicName.parse(name).without_partition()
