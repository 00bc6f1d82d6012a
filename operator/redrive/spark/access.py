"""The credentials that options of the data source name."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import ClassVar

from redrive.admin import oauth2
from redrive.admin.http import Http
from redrive.errors import RedriveError
from redrive.replay.topic.broker_credentials import BrokerCredentials
from redrive.spark.authentication import Plugin, SourceAuthentication


class CredentialsUnreadableError(RedriveError):
    """A file with credentials, which an option names, is not there or not what it should be."""

    reason: ClassVar[str] = "CredentialsUnreadable"


class SourceCredentials(BrokerCredentials):
    """What a query shows to the broker, and trusts in.

    Raises:
        CredentialsUnreadableError: from each method, when a file is missing or of another form.
        AdminError: likewise, when an issuer gives no token.
    """

    def __init__(self, said: SourceAuthentication) -> None:
        super().__init__()
        self._said = said

    def _token(self) -> str | None:
        if self._said.plugin is Plugin.OAUTH2:
            return self._issued()
        if "token" in self._said.files:
            return self._text(self._file("token"))
        return self._said.token

    async def _issue(self) -> oauth2.Issued:
        said, file = self._said.issuer, self._file("client")
        try:
            key = json.loads(self._text(file))
            named = str(key["client_id"]), str(key["client_secret"])
        except (ValueError, KeyError, TypeError):
            raise self._missing(file, "no JSON with client_id and client_secret") from None
        authorities = self._authorities()
        tls = None if authorities is None else self._context(ca=self._text(authorities))
        client = oauth2.Client(
            said["issuerUrl"],
            *named,
            audience=said.get("audience"),
            scope=said.get("scope"),
            tls=tls,
        )
        async with Http.open() as http:
            return await oauth2.issue(client, http)

    def _certificate(self) -> tuple[Path, Path] | None:
        if self._said.plugin is not Plugin.TLS:
            return None
        return self._file("certificate"), self._file("key")

    def _authorities(self) -> Path | None:
        return None if self._said.trusted is None else Path(self._said.trusted)

    def _file(self, name: str) -> Path:
        return Path(self._said.files[name])

    def _missing(self, file: Path, got: str) -> RedriveError:
        return CredentialsUnreadableError(
            f"there are no credentials at {file}, which an option names",
            got=got,
            remedy="put the file there on the driver and on each executor",
        )

    def _no_pem(self, got: str) -> RedriveError:
        return CredentialsUnreadableError(
            "what the options name is no certificate with its key, or no authorities",
            got=got,
            remedy="put files in PEM there, on the driver and on each executor",
        )


_known: dict[str, SourceCredentials] = {}


def shown(said: SourceAuthentication) -> SourceCredentials:
    """Return the credentials that are *said*, the same for a whole process."""
    key = json.dumps(dataclasses.asdict(said))
    return _known.setdefault(key, SourceCredentials(said))
