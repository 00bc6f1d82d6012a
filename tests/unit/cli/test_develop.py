"""Commands for development without a cluster: names, attempts, lines to paste, rights."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from redrive.cli import develop
from redrive.errors import RedriveError
from redrive.policy import codec
from redrive.policy.model import SubscriptionType
from tests.support.documented import DEVELOP, shows, steps

ROOT = Path(__file__).parents[3]
FIRST = str(ROOT / "examples/01-first-policy")
EVERY = str(ROOT / "examples/03-every-field")
POLICY = """\
apiVersion: redrive.io/v1beta1
kind: RetryPolicy
metadata: {name: orders, namespace: shop}
spec:
  connectionRef: {name: main}
  topic: persistent://shop/prod/orders
  subscription: fulfilment
"""


def run(command: str, *arguments: str, stdin: str = "") -> Result:
    """Run a command; its errors are raised."""
    program = getattr(develop, command)
    return CliRunner().invoke(program, arguments, input=stdin, catch_exceptions=False)


def test_explain_shows_names_and_attempts_in_time() -> None:
    output = run("explain", FIRST).stdout
    for line in (
        "RetryPolicy shop/orders-fulfilment",
        "  retry topic        persistent://shop/prod/orders-fulfilment-RETRY",
        "  dead-letter topic  persistent://shop/prod/orders-fulfilment-DLQ",
        "  ConfigMap          orders-fulfilment-redrive",
        "  defaults           of BrokerConnection shop/main",
        "4 attempts in 7s, then dead-lettered",
        "        4  4s          7s",
    ):
        assert line in output.splitlines()


def test_explain_prints_what_the_page_shows() -> None:
    [step] = steps(DEVELOP, "See names, attempts and lines to paste")
    assert step.command == "redrive explain examples/01-first-policy"
    assert shows(f"{step.output}…\n", run("explain", FIRST).stdout)


def test_explain_shortens_many_attempts() -> None:
    output = run("explain", "-", stdin=POLICY + "  maxRetries: 1000\n").stdout
    attempts = [line.split() for line in output.splitlines() if re.match(r" +\d+ ", line)]
    assert len(attempts) == 11
    assert attempts[-1][0] == "1001"
    assert "shop/main is not in these manifests" in output


def test_explain_prints_the_java_lines_of_the_reference() -> None:
    page = (ROOT / "docs/reference/java.md").read_text("utf-8")
    block = page.partition("```java\n")[2].partition("\n\n")[0]
    expected = re.sub(r" +//.*", "", block)
    assert expected in run("explain", "-", stdin=POLICY).stdout


def test_explain_prints_lines_for_go_with_key_shared() -> None:
    output = run("explain", "-", stdin=POLICY + "  subscriptionType: KeyShared\n").stdout
    assert "    Type:             pulsar.KeyShared,\n" in output
    assert "        MaxDeliveries:    16,\n" in output
    assert ".subscriptionType(SubscriptionType.Key_Shared)" in output


def test_explain_offers_no_java_without_dead_letters() -> None:
    output = run("explain", "-", stdin=POLICY + "  deadLetter: {mode: Discard}\n").stdout
    assert "then discarded" in output
    assert "Java and Go: their clients need a dead-letter topic" in output
    assert "MaxDeliveries" not in output


def test_policy_file_has_the_defaults_of_its_connection() -> None:
    policy = codec.decode(run("policy", EVERY, "orders-billing").stdout)
    assert (policy.name, policy.subscription, policy.subscription_type) == (
        "shop/orders-billing",
        "billing",
        SubscriptionType.SHARED,
    )


def test_policy_file_of_several_policies_is_refused() -> None:
    with pytest.raises(RedriveError, match=r"orders-search'; name one of them"):
        run("policy", EVERY)
    with pytest.raises(RedriveError, match="has no RetryPolicy absent; got"):
        run("policy", EVERY, "absent")


def test_manifests_with_errors_are_refused_with_their_lines() -> None:
    result = CliRunner().invoke(develop.policy, ["-"], input=POLICY + "  maxRetries: -1\n")
    assert isinstance(result.exception, RedriveError)
    assert result.stderr.startswith("stdin:8:15 spec.maxRetries: ")


def test_rights_list_the_roles_of_a_policy() -> None:
    rows = [line.split(maxsplit=1) for line in run("rights", FIRST).stdout.splitlines()[1:]]
    assert [role for role, _ in rows] == ["fulfilment"] * 2 + ["replayer"] * 3
    without = run("rights", "-", stdin=POLICY).stdout
    assert without.endswith("  no rights: spec.consumerRoles is empty\n")


def test_provision_needs_an_address() -> None:
    result = CliRunner().invoke(develop.provision, [FIRST])
    assert result.exit_code == 2
    assert "Missing option '--admin-url'" in result.output
