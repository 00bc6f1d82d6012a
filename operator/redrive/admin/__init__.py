"""The Pulsar admin REST client: the one door to a broker's administration.

Reading order: `errors`, `http` (a call and what can become of it), `batcher` (many
requests, one call), `model` (what is read and written), `client` (`Admin`).
"""
