"""Journey 1: a RetryPolicy is applied → topics, subscriptions, grants, a ConfigMap → its status.

```
handlers ─wake─▶ reconcile:  resolve ─▶ desired ─▶ observe ─▶ plan ─▶ apply ─▶ status
                               │                     │
                               └── conditions: is it admissible? ── can it be built there?
```

All checks come before the first write: a policy that is refused leaves the broker untouched.

Reading order: `facts` and `errors` (the words), `reconcile` (the spine), then in the order it
calls them `resolve`, `conditions`, `conflicts`, `desired`, `observe`, `ownership`, `plan` with its
`actions`, `apply`, `cautions`; `finalize`, `removal` and `farewell` for deletions; `connection` for
PulsarConnections; `rounds` for drift; `health` for how the topics fare; `handlers` for what wakes
it all.
"""
