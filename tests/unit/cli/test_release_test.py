"""The tests of a release; tests/integration/chart runs them at an API server."""

from __future__ import annotations

import pytest

from redrive.cli import release_test
from redrive.cli.operator import serving_endpoint
from redrive.cli.release_test import check_endpoint, rights
from redrive.kube import leader_election
from redrive.kube.observability import Liveness
from tests.support.reasons import raises


def test_rights_are_rules_by_namespace_and_name() -> None:
    rules = [
        {"apiGroups": ["redrive.io"], "resources": ["replays/status"], "verbs": ["patch"]},
        {"apiGroups": [""], "resources": ["a"], "resourceNames": ["b"], "verbs": ["get", "list"]},
    ]
    expected = [
        "patch replays/status.redrive.io in all namespaces",
        "get a/b in namespace shop",
        "list a/b in namespace shop",
    ]
    grants = [{"namespace": "", "rules": rules[:1]}, {"namespace": "shop", "rules": rules[1:]}]
    assert [str(right) for right in rights(grants)] == expected
    attributes = next(rights(grants)).attributes
    assert (attributes["resource"], attributes["subresource"]) == ("replays", "status")


@pytest.mark.parametrize("ready", [True, False])
def test_endpoint_is_ready_in_time_or_fails(
    monkeypatch: pytest.MonkeyPatch, *, ready: bool
) -> None:
    monkeypatch.setattr(release_test, "SECONDS", 0.5)
    monkeypatch.setattr(release_test, "PAUSE_SECONDS", 0.05)
    assert leader_election  # its metric is served
    health = Liveness()
    health.ready = ready
    with serving_endpoint("127.0.0.1", 0, health) as port:
        url = f"http://127.0.0.1:{port}"
        if ready:
            check_endpoint(url)
        else:
            with raises("ReleaseTestFailed", match=r"does not answer as it should; got .*503"):
                check_endpoint(url)
