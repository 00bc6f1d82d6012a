"""Argument of the job of an Inspection; pure. The selection stays in the Inspection."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from redrive.api.rocketmq import RocketMQMessages
from redrive.auth.method import without_dollars
from redrive.replay.spec import unreadable_argument


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


_SOURCES = {"Pulsar": PulsarMessages, "RocketMQ": RocketMQMessages}


@dataclass(frozen=True)
class InspectionJob:
    """Messages that a job reads, and the Inspection that it is for.

    Attributes:
        namespace: of the Inspection, as are the name and the uid.
        seconds: time limit of the reading.
        file: address of the file that it writes; empty for none.
        endpoint_url: of the object store of the file; empty for AWS.
        replays: past Replays of the policy, for a report.
    """

    namespace: str
    name: str
    uid: str
    source: PulsarMessages | RocketMQMessages
    seconds: int
    file: str = ""
    endpoint_url: str = ""
    replays: Sequence[Sequence[str]] = ()

    def encode(self) -> str:
        """Return the job as JSON; see `ReplayJob.encode`."""
        (broker,) = (name for name, kind in _SOURCES.items() if isinstance(self.source, kind))
        return without_dollars(json.dumps({**asdict(self), "broker": broker}))

    @classmethod
    def decode(cls, text: str) -> InspectionJob:
        """Parse the text of `encode`.

        Raises:
            InvalidSpecError: the text has another form.
        """
        try:
            fields = json.loads(text)
            source = _SOURCES[fields.pop("broker")](**fields.pop("source"))
            return cls(source=source, **fields)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise unreadable_argument(error) from error
