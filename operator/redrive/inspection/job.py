"""Argument of the job of an Inspection; pure. The selection stays in the Inspection."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from redrive.auth.method import without_dollars
from redrive.replay.spec import unreadable_argument


@dataclass(frozen=True)
class InspectionJob:
    """Topic that a job reads, and the Inspection that it is for.

    Attributes:
        namespace: of the Inspection, as are the name and the uid.
        topic: full name of the topic.
        subscription: its messages that this subscription has not acknowledged are read.
        seconds: time limit of the reading.
        file: address of the file that it writes; empty for none.
        endpoint_url: of the object store of the file; empty for AWS.
        replays: past Replays of the policy, for a report.
    """

    namespace: str
    name: str
    uid: str
    topic: str
    subscription: str
    service_url: str
    admin_url: str
    seconds: int
    file: str = ""
    endpoint_url: str = ""
    replays: Sequence[Sequence[str]] = ()

    def encode(self) -> str:
        """Return the job as JSON; see `ReplayJob.encode`."""
        return without_dollars(json.dumps(asdict(self)))

    @classmethod
    def decode(cls, text: str) -> InspectionJob:
        """Parse the text of `encode`.

        Raises:
            InvalidSpecError: the text has another form.
        """
        try:
            return cls(**json.loads(text))
        except (ValueError, TypeError) as error:
            raise unreadable_argument(error) from error
