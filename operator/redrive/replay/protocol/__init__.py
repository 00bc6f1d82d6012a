"""Pulsar's binary protocol, as far as sending needs it; for one thread, without reconnecting.

The client for Python takes more time for each message than the broker does, and can't name the last
message of a batch. What is here sends a first try; whatever else happens is left to the client.
"""
