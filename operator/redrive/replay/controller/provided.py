"""Whether what a job needs of the namespace of its Replay is there, before it is launched.

Of a Secret nothing but its metadata is asked for. Whether there is an image, and what a pull Secret
is worth, the nodes alone find out; the operator has no right to PersistentVolumeClaims.
"""

from __future__ import annotations

from collections.abc import Iterator

from redrive.kube import resources
from redrive.kube.context import Context
from redrive.kube.errors import ForbiddenError
from redrive.kube.resources import Key, Resource
from redrive.replay.controller.application import JobApplication
from redrive.replay.controller.errors import JobSecretNotFoundError, ServiceAccountNotFoundError

_MOUNTED = {"secret": resources.SECRETS, "configMap": resources.CONFIG_MAPS}


async def check(job: JobApplication, ctx: Context) -> None:
    """Check that what *job* needs is in its namespace: else submissions fail, or pods wait.

    Raises:
        ServiceAccountNotFoundError: what it runs as does not exist.
        JobSecretNotFoundError: what its pods mount, or pull their image with, does not exist.
    """
    namespace = job.metadata["namespace"]
    account = Key(namespace, job.service_account)
    if await _is_missing(resources.SERVICE_ACCOUNTS, account, ctx):
        raise ServiceAccountNotFoundError(
            "the ServiceAccount that replay jobs run as does not exist",
            got=str(account),
            remedy=f"add {namespace} to replay.namespaces of the Helm chart, which creates it with "
            f"its rights, or run kubectl create serviceaccount {account.name} -n {namespace} and "
            "give it the rights of a Spark driver; this Replay starts by itself then",
        )
    for resource, name, use in _needed(job):
        if await _is_missing(resource, Key(namespace, name), ctx):
            raise JobSecretNotFoundError(
                f"a {resource.kind} that the pods of replay jobs {use} does not exist",
                got=str(Key(namespace, name)),
                remedy="create it in the namespace of the Replay, or correct what names it: "
                "spec.replay or spec.job of the PulsarConnection, or replay.job of the Helm chart; "
                "this Replay starts by itself then",
            )


def _needed(job: JobApplication) -> Iterator[tuple[Resource, str, str]]:
    """Go through the Secrets and ConfigMaps that pods need, by name, and what for."""
    for name in job.image_pull_secrets:
        yield resources.SECRETS, name, "pull their image with"
    for volume in job.volumes:
        for source in volume.get("projected", {}).get("sources", (volume,)):
            for kind, resource in _MOUNTED.items():
                if kind in source:
                    yield resource, source[kind]["name"], "mount"


async def _is_missing(resource: Resource, key: Key, ctx: Context) -> bool:
    """Whether an object is known not to exist; that of one that may not be read is not known."""
    try:
        return not await ctx.kubernetes.exists(resource, key)
    except ForbiddenError:
        return False
