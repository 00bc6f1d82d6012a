"""Journey 1: a RetryPolicy is applied → topics, subscriptions, grants, a ConfigMap → its status.

```
handlers ─enqueue─▶ reconciler:  claims ─▶ desired ─▶ observe ─▶ diff ─▶ apply ─▶ outcome
                                   │                     │
                                   └── ADMISSION         └── PREFLIGHT: can it be built there?
```

All checks come before the first write: a policy that is refused leaves the broker untouched.

Reading order:

- the values: `request`, `desired`, `actions` and `outcome`;
- the spine: `reconciler`, which calls `claims`, `desired`, `observe`, `checks`, `diff` (with
  `ownership`), `apply` and `warnings`;
- deletion: `finalize`;
- BrokerConnections: `connection`;
- drift and stalled policies: `poller`;
- health of the topics: `health`, `findings` and `health_checks`; start: `handlers`, which also
  computes which policies a change affects.
"""
