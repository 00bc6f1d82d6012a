"""Print the SBOM of the image that this runs in, in the format of CycloneDX.

It lists the Python packages, the packages of Debian or Ubuntu, and the JARs of Spark. Equal images
give equal text. It needs nothing but Python.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from importlib.metadata import distributions
from pathlib import Path

STATUS = Path("/var/lib/dpkg/status")
RELEASE = Path("/etc/os-release")
JARS = Path("/opt/redrive/spark/jars")
_FIELD = re.compile(r"^(Package|Version|Architecture|Status): (.+)$", re.MULTILINE)
_JAR = re.compile(r"(.+?)-(\d[\w.+-]*)\.jar")


def component(name: str, version: str, url: str = "") -> dict[str, str]:
    """Return a component; *url* is its package URL."""
    identity = {"purl": url, "bom-ref": url} if url else {}
    return {"type": "library", "name": name, "version": version, **identity}


def python_packages() -> Iterator[dict[str, str]]:
    """Yield the distributions that this Python finds."""
    for package in distributions():
        name = re.sub(r"[-_.]+", "-", package.metadata["Name"]).lower()
        yield component(name, package.version, f"pkg:pypi/{name}@{package.version}")


def system_packages(status: str, distribution: str) -> Iterator[dict[str, str]]:
    """Yield the installed packages of a `dpkg` status file."""
    for paragraph in status.split("\n\n"):
        fields = dict(_FIELD.findall(paragraph))
        if fields.get("Status", "").endswith(" installed"):
            name, version = fields["Package"], fields["Version"]
            url = f"pkg:deb/{distribution}/{name}@{version}?arch={fields['Architecture']}"
            yield component(name, version, url)


def jars(folder: Path) -> Iterator[dict[str, str]]:
    """Yield the JARs of a folder, by name and version of their files."""
    for jar in folder.glob("*.jar"):
        if match := _JAR.fullmatch(jar.name):
            yield component(match[1], match[2])


def sbom() -> str:
    """Return the whole SBOM."""
    distribution = dict(re.findall(r'^(\w+)="?([^"\n]*)', RELEASE.read_text("utf-8"), re.MULTILINE))
    status = STATUS.read_text("utf-8") if STATUS.exists() else ""
    components = [
        *python_packages(),
        *system_packages(status, distribution["ID"]),
        *jars(JARS),
    ]
    unique = {json.dumps(part, sort_keys=True): part for part in components}
    parts = [unique[text] for text in sorted(unique)]
    document = {"bomFormat": "CycloneDX", "specVersion": "1.6", "version": 1, "components": parts}
    return json.dumps(document, indent=1, sort_keys=True)


if __name__ == "__main__":
    sys.stdout.write(f"{sbom()}\n")
