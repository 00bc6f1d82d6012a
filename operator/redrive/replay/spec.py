"""`ReplayJob`: all that the operator tells a replay job, as its one argument. Pure.

It holds no secret: arguments show in process lists and in the Spark UI. The token of the replay
role comes in the environment variable `TOKEN_VARIABLE`, and where it may go in another, so that
each process of a job knows both.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from redrive.errors import InvalidSpecError
from redrive.policy import codec
from redrive.policy.model import Policy

TOKEN_VARIABLE = "REDRIVE_PULSAR_TOKEN"  # noqa: S105  the name of a variable, not a token
REDIRECT_HOSTS_VARIABLE = "REDRIVE_PULSAR_REDIRECT_HOSTS"
"""Holds `redirectHosts` of the PulsarConnection, separated by commas."""


@dataclass(frozen=True)
class ReplayJob:
    """One run.

    Attributes:
        namespace: that of the Replay.
        name: that of the Replay.
        uid: the Replay's; it makes a repeated run of this Replay known to the broker.
        where: the selection as its author wrote it; None selects every dead letter.
    """

    namespace: str
    name: str
    uid: str
    policy: Policy
    service_url: str
    admin_url: str
    where: str | None

    def encode(self) -> str:
        """Write the job as JSON; equal jobs give equal text.

        It holds no dollar sign: in a container's arguments a kubelet puts the value of a variable,
        of a Secret too, in the place of `$(NAME)`, and selections are written by anybody.
        """
        written = json.dumps(
            {
                "namespace": self.namespace,
                "name": self.name,
                "uid": self.uid,
                "policy": codec.encode(self.policy),
                "serviceUrl": self.service_url,
                "adminUrl": self.admin_url,
                "where": self.where,
            },
            ensure_ascii=False,
        )
        return written.replace("$", "\\u0024")

    @classmethod
    def decode(cls, text: str) -> ReplayJob:
        """Read what `encode` wrote.

        Raises:
            InvalidSpecError: *text* is something else.
        """
        try:
            document = json.loads(text)
            return cls(
                namespace=document["namespace"],
                name=document["name"],
                uid=document["uid"],
                policy=codec.decode(document["policy"]),
                service_url=document["serviceUrl"],
                admin_url=document["adminUrl"],
                where=document["where"],
            )
        except (ValueError, KeyError, TypeError) as error:
            raise InvalidSpecError(
                "a replay job takes one argument, the JSON document that the operator writes",
                got=repr(error),
                remedy="start it by a Replay; run the same version of operator and image",
            ) from error
