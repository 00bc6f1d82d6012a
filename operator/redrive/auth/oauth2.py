"""OAuth 2.0 client credentials and token refresh: an issuer's token for a client id and its secret.

Called by `kube.credentials` for the operator, and by `auth.files` for jobs. The broker maps the
token to a role.
"""

from __future__ import annotations

import re
import ssl
from dataclasses import dataclass, field

from yarl import URL

from redrive.admin.access import Access, same_origin
from redrive.admin.errors import AdminError, AuthenticationFailedError
from redrive.admin.http import CallSlots, Endpoint, Http, parse_answer
from redrive.reasons import Reason

_DISCOVERY = "/.well-known/openid-configuration"
_DEFAULT_LIFETIME_SECONDS = 300.0
LONGEST_LIFETIME_SECONDS = 86_400.0
"""Maximum lifetime that is assumed for a token."""
_CODE = re.compile("[a-z_]{1,40}")
"""Format of RFC 6749 error codes."""


@dataclass(frozen=True)
class Client:
    """A client of an issuer, and its request.

    Attributes:
        tls: for connections to the issuer; None trusts the authorities of this machine.
        namespace: of the connection, whose calls have a share of all.
    """

    issuer_url: str
    client_id: str
    secret: str = field(repr=False)
    audience: str | None = None
    scope: str | None = None
    tls: ssl.SSLContext | None = field(default=None, repr=False)
    namespace: str = ""


@dataclass(frozen=True)
class Issued:
    """A token, and for how many seconds it is valid."""

    token: str = field(repr=False)
    lifetime: float


async def issue(client: Client, http: Http) -> Issued:
    """Get a token.

    Raises:
        AuthenticationFailedError: the issuer rejects the client or its secret.
        AdminError: it does not answer, or not as an issuer does, or its token endpoint has
            another scheme, host or port than `issuer_url`. No secret was sent to that address.
    """
    discovery = await _ask(client, http, "GET", client.issuer_url.rstrip("/") + _DISCOVERY)
    form = {
        "grant_type": "client_credentials",
        "client_id": client.client_id,
        "client_secret": client.secret,
    }
    if client.audience is not None:
        form["audience"] = client.audience
    if client.scope is not None:
        form["scope"] = client.scope
    endpoint = discovery.get("token_endpoint")
    if not isinstance(endpoint, str):
        raise _unexpected(client, "its discovery document names no token_endpoint")
    if not _is_of_issuer(endpoint, client.issuer_url):
        raise _unexpected(client, "a token_endpoint of another scheme, host or port")
    answer = await _ask(client, http, "POST", endpoint, form)
    token = answer.get("access_token")
    if not isinstance(token, str) or not token.isprintable() or not token:
        raise _unexpected(client, "an answer without access_token")
    lifetime = answer.get("expires_in", _DEFAULT_LIFETIME_SECONDS)
    seconds = float(lifetime) if isinstance(lifetime, int | float) else 0.0
    return Issued(token, max(0.0, min(seconds, LONGEST_LIFETIME_SECONDS)))


def _is_of_issuer(endpoint: str, issuer_url: str) -> bool:
    """Return True if the secret may go to *endpoint*: an address of the issuer's own origin."""
    try:
        address = URL(endpoint)
        return address.raw_user is None and same_origin(address, URL(issuer_url))
    except ValueError:  # not a URL
        return False


async def _ask(
    client: Client, http: Http, method: str, url: str, form: dict[str, str] | None = None
) -> dict[str, object]:
    slots = CallSlots(1, client.namespace)
    issuer = Endpoint(client.issuer_url, Access(tls=client.tls), slots)
    status, text = await http.ask_issuer(method, url, form, issuer)
    try:
        answer = parse_answer(text.encode())
    except ValueError:
        answer = {}
    if not isinstance(answer, dict):
        answer = {}
    if form is not None and (status == 401 or answer.get("error") == "invalid_client"):  # noqa: PLR2004
        raise AuthenticationFailedError(
            f"the issuer {client.issuer_url} does not accept the client",
            got=client.client_id,
            remedy="correct oauth2.clientID, or the secret in the Secret of oauth2.clientSecret",
        )
    if status != 200:  # noqa: PLR2004
        raise _unexpected(client, f"{status} {_code(answer)}".strip())
    return answer


def _code(answer: dict[str, object]) -> str:
    """Return the code of an error; anything else may repeat the request, or forge a message."""
    code = answer.get("error")
    return code if isinstance(code, str) and _CODE.fullmatch(code) else ""


def _unexpected(client: Client, got: str) -> AdminError:
    return AdminError(
        f"the issuer {client.issuer_url} gave no token",
        got=got,
        remedy="No action needed for a passing failure: it is retried automatically. Otherwise "
        "check audience, scope and oauth2.issuerURL, which needs the scheme, host and port of the "
        "token endpoint",
        reason=Reason.ISSUER_FAILED,
    )
