"""What a release is made of, generated from one source each: chart README, manifests, archives.

`python -m release` writes what is kept in the repository; `make dist` calls `release.archives`.
"""

from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[1]
"""Where `import release` finds this package."""
CHART = CHECKOUT / "charts" / "redrive"
