"""Arguments of the commands that read messages: a policy, its topic, a selection, and a broker."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from redrive.api import Body
from redrive.api.inspection import InspectedMessages
from redrive.api.model import parse, parse_spec
from redrive.api.replay import PolicyKind, Selection, check_ids
from redrive.api.retrypolicy import RetryPolicySpec
from redrive.auth.method import Plugin, SourceAuthentication
from redrive.cli.cluster import Cluster
from redrive.cli.documents import ReplayRecord
from redrive.cli.frame import (
    DEFAULT_NAMESPACE,
    FILE,
    NAME_WITHOUT_FILE,
    ClusterFlags,
    cluster_options,
    is_file,
    names_of,
)
from redrive.cli.policies import history_of
from redrive.cli.replay import policy_reference, selected, selection_options
from redrive.errors import RedriveError
from redrive.inspection.payloads import NONE_RECORDED
from redrive.kube.resources import POLICIES, ROCKETMQ_POLICIES, Resource
from redrive.policy.naming import DEAD_LETTER_SUBSCRIPTION, TopicName
from redrive.replay.spec import Choice

if TYPE_CHECKING:
    from redrive.inspection.reader import InspectedTopic

_SELECTION_OPTIONS = {
    "causes": "--cause",
    "fingerprints": "--cause",
    "ids": "--id",
    "keys": "--key",
    "since": "--since",
    "until": "--until",
    "where": "--where",
    "limit": "--limit",
}
"""Options of the command line by field of `spec.select`."""


def _selection_words(select: Body) -> Iterator[str]:
    """Yield the options that select the same messages as *select*."""
    for name, option in _SELECTION_OPTIONS.items():
        values = select.get(name) or ()
        for value in values if isinstance(values, list | tuple) else (values,):
            yield from (option, str(value) or NONE_RECORDED)


@dataclass(frozen=True)
class DirectAccess:
    """Addresses and credentials of `--direct`.

    Attributes:
        is_direct: False without `--direct`.
    """

    is_direct: bool
    service_url: str | None
    admin_url: str | None
    token_file: Path | None
    ca_file: Path | None

    def topic(self, name: TopicName, subscription: str) -> InspectedTopic:
        """Return the topic, to be read with the caller's token.

        Raises:
            UsageError: an address is missing.
        """
        if self.service_url is None or self.admin_url is None:
            raise click.UsageError("--direct needs --service-url and --admin-url")
        # Both take longer than the rest of a command that reads in the cluster.
        from redrive.auth.files import SourceCredentials  # noqa: PLC0415
        from redrive.inspection.reader import InspectedTopic  # noqa: PLC0415

        credentials = SourceCredentials(
            SourceAuthentication(
                plugin=Plugin.NONE if self.token_file is None else Plugin.TOKEN,
                files={} if self.token_file is None else {"token": str(self.token_file)},
                trusted=None if self.ca_file is None else str(self.ca_file),
            )
        )
        return InspectedTopic(name, subscription, self.service_url, self.admin_url, credentials)

    def words(self) -> list[str]:
        """Return the options as they were given, for hints."""
        options = {
            "--service-url": self.service_url,
            "--admin-url": self.admin_url,
            "--token-file": self.token_file,
            "--ca-file": self.ca_file,
        }
        pairs_of_options = [
            (name, str(value)) for name, value in options.items() if value is not None
        ]
        direct = ["--direct"] if self.is_direct else []
        return [*direct, *(word for pair in pairs_of_options for word in pair)]

    def check(self) -> None:
        """Check that an option of `--direct` is not ignored.

        Raises:
            UsageError: `--direct` is missing.
        """
        if not self.is_direct and (words := self.words()):
            options = " and ".join(words[::2])
            raise click.UsageError(
                f"use {options} only with --direct; add it, or leave {options} out"
            )


@dataclass(frozen=True)
class InspectionRequest:
    """Arguments that the commands share.

    Attributes:
        policy: name, or file, of the policy.
        kind: of the policy.
        name: of one policy of the file.
        select: selection, as a Replay has it.
        choice: the same, checked; its limit counts the newest messages.
        reads_all: True to read more than the newest entries.
        waiting: True for messages that wait for a retry.
        reveals: True for clear text.
    """

    policy: str
    name: str | None
    flags: ClusterFlags
    access: DirectAccess
    select: Body
    choice: Choice
    reads_all: bool
    waiting: bool
    reveals: bool
    output: str | None = None
    kind: Resource = POLICIES

    @property
    def source(self) -> InspectedMessages:
        """Return the kind of the topic."""
        return InspectedMessages.RETRY if self.waiting else InspectedMessages.DEAD_LETTER

    def hint(self, command: str, *words: str, **changes: Any) -> str:  # noqa: ANN401  attributes
        """Return a command line for the same messages that can be pasted.

        Args:
            command: its name.
            words: options of its own.
            changes: attributes of the request that it has instead.
        """
        request = replace(self, **changes)
        written = self.policy if self.kind is POLICIES else f"rmqpol/{self.policy}"
        policy = [written] if self.name is None else [written, self.name]
        flags = {
            "--all": request.reads_all,
            "--waiting": request.waiting,
            "--reveal": request.reveals,
        }
        options = [*_selection_words(request.select), *(f for f, is_set in flags.items() if is_set)]
        return self.flags.hint(command, *policy, *words, *options, *self.access.words())

    def repeated(self, **changes: Any) -> str:  # noqa: ANN401  see `hint`
        """Return the current command as `hint` does, with its own options."""
        context = click.get_current_context()
        options = {"--to": context.params.get("target"), "-o": self.output}
        words = [word for name, value in options.items() if value for word in (name, value)]
        return self.hint(context.info_name or "", *words, **changes)

    def topic(self) -> InspectedTopic:
        """Return the topic of the policy.

        Raises:
            RedriveError: there is no such policy, or it has no such topic.
            UsageError: messages can't be reached.
        """
        self.check_evaluated()
        name, subscription = self._of_file() if self.is_of_file else self._of_cluster()
        if not self.access.is_direct:
            problem = "this program reads the broker only with --direct; the messages are in"
            raise click.UsageError(f"{problem} {name}\n{self.direct_hint()}")
        return self.access.topic(name, subscription)

    def check_evaluated(self) -> None:
        """Check that a reader can evaluate the selection.

        Raises:
            UsageError: only Spark can.
        """
        if "where" in self.select:
            raise click.UsageError(
                "--where is evaluated by Spark, in a Replay; select by --cause, --id, --key, "
                "--since or --until"
            )

    def direct_hint(self) -> str:
        """Return the hint to read the broker in this program."""
        if self.kind is not POLICIES:
            return "messages of RocketMQ are read in the cluster only, by an Inspection"
        return (
            "with a token that may consume the topic, and addresses that this machine reaches:\n"
            f"  {self.repeated()} --direct --service-url pulsar://localhost:6650 "
            "--admin-url http://localhost:8080 --token-file FILE"
        )

    def past_replays(self) -> list[ReplayRecord]:
        """Read the Replays of the policy, latest first; none for a policy of a file."""
        if self.is_of_file:
            return []
        cluster = Cluster(self.flags)
        return history_of(cluster, cluster.namespace, self.policy)

    @property
    def is_in_cluster(self) -> bool:
        """Return True if a run in the cluster reads the messages."""
        return not (self.access.is_direct or self.is_of_file)

    @property
    def is_of_file(self) -> bool:
        """Return True if the policy is that of a file."""
        return self.kind is POLICIES and is_file(self.policy)

    def _of_file(self) -> tuple[TopicName, str]:
        from redrive.cli.develop import read_claims  # noqa: PLC0415  imports all checks

        namespace = self.flags.namespace or DEFAULT_NAMESPACE
        claims = read_claims(self.policy, self.name, namespace)
        if len(claims) > 1:
            raise RedriveError(
                "the manifests have several RetryPolicies",
                got=", ".join(claim.request.key.name for claim in claims),
                remedy="name one of them behind the file",
            )
        policy = claims[0].request.policy
        if self.waiting:
            return policy.retry_topic, policy.subscription
        if not policy.dead_letters:
            raise self._missing("the policy discards dead letters")
        return policy.dead_letter_topic, policy.dead_letter_subscription

    def _of_cluster(self) -> tuple[TopicName, str]:
        cluster = Cluster(self.flags)
        body = cluster.get(POLICIES, cluster.namespace, self.policy)
        spec, status = parse_spec(RetryPolicySpec, body), body.get("status") or {}
        name = status.get("retryTopic" if self.waiting else "deadLetterTopic")
        if not self.waiting and not spec.dead_letter.keeps:
            raise self._missing("the policy discards dead letters")
        if name is None:
            raise self._missing(f"the status of {self.policy} names no topic of {self.source}")
        subscription = spec.dead_letter.subscription or DEAD_LETTER_SUBSCRIPTION
        return TopicName.parse_whole(name), spec.subscription if self.waiting else subscription

    def _missing(self, problem: str) -> RedriveError:
        remedy = (
            f"read those that wait for a retry: {self.hint('causes', select={}, waiting=True)}"
            if not self.waiting
            else "wait until the policy is Ready"
        )
        return RedriveError(problem, remedy=remedy)


def inspection_options(function: Callable[..., int | None]) -> Callable[..., Any]:
    """Add the arguments of a command that reads messages; it gets them as one request.

    Further options of the command stay arguments of their own.
    """

    @click.argument("policy", metavar="POLICY|FILE", shell_complete=names_of("retrypolicies"))
    @click.argument("name", metavar="[NAME]", required=False)
    @partial(
        selection_options,
        where="Condition over columns; only of causes without --direct.",
        limit="Number of messages, the newest ones.",
        everything="Read every entry, not the newest 10000.",
    )
    @click.option("--waiting", is_flag=True, help="Messages that wait for a retry.")
    @click.option("--reveal", "reveals", is_flag=True, help="Clear text, not masked.")
    @click.option("--direct", "is_direct", is_flag=True, help="Read in this program.")
    @click.option("--service-url", metavar="URL", help="Such as pulsar://localhost:6650.")
    @click.option("--admin-url", metavar="URL", help="Such as http://localhost:8080.")
    @click.option("--token-file", type=FILE, metavar="FILE", help="Token of the caller.")
    @click.option("--ca-file", type=FILE, metavar="FILE", help="Authorities, as PEM.")
    @cluster_options
    @wraps(function)
    def command(
        policy: str,
        name: str | None,
        flags: ClusterFlags,
        **options: Any,  # noqa: ANN401  a command's own
    ) -> int | None:
        reads_all = options.pop("selects_all")
        select = selected(options)
        direct = ("is_direct", "service_url", "admin_url", "token_file", "ca_file")
        access = DirectAccess(*(options.pop(option) for option in direct))
        access.check()
        kind, policy = policy_reference(policy)
        is_rocketmq = kind is ROCKETMQ_POLICIES
        if is_rocketmq and access.is_direct:
            raise click.UsageError("--direct is for Pulsar; leave it out")
        if name is not None and (is_rocketmq or not is_file(policy)):
            raise click.UsageError(NAME_WITHOUT_FILE)
        selection = parse(Selection, select, "select")
        check_ids(selection, PolicyKind(kind.kind))
        choice = Choice.of(selection, limit=selection.limit)
        logging.getLogger("redrive").addHandler(logging.NullHandler())
        own = {n: options.pop(n) for n in ("waiting", "reveals", "output") if n in options}
        request = InspectionRequest(
            policy, name, flags, access, select, choice, reads_all, **own, kind=kind
        )
        return function(request, **options)

    return command  # type: ignore[no-any-return]
