"""Middleware of consumers, one concern in each file; `chain` is the protocol."""
