from __future__ import annotations

from tests.support.stage import set_stage

__all__ = ["set_stage"]
