"""Shops, as for provisioning."""

from __future__ import annotations

from tests.integration.provision.conftest import make_shop

__all__ = ["make_shop"]
