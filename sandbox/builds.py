"""Fetches Pulsar's official distribution; builds etcd, Kubernetes, Helm from their Go modules.

Called when a sandbox starts, and by ``make test`` beforehand, so that no test waits for a compiler.
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


def prepare() -> None:
    """Fetch or build whatever is missing, so that nothing later has to wait for it.

    Raises:
        SandboxError: something could not be had.
    """
    pulsar()
    toolchain.java_home(for_spark=True)
    etcd()
    kubernetes()
    helm()


def pulsar(version: str = versions.PULSAR) -> Path:
    """The home directory of a release of Pulsar, one of `versions.PULSARS`.

    Raises:
        SandboxError: what was fetched is not what was pinned.
    """
    if version != versions.PULSAR:
        return _assembled_pulsar(version)
    doing = f"fetch Pulsar {versions.PULSAR} (245 MB)"
    return cache.artifact(f"pulsar-{versions.PULSAR}", _fetch_pulsar, doing=doing) / "home"


def etcd() -> Path:
    """The directory that holds ``etcd``.

    Raises:
        SandboxError: it did not compile.
    """
    version = versions.go_module(versions.ETCD_MODULE, "go.etcd.io/etcd/server/v3")
    return _go_build("etcd", version, versions.ETCD_MODULE, output="etcd", stamps=())


def kubernetes() -> Path:
    """The directory that holds ``kube-apiserver``, ``kube-controller-manager`` and ``kubectl``.

    Raises:
        SandboxError: they did not compile.
    """
    version = versions.go_module(versions.KUBERNETES_MODULE, "k8s.io/kubernetes")
    major, minor, _ = version.removeprefix("v").split(".", 2)
    variables = (f"gitVersion={version}", f"gitMajor={major}", f"gitMinor={minor}")
    stamps = [f"k8s.io/component-base/version.{variable}" for variable in variables]
    return _go_build("kubernetes", version, versions.KUBERNETES_MODULE, output="", stamps=stamps)


def helm() -> Path:
    """The directory that holds ``helm``.

    Raises:
        SandboxError: it did not compile.
    """
    version = versions.go_module(versions.HELM_MODULE, "helm.sh/helm/v3")
    # Which Kubernetes a chart is rendered for that is not installed anywhere.
    cluster = versions.go_module(versions.HELM_MODULE, "k8s.io/api").split(".")
    stamps = [
        f"helm.sh/helm/v3/internal/version.version={version}",
        "helm.sh/helm/v3/pkg/chartutil.k8sVersionMajor=1",
        f"helm.sh/helm/v3/pkg/chartutil.k8sVersionMinor={cluster[1]}",
    ]
    return _go_build("helm", version, versions.HELM_MODULE, output="helm", stamps=stamps)


def promtool() -> Path:
    """The directory that holds ``promtool``, which evaluates alerts.

    Raises:
        SandboxError: it did not compile.
    """
    version = versions.go_module(versions.PROMTOOL_MODULE, "github.com/prometheus/prometheus")
    # Without the clients of clouds, which find what to scrape.
    tags = "remove_all_sd", "slicelabels"
    return _go_build(
        "promtool", version, versions.PROMTOOL_MODULE, output="promtool", stamps=(), tags=tags
    )


def _fetch_pulsar(target: Path) -> None:
    # Into the unfinished artifact, not Maven's own repository: nothing half-loaded stays behind.
    downloads = target / "download"
    maven = MavenContext(repo_cache=downloads, remote_repos=maven_mirror(Path.home()), timeout=60)
    project = maven.project("org.apache.pulsar", "pulsar-server-distribution")
    component = project.at_version(versions.PULSAR)
    archive = component.artifact(classifier="bin", packaging="tar.gz").resolve()
    with archive.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha512").hexdigest()
    if digest != versions.PULSAR_SHA512:
        raise SandboxError(
            f"the archive of Pulsar {versions.PULSAR} is not the one that was pinned",
            got=f"sha512 {digest}",
            remedy="look at where Maven's settings send the download, then run this again",
        )
    home = target / "home"
    home.mkdir()
    _run(["tar", "-xzf", str(archive), "-C", str(home), "--strip-components=1"], "unpack Pulsar")
    shutil.rmtree(downloads)


def _assembled_pulsar(version: str) -> Path:
    """The home directory of a release that is in Maven Central as jars only."""
    lock, stock = versions.PULSAR_LOCKS[version], pulsar()
    key = hashlib.sha256(lock.read_bytes()).hexdigest()[:12]

    def fetch(target: Path) -> None:
        home, downloads = target / "home", target / "download"
        shutil.copytree(stock / "bin", home / "bin")
        shutil.copytree(stock / "conf", home / "conf")
        (home / "lib").mkdir()
        maven = MavenContext(
            repo_cache=downloads, remote_repos=maven_mirror(Path.home()), timeout=60
        )
        with ThreadPoolExecutor(8) as threads:
            pins = versions.jars(lock)
            list(threads.map(lambda jar: _fetch_jar(maven, jar, pins[jar], home / "lib"), pins))
        shutil.rmtree(downloads)

    name = f"pulsar-{version}-{key}"
    return cache.artifact(name, fetch, doing=f"fetch Pulsar {version} (243 MB)") / "home"


def _fetch_jar(maven: MavenContext, coordinates: str, digest: str, folder: Path) -> None:
    group, artifact, version, *classifier = coordinates.split(":")
    component = maven.project(group, artifact).at_version(version)
    jar = component.artifact(classifier="".join(classifier), packaging="jar").resolve()
    found = hashlib.sha256(jar.read_bytes()).hexdigest()
    if found != digest:
        raise SandboxError(
            f"{coordinates} is not the one that was pinned",
            got=f"sha256 {found}",
            remedy="look at where Maven's settings send the download, then run this again",
        )
    # The script puts all of lib/ on the class path; its group keeps two of one name apart.
    shutil.move(jar, folder / f"{group}-{jar.name}")


def maven_mirror(user_home: Path) -> dict[str, str] | None:
    """The mirror that the user's ``~/.m2/settings.xml`` names for Maven Central, or None.

    Passwords of mirrors are not read from there; the downloader takes them from ``~/.netrc``.
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


def _go_build(  # noqa: PLR0913  what `go build` takes
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
        go = toolchain.go(versions.go_language(module))
        # An empty *output* makes a folder of the target: one program per `tool` line of go.mod.
        command = [str(go), "build", *arguments, "-o", f"{target}/{output}", "tool"]
        environment = {**os.environ, "CGO_ENABLED": "0", "GOTOOLCHAIN": "local"}
        environment.pop("GOROOT", None)  # each go knows its own
        _run(command, f"build {name} {version}", cwd=module, env=environment)

    # Part of the key: two kinds of machine may share a cache.
    inputs = "\n".join([*arguments, sysconfig.get_platform()]).encode()
    inputs += (module / "go.mod").read_bytes() + (module / "go.sum").read_bytes()
    key = hashlib.sha256(inputs).hexdigest()[:12]
    doing = f"build {name} {version}" + (" (some minutes, once)" if name == "kubernetes" else "")
    return cache.artifact(f"{name}-{version}-{key}", build, doing=doing)


def _run(
    command: list[str], what: str, *, cwd: Path | None = None, env: dict[str, str] | None = None
) -> None:
    run = subprocess.run(  # noqa: S603 - a command composed above
        command, cwd=cwd, env=env, check=False, text=True, capture_output=True
    )
    if run.returncode != 0:
        raise SandboxError(
            f"could not {what}:\n{run.stderr[-3000:]}",
            remedy="fix what it says and run this again; it starts from scratch",
        )
