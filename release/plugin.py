"""The plugin of kubectl as one file, its archive and the manifest for krew.

The file is a zip application for Python 3.11 or newer: redrive with the packages in pure Python
that the commands about a cluster need. Commands that need compiled packages, such as `lint`, name
the extra instead.
"""

from __future__ import annotations

import hashlib
import io
import tarfile
import zipfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import yaml

from redrive import __version__
from release import CHECKOUT, HOME

PACKAGES = (
    "click",
    "kubernetes",
    "urllib3",
    "PyYAML",
    "python-dateutil",
    "durationpy",
    "certifi",
    "oauthlib",
    "requests-oauthlib",
    "requests",
    "idna",
    "charset-normalizer",
    "typing_extensions",
)
"""Packages that the commands about a cluster import."""
TOO_LARGE = ("kubernetes/client/api/", "kubernetes/client/models/", "kubernetes/aio/")
_MAIN = "import sys\nfrom redrive.cli.main import main\nsys.exit(main())\n"
_TIME = (1980, 1, 1, 0, 0, 0)


def write(target: Path) -> None:
    """Write the archive of the plugin and its krew manifest into a folder."""
    program = b"#!/usr/bin/env python3\n" + _zipped()
    archive = target / f"kubectl-redrive-{__version__}.tar.gz"
    with tarfile.open(archive, "w:gz") as packed:
        license_text = (CHECKOUT / "LICENSE").read_bytes()
        for name, content, mode in (
            ("kubectl-redrive", program, 0o755),
            ("LICENSE", license_text, 0o644),
        ):
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(content), mode
            packed.addfile(entry, io.BytesIO(content))
    manifest = _krew(archive.name, hashlib.sha256(archive.read_bytes()).hexdigest())
    text = yaml.safe_dump(manifest, sort_keys=False)
    (target / f"redrive-{__version__}-krew.yaml").write_text(text, "utf-8")


def _zipped() -> bytes:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as packed:
        packed.writestr(zipfile.ZipInfo("__main__.py", _TIME), _MAIN)
        for name, file in sorted({**dict(_own()), **dict(_foreign())}.items()):
            packed.writestr(zipfile.ZipInfo(name, _TIME), file.read_bytes(), zipfile.ZIP_DEFLATED)
    return content.getvalue()


def _own() -> Iterator[tuple[str, Path]]:
    source = CHECKOUT / "operator"
    for file in (source / "redrive").rglob("*.py"):
        yield file.relative_to(source).as_posix(), file


def _foreign() -> Iterator[tuple[str, Path]]:
    """Yield the Python files and certificates of the packages, and their licences."""
    for package in PACKAGES:
        for file in metadata.files(package) or ():
            name = file.as_posix()
            is_license = ".dist-info/" in name and "LICEN" in name.upper()
            is_source = file.suffix in {".py", ".pem"} and not name.startswith((*TOO_LARGE, "../"))
            if is_license or is_source:
                yield name, Path(str(file.locate()))


def _krew(archive: str, digest: str) -> dict[str, object]:
    address = f"{HOME}/releases/download/v{__version__}/{archive}"
    platforms = [
        {
            "selector": {"matchLabels": {"os": system}},
            "uri": address,
            "sha256": digest,
            "bin": "kubectl-redrive",
            "files": [
                {"from": "kubectl-redrive", "to": "."},
                {"from": "LICENSE", "to": "."},
            ],
        }
        for system in ("linux", "darwin")
    ]
    return {
        "apiVersion": "krew.googlecontainertools.github.com/v1alpha2",
        "kind": "Plugin",
        "metadata": {"name": "redrive"},
        "spec": {
            "version": f"v{__version__}",
            "homepage": HOME,
            "shortDescription": "Find and replay dead letters of Apache Pulsar",
            "description": (
                "Shows RetryPolicies that need attention, plans, runs and follows Replays of\n"
                "dead letters, and frees keys that a failing message blocks.\n"
            ),
            "caveats": (
                "Needs Python 3.11 or newer. Commands that read messages or manifests need the\n"
                "wheel of the release, with its extra cli.\n"
            ),
            "platforms": platforms,
        },
    }
