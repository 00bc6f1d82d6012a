"""How often a policy is parsed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from redrive.api.model import InvalidFieldsError, parse_spec
from redrive.api.retrypolicy import RetryPolicySpec
from redrive.kube import connections
from redrive.kube.cache import Cache
from redrive.kube.context import Context
from redrive.policy.model import OutageLimits
from redrive.provision.claims import Conflicts, resolve
from tests.support.fake_kubernetes import edit

MakeBody = Callable[..., dict[str, Any]]


@pytest.fixture
def parses(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The specs of policies that were parsed, in order."""
    found: list[object] = []
    real = parse_spec

    def parse(model: Any, body: Any) -> Any:  # noqa: ANN401 - as the real one
        if model is RetryPolicySpec:
            found.append(body["spec"].get("maxRetries"))
        return real(model, body)

    monkeypatch.setattr(connections, "parse_spec", parse)
    return found


def through(connection: dict[str, Any], generation: int = 1) -> dict[str, Any]:
    metadata = {"namespace": "shop", "name": "main", "uid": "main", "generation": generation}
    return {"metadata": metadata | {"resourceVersion": str(generation)}, "spec": connection}


def test_each_generation_of_a_policy_is_parsed_once_for_its_names_and_all_that_resolve_it(
    ctx: Context, connection: dict[str, Any], policy: MakeBody, parses: list[object]
) -> None:
    body = policy(maxRetries=3)
    ctx = dataclasses.replace(ctx, policies=Cache([body]), connections=Cache([through(connection)]))
    Conflicts(ctx.policies, ctx.connections, lambda _: None)
    first = resolve(body, ctx).policy
    shown = {**body, "status": {"maxRetries": 3}}
    assert resolve(shown, ctx).policy is first
    assert parses == [3]
    edit(body, maxRetries=4)
    assert resolve(body, ctx).policy.max_retries == 4
    assert resolve(body, ctx).policy is resolve(body, ctx).policy
    assert parses == [3, 4]


def test_a_new_generation_of_the_connection_asks_for_something_else(
    ctx: Context, connection: dict[str, Any], policy: MakeBody, parses: list[object]
) -> None:
    body = policy()
    ctx = dataclasses.replace(ctx, policies=Cache([body]), connections=Cache([through(connection)]))
    assert resolve(body, ctx).policy.max_retries == 16
    ctx.connections.put(through(connection | {"policyDefaults": {"maxRetries": 5}}, 2))
    assert resolve(body, ctx).policy.max_retries == 5
    assert len(parses) == 1


def test_a_policy_can_have_no_outage_breaker_where_its_connection_gives_one(
    ctx: Context, connection: dict[str, Any], policy: MakeBody
) -> None:
    defaults = {"policyDefaults": {"outageBreaker": {"window": 50}}}
    connections = Cache([through(connection | defaults)])
    for breaker, expected in (
        ({}, OutageLimits(window=50)),
        ({"outageBreaker": {"mode": "Pause"}}, OutageLimits()),
        ({"outageBreaker": {"mode": "Never"}}, None),
    ):
        body = policy(**breaker)
        ctx = dataclasses.replace(ctx, policies=Cache([body]), connections=connections)
        assert resolve(body, ctx).policy.outage_breaker == expected


def test_an_annotation_has_consumers_ignore_outages(
    ctx: Context, connection: dict[str, Any], policy: MakeBody
) -> None:
    body = policy(outageBreaker={"window": 50})
    ctx = dataclasses.replace(ctx, policies=Cache([body]), connections=Cache([through(connection)]))
    assert resolve(body, ctx).policy.outage_breaker == OutageLimits(window=50)
    assert not resolve(body, ctx).policy.ignore_outages
    body["metadata"]["annotations"] = {"redrive.io/ignore-outages": "true"}
    assert resolve(body, ctx).policy.ignore_outages
    del body["metadata"]["annotations"]
    assert not resolve(body, ctx).policy.ignore_outages


def test_a_spec_that_is_refused_is_parsed_once_too_and_its_traceback_does_not_grow(
    ctx: Context, connection: dict[str, Any], policy: MakeBody, parses: list[object]
) -> None:
    body = policy(maxRetries=-1)
    ctx = dataclasses.replace(ctx, policies=Cache([body]), connections=Cache([through(connection)]))
    depths = []
    for _ in range(3):
        with pytest.raises(InvalidFieldsError, match="maxRetries") as refused:
            resolve(body, ctx)
        depths.append(len(refused.traceback))
    assert len(set(depths)) == 1
    assert len(parses) == 1


def test_nothing_is_kept_of_a_policy_that_is_gone(
    ctx: Context, connection: dict[str, Any], policy: MakeBody, parses: list[object]
) -> None:
    body = policy()
    ctx = dataclasses.replace(ctx, policies=Cache([body]), connections=Cache([through(connection)]))
    first = resolve(body, ctx).policy
    ctx.policies.drop(body)
    assert resolve(body, ctx).policy is not first  # as it is being deleted, the last to read it
    ctx.policies.put(policy(maxRetries=9))  # another one of its name, uid and generation
    assert resolve(policy(maxRetries=9), ctx).policy.max_retries == 9
    assert parses == [None, None, None, 9]
