from __future__ import annotations

from tests.support.provisioned_policy import provision_policy

__all__ = ["provision_policy"]
