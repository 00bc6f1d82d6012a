"""Downloads Pulsar's official distribution; builds etcd, Kubernetes and Helm from Go modules.

Called when a sandbox starts. ``make test`` calls it first, so that no test waits for a compiler.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sysconfig
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from xml.etree import ElementTree as ET

from jgo.maven import MavenContext

from sandbox import cache, toolchain, versions
from sandbox.errors import SandboxError


def prepare(*, with_pulsar: bool = True) -> None:
    """Fetch or build all components that the cache lacks, Pulsar only with *with_pulsar*.

    Raises:
        SandboxError: a download or a build failed.
    """
    if with_pulsar:
        pulsar()
    toolchain.java_home(for_spark=True)
    etcd()
    kubernetes()
    helm()


def pulsar(version: str = versions.PULSAR) -> Path:
    """Return the home directory of a release of Pulsar, one of `versions.PULSARS`.

    Raises:
        SandboxError: a download does not have the pinned digest.
    """
    if version != versions.PULSAR:
        return _assembled_pulsar(version)
    doing = f"fetch Pulsar {versions.PULSAR} (245 MB)"
    return cache.artifact(f"pulsar-{versions.PULSAR}", _fetch_pulsar, doing=doing) / "home"


def rocketmq() -> Path:
    """Return the folder of the jars of RocketMQ.

    Raises:
        SandboxError: a download does not have the pinned digest.
    """
    key = hashlib.sha256(versions.ROCKETMQ_LOCK.read_bytes()).hexdigest()[:12]
    name, doing = (
        f"rocketmq-{versions.ROCKETMQ}-{key}",
        f"fetch RocketMQ {versions.ROCKETMQ} (104 MB)",
    )

    def fetch(target: Path) -> None:
        _fetch_jars(versions.ROCKETMQ_LOCK, target)

    return cache.artifact(name, fetch, doing=doing)


def etcd() -> Path:
    """Return the directory of ``etcd``.

    Raises:
        SandboxError: it did not compile.
    """
    version = versions.go_module(versions.ETCD_MODULE, "go.etcd.io/etcd/server/v3")
    return _go_build("etcd", version, versions.ETCD_MODULE, output="etcd", stamps=())


def kubernetes() -> Path:
    """Return the directory of ``kube-apiserver``, ``kube-controller-manager`` and ``kubectl``.

    Raises:
        SandboxError: they did not compile.
    """
    version = versions.go_module(versions.KUBERNETES_MODULE, "k8s.io/kubernetes")
    major, minor, _ = version.removeprefix("v").split(".", 2)
    variables = (f"gitVersion={version}", f"gitMajor={major}", f"gitMinor={minor}")
    stamps = [f"k8s.io/component-base/version.{variable}" for variable in variables]
    return _go_build("kubernetes", version, versions.KUBERNETES_MODULE, output="", stamps=stamps)


def helm() -> Path:
    """Return the directory of ``helm``.

    Raises:
        SandboxError: it did not compile.
    """
    version = versions.go_module(versions.HELM_MODULE, "helm.sh/helm/v3")
    # The release of Kubernetes for `helm template`, which has no cluster to ask.
    cluster = versions.go_module(versions.HELM_MODULE, "k8s.io/api").split(".")
    stamps = [
        f"helm.sh/helm/v3/internal/version.version={version}",
        "helm.sh/helm/v3/pkg/chartutil.k8sVersionMajor=1",
        f"helm.sh/helm/v3/pkg/chartutil.k8sVersionMinor={cluster[1]}",
    ]
    return _go_build("helm", version, versions.HELM_MODULE, output="helm", stamps=stamps)


def promtool() -> Path:
    """Return the directory of ``promtool``, which evaluates alerts.

    Raises:
        SandboxError: it did not compile.
    """
    version = versions.go_module(versions.PROMTOOL_MODULE, "github.com/prometheus/prometheus")
    # Without the service discovery of cloud providers.
    tags = "remove_all_sd", "slicelabels"
    return _go_build(
        "promtool", version, versions.PROMTOOL_MODULE, output="promtool", stamps=(), tags=tags
    )


def go_program(source: str) -> Path:
    """Return the program of *source* with Pulsar's Go client, built once.

    Raises:
        SandboxError: it did not compile.
    """
    module = versions.GO_CLIENT_MODULE
    version = versions.go_module(module, "github.com/apache/pulsar-client-go")

    def build(target: Path) -> None:
        folder = target / "source"
        shutil.copytree(module, folder)
        (folder / "main.go").write_text(source, "utf-8")
        _compile(module, ["-o", f"{target}/program", "."], "a Go program", folder)

    inputs = [source, sysconfig.get_platform(), (module / "go.sum").read_text("utf-8")]
    key = hashlib.sha256("\n".join(inputs).encode()).hexdigest()[:12]
    doing = f"build a program with pulsar-client-go {version}"
    return cache.artifact(f"go-program-{version}-{key}", build, doing=doing) / "program"


def _fetch_pulsar(target: Path) -> None:
    # Into the unfinished artifact, not Maven's repository: a failed download leaves no file.
    downloads = target / "download"
    maven = MavenContext(repo_cache=downloads, remote_repos=maven_mirror(Path.home()), timeout=60)
    project = maven.project("org.apache.pulsar", "pulsar-server-distribution")
    component = project.at_version(versions.PULSAR)
    archive = component.artifact(classifier="bin", packaging="tar.gz").resolve()
    with archive.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha512").hexdigest()
    if digest != versions.PULSAR_SHA512:
        raise SandboxError(
            f"the archive of Pulsar {versions.PULSAR} does not have the pinned digest",
            got=f"sha512 {digest}",
            remedy="check the mirror in Maven's settings, then run this again",
        )
    home = target / "home"
    home.mkdir()
    _run(["tar", "-xzf", str(archive), "-C", str(home), "--strip-components=1"], "unpack Pulsar")
    shutil.rmtree(downloads)


def _assembled_pulsar(version: str) -> Path:
    """Return the home directory of a release that Maven Central has as jars only."""
    lock, stock = versions.PULSAR_LOCKS[version], pulsar()
    key = hashlib.sha256(lock.read_bytes()).hexdigest()[:12]

    def fetch(target: Path) -> None:
        home = target / "home"
        shutil.copytree(stock / "bin", home / "bin")
        shutil.copytree(stock / "conf", home / "conf")
        (home / "lib").mkdir()
        _fetch_jars(lock, home / "lib")

    name = f"pulsar-{version}-{key}"
    return cache.artifact(name, fetch, doing=f"fetch Pulsar {version} (243 MB)") / "home"


def _fetch_jars(lock: Path, folder: Path) -> None:
    """Fetch the jars of a lock file into *folder*."""
    downloads = folder.with_name(f"{folder.name}-download")
    maven = MavenContext(repo_cache=downloads, remote_repos=maven_mirror(Path.home()), timeout=60)
    with ThreadPoolExecutor(8) as threads:
        pins = versions.jars(lock)
        list(threads.map(lambda jar: _fetch_jar(maven, jar, pins[jar], folder), pins))
    shutil.rmtree(downloads)


def _fetch_jar(maven: MavenContext, coordinates: str, digest: str, folder: Path) -> None:
    group, artifact, version, *classifier = coordinates.split(":")
    component = maven.project(group, artifact).at_version(version)
    jar = component.artifact(classifier="".join(classifier), packaging="jar").resolve()
    actual = hashlib.sha256(jar.read_bytes()).hexdigest()
    if actual != digest:
        raise SandboxError(
            f"{coordinates} does not have the pinned digest",
            got=f"sha256 {actual}",
            remedy="check the mirror in Maven's settings, then run this again",
        )
    # All of lib/ is on the class path. The group in the name separates jars of equal names.
    shutil.move(jar, folder / f"{group}-{jar.name}")


def maven_mirror(user_home: Path) -> dict[str, str] | None:
    """Return the mirror of Maven Central in the user's ``~/.m2/settings.xml``, or None.

    Passwords of mirrors are not read there; the downloader reads them from ``~/.netrc``.
    """
    settings = user_home / ".m2" / "settings.xml"
    if not settings.is_file():
        return None
    for mirror in ET.parse(settings).iterfind(".//{*}mirror"):  # noqa: S314 - the user's
        covered = {part.strip() for part in (mirror.findtext("{*}mirrorOf") or "").split(",")}
        url = (mirror.findtext("{*}url") or "").strip()
        if url and "!central" not in covered and covered & {"*", "external:*", "central"}:
            return {"mirror": url.rstrip("/")}
    return None


def _go_build(  # noqa: PLR0913  arguments of `go build`
    name: str,
    version: str,
    module: Path,
    *,
    output: str,
    stamps: Sequence[str],
    tags: Sequence[str] = (),
) -> Path:
    linker = ["-s", "-w", *(f"-X {stamp}" for stamp in stamps)]
    arguments = ["-trimpath", "-ldflags", " ".join(linker)]
    if tags:
        arguments += ["-tags", ",".join(tags)]

    def build(target: Path) -> None:
        # With an empty *output* go writes one program per `tool` line of go.mod into the folder.
        command = [*arguments, "-o", f"{target}/{output}", "tool"]
        _compile(module, command, f"{name} {version}", module)

    # The platform is part of the key: machines of two architectures may share a cache.
    inputs = "\n".join([*arguments, sysconfig.get_platform()]).encode()
    inputs += (module / "go.mod").read_bytes() + (module / "go.sum").read_bytes()
    key = hashlib.sha256(inputs).hexdigest()[:12]
    doing = f"build {name} {version}" + (" (some minutes, once)" if name == "kubernetes" else "")
    return cache.artifact(f"{name}-{version}-{key}", build, doing=doing)


def _compile(module: Path, arguments: Sequence[str], name: str, folder: Path) -> None:
    go = toolchain.go(versions.go_language(module))
    environment = {**os.environ, "CGO_ENABLED": "0", "GOTOOLCHAIN": "local"}
    environment.pop("GOROOT", None)  # of another installation of go
    _run([str(go), "build", *arguments], f"build {name}", cwd=folder, env=environment)


def _run(
    command: list[str], action: str, *, cwd: Path | None = None, env: dict[str, str] | None = None
) -> None:
    run = subprocess.run(  # noqa: S603 - a command composed above
        command, cwd=cwd, env=env, check=False, text=True, capture_output=True
    )
    if run.returncode != 0:
        raise SandboxError(
            f"could not {action}:\n{run.stderr[-3000:]}",
            remedy="fix the cause and run this again; the step starts from scratch",
        )
