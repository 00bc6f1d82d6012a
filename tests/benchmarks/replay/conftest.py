from __future__ import annotations

from tests.integration.replay.conftest import provision_policy, replay_token, spark

__all__ = ["provision_policy", "replay_token", "spark"]
