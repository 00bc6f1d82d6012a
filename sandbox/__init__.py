"""Real components on one machine, for the demo and the tests: Pulsar, an API server, Spark.

Start reading at `sandbox.sandbox.Sandbox`. Only the demo, the tests and `release` import this
package; no part of it runs in production.
"""

from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[1]
"""The folder from which `import sandbox` works."""
SOURCE_ROOT = CHECKOUT / "operator"
"""The folder from which `import redrive` works."""
