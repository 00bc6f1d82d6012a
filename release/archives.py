"""`make dist`: all files of a release except its images, with checksums.

Called as `python -m release.archives DIRECTORY`.
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from tempfile import TemporaryDirectory

from redrive import __version__
from release import CHART, CHECKOUT, manifests, plugin
from sandbox import chart

CHECKSUMS = "SHA256SUMS"


def build(target: Path) -> list[Path]:
    """Delete the content of *target*, write all files of a release there, and return them.

    Wheel, source archive, chart, install.yaml, kustomize base, files for GitOps, the plugin for
    krew; SHA256SUMS lists them.
    """
    if target.exists():
        shutil.rmtree(target)
    target.mkdir(parents=True)
    _run("-m", "hatchling", "build", "-d", str(target.absolute()))
    versions = f"--version={__version__}", f"--app-version={__version__}"
    chart.helm("package", str(CHART), f"--destination={target}", *versions)
    (target / f"redrive-{__version__}-install.yaml").write_text(manifests.install_yaml(), "utf-8")
    _archive_kustomize_base(target / f"redrive-{__version__}-kustomize.tar.gz")
    _archive_gitops(target / f"redrive-{__version__}-gitops.tar.gz")
    plugin.write(target)
    files = sorted(target.iterdir())
    sums = "".join(f"{_sha256(file)}  {file.name}\n" for file in files)
    (target / CHECKSUMS).write_text(sums, "ascii")
    return [*files, target / CHECKSUMS]


def _archive_kustomize_base(archive: Path) -> None:
    with TemporaryDirectory() as folder, tarfile.open(archive, "w:gz") as packed:
        base = Path(folder) / "redrive"
        manifests.write_kustomize_base(base)
        packed.add(base, arcname="redrive")


def _archive_gitops(archive: Path) -> None:
    """Pack both folders under their paths in the repository: examples refer to the other folder."""
    with tarfile.open(archive, "w:gz") as packed:
        for folder in ("gitops", "examples/gitops"):
            packed.add(CHECKOUT / folder, arcname=f"redrive/{folder}")


def _run(*arguments: str) -> None:
    subprocess.run([sys.executable, *arguments], cwd=CHECKOUT, check=True)  # noqa: S603


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m release.archives")
    parser.add_argument("directory", type=Path)
    for archive in build(parser.parse_args().directory):
        print(archive)  # noqa: T201  output of a command
