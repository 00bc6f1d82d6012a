from __future__ import annotations

import itertools
import re
import secrets
from collections.abc import Iterator
from typing import Any, NamedTuple, cast

import pytest

from redrive.api import Body
from redrive.api.crds import KINDS, Kind, structural
from redrive.api.model import parse_spec
from redrive.errors import InvalidSpecError
from release.api_reference import manifests
from sandbox.errors import SandboxError
from sandbox.kubernetes import Cluster
from tests.support.crd_fields import ITEM, SpecField, SpecFields
from tests.support.manifests import REFUSED, VALID, manifest
from tests.support.namespaces import new_namespace

pytestmark = pytest.mark.xdist_group("control plane")

Emptied = tuple[tuple[str, ...], dict[str, Any]]
KIND = {kind.kind: kind for kind in KINDS}


class Place(NamedTuple):
    """The namespace of all tests that use it, and a name for an object of one test."""

    namespace: str
    name: str


@pytest.fixture(scope="module")
def namespace(cluster: Cluster) -> Iterator[str]:
    with new_namespace(cluster) as name:
        yield name


@pytest.fixture
def place(namespace: str) -> Place:
    return Place(namespace, f"o-{secrets.token_hex(4)}")


def refusal(cluster: Cluster, body: dict[str, Any], namespace: str = "default") -> str:
    """Return the message with which the API server refuses *body*."""
    with pytest.raises(SandboxError) as refused:
        cluster.objects.put(body, namespace, dry_run=True)
    return str(refused.value)


@pytest.mark.parametrize("refused", REFUSED, ids=lambda refused: refused["case"])
def test_bad_value_is_refused_with_path_value_and_remedy(
    cluster: Cluster, refused: dict[str, Any]
) -> None:
    message = refusal(cluster, manifest(refused["kind"], **refused["spec"]))
    path = refused.get("admissionPath", refused["path"])
    for words in [path, *refused.get("admission", refused["says"])]:
        assert words in message
    assert refused.get("never", "\0") not in message


@pytest.mark.parametrize("kind", VALID)
def test_smallest_manifest_is_accepted_and_read_back(cluster: Cluster, kind: str) -> None:
    applied = cluster.objects.put(manifest(kind), "default", dry_run=True)
    assert parse_spec(KIND[kind].spec, applied) == parse_spec(KIND[kind].spec, manifest(kind))


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.kind)
def test_manifests_of_the_api_reference_are_accepted(cluster: Cluster, kind: Kind) -> None:
    for body in manifests(kind):
        metadata = {"name": body["metadata"]["name"]}
        stored = cluster.objects.put({**body, "metadata": metadata}, "default", dry_run=True)
        assert stored["spec"] == body["spec"]


@pytest.mark.parametrize(
    ("kind", "leaf"),
    [
        pytest.param(kind, leaf, id=f"{kind} {leaf}")
        for kind in VALID
        for leaf in SpecFields(kind).all
        if leaf.immutable and str(leaf) != "replayRef.name"  # it is the name of the object
    ],
)
def test_immutable_field_cannot_change(
    cluster: Cluster, place: Place, kind: str, leaf: SpecField
) -> None:
    topics = tuple(f"persistent://shop/prod/{name}" for name in "ab")
    moments = "2026-11-20T10:00:00Z", "2026-11-20T10:00:00.5+01:00"
    values: dict[str, tuple[object, ...]] = dict.fromkeys(
        ("naming.retryTopic", "naming.deadLetterTopic", "target.topic"), topics
    )
    recipients = "A" * 43 + "=", "B" * 43 + "="
    values |= dict.fromkeys(("messages.recipient", "causes.recipient"), recipients)
    values |= dict.fromkeys(("select.since", "select.until", "startBefore"), moments)
    beside = {"target": {"type": "Topic"}} if str(leaf) == "target.topic" else {}
    base = manifest(kind, place.name)["spec"] | beside
    specs = SpecFields(kind, values).specs(leaf, base, 2)
    now, later = [base, *specs][-2:]  # a field that has one value only is left out first
    cluster.objects.create(manifest(kind, place.name, **now), place.namespace)
    changed = manifest(kind, place.name, **later)
    assert "immutable" in refusal(cluster, changed, place.namespace)


def test_ladder_of_1001_rungs_is_refused(cluster: Cluster) -> None:
    most = {"delays": ["9d23h59m59s"] * 1_000}
    cluster.objects.put(manifest("RetryPolicy", delayLadder=most), "default", dry_run=True)
    message = refusal(
        cluster, manifest("RetryPolicy", delayLadder={"delays": [*most["delays"], "1s"]})
    )
    assert "spec.delayLadder.delays: Too many: 1001: must have at most 1000 items" in message


def test_admission_and_models_agree_on_durations(cluster: Cluster) -> None:
    counts = ("", "0", "1", "59", "10", "11", "864000", "864001", "999999999", "1000000000", "٣")
    delays = [f"{count}{unit}" for count, unit in itertools.product(counts, "dhms")]
    delays += ["", " 1s", "1s ", "1S", "+1s", "-1s", "1.5s", "1s1m", "1m1m", "1d1h1m1s", "9d24h"]
    delays += ["10d0s", "10d1s", "9d23h59m60s", "240h1s", "14400m", "14401m", "0d0h0m1s", "1w"]
    body = manifest("RetryPolicy", delayLadder={"delays": delays})

    with pytest.raises(InvalidSpecError) as refused:
        parse_spec(KIND["RetryPolicy"].spec, body)
    by_models = set(re.findall(r"delays\[(\d+)\]", str(refused.value)))
    by_admission = set(re.findall(r"delays\[(\d+)\]", refusal(cluster, body)))

    def words(indexes: set[str]) -> list[str]:
        return sorted(delays[int(index)] for index in indexes)

    assert words(by_models) == words(by_admission)
    assert 0 < len(by_models) < len(delays)


def optional_objects(schema: dict[str, Any], path: tuple[str, ...] = ()) -> Iterator[Emptied]:
    """Yield each optional object below *schema*, with the fields that a value of it has."""
    for name, field in schema.get("properties", {}).items():
        if field["type"] != "object":
            continue
        step = (*path, name)
        if field.get("nullable"):
            yield step, field
        yield from optional_objects(field, step)


def nested(path: tuple[str, ...], value: Any) -> dict[str, Any]:  # noqa: ANN401 - of any kind
    """Return an object with *value* at *path*."""
    for step in reversed(path):
        value = {step: value}
    return cast("dict[str, Any]", value)


def deep(base: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    """Merge *more* into *base*, object by object; an empty object of *more* replaces the other."""
    merged = dict(base)
    for name, value in more.items():
        both = isinstance(merged.get(name), dict) and isinstance(value, dict) and value
        merged[name] = deep(merged[name], value) if both else value
    return merged


@pytest.mark.parametrize("empty", [None, {}], ids=["null", "empty"])
@pytest.mark.parametrize(
    ("kind", "path"),
    [
        pytest.param(kind, path, id=f"{kind} {'.'.join(path)}")
        for kind in VALID
        for path, _ in optional_objects(structural(KIND[kind].spec))
        if SpecField(path, {}, required=False, immutable=False).of(VALID[kind]) is None
    ],
)
def test_optional_object_emptied_means_left_out(
    cluster: Cluster, kind: str, path: tuple[str, ...], empty: object
) -> None:
    """Server-side apply makes it null, or an empty object from Kubernetes 1.36 on."""
    body = {**manifest(kind), "spec": deep(VALID[kind], nested(path, empty))}
    stored = cluster.objects.put(body, "default", dry_run=True)
    assert parse_spec(KIND[kind].spec, stored) == parse_spec(KIND[kind].spec, manifest(kind))


TOPICS = [
    pytest.param(kind, leaf, id=f"{kind} {leaf}")
    for kind in VALID
    for leaf in SpecFields(kind).all
    if leaf.schema.get("pattern", "").startswith("^persistent://[-=:.")
]


@pytest.mark.parametrize(
    "local", ["__change_events", "orders-__transaction_pending_ack", "orders-partition-3"]
)
@pytest.mark.parametrize(("kind", "leaf"), TOPICS)
def test_topic_of_pulsars_own_is_refused_in_every_field(
    cluster: Cluster, kind: str, leaf: SpecField, local: str
) -> None:
    value = nested(leaf.steps, f"persistent://shop/prod/{local}")
    beside = {"target": {"type": "Topic"}} if leaf.steps[0] == "target" else {}
    body = {**manifest(kind), "spec": deep(VALID[kind] | beside, value)}
    assert f"spec.{leaf}: Invalid value" in refusal(cluster, body)


@pytest.mark.parametrize("kind", VALID)
def test_name_of_64_characters_is_refused(cluster: Cluster, kind: str) -> None:
    cluster.objects.put(manifest(kind, name="a" * 63), "default", dry_run=True)
    message = refusal(cluster, manifest(kind, name="a" * 64))
    assert "metadata.name: Too long: may not be more than 63" in message


@pytest.mark.parametrize(("field", "word"), [("topic", "orders-v2"), ("subscription", "billing")])
def test_identity_of_policy_cannot_change(
    cluster: Cluster, kube_namespace: str, field: str, word: str
) -> None:
    put(cluster, kube_namespace)
    old = VALID["RetryPolicy"][field]
    new = f"persistent://shop/prod/{word}" if field == "topic" else word
    message = refusal(cluster, manifest("RetryPolicy", **{field: new}), kube_namespace)
    assert f"`{field}` of a policy is immutable; got '{new}' where it was '{old}'" in message
    assert "create another RetryPolicy" in message


def test_other_fields_of_policy_can_change(cluster: Cluster, kube_namespace: str) -> None:
    old = manifest("RetryPolicy", delayLadder={"preset": "TDMQ"})
    cluster.objects.put(old, kube_namespace)
    changed = cluster.objects.put(
        manifest(
            "RetryPolicy",
            delayLadder={"delays": ["1s", "2s", "4s"]},
            maxRetries=3,
            subscriptionType="KeyShared",
            consumerRoles=["fulfilment"],
            connectionRef={"name": "other", "namespace": "elsewhere"},
        ),
        kube_namespace,
    )
    assert changed["metadata"]["generation"] == 2
    assert changed["spec"]["delayLadder"] == {"delays": ["1s", "2s", "4s"]}


def put(cluster: Cluster, namespace: str, **fields: Any) -> dict[str, Any]:  # noqa: ANN401
    """Create or replace a policy, and return the object that the API server stores."""
    return cluster.objects.put(manifest("RetryPolicy", **fields), namespace)


def test_omitted_fields_are_stored_without_values(cluster: Cluster, kube_namespace: str) -> None:
    for kind, spec in VALID.items():
        cluster.objects.put(manifest(kind), kube_namespace)
        stored = cluster.objects.get(kind.lower(), "one", kube_namespace)["spec"]
        assert {field: value for field, value in stored.items() if value != {}} == spec


def emptied(spec: Any, steps: tuple[str, ...], empty: object) -> Any:  # noqa: ANN401 - a part
    """Return *spec* with *empty* at a path; `OMIT` removes the value at the path."""
    step, *rest = steps
    if step == ITEM:
        return [emptied(item, tuple(rest), empty) for item in spec]
    if rest:
        return {**spec, step: emptied(spec[step], tuple(rest), empty)}
    others = {name: value for name, value in spec.items() if name != step}
    return others if empty is OMIT else {**others, step: empty}


OMIT = object()


def optional_in(schema: dict[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield the path of each optional object below *schema*, in items of lists, too."""
    for name, field in schema.get("properties", {}).items():
        inner, step = field, (*path, name)
        if field["type"] == "array":
            inner, step = field["items"], (*step, ITEM)
        elif field["type"] == "object" and field.get("nullable"):
            yield step
        yield from optional_in(inner, step)


ACCESS = {"user": "redrive", "secretRef": {"name": "rocketmq", "key": "secretKey"}}
TO_ROCKETMQ: Body = {
    "rocketmq": {
        "nameServers": ["rocketmq:9876"],
        "authentication": {"type": "AccessKey", "accessKey": ACCESS},
    }
}
"""A connection of the other kind of broker than that of `VALID`."""
BROKERS = {("pulsar",), ("rocketmq",)}


def filled(kind: str, path: tuple[str, ...]) -> Body | None:
    """Return a valid spec with a value at *path* that can change; None if there is none."""
    fields, base = SpecFields(kind), TO_ROCKETMQ if path[0] == "rocketmq" else VALID[kind]
    if path in BROKERS:
        return None  # a connection must have one of them
    for leaf in fields.all:
        if leaf.steps[: len(path)] != path or leaf.immutable:
            continue
        for spec in fields.specs(leaf, base, 1):
            if fields.is_valid(emptied(spec, path, OMIT)):
                return spec
    return None


@pytest.mark.parametrize(
    ("kind", "path"),
    [
        pytest.param(kind, path, id=f"{kind} {'.'.join(path)}")
        for kind in ("BrokerConnection", "RetryPolicy")
        for path in optional_in(structural(KIND[kind].spec))
    ],
)
def test_object_emptied_by_server_side_apply_means_left_out(
    cluster: Cluster, place: Place, kind: str, path: tuple[str, ...]
) -> None:
    """The owner of the fields removes them from the object, or removes the object."""
    spec = filled(kind, path)
    if spec is None:
        # Immutable, or the one field that a type or a volume must have, or a map of known keys.
        assert path in BROKERS or {"naming", "authentication", "volumes", "sparkConf"} & set(path)
        return
    expected = parse_spec(KIND[kind].spec, {"spec": emptied(spec, path, OMIT)})
    for empty in ({}, OMIT):
        body = manifest(kind, place.name)
        cluster.objects.apply({**body, "spec": spec}, place.namespace)
        reduced = {**body, "spec": emptied(spec, path, empty)}
        stored = cluster.objects.apply(reduced, place.namespace)
        assert parse_spec(KIND[kind].spec, stored) == expected


CANT_CHANGE = "`naming` of a policy is immutable"


@pytest.mark.parametrize("field", ["retryTopic", "deadLetterTopic"])
def test_explicit_topic_name_cannot_change(
    cluster: Cluster, kube_namespace: str, field: str
) -> None:
    name, other = ({field: f"persistent://shop/prod/{local}"} for local in "ab")
    for before, after in ((name, other), (name, {}), ({}, name), (name, None), (None, name)):
        fields: list[dict[str, Any]] = [
            {} if naming is None else {"naming": naming} for naming in (before, after)
        ]
        put(cluster, kube_namespace, **fields[0])
        with pytest.raises(SandboxError, match=CANT_CHANGE):
            put(cluster, kube_namespace, **fields[1])
        cluster.objects.delete("retrypolicy", "one", kube_namespace)


@pytest.mark.parametrize(
    ("before", "after", "allowed"),
    [
        (None, "Pulsar", True),
        ("Pulsar", None, True),
        (None, "RocketMQ", False),
        ("RocketMQ", None, False),
        ("RocketMQ", "SubscriptionUpper", False),
    ],
)
def test_naming_scheme_of_policy_cannot_change(
    cluster: Cluster, kube_namespace: str, before: str | None, after: str | None, *, allowed: bool
) -> None:
    old, new = (
        {} if scheme is None else {"naming": {"scheme": scheme}} for scheme in (before, after)
    )
    put(cluster, kube_namespace, **old)
    if allowed:
        assert put(cluster, kube_namespace, **new)["spec"].get("naming", {}) == new.get(
            "naming", {}
        )
    else:
        with pytest.raises(SandboxError, match=CANT_CHANGE):
            put(cluster, kube_namespace, **new)


def test_per_key_order_of_shared_subscription_is_refused(
    cluster: Cluster,
) -> None:
    message = refusal(cluster, manifest("RetryPolicy", ordering="PerKey"))
    assert "got 'Shared'; use KeyShared, or ordering None" in message


@pytest.mark.parametrize("select", [{"select": {"where": "cause_type = 'X'"}}, {}])
def test_spec_of_replay_cannot_change(
    cluster: Cluster, kube_namespace: str, select: dict[str, Any]
) -> None:
    cluster.objects.put(manifest("Replay", select={"where": "true"}), kube_namespace)
    message = refusal(cluster, manifest("Replay", **select), kube_namespace)
    assert (
        "the spec of a Replay is immutable, except suspend, cancel, rateLimit, deadline, "
        "ttlAfterFinished and mode Review" in message
    )
    assert "create another Replay" in message
    for suspend in (True, False):
        may_change: dict[str, Any] = {
            "suspend": suspend,
            "rateLimit": {"messages": 1 + suspend},
            "deadline": f"{1 + suspend}h",
            "ttlAfterFinished": f"{1 + suspend}h",
        }
        same = manifest("Replay", select={"where": "true"}, **may_change)
        assert cluster.objects.put(same, kube_namespace)["spec"]["suspend"] is suspend
    same = manifest("Replay", select={"where": "true"}, **may_change, cancel=True)
    assert cluster.objects.put(same, kube_namespace)["spec"]["cancel"] is True
    for taken_back in (may_change, may_change | {"cancel": False}):
        same = manifest("Replay", select={"where": "true"}, **taken_back)
        assert "`cancel` is immutable once it is true" in refusal(cluster, same, kube_namespace)


@pytest.mark.parametrize("before", ["Run", "Plan", "Review", "Audit", None])
@pytest.mark.parametrize("after", ["Run", "Plan", "Review", "Audit", None])
def test_mode_changes_from_review_to_run_only(
    cluster: Cluster, place: Place, before: str | None, after: str | None
) -> None:
    def with_mode(mode: str | None) -> dict[str, Any]:
        return manifest("Replay", place.name, **({} if mode is None else {"mode": mode}))

    cluster.objects.create(with_mode(before), place.namespace)
    if before == after or (before, after) == ("Review", "Run"):
        cluster.objects.put(with_mode(after), place.namespace)
    else:
        message = refusal(cluster, with_mode(after), place.namespace)
        assert "`mode` is immutable, except from Review to Run" in message


def fields(schema: dict[str, Any]) -> Iterator[str]:
    """The names of all fields below *schema*."""
    for name, field in schema.get("properties", {}).items():
        yield name
        yield from fields(element(field))


def element(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema of the elements of a list or map, also of nested ones; else *schema*."""
    inner = schema.get("items") or schema.get("additionalProperties")
    return element(inner) if isinstance(inner, dict) else schema


@pytest.mark.parametrize(
    ("kind", "part"),
    [
        pytest.param(kind, part, id=f"{kind.kind}-{part}")
        for kind in KINDS
        for part in ("spec", "status")
        if getattr(kind, part)
    ],
)
def test_kubectl_explains_every_field(cluster: Cluster, kind: Kind, part: str) -> None:
    schema = structural(getattr(kind, part))
    explained = cluster.kubectl("explain", f"{kind.kind.lower()}.{part}", "--recursive")
    listed = re.findall(r"^ +(\w+)\t", explained, re.MULTILINE)
    assert sorted(listed) == sorted(fields(schema))
    assert schema["description"][:40] in explained
    words = [enum for field in leaves(schema) if (enum := field.get("enum"))]
    shown = re.findall(r"^ +enum: (.+)$", explained, re.MULTILINE)
    assert sorted(shown) == sorted(", ".join(abridged(enum)) for enum in words)


def abridged(enum: list[str]) -> list[str]:
    """Return the words as `kubectl explain --recursive` lists them: of many the first four."""
    return enum if len(enum) <= 4 else [*enum[:4], "...."]


def leaves(schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The schemas of all fields below *schema*, and of the items of lists."""
    for field in schema.get("properties", {}).values():
        yield field
        yield from leaves(element(field))


def test_kubectl_shows_policies_and_replays_in_readable_columns(
    cluster: Cluster, kube_namespace: str
) -> None:
    put(cluster, kube_namespace, maxRetries=3)
    cluster.objects.put(manifest("Replay"), kube_namespace)
    backlog = {"retry": 3, "deadLetter": 41, "oldestDeadLetterTime": "2026-11-20T10:00:00Z"}
    conditions = [condition("True", "Provisioned")]
    status = {"conditions": conditions, "topic": "orders", "backlog": backlog}
    patch_status(cluster, kube_namespace, "retrypolicy", status)
    account = {
        "phase": "Completed",
        "run": {
            "counts": {"moved": 5, "refused": 1},
            "outcome": {
                "observedTime": "2026-11-20T10:00:00Z", "handled": 3, "waiting": 0, "deadAgain": 2,
                "settled": True,
            },
        },
        "conditions": [condition("True", "ReplayCompleted")],
    }  # fmt: skip
    patch_status(cluster, kube_namespace, "replay", account)
    shown = cluster.kubectl("get", "rpol,replay", f"--namespace={kube_namespace}")
    wide = cluster.kubectl("get", "replay", "-o", "wide", f"--namespace={kube_namespace}")
    table = [re.split(r"\s{2,}|\t", line.strip()) for line in shown.splitlines() if line]
    policy_header, policy, replay_header, replay = table
    assert policy_header == ("NAME READY REASON TOPIC SUBSCRIPTION WAITING DEAD OLDEST AGE".split())
    assert policy[1:-2] == ["True", "Provisioned", "orders", "fulfilment", "3", "41"]
    assert re.fullmatch(r"\d+d(\d+h)?", policy[-2])
    assert replay_header == "NAME POLICY PHASE MOVED REFUSED REASON AGE".split()
    assert replay[1:-1] == ["orders-fulfilment", "Completed", "5", "1", "ReplayCompleted"]
    header, row = wide.splitlines()
    assert row[header.index("DEAD AGAIN") :].split()[0] == "2"


WIDE: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "BrokerConnection": (
        "connection-of-platform-1", "TargetDoesNotDeduplicate", {},
        {"brokerVersion": "4.0.8", "policies": 10_000},
    ),
    "RetryPolicy": (
        "orders-europe-fulfilment", "AdoptionNotAllowed",
        {"topic": "persistent://shop/prod/orders-europe"},
        {
            "topic": "orders-europe",
            "backlog": {
                "retry": 10_000,
                "deadLetter": 100_000,
                "oldestDeadLetterTime": "2026-01-20T10:00:00Z",
            },
        },
    ),
    "Replay": (
        "after-the-outage-of-nov9", "TargetDoesNotDeduplicate",
        {"policyRef": {"name": "orders-europe-fulfilment"}},
        {"phase": "Completed", "run": {"counts": {"moved": 1_000_000, "refused": 1_000_000}}},
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", WIDE)
def test_columns_of_a_kind_fit_120_characters(
    cluster: Cluster, kube_namespace: str, kind: str
) -> None:
    name, reason, fields, status = WIDE[kind]
    assert len(name) == 24
    cluster.objects.put(manifest(kind, name, **fields), kube_namespace)
    body = {"status": {**status, "conditions": [condition("False", reason)]}}
    cluster.objects.patch(kind.lower(), name, body, kube_namespace, "status")
    for line in cluster.kubectl("get", kind.lower(), "-n", kube_namespace).splitlines():
        assert len(line.rstrip()) <= 120, line


def test_figures_of_a_backlog_are_shown_with_their_age(
    cluster: Cluster, kube_namespace: str
) -> None:
    put(cluster, kube_namespace)
    backlog = {"retry": 3, "deadLetter": 4, "observedTime": "2026-01-20T10:00:00Z"}
    patch_status(cluster, kube_namespace, "retrypolicy", {"backlog": backlog})
    header, row = cluster.kubectl(
        "get", "rpol", "-o", "wide", f"--namespace={kube_namespace}"
    ).splitlines()
    at = header.index("COUNTED")
    assert re.match(r"\d+d", row[at:])


@pytest.mark.parametrize(
    ("kind", "selector"),
    [
        ("retrypolicy", "spec.connectionRef.name=main"),
        ("replay", "spec.policyRef.name=orders-fulfilment"),
        ("replay", "status.phase=Running"),
    ],
)
def test_kinds_are_selected_by_their_selectable_fields(
    cluster: Cluster, kube_namespace: str, kind: str, selector: str
) -> None:
    for manifested in ("RetryPolicy", "Replay"):
        cluster.objects.put(manifest(manifested), kube_namespace)
    patch_status(cluster, kube_namespace, "replay", {"phase": "Running"})
    listed, others = (
        cluster.kubectl(
            "get", kind, "-o", "name", f"--namespace={kube_namespace}", f"--field-selector={terms}"
        )
        for terms in (selector, f"{selector}-else")
    )
    assert (listed.split(), others.split()) == ([f"{kind}.redrive.io/one"], [])


def test_approval_has_the_name_of_its_replay_and_does_not_change(
    cluster: Cluster, kube_namespace: str
) -> None:
    another = manifest("ReplayApproval", replayRef={"name": "two", "uid": "x"})
    other = refusal(cluster, another, kube_namespace)
    assert "a ReplayApproval must have the name of its Replay" in other
    cluster.objects.put(manifest("ReplayApproval"), kube_namespace)
    changed = refusal(cluster, manifest("ReplayApproval", messages=1201), kube_namespace)
    assert "the spec of a ReplayApproval is immutable" in changed


def test_short_names_and_the_category_lead_to_the_kinds(
    cluster: Cluster, kube_namespace: str
) -> None:
    for kind in KINDS:
        cluster.objects.put(manifest(kind.kind), kube_namespace)
    listed = cluster.kubectl("get", "redrive", "-o", "name", f"--namespace={kube_namespace}")
    for kind in KINDS:
        assert f"{kind.kind.lower()}.redrive.io/one" in listed.split()
    for name in ("bconn", "rpol"):
        cluster.kubectl("get", name, "one", f"--namespace={kube_namespace}")


def test_a_spec_is_not_changed_through_the_status(cluster: Cluster, kube_namespace: str) -> None:
    put(cluster, kube_namespace)
    body = {"spec": {"maxRetries": 5}, "status": {"configMap": "one-redrive"}}
    stored = cluster.objects.patch("retrypolicy", "one", body, kube_namespace, "status")
    assert stored["status"]["configMap"] == "one-redrive"
    assert "maxRetries" not in stored["spec"]


def condition(status: str, reason: str) -> dict[str, Any]:
    return {
        "type": "Ready",
        "status": status,
        "reason": reason,
        "message": "",
        "lastTransitionTime": "2026-11-21T09:00:00Z",
    }


def patch_status(cluster: Cluster, namespace: str, kind: str, status: dict[str, Any]) -> None:
    cluster.objects.patch(kind, "one", {"status": status}, namespace, "status")
