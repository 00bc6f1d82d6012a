"""The output of `make dist`: complete, verified, and admitted by an API server."""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml

from redrive import __version__
from release import CHECKOUT, archives, manifests
from sandbox import chart
from sandbox.kubernetes import Cluster
from tests.support.documented import RELEASE, block

PAGE = (CHECKOUT / RELEASE).read_text("utf-8")


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("release") / "dist"
    folder.mkdir()
    (folder / "of-an-earlier-build").touch()
    archives.build(folder)
    return folder


def test_a_release_holds_the_files_that_its_page_lists(dist: Path) -> None:
    listed = re.findall(r"^ +\| `(\S+)` \|", PAGE.replace("X.Y.Z", __version__), re.MULTILINE)
    assert len(listed) == 9
    assert sorted(file.name for file in dist.iterdir()) == sorted(listed)


def test_a_release_takes_all_runs_of_tests() -> None:
    """Except parts of other targets, which are short forms and the collection of `bytecode`."""
    makefile = (CHECKOUT / "Makefile").read_text("utf-8")
    targets = re.findall(r"^([a-z0-9-]+):.*\n((?:\t.*\n)+)", makefile, re.MULTILINE)
    runs = {name for name, recipe in targets if "-m pytest" in recipe} - {
        "bench",
        "bytecode",
        "check",
        "chaos-short",
    }
    assert {"test", "e2e-node"} <= runs
    sentence = PAGE.partition("have passed")[0].rpartition("whose")[2]
    assert set(re.findall(r"`make (\S+)`", sentence)) == runs


def test_checksums_are_those_of_the_files(dist: Path) -> None:
    lines = (dist / archives.CHECKSUMS).read_text("ascii").splitlines()
    listed = {name: digest for digest, name in (line.split("  ") for line in lines)}
    assert listed == {
        file.name: hashlib.sha256(file.read_bytes()).hexdigest()
        for file in dist.iterdir()
        if file.name != archives.CHECKSUMS
    }


def test_plugin_runs_without_installed_packages(dist: Path, tmp_path: Path) -> None:
    archive = dist / f"kubectl-redrive-{__version__}.tar.gz"
    (manifest,) = yaml.safe_load_all((dist / f"redrive-{__version__}-krew.yaml").read_text())
    digest = hashlib.sha256(archive.read_bytes()).hexdigest()
    platforms = manifest["spec"]["platforms"]
    assert {platform["sha256"] for platform in platforms} == {digest}
    assert {platform["uri"].rpartition("/")[2] for platform in platforms} == {archive.name}
    with tarfile.open(archive) as packed:
        packed.extractall(tmp_path, filter="data")
    for platform in platforms:
        assert all((tmp_path / file["from"]).is_file() for file in platform["files"])
    config = {
        "clusters": [{"name": "c", "cluster": {"server": "https://127.0.0.1:1"}}],
        "users": [{"name": "u", "user": {"token": "t"}}],
        "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
        "current-context": "c",
    }
    (tmp_path / "config").write_text(yaml.safe_dump(config))
    program = [sys.executable, "-I", "-S", str(tmp_path / "kubectl-redrive")]
    for arguments, message in (
        (["status", "--request-timeout", "1s"], "the API server of context c does not answer"),
        (["lint", "."], "MissingExtra: `redrive lint` needs redrive[cli]"),
    ):
        run = subprocess.run(
            [*program, *arguments],
            env={"KUBECONFIG": str(tmp_path / "config")},
            capture_output=True,
            text=True,
            check=False,
        )
        assert run.returncode == 1
        assert message in run.stderr


def test_packaged_chart_has_the_crds_and_renders_as_the_checkout(dist: Path) -> None:
    packed = dist / f"redrive-{__version__}.tgz"
    with tarfile.open(packed) as archive:
        names = archive.getnames()
    definitions = {f"redrive/definitions/{path.name}" for path in (CHECKOUT / "crds").iterdir()}
    assert definitions == {name for name in names if name.startswith("redrive/definitions/")}
    flags = "--namespace=redrive-system", "--set=image.registry=r"
    from_checkout = chart.helm("template", "redrive", str(chart.CHART), *flags)
    assert chart.helm("template", "redrive", str(packed), *flags) == from_checkout


def test_the_source_archive_builds_the_same_wheel(dist: Path, tmp_path: Path) -> None:
    """Without a repository, as for a distributor who packages redrive again."""
    with tarfile.open(dist / f"redrive-{__version__}.tar.gz") as archive:
        archive.extractall(tmp_path, filter="data")
    (source,) = tmp_path.iterdir()
    assert (source / "LICENSE").is_file()
    build = [sys.executable, "-m", "hatchling", "build", "--target=wheel", f"-d{tmp_path}/built"]
    subprocess.run(build, cwd=source, check=True)
    name = f"redrive-{__version__}-py3-none-any.whl"
    assert contents(tmp_path / "built" / name) == contents(dist / name)


def contents(wheel: Path) -> dict[str, bytes]:
    """Return the files of a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def test_the_api_server_admits_the_manifest_strictly(dist: Path, cluster: Cluster) -> None:
    text = (dist / f"redrive-{__version__}-install.yaml").read_text("utf-8")
    bodies = [body for body in yaml.load_all(text, yaml.CSafeLoader) if body]
    # A dry run creates no namespace for the objects; others may create it meanwhile.
    metadata = {"name": manifests.NAMESPACE}
    cluster.objects.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": metadata})
    admitted = cluster.kubectl(
        "apply", "--server-side", "--dry-run=server", "--validate=strict", "--force-conflicts",
        "--output=name", "-f", "-", input=text,
    )  # fmt: skip
    assert len(admitted.splitlines()) == len(bodies)
    assert "helm" not in text.partition("\n")[2].lower()


@pytest.fixture
def base(dist: Path, tmp_path: Path) -> Path:
    """The kustomize base, unpacked."""
    with tarfile.open(dist / f"redrive-{__version__}-kustomize.tar.gz") as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path / "redrive"


def kustomized(cluster: Cluster, folder: Path) -> dict[tuple[str, ...], dict[str, Any]]:
    """Return the objects that kustomize builds from a folder, by kind, namespace and name."""
    text = cluster.kubectl("kustomize", str(folder))
    built = list(yaml.load_all(text, yaml.CSafeLoader))
    return {address(body): body for body in built}


def address(body: dict[str, Any]) -> tuple[str, ...]:
    metadata = body["metadata"]
    return body["kind"], metadata.get("namespace", ""), metadata["name"]


def test_the_kustomize_base_is_the_manifest(dist: Path, base: Path, cluster: Cluster) -> None:
    text = (dist / f"redrive-{__version__}-install.yaml").read_text("utf-8")
    manifest = {address(body): body for body in yaml.load_all(text, yaml.CSafeLoader) if body}
    assert kustomized(cluster, base) == manifest


def test_documented_kustomization_replaces_only_the_two_images(
    base: Path, cluster: Cluster
) -> None:
    overlay = base.parent / "overlay"
    overlay.mkdir()
    documented = block(RELEASE, "install.yaml and kustomize", "yaml")
    (overlay / "kustomization.yaml").write_text(documented, "utf-8")
    plain, built = kustomized(cluster, base), kustomized(cluster, overlay)
    deployment = ("Deployment", manifests.NAMESPACE, "redrive")
    (container,) = plain[deployment]["spec"]["template"]["spec"]["containers"]
    container["image"] = "ours.example/redrive:1"
    template = plain["PodTemplate", manifests.NAMESPACE, "redrive-replay"]
    template["template"]["spec"]["containers"][0]["image"] = "ours.example/redrive-replay:1"
    assert built == plain


def test_archived_examples_build_as_those_of_the_checkout(
    dist: Path, tmp_path: Path, cluster: Cluster
) -> None:
    with tarfile.open(dist / f"redrive-{__version__}-gitops.tar.gz") as archive:
        archive.extractall(tmp_path, filter="data")
    for tool in ("argocd", "flux"):
        folder = f"examples/gitops/{tool}/apps/fulfilment"
        built = kustomized(cluster, tmp_path / "redrive" / folder)
        assert built == kustomized(cluster, CHECKOUT / folder)
        assert ("RetryPolicy", "shop", "orders-fulfilment") in built
