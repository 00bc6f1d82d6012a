"""Reading of a topic between two points: `reader`, the spine, returns messages in order.

Reading order: `positions`, `bitmap` (sets of entries), `ranges`; `frames`, `session`, `stored` and
`entries` (the Pulsar binary protocol, and stored entries); `broker` (connections, and
snapshots of a topic); `rows` (a message as columns); `reader`.
"""
