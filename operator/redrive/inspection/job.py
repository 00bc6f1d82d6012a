"""Argument of the job of an Inspection; pure. The selection stays in the Inspection."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pydantic import TypeAdapter

from redrive.api.rocketmq import RocketMQMessages
from redrive.replay.spec import decode_argument, encode_argument


@dataclass(frozen=True)
class PulsarMessages:
    """Messages of a topic of Pulsar.

    Attributes:
        topic: full name of the topic.
        subscription: its messages that this subscription has not acknowledged are read.
    """

    topic: str
    subscription: str
    service_url: str
    admin_url: str


@dataclass(frozen=True)
class InspectionJob:
    """Messages that a job reads, and the Inspection that it is for.

    Attributes:
        namespace: of the Inspection, as are the name and the uid.
        seconds: time limit of the reading.
        file: address of the file that it writes; empty for none.
        endpoint_url: of the object store of the file; empty for AWS.
        replays: past Replays of the policy, for a report.
        shown: paths of fields of payloads whose values are shown; see `Masking`.
        shows_keys: True if keys are shown likewise.
    """

    namespace: str
    name: str
    uid: str
    source: PulsarMessages | RocketMQMessages
    seconds: int
    file: str = ""
    endpoint_url: str = ""
    replays: Sequence[Sequence[str]] = ()
    shown: Sequence[str] = ()
    shows_keys: bool = False

    def encode(self) -> str:
        """Return the job as JSON; see `ReplayJob.encode`."""
        return encode_argument(self, _JOB)

    @classmethod
    def decode(cls, text: str) -> InspectionJob:
        """Parse the text of `encode`.

        Raises:
            InvalidSpecError: the text has another form.
        """
        return decode_argument(text, _JOB)


_JOB = TypeAdapter(InspectionJob)
