"""Bad input of every kind, all of it at once: each error has a remedy, and the broker is as before.

Each manifest has its expected error: with `path` the API server refuses it, with `reason`
it is a condition; `says` is the value and the remedy, `never` a text that must not be shown.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from sandbox.errors import SandboxError
from tests.support.manifests import bad_input, manifest

Shop = Any  # of the conftest of provisioning
Case = dict[str, Any]

CATEGORIES = bad_input()
CASES = {
    f"{category}-{number}".replace("_", "-"): case
    for category, cases in CATEGORIES.items()
    for number, case in enumerate(cases)
}


@dataclass(frozen=True)
class Tried:
    """All manifests applied: the error of each, and the broker before and after."""

    shop: Shop
    errors: dict[str, str]
    reasons: dict[str, str]
    before: dict[str, Any]
    after: dict[str, Any]


def filled(text: str, shop: Shop) -> str:
    """Put the shop's names in their places."""
    names = {"tenant": shop.tenant, "namespace": shop.namespace, "other": f"{shop.namespace}-other"}
    for name, value in names.items():
        text = text.replace(f"{{{name}}}", value)
    return text


def body_of(identity: str, case: Case, shop: Shop) -> dict[str, Any]:
    """The manifest of *case*: bad in one thing, right for the shop in all others."""
    name = case.get("name", identity)
    token = {"secretRef": {"name": name if "secret" in case else "pulsar-admin", "key": "token"}}
    right = {
        "RetryPolicy": {"topic": shop.topic("orders"), "subscription": identity},
        "BrokerConnection": {
            "pulsar": {
                "serviceURL": shop.broker.service_url,
                "adminURL": shop.broker.admin_url,
                "authentication": {"type": "Token", "token": token},
            },
            "allow": [shop.rule("fulfilment")],
        },
    }[case["kind"]]
    bad = json.loads(filled(json.dumps(case["spec"]), shop))
    return manifest(case["kind"], name, **{**right, **bad})


def apply(identity: str, case: Case, shop: Shop) -> str | None:
    """Create the object; return the error of the API server if it refuses."""
    body = body_of(identity, case, shop)
    try:
        shop.cluster.objects.create(body, shop.namespace)
    except SandboxError as refusal:
        return str(refusal)
    return None


@pytest.fixture(scope="module")
def tried(make_shop: Callable[[], Shop]) -> Tried:
    """All cases at once: asynchronous refusals are waited for together."""
    shop = make_shop()
    shop.create_topic(shop.topic("orders"))
    shop.connection()
    shop.cluster.objects.create_namespace(f"{shop.namespace}-other")
    replace(shop, namespace=f"{shop.namespace}-other").connection()
    for identity, case in CASES.items():
        if "secret" in case:
            shop.secret(case.get("name", identity), token=case["secret"])
    before = shop.dump()
    refused = {identity: apply(identity, case, shop) for identity, case in CASES.items()}
    errors = {identity: text for identity, text in refused.items() if text is not None}
    reasons = {}
    for identity, case in CASES.items():
        if identity not in errors:
            name, kind = case.get("name", identity), case["kind"].lower()
            body = shop.reaches(name, case.get("reason", "nothing"), kind)
            ready = next(c for c in body["status"]["conditions"] if c["type"] == "Ready")
            errors[identity], reasons[identity] = ready["message"], ready["reason"]
    after = shop.dump()
    shop.cluster.objects.delete("namespace", f"{shop.namespace}-other")
    return Tried(shop, errors, reasons, before, after)


def test_there_are_twelve_categories_of_five() -> None:
    assert len(CATEGORIES) == 12
    assert {len(cases) for cases in CATEGORIES.values()} == {5}


@pytest.mark.parametrize("identity", CASES)
def test_bad_input_error_names_problem_value_and_remedy(tried: Tried, identity: str) -> None:
    case = CASES[identity]
    assert tried.reasons.get(identity) == case.get("reason")
    for words in [*([case["path"]] if "path" in case else []), *case["says"]]:
        assert filled(words, tried.shop) in tried.errors[identity]


def test_bad_input_leaves_the_broker_as_it_was(tried: Tried) -> None:
    assert tried.after == tried.before


def test_secrets_are_shown_nowhere(tried: Tried, operator_process: Path) -> None:
    shown = operator_process.read_text()
    shown += tried.shop.kubectl("get", "brokerconnections,retrypolicies,events", "-oyaml")
    hidden = {case["never"]: identity for identity, case in CASES.items() if "never" in case}
    assert len(hidden) >= 3
    for secret, identity in hidden.items():
        assert secret not in tried.errors[identity]
        assert secret not in shown
