from __future__ import annotations

import pytest

from redrive.errors import InvalidSpecError
from redrive.policy.values import parse_size


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1Ki", 1024),
        ("512Mi", 512 * 2**20),
        ("10Gi", 10 * 2**30),
        ("3Ti", 3 * 2**40),
        ("1k", 1_000),
        ("1M", 10**6),
        ("2G", 2 * 10**9),
        ("1T", 10**12),
    ],
)
def test_a_size_is_read_as_kubernetes_reads_a_quantity(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "text", ["", "1", "0Mi", "-1Mi", "1.5Gi", "1 Gi", "1GB", "1gi", "1Mi\n", "Gi", "\u0661Mi"]
)
def test_what_has_no_unit_or_is_no_whole_number_is_refused(text: str) -> None:
    with pytest.raises(InvalidSpecError, match="write it like 512Mi or 10Gi"):
        parse_size(text)
