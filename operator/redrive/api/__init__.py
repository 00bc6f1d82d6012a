"""The `redrive.io/v1alpha1` API: RetryPolicy, Replay and PulsarConnection as typed values.

The models are the one statement of the API: the CRDs in `crds/` are generated from them, and the
operator reads objects through them. What the API server can refuse is refused at admission, by
rules that stand beside the fields they guard; the same values are refused when an object is read,
because it may be older than the rule.

Reading order: `rules`, `model`, `fields`, `ladder`, `choices`, `topology`; `connection`,
`retrypolicy`, `replay`, `conditions`; `parsing` (object → model); `kinds` and `crds` (models →
CRDs).
"""

from __future__ import annotations

GROUP = "redrive.io"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"
