"""Keys of ledgers, and the Secrets with which pods of jobs mount them.

The operator has one Secret with random keys in its own namespace, and derives the key of a ledger
from one of them. So no other data has to be stored: the Secret of a policy that was deleted, or
restored elsewhere, is created again with the same key. A property of the ledger topic identifies
the key. Without it the records of the ledger are unreadable, so no Replay starts.
"""

from __future__ import annotations

import base64
import binascii
import secrets

from redrive.api import Body
from redrive.kube import resources
from redrive.kube.client import ConflictError, NotFoundError
from redrive.kube.context import Context
from redrive.kube.resources import MANAGED, Key, PolicyKey
from redrive.policy.naming import TopicName
from redrive.reasons import Reason
from redrive.replay.controller.admission import Admitted, retry_policy_of
from redrive.replay.controller.launch import KEY_FILE
from redrive.replay.evidence import KEY_BYTES, LedgerKey
from redrive.replay.spec import ReplayJob

KEY_ID = "redrive.io/ledger-key"
"""Property of a ledger topic: the id of its key."""
_CURRENT = "current"
"""Entry of the operator's Secret from which the keys of new ledgers are derived. Other entries, of
any name, are keys of earlier installations."""
_ID_ROOM = 10


def operator_secret(template: Key) -> Key:
    """Return the operator's Secret.

    Args:
        template: PodTemplate of replay jobs, which lies in the same namespace.
    """
    return Key(template.namespace, f"{template.name}-keys")


async def ledger_key(admitted: Admitted, template: Key, ctx: Context) -> LedgerKey | None:
    """Return the key of the ledger of a Replay, and mark the ledger topic with it.

    A ledger of RocketMQ has no key.

    Args:
        admitted: the Replay.
        template: see `operator_secret`.
        ctx: reads the operator's Secret, or creates it.

    Raises:
        LedgerKeyLost: the ledger has another key than those of the operator.
        RedriveError: the broker or the API server refuses.
    """
    job = admitted.job
    if not isinstance(job, ReplayJob):
        return None
    topic = job.policy.ledger_topic
    connection = await ctx.brokers.resolve(admitted.connection_ref, job.namespace)
    secret = operator_secret(template)
    keys = _derived(await _read(secret, ctx), job.namespace, topic)
    properties = (await connection.admin.metadata(topic, partitioned=False)).properties
    key_id = properties.get(KEY_ID, "")
    for key in keys:
        if key.id == key_id:
            return key
    if key_id or not keys:
        raise Reason.LEDGER_KEY_LOST.error(
            f"the Secret {secret} has no key that {topic} was written with, so what earlier "
            "Replays have moved is unknown",
            got=f"key {key_id}" if key_id else "no key",
            remedy="add the lost key to that Secret, as an entry of any name, from a backup or "
            "from the installation that ran Replays of this policy before. If it is lost "
            "permanently, and messages of failed Replays may be moved twice, remove the property "
            f"(`pulsar-admin topics remove-properties --key {KEY_ID} {topic}`)",
        )
    await connection.admin.set_properties(topic, {KEY_ID: keys[0].id})
    return keys[0]


def secret_of(replay: Body, key: LedgerKey) -> str:
    """Return the name of the Secret with *key*, in the namespace of a Replay.

    The Replays of a policy share it. Its name identifies the key, so its content never changes.
    """
    return f"{PolicyKey.of(replay).name}-ledger-{key.id[:_ID_ROOM]}"


async def provide_secret(replay: Body, key: LedgerKey | None, ctx: Context) -> None:
    """Create the Secret with *key*, if any, unless it exists; it is deleted with the policy.

    Raises:
        KubernetesError: the API server refuses.
    """
    if key is None:
        return
    policy = retry_policy_of(replay, ctx.policies)
    owners = [] if policy is None else [resources.owner_reference(resources.POLICIES, policy)]
    label, value = MANAGED
    body = {
        "apiVersion": "v1",
        "kind": "Secret",
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
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {**secret._asdict(), "labels": {label: value}},
            "type": "Opaque",
            "data": {_CURRENT: _encoded(secrets.token_bytes(KEY_BYTES))},
        }
        return await ctx.kubernetes.create(resources.SECRETS, body)


def _derived(secret: Body, namespace: str, topic: TopicName) -> list[LedgerKey]:
    """Return the keys of a ledger by the operator's Secret, the one of new ledgers first."""
    entries = sorted((secret.get("data") or {}).items(), key=lambda item: item[0] != _CURRENT)
    if not entries or entries[0][0] != _CURRENT:
        return []
    masters = filter(None, (_decoded(text) for _, text in entries))
    return [LedgerKey.derive(master, namespace, topic) for master in masters]


def _encoded(key: bytes) -> str:
    return base64.b64encode(key.hex().encode()).decode()


def _decoded(text: str) -> bytes:
    """Return a key; nothing if the entry holds something else."""
    try:
        key = bytes.fromhex(base64.b64decode(text).decode())
    except (ValueError, binascii.Error):
        return b""
    return key if len(key) >= KEY_BYTES else b""
