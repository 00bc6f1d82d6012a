"""Tests of an installed release, which the pods of `helm test` run.

`python3 -m redrive.cli.release_test [--endpoint URL] [--grants JSON]`
`python3 -m redrive.cli.release_test --manifests JSON --namespace NS`

The pod with the operator's ServiceAccount tests its rights and the operator's endpoint. The other
pod has an account that may create the kinds of redrive in the namespace of the release. It creates
nothing: dry runs show that the CRDs are installed, are of this release, and are admitted.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from redrive.api import Body
from redrive.errors import RedriveError
from redrive.kube import resources
from redrive.kube.client import ForbiddenError, Kubernetes
from redrive.kube.resources import Resource

SECONDS = 60.0
"""Time for the operator to become ready, and for new rights to reach the API server."""
PAUSE_SECONDS = 1.0
AT_ONCE = 10
"""Reviews of rights at the same time."""
NAME = "release-test"
"""Name of the objects in dry runs."""
KINDS: Mapping[str, Resource] = {
    kind.kind: kind
    for kind in (
        resources.CONNECTIONS,
        resources.POLICIES,
        resources.REPLAYS,
        resources.APPROVALS,
        resources.INSPECTIONS,
        resources.ROCKETMQ_POLICIES,
    )
}


@dataclass(frozen=True)
class Right:
    """One verb on one resource, in one namespace; an empty namespace means all.

    Attributes:
        resource: the plural, with a subresource after a slash where there is one.
        name: of the only object that it concerns; empty for all.
    """

    verb: str
    group: str
    resource: str
    namespace: str
    name: str

    def __str__(self) -> str:
        where = f"namespace {self.namespace}" if self.namespace else "all namespaces"
        subject = f"{self.resource}.{self.group}" if self.group else self.resource
        return f"{self.verb} {subject}{f'/{self.name}' if self.name else ''} in {where}"

    @property
    def attributes(self) -> Mapping[str, str]:
        """Return this right as an API server names it in reviews."""
        plural, _, subresource = self.resource.partition("/")
        return {
            "verb": self.verb,
            "group": self.group,
            "resource": plural,
            "subresource": subresource,
            "namespace": self.namespace,
            "name": self.name,
        }


def rights(grants: Sequence[Body]) -> Iterator[Right]:
    """Yield each right of *grants*: rules of roles, each with the namespace of its binding."""
    for grant in grants:
        for rule in grant["rules"]:
            for group in rule["apiGroups"]:
                for resource in rule["resources"]:
                    for verb in rule["verbs"]:
                        for name in rule.get("resourceNames", [""]):
                            yield Right(verb, group, resource, grant.get("namespace", ""), name)


async def check_rights(kubernetes: Kubernetes, grants: Sequence[Body]) -> int:
    """Check that the caller has all rights of *grants*; return how many.

    Raises:
        RedriveError: some are missing.
        KubernetesError: the API server does not answer.
    """
    expected = list(rights(grants))
    slots = asyncio.Semaphore(AT_ONCE)

    async def is_allowed(right: Right) -> bool:
        async with slots:
            return await kubernetes.is_allowed(right.attributes)

    answers = await asyncio.gather(*map(is_allowed, expected))
    missing = [str(right) for right, allowed in zip(expected, answers, strict=True) if not allowed]
    if missing:
        raise RedriveError(
            "the operator's ServiceAccount lacks rights that the chart grants",
            got="; ".join(missing),
            remedy="install the release again, with its Roles, ClusterRoles and their bindings",
            reason="ReleaseTestFailed",
        )
    return len(expected)


async def check_kinds(kubernetes: Kubernetes, manifests: Sequence[Body], namespace: str) -> None:
    """Create each of *manifests* in *namespace* with a dry run, which persists nothing.

    Raises:
        KubernetesError: a kind is not installed, or the manifest is refused.
    """
    deadline = time.monotonic() + SECONDS
    for manifest in manifests:
        body = _named(manifest, namespace)
        while True:
            try:
                await kubernetes.dry_run(KINDS[manifest["kind"]], body)
                break
            except ForbiddenError:  # the role of this test is seconds old
                if time.monotonic() > deadline:
                    raise
                await asyncio.sleep(PAUSE_SECONDS)


def _named(manifest: Body, namespace: str) -> Body:
    """Return *manifest* under a name of this test, so that it meets no object of a user."""
    spec = manifest["spec"]
    if "replayRef" in spec:  # an approval has the name of its Replay
        spec = {**spec, "replayRef": {**spec["replayRef"], "name": NAME}}
    return {**manifest, "metadata": {"name": NAME, "namespace": namespace}, "spec": spec}


def check_endpoint(url: str) -> None:
    """Check that the operator becomes ready, and that it serves metrics.

    Raises:
        RedriveError: it does not within `SECONDS`.
    """
    deadline = time.monotonic() + SECONDS
    while problem := _endpoint_problem(url):
        if time.monotonic() > deadline:
            raise RedriveError(
                "the operator's endpoint does not answer as it should",
                got=problem,
                remedy="check the pods of the Deployment, and NetworkPolicies",
                reason="ReleaseTestFailed",
            )
        time.sleep(PAUSE_SECONDS)


def _endpoint_problem(url: str) -> str:
    """Return what is wrong with the answers of an endpoint; empty for nothing."""
    for path, content in (("/readyz", b"ready"), ("/metrics", b"redrive_lease_held")):
        try:
            with urllib.request.urlopen(f"{url}{path}", timeout=5) as response:  # noqa: S310  http
                answer = response.read()
        except OSError as error:
            return f"{url}{path}: {error}"
        if content not in answer:
            return f"{url}{path} without {content.decode()}"
    return ""


async def run(options: argparse.Namespace) -> None:
    """Run the tests that the arguments ask for.

    Raises:
        RedriveError: one failed.
    """
    async with Kubernetes.connect() as kubernetes:
        if options.grants:
            count = await check_rights(kubernetes, options.grants)
            _print(f"the operator has its {count} rights")
        if options.manifests:
            await check_kinds(kubernetes, options.manifests, options.namespace)
            kinds = ", ".join(dict.fromkeys(body["kind"] for body in options.manifests))
            _print(f"the API server admits {kinds}")
    if options.endpoint:
        check_endpoint(options.endpoint)
        _print("the operator is ready")


def _print(line: str) -> None:
    print(line, flush=True)  # noqa: T201  the log of a test pod


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tests; return 1 and print the reason if one fails."""
    parser = argparse.ArgumentParser(prog="python3 -m redrive.cli.release_test")
    parser.add_argument("--endpoint", default="", metavar="URL")
    parser.add_argument("--grants", type=json.loads, default=[], metavar="JSON")
    parser.add_argument("--manifests", type=json.loads, default=[], metavar="JSON")
    parser.add_argument("--namespace", default="", metavar="NS")
    try:
        asyncio.run(run(parser.parse_args(argv)))
    except RedriveError as error:
        print(f"redrive: {error.reason}: {error}", file=sys.stderr)  # noqa: T201
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
