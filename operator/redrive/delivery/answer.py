"""What a handler answered → what became of each message; called by `run`.

A handler for one message and one for a batch are brought into one form here: messages in, one
outcome per message out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pulsar

from redrive.errors import RedriveError
from redrive.policy.verdict import Done

Handler = Callable[[pulsar.Message], object]
BatchHandler = Callable[[Sequence[pulsar.Message]], Sequence[Done | Exception | None] | None]
Outcome = Exception | None
"""Why a message was not handled; None if it was."""
Handle = Callable[[Sequence[pulsar.Message]], Sequence[Outcome]]


class NotDoneError(RedriveError):
    """A handler whose only success is `Done` returned something else."""

    reason = "NotDone"


class BatchAnswerError(RedriveError):
    """A batch handler's answer can't be matched with its messages, so none counts as handled."""

    reason = "BatchAnswer"


def one(handler: Handler, *, explicit: bool) -> Handle:
    """Give a batch of one to a *handler* of single messages."""

    def handle(messages: Sequence[pulsar.Message]) -> Sequence[Outcome]:
        (message,) = messages
        answer = handler(message)
        return [_not_done(answer) if explicit and not isinstance(answer, Done) else None]

    return handle


def many(handler: BatchHandler, *, explicit: bool) -> Handle:
    """Give a whole batch to *handler*, and read its answer message by message."""

    def handle(messages: Sequence[pulsar.Message]) -> Sequence[Outcome]:
        answers = handler(messages)
        if answers is None:
            answers = [None] * len(messages)
        if len(answers) != len(messages):
            raise BatchAnswerError(
                f"a handler of {len(messages)} messages answers for each of them, or with None",
                got=f"{len(answers)} answers",
                remedy="return a list with one of Done(), None and an exception per message",
            )
        return [_outcome(answer, explicit=explicit) for answer in answers]

    return handle


def _outcome(answer: object, *, explicit: bool) -> Outcome:
    if isinstance(answer, Done):
        return None
    if isinstance(answer, Exception):
        return answer
    return _not_done(answer) if explicit or answer is not None else None


def _not_done(answer: object) -> NotDoneError:
    return NotDoneError(
        "the handler did not say that the message is done",
        got=type(answer).__name__,
        remedy="return Done() once a message is handled",
    )
