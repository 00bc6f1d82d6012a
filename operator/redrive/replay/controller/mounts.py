"""Credentials of the replay role → a volume of a job's pods, and what tells the job of it. Pure.

Called by `reconcile`. Only references to Secrets are written; each lies in the namespace of the
Replay. Of a Secret only the keys that are named are mounted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from redrive.api.authentication import CaKind, CaRef, OAuth2, ReplayAuthentication
from redrive.api.connection import ReplayIdentity
from redrive.replay.spec import ACCESS_VARIABLE, BrokerAccess, Method

FOLDER = "/etc/redrive/access"
_VOLUME = "redrive-access"


@dataclass(frozen=True)
class PodAccess:
    """What gives a pod the credentials of the replay role.

    Attributes:
        volumes: of the application; none where nothing has to be mounted.
        mounts: of each pod.
        variable: of the environment of each pod: a `BrokerAccess`.
    """

    volumes: tuple[Mapping[str, Any], ...]
    mounts: tuple[Mapping[str, Any], ...]
    variable: Mapping[str, Any]


def access(identity: ReplayIdentity, redirect_hosts: Sequence[str]) -> PodAccess:
    """Return what gives driver and executors the credentials of *identity*.

    Args:
        identity: the replay role.
        redirect_hosts: where else than to the host of `adminUrl` they may go.
    """
    description = _description(identity.credentials, tuple(redirect_hosts))
    variable = {"name": ACCESS_VARIABLE, "value": description.encode()}
    sources = list(_sources(identity))
    if not sources:
        return PodAccess((), (), variable)
    volume = {"name": _VOLUME, "projected": {"sources": sources}}
    mount = {"name": _VOLUME, "mountPath": FOLDER, "readOnly": True}
    return PodAccess((volume,), (mount,), variable)


def _description(given: ReplayAuthentication, redirect_hosts: tuple[str, ...]) -> BrokerAccess:
    (method,) = (each for each in Method if getattr(given, each) is not None)
    client = given.oauth2
    if client is None:
        return BrokerAccess(method, FOLDER, redirect_hosts)
    return BrokerAccess(
        method,
        FOLDER,
        redirect_hosts,
        client.issuer_url,
        client.client_id,
        client.audience,
        client.scope,
    )


def _sources(identity: ReplayIdentity) -> Iterator[Mapping[str, Any]]:
    """Yield what is mounted, each at the path that `BrokerAccess` has for it."""
    match identity.credentials:
        case ReplayAuthentication(token=token) if token is not None:
            ref = token.secret_ref
            yield _source("secret", ref.name, {ref.key: "credentials/token"})
        case ReplayAuthentication(tls=certificate) if certificate is not None:
            pair = {file: f"credentials/{file}" for file in ("tls.crt", "tls.key")}
            yield _source("secret", certificate.secret_ref.name, pair)
        case ReplayAuthentication(oauth2=OAuth2() as client):
            ref = client.client_secret.secret_ref
            yield _source("secret", ref.name, {ref.key: "credentials/client-secret"})
            if client.ca_ref is not None:
                yield _authorities(client.ca_ref, "issuer-ca/ca.crt")
    if identity.tls is not None:
        yield _authorities(identity.tls.ca_ref, "ca/ca.crt")


def _authorities(ref: CaRef, path: str) -> Mapping[str, Any]:
    kind = "secret" if ref.kind is CaKind.SECRET else "configMap"
    return _source(kind, ref.name, {ref.key: path})


def _source(kind: str, name: str, keys: Mapping[str, str]) -> Mapping[str, Any]:
    return {kind: {"name": name, "items": [{"key": k, "path": path} for k, path in keys.items()]}}
