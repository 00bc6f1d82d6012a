"""Behaviour of an API server that redrive relies on: the real one and the fake agree."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import pytest

from redrive.api import Body
from redrive.kube.client import ConflictError, Kubernetes, KubernetesError, NotFoundError
from redrive.kube.resources import LEASES, Key, Resource
from sandbox.kubernetes import Cluster
from tests.support.fake_kubernetes import FakeKubernetes

DEPLOYMENTS = Resource("apps", "v1", "deployments", "Deployment")
"""A kind with a status of its own that no controller of the sandbox writes."""
CONTAINER = {"name": "a", "image": "a"}


@dataclass(frozen=True)
class Server:
    """An API server with a namespace for one test.

    Attributes:
        delete: begins the deletion of a Lease that has a finalizer.
    """

    client: Kubernetes
    namespace: str
    delete: Callable[[Key], object]

    async def create(self, name: str = "a", **metadata: object) -> Key:
        """Create a Lease."""
        key = Key(self.namespace, name)
        body = {
            "apiVersion": LEASES.api_version,
            "kind": LEASES.kind,
            "metadata": {**key._asdict(), **metadata},
            "spec": {"holderIdentity": "one", "leaseDurationSeconds": 10},
        }
        await self.client.create(LEASES, body)
        return key


@pytest.fixture(params=["fake", "cluster"])
async def server(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Server]:
    if request.param == "fake":
        fake = FakeKubernetes()
        deletion = {"deletionTimestamp": "2026-01-01T00:00:00Z"}
        yield Server(fake, "n", lambda key: fake.objects[LEASES][key]["metadata"].update(deletion))
        return
    cluster: Cluster = request.getfixturevalue("cluster")
    namespace: str = request.getfixturevalue("kube_namespace")

    def delete(key: Key) -> None:
        cluster.kubectl("delete", "lease", key.name, f"--namespace={namespace}", "--wait=false")

    monkeypatch.setenv("KUBECONFIG", str(cluster.kubeconfig))
    async with Kubernetes.connect() as client:
        yield Server(client, namespace, delete)


def version(body: Body) -> int:
    return int(body["metadata"]["resourceVersion"])


async def test_patch_merges_objects_replaces_lists_removes_none(
    server: Server,
) -> None:
    key = await server.create(labels={"a": "1", "b": "2"}, finalizers=["x.io/a", "x.io/b"])
    patch: dict[str, Any] = {
        "metadata": {
            "labels": {"a": None, "absent": None, "c": "3"},
            "annotations": {"new": "1", "none": None},
            "finalizers": ["x.io/c"],
        },
        "spec": {"holderIdentity": None, "leaseTransitions": 1},
    }
    patched = await server.client.patch(LEASES, key, patch)
    assert patched["metadata"]["labels"] == {"b": "2", "c": "3"}
    assert patched["metadata"]["annotations"] == {"new": "1"}
    assert patched["metadata"]["finalizers"] == ["x.io/c"]
    assert patched["spec"] == {"leaseDurationSeconds": 10, "leaseTransitions": 1}
    assert await server.client.get(LEASES, key) == patched
    await server.client.patch(LEASES, key, {"metadata": {"finalizers": None}})


async def test_patch_of_another_version_is_refused(server: Server) -> None:
    key = await server.create()
    seen = await server.client.get(LEASES, key)
    current = await server.client.patch(LEASES, key, {"spec": {"holderIdentity": "two"}})
    assert version(current) > version(seen)
    outdated = {
        "metadata": {"resourceVersion": seen["metadata"]["resourceVersion"]},
        "spec": {"holderIdentity": "one"},
    }
    with pytest.raises(ConflictError):
        await server.client.patch(LEASES, key, outdated)
    assert await server.client.get(LEASES, key) == current
    precondition = {"metadata": {"resourceVersion": current["metadata"]["resourceVersion"]}}
    await server.client.patch(LEASES, key, outdated | precondition)
    assert (await server.client.get(LEASES, key))["spec"]["holderIdentity"] == "one"


async def test_status_patch_for_another_version_is_refused(server: Server) -> None:
    seen = await deployment(server)
    key = Key.of(seen)
    version_seen = seen["metadata"]["resourceVersion"]
    current = await server.client.patch_status(
        DEPLOYMENTS, key, {"observedGeneration": 1}, version_seen
    )
    with pytest.raises(ConflictError):
        await server.client.patch_status(DEPLOYMENTS, key, {"observedGeneration": 2}, version_seen)
    assert await server.client.get(DEPLOYMENTS, key) == current
    assert current["status"]["observedGeneration"] == 1


async def deployment(server: Server) -> Body:
    """Create a Deployment without pods."""
    spec = {"replicas": 0, "selector": {"matchLabels": {"a": "b"}}}
    template = {"metadata": {"labels": {"a": "b"}}, "spec": {"containers": [CONTAINER]}}
    body = {
        "apiVersion": DEPLOYMENTS.api_version,
        "kind": DEPLOYMENTS.kind,
        "metadata": {"name": "a", "namespace": server.namespace},
        "spec": spec | {"template": template},
    }
    return await server.client.create(DEPLOYMENTS, body)


async def test_applied_status_removes_fields_left_out(server: Server) -> None:
    seen = await deployment(server)
    key = Key.of(seen)
    await server.client.patch_status(DEPLOYMENTS, key, {"observedGeneration": 1})
    for status in ({"replicas": 1, "readyReplicas": 1}, {"replicas": 2}):
        seen = await server.client.get(DEPLOYMENTS, key)
        applied = await server.client.apply_status(DEPLOYMENTS, seen, status, "job")
        assert applied["status"] == {"observedGeneration": 1, **status}


async def test_status_applied_to_another_version_is_refused(server: Server) -> None:
    seen = await deployment(server)
    current = await server.client.apply_status(DEPLOYMENTS, seen, {"replicas": 1}, "job")
    with pytest.raises(ConflictError):
        await server.client.apply_status(DEPLOYMENTS, seen, {"replicas": 2}, "job")
    another = {**current, "metadata": {**current["metadata"], "uid": "another"}}
    with pytest.raises(KubernetesError):
        await server.client.apply_status(DEPLOYMENTS, another, {"replicas": 2}, "job")
    assert await server.client.get(DEPLOYMENTS, Key.of(seen)) == current


async def test_patch_of_another_object_is_refused(server: Server) -> None:
    key = await server.create()
    seen = await server.client.get(LEASES, key)
    other = {"metadata": {"uid": "another"}, "spec": {"holderIdentity": "one"}}
    with pytest.raises(KubernetesError):
        await server.client.patch(LEASES, key, other)
    assert await server.client.get(LEASES, key) == seen


async def test_an_object_that_is_deleted_goes_with_its_last_finalizer(server: Server) -> None:
    key = await server.create(finalizers=["x.io/a", "x.io/b"])
    server.delete(key)
    await server.client.patch(LEASES, key, {"metadata": {"finalizers": ["x.io/b"]}})
    assert "deletionTimestamp" in (await server.client.get(LEASES, key))["metadata"]
    await server.client.patch(LEASES, key, {"metadata": {"finalizers": []}})
    with pytest.raises(NotFoundError):
        await server.client.get(LEASES, key)


async def test_existing_is_not_created_and_absent_is_not_patched(
    server: Server,
) -> None:
    await server.create()
    with pytest.raises(ConflictError):
        await server.create()
    with pytest.raises(NotFoundError):
        await server.client.patch(LEASES, Key(server.namespace, "absent"), {"spec": {}})


async def test_a_list_is_of_one_namespace_or_of_all(server: Server) -> None:
    key = await server.create()
    assert [Key.of(body) for body in await server.client.list(LEASES, server.namespace)] == [key]
    assert await server.client.list(LEASES, "elsewhere") == []
    assert key in [Key.of(body) for body in await server.client.list(LEASES)]


async def test_annotations_are_read_without_the_object(server: Server) -> None:
    marked = await server.create("marked", annotations={"redrive.io/usable-by": "a/b"})
    plain = await server.create("plain")
    assert await server.client.annotations(LEASES, marked) == {"redrive.io/usable-by": "a/b"}
    assert await server.client.annotations(LEASES, plain) == {}
    with pytest.raises(NotFoundError):
        await server.client.annotations(LEASES, Key(server.namespace, "absent"))
