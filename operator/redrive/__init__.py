"""Retry and dead-letter topology for Apache Pulsar; see `redrive.delivery` for consumers."""
