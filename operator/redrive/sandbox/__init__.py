"""Real parts on one machine, for the demo and for tests: Pulsar, the API server, and the rest.

Start with `redrive.sandbox.sandbox.Sandbox`. Nothing outside of this folder, the demo and the
tests imports it: no part of it runs in production.
"""
