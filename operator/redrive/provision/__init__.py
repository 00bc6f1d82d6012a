"""Journey 1: a RetryPolicy is applied → topics, subscriptions, grants, a ConfigMap → its status.

```
handlers ─enqueue─▶ reconcile:  resolve ─▶ desired ─▶ observe ─▶ diff ─▶ apply ─▶ outcome
                                   │                     │
                                   └── ADMISSION         └── PREFLIGHT: can it be built there?
```

All checks come before the first write: a policy that is refused leaves the broker untouched.

Reading order:

- the words: `facts`, `actions`, `outcome` and `errors`;
- the spine: `reconcile`, then `converge`, which calls `resolve` (with `admission_checks` and
  `conflicts`), `desired` (with `topic_policies`), `observe`, `preflight_checks`, `diff` (with
  `ownership`), `apply` and `status_warnings`; `pause` for policies that are paused or only observe;
- deletions: `finalize`, `removal`, `finalizer` and `deletion_events`;
- PulsarConnections: `connection`;
- drift: `resync`, which asks `namespace_facts` and `stall_checks`, within a `rate_limit`;
- how the topics fare: `health`; what starts it all: `handlers`, and `queues`, which says what a
  change affects.
"""
