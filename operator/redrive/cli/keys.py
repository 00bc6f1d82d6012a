"""The command `keys`: keys of an ordered policy whose messages wait for the retry of one."""

from __future__ import annotations

import click

from redrive.cli.cluster import Cluster
from redrive.cli.frame import ClusterFlags, cluster_options, policy_argument
from redrive.cli.output import (
    FORMATS,
    MISSING,
    TableColumn,
    age_of,
    document,
    now,
    output_option,
    print_document,
    say,
    table,
)
from redrive.cli.policies import policy_status
from redrive.cli.policy_actions import refreshed
from redrive.kube.resources import POLICIES

_COLUMNS = (
    TableColumn("KEY"),
    TableColumn("SINCE", right=True),
    TableColumn("MESSAGE"),
    TableColumn("FAILED", right=True, dropped=1),
    TableColumn("BEHIND", right=True),
    TableColumn("CAUSE"),
)


@click.command()
@policy_argument
@click.option("--refresh", is_flag=True, help="Have the keys read now.")
@output_option("wide", "json", "yaml", "jsonl")
@cluster_options
def keys(policy: str, output: str | None, flags: ClusterFlags, *, refresh: bool) -> None:
    """Show keys that wait for the retry of a message, the longest blocked first.

    For policies with ordering PerKey and consumers in Python. KEY is a hash, which changes when a
    consumer restarts. MESSAGE is the origin of the failing message; BEHIND counts the later
    messages of the key that the consumer has. The operator reads them about once a minute, so a key
    appears and disappears that much later. Dead keys are in the dead-letter topic: causes counts
    the messages that follow a dead letter.
    """
    cluster = Cluster(flags)
    body = cluster.get(POLICIES, cluster.namespace, policy)
    if refresh:
        body = refreshed(cluster, body)
    status = policy_status(body)
    items, at = status["blockedKeys"], now()
    if output in FORMATS:
        print_document(document("BlockedKeyList", items), output)
        return
    if items:
        rows = [
            [
                item["keyHash"],
                age_of(item["sinceTime"], at),
                item["messageID"],
                item["failures"],
                item["behind"],
                item["cause"] or MISSING,
            ]
            for item in items
        ]
        click.echo("\n".join(table(_COLUMNS, rows, output == "wide")))
        free = flags.hint("dead-letter", policy, "--origin", items[0]["messageID"])
        click.echo(f"Dead-letter one, which frees its key: {free}")
    elif (body["spec"].get("ordering") or "None") == "None":
        click.echo(f"policy {policy} keeps no order: no key waits for another message")
        return
    else:
        click.echo(f"no key of policy {policy} waits for a retry for ten seconds or more")
        if (body["spec"].get("deadLetter") or {}).get("sequenced"):
            command = flags.hint("causes", policy, "-o", "wide")
            click.echo(f"FOLLOWING counts messages behind dead letters of their key: {command}")
    if observed := status["observedTime"]:
        read_now = flags.hint("keys", policy, "--refresh")
        say(f"read {age_of(observed, at)} ago; read them now: {read_now}")
