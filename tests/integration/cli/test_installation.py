"""Commands that install redrive, as the pages have them: charts rendered, objects admitted.

No node and no operator run here. `helm` renders, and the API server checks the result as a dry
run; waits check once. `make e2e-node` runs the same commands in a cluster.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from sandbox import builds
from sandbox.kubernetes import Cluster
from tests.support.documented import INSTALL, QUICK_START, README, ROOT, commands

pytestmark = pytest.mark.xdist_group("control plane")

PROGRAMS = r"""
pulsar() { :; }; pulsar-admin() { :; }; pulsar-client() { :; }; redrive() { :; }; sleep() { :; }
helm() {
  [ "$1" = upgrade ] || return 0
  local word words=()
  for word in "${@:2}"; do
    case $word in --install|--create-namespace|--reuse-values) ;; *) words+=("$word");; esac
  done
  command helm template "${words[@]}" --no-hooks --set crds.install=false > rendered.yaml
  command kubectl apply --dry-run=server --server-side --force-conflicts -f rendered.yaml
}
kubectl() {
  case " $* " in
    *" rollout "*) ;;
    *" logs "*) echo handled;;
    *" delete "*) command kubectl "$@" --dry-run=server;;
    *" create token "*) echo token;;
    *" wait "*) local seen
      seen=$(command kubectl "$@" --timeout=0s 2>&1) || [[ $seen = *"not met"* ]] \
        || { echo "$seen"; false; };;
    *) command kubectl "$@";;
  esac
}
"""


PAGES = {
    "readme": [commands(README, "Use it on your cluster")],
    "install": [
        commands(QUICK_START),
        commands(INSTALL, "The operator"),
        commands(INSTALL, "Delete a namespace of the list `namespaces`"),
        commands(INSTALL, "Run outside of the cluster"),
        commands(INSTALL, "Uninstall"),
    ],
}


@pytest.mark.usefixtures("client")  # deletes all objects of redrive at the end
@pytest.mark.parametrize("name", PAGES)
def test_commands_of_a_page_are_admitted(api_server: Cluster, tmp_path: Path, name: str) -> None:
    names = {"redrive-system": f"{name}-system", "shop": f"{name}-shop"}

    def renamed(text: str) -> str:
        """Replace the namespaces, and no tenant or name in a path."""
        return re.sub(r"(?<![/\w-])(redrive-system|shop)(?![\w.-])", lambda m: names[m[0]], text)

    api_server.objects.create_namespace(names["redrive-system"])
    for folder in ("01-first-policy", "02-deployment"):
        (tmp_path / "examples" / folder).mkdir(parents=True)
        for file in (ROOT / "examples" / folder).glob("*.*"):
            text = file.read_text("utf-8")
            (tmp_path / "examples" / folder / file.name).write_text(renamed(text), "utf-8")
    (tmp_path / "charts").symlink_to(ROOT / "charts")
    (tmp_path / "admin.token").write_text("token", "ascii")
    kubeconfig = tmp_path / "kubeconfig"
    kubeconfig.write_bytes(api_server.kubeconfig.read_bytes())
    environment = os.environ | {
        "KUBECONFIG": str(kubeconfig),
        "PATH": f"{builds.kubernetes()}:{builds.helm()}:{os.environ['PATH']}",
        "PULSAR_URL": "pulsar://pulsar.example:6650",
        "PULSAR_ADMIN_URL": "http://pulsar.example:8080",
        "PULSAR_SECRET_KEY": "file:///key",
    }
    script = "".join(block.text for part in PAGES[name] for block in part)
    run = subprocess.run(
        ["/bin/bash", "-euo", "pipefail", "-c", PROGRAMS + renamed(script)],
        env=environment, cwd=tmp_path, check=False, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout
    assert "deployment.apps/redrive serverside-applied (server dry run)" in run.stdout
    assert "retrypolicy.redrive.io/orders-fulfilment created" in run.stdout
