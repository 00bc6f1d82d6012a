"""Real parts on one machine, for the demo and for tests: Pulsar, the API server, and the rest.

Start with `sandbox.sandbox.Sandbox`. Nothing outside of this folder, the demo and the
tests imports it: no part of it runs in production.
"""

from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[1]
"""Where `import sandbox` finds this package."""
SOURCE_ROOT = CHECKOUT / "operator"
"""Where `import redrive` finds the product."""
