"""The credentials of the replay role, as a job finds them in its pod.

Read from files each time, which a kubelet renews when their Secret changes: a run may be long.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

from redrive.admin import oauth2
from redrive.admin.http import Http
from redrive.errors import RedriveError
from redrive.replay.spec import ACCESS_VARIABLE, BrokerAccess, Method
from redrive.replay.topic.broker_credentials import BrokerCredentials


class CredentialsMissingError(RedriveError):
    """The pod of the job lacks credentials, or what is there is none."""

    reason: ClassVar[str] = "CredentialsMissing"


class JobCredentials(BrokerCredentials):
    """What a job shows to the broker, and trusts in: files below one folder.

    Raises:
        CredentialsMissingError: from each method, when a file is missing or not what it should be.
        AdminError: likewise, when an issuer gives no token.
    """

    def __init__(self, access: BrokerAccess) -> None:
        super().__init__(access.redirect_hosts)
        self._given = access
        self._folder = Path(access.folder)

    def _token(self) -> str | None:
        if self._given.method is Method.TOKEN:
            return self._text(self._folder / "credentials" / "token")
        return self._issued() if self._given.method is Method.OAUTH2 else None

    async def _issue(self) -> oauth2.Issued:
        given = self._given
        client = oauth2.Client(
            given.issuer_url or "",
            given.client_id or "",
            self._text(self._folder / "credentials" / "client-secret"),
            audience=given.audience,
            scope=given.scope,
        )
        if (authorities := self._folder / "issuer-ca" / "ca.crt").exists():
            client = replace(client, tls=self._context(ca=self._text(authorities)))
        async with Http.open() as http:
            return await oauth2.issue(client, http)

    def _certificate(self) -> tuple[Path, Path] | None:
        folder = self._folder / "credentials"
        return (
            (folder / "tls.crt", folder / "tls.key") if self._given.method is Method.TLS else None
        )

    def _authorities(self) -> Path | None:
        file = self._folder / "ca" / "ca.crt"
        return file if file.exists() else None

    def _missing(self, file: Path, got: str) -> RedriveError:
        return CredentialsMissingError(
            f"the credentials of the replay role are not at {file}",
            got=got,
            remedy="store them in the Secret that replay.authentication of the PulsarConnection "
            "names",
        )

    def _no_pem(self, got: str) -> RedriveError:
        return CredentialsMissingError(
            "what is mounted is no certificate with its key, or no authorities",
            got=got,
            remedy="store them in PEM in the Secret or ConfigMap of the connection's replay",
        )


_known: dict[str, JobCredentials] = {}


def of_this_job() -> JobCredentials:
    """Return the credentials that the environment tells of, the same for a whole process.

    Raises:
        CredentialsMissingError: it tells of none.
        InvalidSpecError: what it tells can't be read.
    """
    written = os.environ.get(ACCESS_VARIABLE, "")
    if not written:
        raise CredentialsMissingError(
            f"the environment variable {ACCESS_VARIABLE} is not set",
            remedy="give it to driver and executors, as the operator does",
        )
    if written not in _known:
        _known[written] = JobCredentials(BrokerAccess.decode(written))
    return _known[written]
