"""How a size is written: a whole number of bytes with a unit, as Kubernetes writes quantities."""

from __future__ import annotations

import re

from redrive.errors import InvalidSpecError

PATTERN = "^[1-9][0-9]{0,14}(Ki|Mi|Gi|Ti|k|M|G|T)$"
"""What `parse` reads, for other systems to check: one that RE2 and Python read alike."""
_UNITS: dict[str, int] = {
    unit: base**power
    for base, units in ((1024, ("Ki", "Mi", "Gi", "Ti")), (1000, ("k", "M", "G", "T")))
    for power, unit in enumerate(units, start=1)
}


def parse(text: str) -> int:
    """Read a size; return bytes.

    Raises:
        InvalidSpecError: it is not written like `512Mi` or `10Gi`.
    """
    if not re.fullmatch(PATTERN, text, re.ASCII):
        raise InvalidSpecError(
            "a size is a whole number with one of the units Ki, Mi, Gi, Ti, k, M, G, T",
            got=text[:64],
            remedy="write it like 512Mi or 10Gi",
        )
    digits = text.rstrip("KMGTki")
    return int(digits) * _UNITS[text.removeprefix(digits)]
