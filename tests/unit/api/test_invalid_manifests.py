from __future__ import annotations

from typing import Any

import pytest

from redrive.api.crds import KINDS
from redrive.api.model import InvalidFieldsError, parse_spec
from redrive.api.retrypolicy import RetryPolicySpec
from tests.support.invalid_manifests import REFUSED, VALID

SPECS = {kind.kind: kind.spec for kind in KINDS}


@pytest.mark.parametrize("refused", REFUSED, ids=lambda refused: refused["case"])
def test_a_bad_value_is_refused_with_path_found_value_and_remedy(refused: dict[str, Any]) -> None:
    spec = VALID[refused["kind"]] | refused["spec"]
    with pytest.raises(InvalidFieldsError) as refusal:
        parse_spec(SPECS[refused["kind"]], {"spec": spec})
    for words in [refused["path"] + ":", *refused["says"]]:
        assert words in str(refusal.value)
    assert refused.get("never", "\0") not in str(refusal.value)


@pytest.mark.parametrize("kind", VALID)
def test_the_smallest_spec_is_valid(kind: str) -> None:
    assert parse_spec(SPECS[kind], {"spec": VALID[kind]}).to_manifest().items() >= (
        VALID[kind].items()
    )


def test_all_that_is_wrong_is_said_at_once() -> None:
    with pytest.raises(InvalidFieldsError) as refusal:
        parse_spec(RetryPolicySpec, {"spec": {"topic": "x", "maxRetries": -1}})
    for path in ("spec.connectionRef", "spec.topic", "spec.subscription", "spec.maxRetries"):
        assert f"{path}: " in str(refusal.value)


def test_an_object_without_spec_is_refused_by_its_missing_fields() -> None:
    with pytest.raises(InvalidFieldsError, match=r"spec\.topic: is missing"):
        parse_spec(RetryPolicySpec, {})


def test_a_token_in_the_wrong_place_is_not_repeated() -> None:
    spec = VALID["BrokerConnection"] | {"authentication": {"token": "eyJ.secret.token"}}
    with pytest.raises(InvalidFieldsError) as refusal:
        parse_spec(SPECS["BrokerConnection"], {"spec": spec})
    assert "spec.authentication.token" in str(refusal.value)
    assert "secret.token" not in str(refusal.value)


def test_an_unknown_field_is_named_but_its_value_is_not_repeated() -> None:
    spec = VALID["BrokerConnection"] | {"password": "hunter2"}
    with pytest.raises(
        InvalidFieldsError, match=r"spec\.password: is not a known field"
    ) as refusal:
        parse_spec(SPECS["BrokerConnection"], {"spec": spec})
    assert "hunter2" not in str(refusal.value)
