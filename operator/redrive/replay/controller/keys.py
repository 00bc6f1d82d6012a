"""Keys of ledgers, and the Secrets with which pods of jobs mount them.

The operator has one Secret with random keys in its own namespace, and derives the key of a ledger
from one of them. So no other data has to be stored: the Secret of a policy that was deleted, or
restored elsewhere, is created again with the same key. A property of the ledger topic identifies
the key; RocketMQ stores none, so there the status of the policy does. Without the key the records
of the ledger are unreadable, so no Replay starts.
"""

from __future__ import annotations

import base64
import binascii
import json
import secrets

from redrive.api import Body
from redrive.kube import resources
from redrive.kube.client import ConflictError, NotFoundError
from redrive.kube.context import Context
from redrive.kube.resources import MANAGED, Key, PolicyKey
from redrive.policy.naming import TopicName
from redrive.reasons import Reason
from redrive.replay.controller.admission import Admitted
from redrive.replay.controller.launch import KEY_FILE
from redrive.replay.evidence import KEY_BYTES, LedgerKey
from redrive.replay.spec import ReplayJob

KEY_ID = "redrive.io/ledger-key"
"""Property of a ledger topic: the id of its key."""
_CURRENT = "current"
"""Entry of the operator's Secret from which the keys of new ledgers are derived. Other entries, of
any name, are keys of earlier installations."""
_KEY_FIELD = "ledgerKey"
"""Field of the internal status of a RocketMQRetryPolicy: the id of the key of its ledger."""
_ID_ROOM = 10


def operator_secret(template: Key) -> Key:
    """Return the operator's Secret.

    Args:
        template: PodTemplate of replay jobs, which lies in the same namespace.
    """
    return Key(template.namespace, f"{template.name}-keys")


async def ledger_key(replay: Body, admitted: Admitted, template: Key, ctx: Context) -> LedgerKey:
    """Return the key of the ledger of a Replay, and record its id.

    Args:
        replay: the Replay.
        admitted: its run.
        template: see `operator_secret`.
        ctx: reads the operator's Secret, or creates it.

    Raises:
        LedgerKeyLost: the ledger has another key than those of the operator.
        RedriveError: the broker or the API server refuses.
    """
    if isinstance(admitted.job, ReplayJob):
        return await _key_of_topic(admitted, admitted.job.policy.ledger_topic, template, ctx)
    policy = PolicyKey.of(replay).key
    status = (ctx.rocketmq_policies.get(policy) or {}).get("status") or {}
    recorded = str((status.get("internal") or {}).get(_KEY_FIELD, ""))
    reset = json.dumps({"status": {"internal": {_KEY_FIELD: None}}})
    command = (
        f"kubectl patch rocketmqretrypolicy {policy.name} -n {policy.namespace} "
        f"--subresource=status --type=merge -p '{reset}'"
    )
    key = await _chosen(admitted, admitted.job.ledger, recorded, command, template, ctx)
    if not recorded:
        internal = {"internal": {_KEY_FIELD: key.id}}
        await ctx.kubernetes.patch_status(resources.ROCKETMQ_POLICIES, policy, internal)
    return key


async def _key_of_topic(
    admitted: Admitted, topic: TopicName, template: Key, ctx: Context
) -> LedgerKey:
    connection = await ctx.brokers.resolve(admitted.connection_ref, admitted.job.namespace)
    metadata = await connection.admin.metadata(topic, partitioned=False)
    recorded = metadata.properties.get(KEY_ID, "")
    command = f"pulsar-admin topics remove-properties --key {KEY_ID} {topic}"
    key = await _chosen(admitted, str(topic), recorded, command, template, ctx)
    if not recorded:
        await connection.admin.set_properties(topic, {KEY_ID: key.id})
    return key


async def _chosen(  # noqa: PLR0913, PLR0917  a ledger, its record, and the keys
    admitted: Admitted, ledger: str, recorded: str, command: str, template: Key, ctx: Context
) -> LedgerKey:
    """Return the recorded key of a ledger; the one of new ledgers if none is recorded.

    Args:
        recorded: id of the key, or empty.
        command: removes that record.

    Raises:
        LedgerKeyLost: the operator's Secret has no such key.
    """
    secret = operator_secret(template)
    keys = _derived(await _read(secret, ctx), admitted.job.namespace, ledger)
    for key in keys:
        if recorded in {key.id, ""}:
            return key
    raise Reason.LEDGER_KEY_LOST.error(
        f"the Secret {secret} has no key that {ledger} was written with, so what earlier "
        "Replays have moved is unknown",
        got=f"key {recorded}" if recorded else "no key",
        remedy="add the lost key to that Secret, as an entry of any name, from a backup or "
        "from the installation that ran Replays of this policy before. If it is lost "
        "permanently, and messages of failed Replays may be moved twice, remove the record of "
        f"its id (`{command}`)",
    )


def secret_of(replay: Body, key: LedgerKey) -> str:
    """Return the name of the Secret with *key*, in the namespace of a Replay.

    The Replays of a policy share it. Its name identifies the key, so its content never changes.
    """
    return f"{PolicyKey.of(replay).name}-ledger-{key.id[:_ID_ROOM]}"


async def provide_secret(replay: Body, key: LedgerKey, ctx: Context) -> None:
    """Create the Secret with *key*, unless it exists; it is deleted with the policy.

    Raises:
        KubernetesError: the API server refuses.
    """
    reference = PolicyKey.of(replay)
    kinds = {kind.kind: kind for kind in (resources.POLICIES, resources.ROCKETMQ_POLICIES)}
    policy = ctx.find_policy(reference)
    owner = kinds[reference.kind]
    owners = [] if policy is None else [resources.owner_reference(owner, policy)]
    label, value = MANAGED
    body = {
        **resources.SECRETS.typed,
        "metadata": {
            "name": secret_of(replay, key),
            "namespace": Key.of(replay).namespace,
            "labels": {label: value, resources.POLICY_LABEL: PolicyKey.of(replay).name},
            "ownerReferences": owners,
        },
        "type": "Opaque",
        "immutable": True,
        "data": {KEY_FILE: _encoded(key.secret)},
    }
    try:
        await ctx.kubernetes.create(resources.SECRETS, body)
    except ConflictError:
        return


async def _read(secret: Key, ctx: Context) -> Body:
    """Read the operator's Secret; create it with a random key if it does not exist."""
    try:
        return await ctx.kubernetes.get(resources.SECRETS, secret)
    except NotFoundError:
        label, value = MANAGED
        body = {
            **resources.SECRETS.typed,
            "metadata": {**secret._asdict(), "labels": {label: value}},
            "type": "Opaque",
            "data": {_CURRENT: _encoded(secrets.token_bytes(KEY_BYTES))},
        }
        return await ctx.kubernetes.create(resources.SECRETS, body)


def _derived(secret: Body, namespace: str, ledger: str) -> list[LedgerKey]:
    """Return the keys of a ledger by the operator's Secret, the one of new ledgers first."""
    entries = sorted((secret.get("data") or {}).items(), key=lambda item: item[0] != _CURRENT)
    if not entries or entries[0][0] != _CURRENT:
        return []
    masters = filter(None, (_decoded(text) for _, text in entries))
    return [LedgerKey.derive(master, namespace, ledger) for master in masters]


def _encoded(key: bytes) -> str:
    return base64.b64encode(key.hex().encode()).decode()


def _decoded(text: str) -> bytes:
    """Return a key; nothing if the entry holds something else."""
    try:
        key = bytes.fromhex(base64.b64decode(text).decode())
    except (ValueError, binascii.Error):
        return b""
    return key if len(key) >= KEY_BYTES else b""
