"""`make site`: the pages as a website, with warnings as errors.

Called as `python -m release.site DIRECTORY`. `stage` copies docs/ and the pages outside of it, and
adds the reference of the Python API. `build` runs Zensical, which has a lock and an environment of
its own, over the copy.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

from release import CHART, CHECKOUT, python_reference
from sandbox import toolchain

CONFIGURATION = CHECKOUT / "mkdocs.yml"
LOCK = CHECKOUT / "release" / "site.lock"
DOCS = CHECKOUT / "docs"
ADDED: Mapping[Path, str] = {
    CHECKOUT / "README.md": "project/readme.md",
    CHECKOUT / "CONTRIBUTING.md": "project/contributing.md",
    CHECKOUT / "SECURITY.md": "project/security.md",
    CHECKOUT / "CHANGELOG.md": "project/changelog.md",
    CHART / "README.md": "project/chart.md",
}
"""Pages outside of docs/ → their places in the site."""
_LINK = re.compile(r"\[(?P<text>[^]]+)\]\((?P<path>[^)\s#]+)(?P<anchor>#[^)\s]*)?\)")


def stage(target: Path) -> None:
    """Copy the configuration and all pages to *target*; links lead to pages of the site only."""
    ignored = shutil.ignore_patterns("*.py", "__pycache__")
    shutil.copytree(DOCS, target / "docs", ignore=ignored)
    shutil.copy(CONFIGURATION, target)
    places = {page: str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")} | dict(ADDED)
    for page, place in places.items():
        staged = target / "docs" / place
        staged.parent.mkdir(exist_ok=True)
        relinked = _LINK.sub(_relinked(page, Path(place).parent), page.read_text("utf-8"))
        staged.write_text(relinked, "utf-8")
    (target / "docs" / python_reference.FOLDER).mkdir()
    for place, text in python_reference.render().items():
        (target / "docs" / place).write_text(text, "utf-8")


def _relinked(page: Path, folder: Path) -> Callable[[re.Match[str]], str]:
    """Return the replacement of a link of *page*, which is in *folder* of the site.

    A file of the repository that is not in the site has no address; its path is shown instead.
    """

    def replacement(link: re.Match[str]) -> str:
        if "://" in link["path"]:
            return link[0]
        file = (page.parent / link["path"]).resolve()
        if file in ADDED:
            file = DOCS / ADDED[file]
        if file.is_relative_to(DOCS) and file.suffix != ".py":
            return f"[{link['text']}]({os.path.relpath(file, DOCS / folder)}{link['anchor'] or ''})"
        path = f"`{file.relative_to(CHECKOUT)}`"
        return path if link["text"].strip("`") in path else f"{link['text']} ({path})"

    return replacement


def build(target: Path) -> None:
    """Replace *target* by the site.

    Raises:
        subprocess.CalledProcessError: there is a warning or an error, which was shown.
    """
    zensical = toolchain.python_environment(LOCK) / "bin" / "zensical"
    with TemporaryDirectory(prefix="redrive-site-") as folder:
        stage(Path(folder))
        subprocess.run(  # noqa: S603
            [zensical, "build", "--strict"],
            cwd=folder,
            check=True,
            env=os.environ | {"NO_COLOR": "1"},
        )
        if target.exists():
            shutil.rmtree(target)
        shutil.copytree(Path(folder) / "site", target)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m release.site")
    parser.add_argument("target", type=Path)
    try:
        build(parser.parse_args().target)
    except subprocess.CalledProcessError as error:
        sys.exit(f"the site has warnings or errors, or was not built: exit {error.returncode}")
