"""Keys of ledgers, and the Secrets with which pods of jobs mount them.

The operator has one Secret with random keys in its own namespace, and derives the key of a ledger
from one of them. So no other data has to be stored: the Secret of a policy that was deleted, or
restored elsewhere, is created again with the same key. A property of the ledger topic identifies
the key; RocketMQ stores none, so there the status of the policy does. Without the key the records
of the ledger are unreadable, so no Replay starts. Nor does one of a RocketMQRetryPolicy that lost
its status while there are several keys, and messages in its ledger.
"""

from __future__ import annotations

import base64
import binascii
import json
import secrets
from collections.abc import Awaitable, Callable, Mapping

from redrive.api import Body
from redrive.kube import resources
from redrive.kube.client import ConflictError, NotFoundError
from redrive.kube.connections import key_of
from redrive.kube.context import Context
from redrive.kube.resources import MANAGED, Key, PolicyKey
from redrive.reasons import Reason
from redrive.replay.controller.admission import Admitted
from redrive.replay.controller.launch import KEY_FILE
from redrive.replay.evidence import KEY_BYTES, LedgerKey
from redrive.replay.spec import QueueReplayJob, ReplayJob, RunJob

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
    job, secret = admitted.job, operator_secret(template)
    return await _KEYS[type(job)](job, PolicyKey.of(replay), admitted, secret, ctx)


async def _key_of_queues(
    job: QueueReplayJob, reference: PolicyKey, admitted: Admitted, secret: Key, ctx: Context
) -> LedgerKey:
    policy, ledger = reference.key, job.ledger
    status = (ctx.rocketmq_policies.get(policy) or {}).get("status") or {}
    recorded = str((status.get("internal") or {}).get(_KEY_FIELD, ""))
    keys = await _keys(admitted, ledger, secret, ctx)
    if not recorded and len(keys) > 1 and await _has_messages(admitted, ledger, ctx):
        raise Reason.LEDGER_KEY_LOST.error(
            f"the status of policy {policy} does not name the key of the Secret {secret} that "
            f"protects {ledger}, so the messages that earlier Replays moved are unknown",
            got="; ".join(f"entry {name} has key {key.id}" for name, key in keys.items()),
            remedy="record the id of the key of the installation that ran Replays of this policy "
            f"before, or of `{_CURRENT}` if there were none: {_recording(policy, 'ID')}",
        )
    key = _chosen(keys, ledger, recorded, secret, _recording(policy, None))
    if not recorded:
        internal = {"internal": {_KEY_FIELD: key.id}}
        await ctx.kubernetes.patch_status(resources.ROCKETMQ_POLICIES, policy, internal)
    return key


def _recording(policy: Key, key_id: str | None) -> str:
    """Return the command that records the id of a key, or removes it."""
    patch = json.dumps({"status": {"internal": {_KEY_FIELD: key_id}}})
    return (
        f"kubectl patch rocketmqretrypolicy {policy.name} -n {policy.namespace} "
        f"--subresource=status --type=merge -p '{patch}'"
    )


async def _has_messages(admitted: Admitted, ledger: str, ctx: Context) -> bool:
    """Return True if a master keeps messages of a ledger."""
    namespace = admitted.job.namespace
    connection = await ctx.brokers.rocketmq(key_of(admitted.connection_ref, namespace), namespace)
    async with connection.admin.session() as session:
        for master in await session.masters():
            if await session.messages(master, ledger):
                return True
    return False


async def _key_of_topic(
    job: ReplayJob, _: PolicyKey, admitted: Admitted, secret: Key, ctx: Context
) -> LedgerKey:
    topic = job.policy.ledger_topic
    connection = await ctx.brokers.resolve(admitted.connection_ref, job.namespace)
    metadata = await connection.admin.metadata(topic, partitioned=False)
    recorded = metadata.properties.get(KEY_ID, "")
    keys = await _keys(admitted, str(topic), secret, ctx)
    command = f"pulsar-admin topics remove-properties --key {KEY_ID} {topic}"
    key = _chosen(keys, str(topic), recorded, secret, command)
    if not recorded:
        await connection.admin.set_properties(topic, {KEY_ID: key.id})
    return key


_KEYS: Mapping[type[RunJob], Callable[..., Awaitable[LedgerKey]]] = {
    ReplayJob: _key_of_topic,
    QueueReplayJob: _key_of_queues,
}


def _chosen(
    keys: Mapping[str, LedgerKey], ledger: str, recorded: str, secret: Key, command: str
) -> LedgerKey:
    """Return the recorded key of a ledger; the one of new ledgers if none is recorded.

    Args:
        keys: see `_keys`.
        ledger: its topic.
        recorded: id of the key, or empty.
        secret: Secret of the operator.
        command: removes that record.

    Raises:
        LedgerKeyLost: the operator's Secret has no such key.
    """
    for key in keys.values():
        if recorded in {key.id, ""}:
            return key
    raise Reason.LEDGER_KEY_LOST.error(
        f"the Secret {secret} has no key that {ledger} was written with, so the messages that "
        "earlier Replays moved are unknown",
        got=f"key {recorded}",
        remedy="add the lost key to that Secret, as an entry of any name, from a backup or "
        "from the installation that ran Replays of this policy before. If it is lost "
        "permanently, and messages of earlier Replays may be moved twice, remove the record of "
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
    policy = ctx.find_policy(reference)
    owner = resources.POLICY_KINDS[reference.kind]
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


async def _keys(
    admitted: Admitted, ledger: str, secret: Key, ctx: Context
) -> Mapping[str, LedgerKey]:
    """Return the keys of a ledger by the operator's Secret, the one of new ledgers first.

    Raises:
        LedgerKeyLost: the Secret has none for new ledgers.
        KubernetesError: it can't be read, or not be created.
    """
    data = (await _read(secret, ctx)).get("data") or {}
    masters = {name: _decoded(data[name]) for name in sorted(data, key=lambda n: n != _CURRENT)}
    if not masters.get(_CURRENT):
        raise Reason.LEDGER_KEY_LOST.error(
            f"the Secret {secret} has no valid entry `{_CURRENT}`, from which the keys of new "
            "ledgers are derived",
            got=sorted(data),
            remedy=f"add an entry `{_CURRENT}` of {2 * KEY_BYTES} hexadecimal digits, or copy a "
            "valid entry to that name",
        )
    return {
        name: LedgerKey.derive(master, admitted.job.namespace, ledger)
        for name, master in masters.items()
        if master
    }


def _encoded(key: bytes) -> str:
    return base64.b64encode(key.hex().encode()).decode()


def _decoded(text: str) -> bytes:
    """Return a key; nothing if the entry holds something else."""
    try:
        key = bytes.fromhex(base64.b64decode(text).decode())
    except (ValueError, binascii.Error):
        return b""
    return key if len(key) >= KEY_BYTES else b""
