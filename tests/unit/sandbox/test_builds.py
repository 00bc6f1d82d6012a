from __future__ import annotations

from pathlib import Path

import pytest

from sandbox import builds

NAMESPACES = ["", ' xmlns="urn:settings"']


def settings(home: Path, mirror_of: str, namespace: str = "") -> None:
    file = home / ".m2" / "settings.xml"
    file.parent.mkdir()
    file.write_text(
        f"<settings{namespace}><mirrors><mirror><id>m</id><url> https://mirror.test/central/ </url>"
        f"<mirrorOf>{mirror_of}</mirrorOf></mirror></mirrors></settings>"
    )


def test_without_settings_maven_central_itself_is_asked(tmp_path: Path) -> None:
    assert builds.maven_mirror(tmp_path) is None


@pytest.mark.parametrize("namespace", NAMESPACES)
@pytest.mark.parametrize("mirror_of", ["*", "central", "external:*", "snapshots, central"])
def test_a_mirror_of_maven_central_is_asked_instead(
    tmp_path: Path, mirror_of: str, namespace: str
) -> None:
    settings(tmp_path, mirror_of, namespace)
    assert builds.maven_mirror(tmp_path) == {"mirror": "https://mirror.test/central"}


@pytest.mark.parametrize("mirror_of", ["snapshots", "*,!central"])
def test_a_mirror_of_something_else_is_not_asked(tmp_path: Path, mirror_of: str) -> None:
    settings(tmp_path, mirror_of)
    assert builds.maven_mirror(tmp_path) is None
