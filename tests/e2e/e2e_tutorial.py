"""The tutorial on the sandbox, pasted block by block into one shell."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from sandbox import builds
from sandbox.sandbox import Sandbox
from tests.support.documented import ROOT, SANDBOX, Block, blocks

pytestmark = pytest.mark.timeout(600)  # as of the demo: two Replays on a loaded machine
FILES = iter(("consumer.py", "producer.py"))


def test_tutorial_on_the_sandbox_shows_what_it_says(installed: Sandbox, tmp_path: Path) -> None:
    token = installed.pulsar.token_file("superuser").read_text("ascii").strip()
    programs = [Path(sys.executable).parent, builds.kubernetes(), os.environ["PATH"]]
    environment = os.environ | {
        "HOME": str(tmp_path),
        "KUBECONFIG": str(installed.cluster.kubeconfig),
        "PATH": os.pathsep.join(map(str, programs)),
        "PULSAR_ADMIN_URL": installed.pulsar.admin_url,
        "PULSAR_SERVICE_URL": installed.pulsar.service_url,
        "PULSAR_TOKEN": token,
        "PYTHONPATH": str(ROOT / "operator"),
    }
    script = "redrive() { python3 -m redrive \"$@\"; }\ntrap 'kill $(jobs -p) 2> /dev/null' EXIT\n"
    run = subprocess.run(
        ["/bin/bash", "-euo", "pipefail", "-c", script + "\n".join(map(pasted, blocks(SANDBOX)))],
        cwd=ROOT, env=environment, check=False, text=True, stdout=subprocess.PIPE,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout
    sections: defaultdict[str, str] = defaultdict(str)
    for part in run.stdout.split("\n## ")[1:]:
        heading, output = part.split("\n", 1)
        sections[heading] += output
    assert "orders-oven condition met" in sections["3. Apply a connection and a policy"]
    causes = re.findall(r"^ *(\d+)  (\w+) ", sections["5. Find the cause"], re.MULTILINE)
    assert causes[-2:] == [("10", "OvenBroken"), ("2", "JSONDecodeError")]
    replayed = sections["6. Replay the orders"]
    assert "Complete: 10 moved" in replayed
    baked = re.findall(r"^baked (\d)$", replayed, re.MULTILINE)
    assert sorted(baked) == [str(number) for number in range(10)]
    assert "exit code 3" in sections["7. Replay what was not fixed"]


def pasted(block: Block) -> str:
    """Return the lines by which a reader follows *block*: commands, or a file to save."""
    if block.language == "python":
        return f"cat > ~/bakery/{next(FILES)} <<'FILE'\n{block.text}FILE\n"
    return f"echo; echo '## {block.heading}'\n{block.text}"
