"""The fault of the client that `docs/design/delivery-guarantees.md` reports."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from sandbox.pulsar import SUPERUSER
from tests.support.deduplication import deduplicate
from tests.support.provisioned_policy import ProvisionedPolicy

PROGRAM = Path(__file__).parents[3] / "docs" / "design" / "numbered_twice.py"
ROUNDS = 30  # the first one as a rule; on a busy machine the producer may be back too early


def test_client_has_receipts_for_messages_that_are_lost(
    provision_policy: Callable[..., ProvisionedPolicy],
) -> None:
    """Once it fails, the client is cured: say so on the page."""
    provisioned = provision_policy()
    broker = provisioned.broker
    lost = 0
    for number in range(ROUNDS):
        topic = replace(provisioned.policy.topic, local=f"numbered-{number}")
        provisioned.create(topic, "fulfilment", 0)
        deduplicate(broker, topic)
        options = [broker.service_url, broker.admin_url, str(topic), broker.token(SUPERUSER)]
        program = subprocess.run(
            [sys.executable, PROGRAM, *options],
            capture_output=True,
            text=True,
            check=True,
            timeout=120,
        )
        match = re.fullmatch(r"16 receipts, (\d+) stored\n", program.stdout)
        assert match is not None, program.stdout
        lost += 16 - int(match.group(1))
        if lost:
            return
    raise AssertionError(lost)
