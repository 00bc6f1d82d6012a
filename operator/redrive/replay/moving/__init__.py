"""One range → the target, each message once: `mover`, the spine: send, receipt, acknowledge.

`task` says what to move. `sending` has the producers, `window` bounds what is on its way at a time,
`outcome` holds what became of each message. `tail` finds in a target what an earlier try has
stored.
"""
