"""Expectation of an error by its reason."""

from __future__ import annotations

import pytest

from redrive.errors import RedriveError


def raises(reason: str, match: str | None = None) -> pytest.RaisesExc[RedriveError]:
    """Expect an error with *reason*, as `pytest.raises` expects one of a class."""
    return pytest.raises(RedriveError, match=match, check=lambda error: error.reason == reason)
