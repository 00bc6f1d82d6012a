"""The generated files of a release, each from one source: chart README, manifests, archives.

`python -m release` writes those that are kept in the repository; `make dist` calls
`release.archives`.
"""

from pathlib import Path

from redrive import __version__

CHECKOUT = Path(__file__).resolve().parents[1]
"""The folder from which `import release` works."""
CHART = CHECKOUT / "charts" / "redrive"
HOME = "https://git.example/redrive"
"""The address of the repository; a placeholder until it is published."""


def page(path: str) -> str:
    """Return the absolute URL of a file of the repository, at this version."""
    return f"{HOME}/blob/v{__version__}/{path}"
