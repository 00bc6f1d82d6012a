"""The Pulsar admin REST client: the only access to a broker's administration.

Reading order: `errors`, `model` (values read and written) and `policies` (topic policies); `guards`
(conditions for sending a call), `shares` (processor time of namespaces), `connector` (connections),
`http` (one call and its failures), `granting` (one call for many requests), `client` (`Admin`).
"""
