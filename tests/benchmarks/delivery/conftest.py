from __future__ import annotations

from tests.stage import set_stage

__all__ = ["set_stage"]
