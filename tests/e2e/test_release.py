"""What `make dist` makes: complete, checked, and admitted by an API server."""

from __future__ import annotations

import hashlib
import json
import tarfile
from pathlib import Path

import pytest
import yaml

from redrive import __version__
from release import archives, manifests
from sandbox import chart
from sandbox.kubernetes import Cluster


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("release") / "dist"
    folder.mkdir()
    (folder / "of-an-earlier-build").touch()
    archives.build(folder)
    return folder


def test_a_release_is_complete(dist: Path) -> None:
    assert sorted(file.name for file in dist.iterdir()) == sorted(
        [
            f"redrive-{__version__}-py3-none-any.whl",
            f"redrive-{__version__}.tar.gz",
            f"redrive-{__version__}.tgz",
            f"redrive-{__version__}-install.yaml",
            f"redrive-{__version__}-kustomize.tar.gz",
            archives.CHECKSUMS,
        ]
    )


def test_checksums_are_those_of_the_files(dist: Path) -> None:
    lines = (dist / archives.CHECKSUMS).read_text("ascii").splitlines()
    listed = {name: digest for digest, name in (line.split("  ") for line in lines)}
    assert listed == {
        file.name: hashlib.sha256(file.read_bytes()).hexdigest()
        for file in dist.iterdir()
        if file.name != archives.CHECKSUMS
    }


def test_the_packaged_chart_holds_the_kinds_and_renders_as_the_checkout(dist: Path) -> None:
    packed = dist / f"redrive-{__version__}.tgz"
    with tarfile.open(packed) as archive:
        names = archive.getnames()
    assert len([name for name in names if name.startswith("redrive/definitions/")]) == 3
    flags = "--namespace=redrive-system", "--set=image.repository=r"
    from_checkout = chart.helm("template", "redrive", str(chart.CHART), *flags)
    assert chart.helm("template", "redrive", str(packed), *flags) == from_checkout


def test_the_source_archive_builds_without_the_repository(dist: Path) -> None:
    with tarfile.open(dist / f"redrive-{__version__}.tar.gz") as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"pyproject.toml", "operator/redrive/__init__.py", "LICENSE", "README.md"} <= names


def test_the_api_server_admits_the_manifest_strictly(dist: Path, cluster: Cluster) -> None:
    text = (dist / f"redrive-{__version__}-install.yaml").read_text("utf-8")
    bodies = [body for body in yaml.safe_load_all(text) if body]
    existing = cluster.kubectl("get", "namespaces", "--output=name").splitlines()
    if "namespace/redrive-system" not in existing:  # a dry run makes none for what lies in it
        cluster.kubectl("create", "namespace", "redrive-system")
    admitted = cluster.kubectl(
        "apply", "--server-side", "--dry-run=server", "--validate=strict", "--force-conflicts",
        "--output=name", "-f", "-", input=text,
    )  # fmt: skip
    assert len(admitted.splitlines()) == len(bodies)
    assert "helm" not in text.partition("\n")[2].lower()


def test_the_kustomize_base_is_the_manifest(dist: Path, cluster: Cluster, tmp_path: Path) -> None:
    with tarfile.open(dist / f"redrive-{__version__}-kustomize.tar.gz") as archive:
        archive.extractall(tmp_path, filter="data")
    overlay = tmp_path / "overlay"
    overlay.mkdir()
    images = [{"name": manifests.IMAGE, "newName": "ours.test/redrive", "newTag": "7"}]
    kustomization = {"resources": ["../redrive"], "images": images}
    (overlay / "kustomization.yaml").write_text(json.dumps(kustomization))
    built = list(yaml.safe_load_all(cluster.kubectl("kustomize", str(overlay))))
    assert len(built) == len(manifests.objects())
    (pod,) = (body for body in built if body["kind"] == "Deployment")
    container = pod["spec"]["template"]["spec"]["containers"][0]
    assert container["image"] == "ours.test/redrive:7"
