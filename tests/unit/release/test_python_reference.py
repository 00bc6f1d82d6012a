"""The reference of the Python API: every public name, with its signature and its errors."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePosixPath

import pytest

import redrive
from redrive import middleware, testing
from release import python_reference
from tests.unit.test_docs import LINK

Pages = Mapping[str, str]
CONSUMERS = "reference/python/consumers.md"


@pytest.fixture(scope="module")
def pages() -> Pages:
    return python_reference.render()


def section(page: str, heading: str) -> str:
    """Return the text below a heading."""
    (text,) = page.split(f"\n## {heading}\n")[1:]
    return text.split("\n## ")[0]


@pytest.mark.parametrize(
    ("module", "public"),
    [
        ("redrive", redrive.__all__),
        ("redrive.middleware", middleware.__all__),
        ("redrive.testing", testing.__all__),
        ("redrive.prometheus", ["HandlerMetrics", "count", "follow"]),
        ("redrive.opentelemetry", ["Tracing", "follow"]),
    ],
)
def test_each_public_name_is_described_once(module: str, public: list[str], pages: Pages) -> None:
    parts = [part for part in python_reference.parts() if part.module == module]
    shared = {"Done"} if module == "redrive.middleware" else set()  # the same as redrive.Done
    assert sorted(name for part in parts for name in part.values) == sorted(set(public) - shared)
    for part in parts:
        page = pages[f"reference/python/{part.page}"]
        for name in part.values:
            assert len(section(page, name).split()) > 4, name


def test_links_of_the_reference_have_targets(pages: Pages) -> None:
    anchors = {
        f"{place}#{line.lstrip('# ').replace('.', '').lower()}"
        for place, text in pages.items()
        for line in text.splitlines()
        if line.startswith("#")
    }
    links = 0
    for place, text in pages.items():
        for link in LINK.findall(text):
            page, hash_sign, anchor = link.partition("#")
            if hash_sign and (page.startswith("python/") or "/" not in page):
                target = str(PurePosixPath(place).parent / page) if page else place
                assert f"{target}#{anchor}" in anchors, f"{place}: {link}"
                links += 1
    assert links > 100


def test_signature_has_options_and_values_of_constants(pages: Pages) -> None:
    consumer = section(pages[CONSUMERS], "RetryConsumer")
    assert "\n    ack_timeout: float | timedelta | None = ...,\n" in consumer
    assert "\n    timeout: float | timedelta | None = timedelta(seconds=60),\n" in consumer
    policy = section(pages["reference/python/policies.md"], "Policy")
    assert "\n    max_retries: int = 16,\n" in policy
    assert "\n    topic: naming.TopicName | str,\n" in policy


def test_sections_of_a_docstring_become_tables(pages: Pages) -> None:
    receive = section(pages[CONSUMERS], "RetryConsumer").split("### RetryConsumer.receive\n")[1]
    assert "| error | meaning |\n|---|---|\n| [`ConsumerStoppedError`](errors.md#" in receive


def test_inherited_members_are_described_at_their_base(pages: Pages) -> None:
    tests = section(pages["reference/python/tests-without-a-broker.md"], "InMemoryConsumer")
    assert "Base: [`RetryConsumer`](consumers.md#retryconsumer)." in tests
    assert "### InMemoryConsumer.dead_letters" in tests
    assert "### InMemoryConsumer.reconsume_later" not in tests


def test_example_in_a_docstring_is_a_block_of_code() -> None:
    blocks = list(
        python_reference.blocks_of(
            "Do it.\n\n    do(it)\n\nRaises:\n    OSError: no.\n        It.\n"
        )
    )
    assert blocks[:2] == ["Do it.", "```python\ndo(it)\n```"]
    assert blocks[2] == "| error | meaning |\n|---|---|\n| `OSError` | no. It. |"
