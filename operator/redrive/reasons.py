"""Reasons of conditions and Events: one table, from which docs/reference/reasons.md is generated.

`Reason.NAME.error(…)` is the usual way to fail; an error that no condition shows is a
`RedriveError` with the text of its reason. An error has a class of its own only where code catches
it, or where its name is public or stored with a dead letter.
"""

from __future__ import annotations

import enum
from typing import Any, NamedTuple, Self

from redrive.errors import NOTHING, RedriveError, Requeue


class Shown(enum.StrEnum):
    """The place in which a reason is shown."""

    READY = "Ready"
    """Ready is True."""
    STALLED = "Stalled"
    """Ready is False, until the spec or its surroundings change."""
    RECONCILING = "Reconciling"
    """Ready is False or Unknown, and may become True without a change by the user."""
    WARNING = "Warning"
    """A condition of that type beside Ready."""
    EVENT = "Event"
    """An Event, and no condition."""
    LOG = "Log"
    """The log of the operator only."""


class _ReasonRow(NamedTuple):
    """A row of the table. `requeue` defaults to ON_CHANGE for stalled objects, else BACKOFF."""

    name: str
    shown: Shown
    meaning: str
    remedy: str
    requeue: Requeue | None = None
    private: bool = False


READY, STALLED, RECONCILING, WARNING, EVENT, LOG = Shown


class Reason(enum.StrEnum):
    """A reason of a condition or an Event, and of the error that causes it.

    Attributes:
        shown: the place in which it is shown.
        meaning: the meaning, in Markdown.
        remedy: the remedy for the user, in Markdown.
        requeue: when an object that fails with this reason is reconciled again.
        private: whether its messages name Secrets or fields of a connection, which only objects
            of the connection's own namespace show.
    """

    shown: Shown
    meaning: str
    remedy: str
    requeue: Requeue
    private: bool

    def __new__(cls, *columns: Any) -> Self:  # noqa: ANN401, D102 - the columns of a row
        row = _ReasonRow(*columns)
        member = str.__new__(cls, row.name)
        member._value_ = row.name
        member.shown, member.meaning, member.remedy = row.shown, row.meaning, row.remedy
        by_default = Requeue.ON_CHANGE if row.shown is STALLED else Requeue.BACKOFF
        member.requeue = row.requeue or by_default
        member.private = row.private
        return member

    __repr__ = str.__repr__  # messages quote the value, as of any text

    @property
    def stalls(self) -> bool:
        """Return True if the object stays as it is until its spec or its surroundings change."""
        return self.shown is Shown.STALLED

    def error(self, problem: str, *, got: object = NOTHING, remedy: str) -> RedriveError:
        """Return an error with this reason; see `RedriveError` for the arguments."""
        return RedriveError(problem, got=got, remedy=remedy, reason=self)

    @classmethod
    def of(cls, error: RedriveError) -> Reason:
        """Return the reason of *error*; INTERNAL_ERROR for one of consumers and jobs."""
        try:
            return cls(error.reason)
        except ValueError:
            return cls.INTERNAL_ERROR

    # fmt: off

    # Normal states
    PROVISIONED = _ReasonRow("Provisioned", READY,
        "topics, subscriptions, grants and ConfigMap are as the policy requires", "nothing")
    OBSERVED = _ReasonRow("Observed", READY,
        "a policy that only observes was compared with the broker ([dry run](pause.md))",
        "read `DriftDetected`")
    CONNECTED = _ReasonRow("Connected", READY,
        "the broker accepts the connection's token, and its role administers the named tenants; "
        "checked every minute", "nothing")
    COMPLETED = _ReasonRow("Completed", READY,
        "a Replay moved all dead letters that it selected, or they needed no move; or a plan or an "
        "Inspection counted them, or an audit compared them", "nothing")
    REVIEW_EXPIRED = _ReasonRow("ReviewExpired", READY,
        "a review was not confirmed within 15 minutes; nothing was moved", "create another Replay")
    COMPLETED_WITH_REFUSALS = _ReasonRow("CompletedWithRefusals", READY,
        "a Replay moved dead letters, or they needed no move, and refused others",
        "read `MessagesRefused`")
    PROGRESSING = _ReasonRow("Progressing", RECONCILING,
        "the first reconcile of a new spec, or a run of a Replay, is in progress", "wait")
    LAUNCHED = _ReasonRow("Launched", EVENT,
        "the Job or SparkApplication of a Replay or Inspection was created", "nothing")
    TARGET_RIGHTS_ABANDONED = _ReasonRow("TargetRightsAbandoned", EVENT,
        "a Replay is gone, and the rights of the replay role at its [target](replays.md#target) "
        "could not be revoked within ten minutes",
        "revoke them by hand (`pulsar-admin topics revoke-permissions`)")
    REPAIRED = _ReasonRow("Repaired", EVENT,
        "the operator reverted changes at the broker, or applied a change of the BrokerConnection, "
        "for a policy that was ready", "find out who changed it, unless the connection changed")
    DELETED = _ReasonRow("Deleted", EVENT,
        "the topics, subscriptions and grants of a deleted policy are deleted "
        "([deletion](deletion.md))", "nothing")
    RETAINED = _ReasonRow("Retained", EVENT,
        "a policy is deleted, and its resources at the broker are retained",
        "delete them by hand once they are unused")
    CLEANUP_ABANDONED = _ReasonRow("CleanupAbandoned", EVENT,
        "a policy is deleted, and the operator could not clean up at the broker",
        "delete the resources that the message names by hand")

    # The object itself
    INVALID_SPEC = _ReasonRow("InvalidSpec", STALLED,
        "the spec is invalid", "correct the field that the message names")
    PAUSED = _ReasonRow("Paused", WARNING,
        "the annotation `redrive.io/paused` pauses the policy", "remove the annotation to resume")
    DRIFT_DETECTED = _ReasonRow("DriftDetected", WARNING,
        "the broker differs from the spec of a policy that only observes",
        "set `managementPolicy: Manage`, or fix it by hand")
    LADDER_DESCENDS = _ReasonRow("LadderDescends", WARNING,
        "a later retry has a shorter delay than an earlier one", "sort the delays")
    RESOURCE_CONFLICT = _ReasonRow("ResourceConflict", STALLED,
        "another policy with [priority](ownership.md) is for the same topic and subscription; that "
        "policy shows a warning",
        "delete one of the two")
    NAME_COLLISION = _ReasonRow("NameCollision", STALLED,
        "another policy with [priority](ownership.md) needs a topic of the same name, or retries "
        "it as its source; that policy shows a warning",
        "use other names for the topics")

    # BrokerConnection and Secrets
    CONNECTION_NOT_FOUND = _ReasonRow("ConnectionNotFound", RECONCILING,
        "there is no BrokerConnection of the name in `connectionRef`",
        "create it", requeue=Requeue.ON_CHANGE)
    OTHER_BROKER = _ReasonRow(
        "OtherBroker", STALLED, "the connection or a field is for another broker", "use another")
    CONNECTION_INVALID = _ReasonRow("ConnectionInvalid", STALLED,
        "the spec of the connection can't be read", "correct it", private=True)
    DELETION_BLOCKED = _ReasonRow("DeletionBlocked", WARNING,
        "the connection is being deleted, and policies use it, or rights of Replays at their "
        "targets are not revoked yet",
        "delete them, or set `connectionRef` of the policies to another connection "
        "([more](deletion.md#brokerconnection))")
    NAMESPACE_NOT_ALLOWED = _ReasonRow("NamespaceNotAllowed", STALLED,
        "the connection is not for objects of this Kubernetes namespace",
        "add the namespace to a rule of `allow`")
    NAMESPACE_UNREAD = _ReasonRow("NamespaceUnread", RECONCILING,
        "a selector in `allow` needs the labels of the Kubernetes namespace, which are not read "
        "yet",
        "wait")
    TOPIC_NOT_ALLOWED = _ReasonRow("TopicNotAllowed", STALLED,
        "the connection does not allow this topic, or one derived from it",
        "add the topic to a rule of `allow` for this namespace")
    LIMIT_EXCEEDED = _ReasonRow("LimitExceeded", STALLED,
        "the namespace has more policies, or a topic more partitions, than "
        "[`limits`](rights.md#limits) of its rule allow; or the grants on topics of a Pulsar "
        "namespace exceed the record in which the broker stores them; or Replays of the namespace "
        "need grants at too many targets; or a cluster of RocketMQ has more than 64 masters",
        "delete unused policies, set fewer partitions, revoke grants, wait for other Replays to "
        "end, or raise the limit", requeue=Requeue.SLOW_BACKOFF)
    GROUP_NOT_ALLOWED = _ReasonRow("GroupNotAllowed", STALLED,
        "no rule of the connection allows this group and topic", "add both to `rocketmq.allow`")
    ROLE_NOT_ALLOWED = _ReasonRow("RoleNotAllowed", STALLED,
        "the connection does not allow policies to grant this role access to this topic",
        "add the role to a rule of `allow` for that topic")
    ADOPTION_NOT_ALLOWED = _ReasonRow("AdoptionNotAllowed", STALLED,
        "the connection does not allow policies of this namespace to adopt the topic",
        "set `adoption: Allowed` in a rule for the topic")
    DELETION_NOT_ALLOWED = _ReasonRow("DeletionNotAllowed", STALLED,
        "the connection does not allow policies of this namespace to delete the topic with them",
        "`deletionPolicy: Retain`, or set `deletion: Allowed` in a rule for the topic")
    SECRET_NOT_FOUND = _ReasonRow("SecretNotFound", RECONCILING,
        "a Secret that the connection refers to does not exist", "create it", private=True)
    SECRET_KEY_NOT_FOUND = _ReasonRow("SecretKeyNotFound", RECONCILING,
        "the Secret lacks the key, or its value is not usable", "add the key", private=True)
    TOKEN_FILE_INVALID = _ReasonRow("TokenFileInvalid", STALLED,
        "the file that the connection names has no token, or can't be read",
        "mount a token there", requeue=Requeue.SLOW_BACKOFF, private=True)
    CERTIFICATE_INVALID = _ReasonRow("CertificateInvalid", STALLED,
        "the Secret has no client certificate with its key",
        "store a pair that belongs together", requeue=Requeue.SLOW_BACKOFF, private=True)
    CA_INVALID = _ReasonRow("CaInvalid", STALLED,
        "there are no certificate authorities in the Secret or ConfigMap that the connection names",
        "store PEM certificates there", requeue=Requeue.SLOW_BACKOFF, private=True)
    PROXY_INVALID = _ReasonRow("ProxyInvalid", STALLED,
        "the environment of the operator names a proxy that is not an HTTP proxy",
        "[set `http://HOST:PORT`](../howto/install.md#proxies)", requeue=Requeue.SLOW_BACKOFF)
    ADMIN_URL_INVALID = _ReasonRow("AdminUrlInvalid", STALLED,
        "`adminURL`, or an address that it redirects to, can't be called",
        "correct it", requeue=Requeue.SLOW_BACKOFF, private=True)

    # The broker
    REDIRECT_REFUSED = _ReasonRow("RedirectRefused", STALLED,
        "the broker redirects to an address that the connection does not name",
        "name the brokers' hosts in `redirectHosts`, with their port if it is not that of "
        "`adminURL`, or use a Pulsar proxy", requeue=Requeue.SLOW_BACKOFF)
    BROKER_UNREACHABLE = _ReasonRow("BrokerUnreachable", RECONCILING,
        "nothing answers at `adminURL`, or not in time",
        "check the URL, the network and the broker")
    BROKER_FAILED = _ReasonRow("BrokerFailed", RECONCILING,
        "the broker failed (5xx), or limits the rate of calls (429)",
        "see its log if the error persists")
    BROKER_REFUSED = _ReasonRow("BrokerRefused", STALLED,
        "the broker refused the call",
        "read its response in the message", requeue=Requeue.SLOW_BACKOFF)
    BROKER_CONFLICT = _ReasonRow("BrokerConflict", RECONCILING,
        "the resource exists already, or another client is changing it (409)", "wait")
    LIMIT_REACHED = _ReasonRow("LimitReached", STALLED,
        "a limit of the Pulsar namespace or of the brokers allows no more topics, subscriptions or "
        "producers, or a topic is over its backlog quota",
        "raise the setting that the message names", requeue=Requeue.SLOW_BACKOFF)
    TOPIC_TERMINATED = _ReasonRow("TopicTerminated", STALLED,
        "a topic was terminated and accepts no more messages",
        "process its messages, then delete it: the operator creates it again",
        requeue=Requeue.SLOW_BACKOFF)
    NOT_FOUND = _ReasonRow("NotFound", RECONCILING,
        "the resource to change was deleted meanwhile (404)", "wait")
    UNEXPECTED_ANSWER = _ReasonRow("UnexpectedAnswer", RECONCILING,
        "`adminURL` does not lead to a Pulsar admin API",
        "check `adminURL`", requeue=Requeue.SLOW_BACKOFF)
    UNSUPPORTED = _ReasonRow("Unsupported", RECONCILING,
        "this broker does not know the call (405)",
        "use a supported version of Pulsar", requeue=Requeue.SLOW_BACKOFF)
    AUTHENTICATION_FAILED = _ReasonRow("AuthenticationFailed", STALLED,
        "the broker does not accept the token (401)",
        "store a valid token", requeue=Requeue.SLOW_BACKOFF, private=True)
    CERTIFICATE_REFUSED = _ReasonRow("CertificateRefused", STALLED,
        "the broker's certificate is not trusted, or is for another host",
        "correct the URL, or `tls.caRef`", requeue=Requeue.SLOW_BACKOFF, private=True)
    ISSUER_FAILED = _ReasonRow("IssuerFailed", RECONCILING,
        "the OAuth 2.0 issuer issues no token, or its token endpoint has another scheme, host or "
        "port",
        "check issuer and credentials", private=True)
    FORBIDDEN = _ReasonRow("Forbidden", STALLED,
        "the role of the token lacks a permission (403)",
        "make it an administrator of the tenant ([rights](rights.md))",
        requeue=Requeue.SLOW_BACKOFF)
    TENANT_NOT_FOUND = _ReasonRow("TenantNotFound", RECONCILING,
        "a tenant does not exist", "create it")
    NAMESPACE_NOT_FOUND = _ReasonRow("NamespaceNotFound", RECONCILING,
        "the source topic's Pulsar namespace does not exist", "create it")
    TOPIC_NOT_FOUND = _ReasonRow("TopicNotFound", RECONCILING,
        "the source topic does not exist", "create it")
    CHAINED_POLICY = _ReasonRow("ChainedPolicy", STALLED,
        "the source topic is itself a retry, dead-letter or ledger topic of redrive",
        "use the topic that producers send to, or create the policy with `chaining: Allowed`")
    BROKER_CHANGED = _ReasonRow("BrokerChanged", STALLED,
        "`connectionRef` leads to another broker, without the policy's topics",
        "set `connectionRef` back, or [move](ownership.md#from-one-broker-to-another) the policy")
    HANDED_OVER = _ReasonRow("HandedOver", WARNING,
        "the policy's topics [belong to another cluster](ownership.md#from-one-cluster-to-another)",
        "delete the policy once the other is Ready")
    TOPIC_EXISTS = _ReasonRow("TopicExists", STALLED,
        "a topic with the name that the policy needs exists, and redrive did not create it",
        "use other names, or [adopt it](ownership.md#adoption) with `adoption: IfPresent`, which "
        "is not possible for a ledger or sequences topic")
    STRAY_PARTITION = _ReasonRow("StrayPartition", STALLED,
        "the broker cannot create partitions that the policy needs: another topic has the name of "
        "a partition, because a client created it under that name",
        "process or move its messages and delete it; stop that client",
        requeue=Requeue.SLOW_BACKOFF)
    OWNER_CONFLICT = _ReasonRow("OwnerConflict", STALLED,
        "a topic [belongs to another policy](ownership.md), which may be gone",
        "use other names, or take the topic over as the message says")
    PARTITIONS_DIFFER = _ReasonRow("PartitionsDiffer", STALLED,
        "the retry topic is partitioned and should not be, or the reverse",
        "delete it once it is drained, or set `retry.partitions`")
    SUBSCRIPTION_EXPIRY = _ReasonRow("SubscriptionExpiry", STALLED,
        "the Pulsar namespace deletes idle subscriptions, and with them dead letters",
        "set its `subscriptionExpirationTime` to 0")
    LATE_WRITES = _ReasonRow("LateWrites", RECONCILING,
        "a policy was deleted while it was provisioned, and the broker may still create a topic",
        "wait 30 s")
    BROKER_NOT_SUPPORTED = _ReasonRow("BrokerNotSupported", WARNING,
        "redrive is not tested with the release line of the broker ([support](support.md))",
        "use a supported release, or test yours")
    NOT_ENFORCED = _ReasonRow("NotEnforced", WARNING,
        "remoting clients ignore `maxRetries` and `ladder`", "remove both, or use gRPC clients")
    DEAD_LETTERS_EXPIRE = _ReasonRow("DeadLettersExpire", WARNING,
        "RocketMQ deletes dead letters like all messages", "raise `fileReservedTime` of brokers")
    NO_OWNERSHIP_MARK = _ReasonRow("NoOwnershipMark", WARNING,
        "RocketMQ stores no owner of a group", "let one Kubernetes cluster manage a group")
    IN_USE = _ReasonRow("InUse", RECONCILING,
        "clients are connected to a topic or subscription that is to be deleted", "stop them")
    MAX_DELIVERY_DELAY = _ReasonRow("MaxDeliveryDelay", WARNING,
        "the maximum delay of the broker is shorter than the longest delay of the ladder",
        "raise the limit, or shorten the ladder")
    DELAYED_DELIVERY_REFUSED = _ReasonRow("DelayedDeliveryRefused", WARNING,
        "the broker refuses delayed delivery of the retry topic, so retries come early",
        "allow the operator's role to set delayed delivery of topics")
    RETRIES_EARLY = _ReasonRow("RetriesEarly", WARNING,
        "the shortest delay is within the broker's tick, so it may have no effect; this broker has "
        "no tick for each topic",
        "set `delayedDeliveryTickTimeMillis=50` at the brokers, or make the shortest delay longer")
    PARTITIONS_NEVER_SHRINK = _ReasonRow("PartitionsNeverShrink", WARNING,
        "the retry or the dead-letter topic has more partitions than it should have",
        "leave it, or set `retry.partitions` or `deadLetter.partitions`")
    SCHEMA_REFUSED = _ReasonRow("SchemaRefused", WARNING,
        "the broker refuses to copy the source topic's schema, or a version, to another topic",
        "allow the change, or delete the topic's schema")
    SCHEMA_NOT_ALLOWED = _ReasonRow("SchemaNotAllowed", WARNING,
        "the rules of the connection grant roles the retry or dead-letter topic but not the source "
        "topic, so the schema is [not copied](topic-policies.md)",
        "add a rule for these roles that covers the source topic too")
    SCHEMA_UNSUPPORTED = _ReasonRow("SchemaUnsupported", WARNING,
        "consumers in Python can't retry or dead-letter messages of the source topic's schema",
        "consume the topic with Java; see [schemas](java.md#schemas)")
    GEO_REPLICATED = _ReasonRow("GeoReplicated", WARNING,
        "the retry or dead-letter topic is replicated to other clusters",
        "keep both in this cluster")
    ACK_HOLES = _ReasonRow("AckHoles", WARNING,
        "more messages are acknowledged out of order than [the broker "
        "persists](warnings.md#stored-acknowledgements)",
        "use more similar delays, add partitions, or raise the setting that the message names")
    FOREIGN_SUBSCRIPTION = _ReasonRow("ForeignSubscription", WARNING,
        "a topic of the policy has a subscription that the policy did not create",
        "delete it, or narrow its pattern")
    SUBSCRIPTION_TYPE_DIFFERS = _ReasonRow("SubscriptionTypeDiffers", WARNING,
        "connected consumers have another subscription type than the policy",
        "stop all of them before new ones start, or change `subscriptionType`")
    SUBSCRIPTION_TYPE_NOT_ALLOWED = _ReasonRow("SubscriptionTypeNotAllowed", WARNING,
        "the Pulsar namespace or the broker refuses a subscription type that the policy needs",
        "allow the type, as the message shows")
    ENCRYPTION_REQUIRED = _ReasonRow("EncryptionRequired", WARNING,
        "the broker accepts only encrypted messages, and Replays can't encrypt",
        "switch off `encryptionRequired` or `encryptionRequireOnProducer` while a Replay runs")
    SENDS_REFUSED = _ReasonRow("SendsRefused", WARNING,
        "a topic of the policy is terminated, or a limit makes the broker refuse messages there",
        "do what the message says")
    CONSUMERS_REFUSED = _ReasonRow("ConsumersRefused", WARNING,
        "a topic of the policy refuses further consumers or subscriptions, or their type",
        "change the setting that the message names")
    RETRY_TOPIC_NOT_CONSUMED = _ReasonRow("RetryTopicNotConsumed", WARNING,
        "the retry topic has no consumers", "subscribe the consumers to it, too")
    RETRY_STORM = _ReasonRow("RetryStorm", WARNING,
        "most deliveries are retries", "fix the cause of the failures")
    RETRIES_OVERDUE = _ReasonRow("RetriesOverdue", WARNING,
        "retries are due and consumers are connected, but the broker delivers none",
        "run `kubectl redrive unload POLICY`")
    CHUNKS_STRANDED = _ReasonRow("ChunksStranded", WARNING,
        "a consumer disconnected between two chunks of a large message, which the broker delivers "
        "to no other consumer",
        "unload the topic that the message names")
    QUOTA_NEARLY_REACHED = _ReasonRow("QuotaNearlyReached", WARNING,
        "the dead-letter topic nears its backlog quota",
        "replay or delete dead letters, or raise the quota")
    OUTAGE_SUSPECTED = _ReasonRow("OutageSuspected", WARNING,
        "consumers have paused, because most messages fail with one cause",
        "fix the service that they depend on, or run `kubectl redrive ignore-outage POLICY --for "
        "1h`")

    # Kubernetes
    CONFIG_MAP_NOT_OURS = _ReasonRow("ConfigMapNotOurs", STALLED,
        "a ConfigMap with the name that the policy needs has another owner", "delete or rename it")
    KUBERNETES_FORBIDDEN = _ReasonRow("KubernetesForbidden", STALLED,
        "the operator's ServiceAccount lacks a permission",
        "install the RBAC rules of the Helm chart", requeue=Requeue.SLOW_BACKOFF)
    KUBERNETES_REFUSED = _ReasonRow("KubernetesRefused", RECONCILING,
        "the Kubernetes API refuses a call, such as by a quota or an admission webhook",
        "read its response in the message, and correct the cause")
    KUBERNETES_NOT_FOUND = _ReasonRow("KubernetesNotFound", RECONCILING,
        "an object was deleted meanwhile", "wait")
    KUBERNETES_CONFLICT = _ReasonRow("KubernetesConflict", RECONCILING,
        "an object was changed since it was read", "wait")
    KUBERNETES_UNAVAILABLE = _ReasonRow("KubernetesUnavailable", RECONCILING,
        "the Kubernetes API does not answer, or limits the rate of calls", "wait")
    NO_CLUSTER = _ReasonRow("NoCluster", LOG,
        "no configuration of a cluster was found: the operator does not start",
        "provide a kubeconfig, or run it in a Pod")
    CLUSTER_UNKNOWN = _ReasonRow("ClusterUnknown", LOG,
        "the identity of this cluster is unknown: the operator does not start",
        "pass `--cluster-id`")
    LEASE_LOST = _ReasonRow("LeaseLost", LOG,
        "another operator has taken over: this one exits", "nothing")
    LEASE_NOT_RENEWED = _ReasonRow("LeaseNotRenewed", LOG,
        "this operator could not renew its Lease, and writes nothing",
        "find out why it can't reach the Kubernetes API")
    INTERNAL_ERROR = _ReasonRow("InternalError", LOG,
        "an error without a reason of its own", "report it")

    # Replays
    POLICY_NOT_FOUND = _ReasonRow("PolicyNotFound", RECONCILING,
        "there is no policy of the kind and name in `policyRef`, or it is being deleted",
        "create it", requeue=Requeue.ON_CHANGE)
    POLICY_NOT_READY = _ReasonRow("PolicyNotReady", RECONCILING,
        "the RetryPolicy is not Ready, or not valid with the defaults of its connection",
        "see its conditions", requeue=Requeue.ON_CHANGE)
    DEAD_LETTERS_DISCARDED = _ReasonRow("DeadLettersDiscarded", STALLED,
        "the RetryPolicy discards: there is nothing to replay", "set `deadLetter.mode: Keep`")
    REPLAY_IDENTITY_MISSING = _ReasonRow("ReplayIdentityMissing", STALLED,
        "the BrokerConnection has no credentials for Replays", "set `replay` there")
    AUTHOR_FIELD_MISSING = _ReasonRow("AuthorFieldMissing", STALLED,
        "the Replay lacks a `reason` or `ticket` that `replay.require` of its connection requires",
        "create another Replay with it")
    INSPECTION_IDENTITY_MISSING = _ReasonRow("InspectionIdentityMissing", STALLED,
        "the BrokerConnection has no credentials for Inspections", "set `inspection` there")
    RETRIES_NOT_INSPECTED = _ReasonRow("RetriesNotInspected", STALLED,
        "the BrokerConnection does not permit Inspections of waiting retries",
        "inspect dead letters, or set `inspection.retryTopics: Allowed` there")
    CLEAR_TEXT_NOT_PERMITTED = _ReasonRow("ClearTextNotPermitted", STALLED,
        "the BrokerConnection or the installation does not permit Inspections in clear text, or "
        "this one has not started within 10 minutes of its creation",
        "create another Inspection: with `payload: Masked`, or after setting "
        "`inspection.clearPayloads: Allowed` and installing the admission policies of the chart")
    DESTINATION_NOT_FOUND = _ReasonRow("DestinationNotFound", STALLED,
        "the BrokerConnection names no such destination for files of Inspections",
        "correct `export.destination`, or add it to `inspection.destinations` there")
    INSPECTION_ROLE_NOT_GRANTED = _ReasonRow("InspectionRoleNotGranted", RECONCILING,
        "the RetryPolicy has not granted the inspection role its right yet",
        "wait; see the conditions of the RetryPolicy if it stays")
    INSPECTION_FAILED = _ReasonRow("InspectionFailed", STALLED,
        "the Job of an Inspection has failed; the message has its error",
        "fix the cause and create another Inspection")
    TRUST_NOT_SUPPORTED = _ReasonRow("TrustNotSupported", STALLED,
        "the connection has certificate authorities of its own, and names none for replay jobs",
        "set `replay.tls`, with authorities in the namespaces of Replays")
    JOB_NOT_PERMITTED = _ReasonRow("JobNotPermitted", STALLED,
        "the Replay requests a job template, or a number of executors, that [is not "
        "permitted](job-templates.md#choices-of-a-replay)",
        "create another Replay without it, or extend `jobs` of the BrokerConnection, or the "
        "template")
    JOB_TEMPLATE_NOT_FOUND = _ReasonRow("JobTemplateNotFound", RECONCILING,
        "the operator has no job template of the name that the Replay, or its connection, names; a "
        "new template is in effect [within two minutes](job-templates.md#templates)",
        "wait, add it to [`jobTemplates`](job-templates.md) of the Helm chart, or create a Replay "
        "with another template", requeue=Requeue.ON_CHANGE)
    JOB_TEMPLATE_INVALID = _ReasonRow("JobTemplateInvalid", STALLED,
        "the job template [is invalid](job-templates.md#invalid-templates) and never had a valid "
        "form, or the Spark operator does not know one of its fields",
        "correct the template, or upgrade the Spark operator", requeue=Requeue.SLOW_BACKOFF)
    JOB_SECRET_NOT_FOUND = _ReasonRow("JobSecretNotFound", RECONCILING,
        "the Replay's namespace lacks a Secret, ConfigMap or PersistentVolumeClaim that the pods "
        "of its job need: the [job template](job-templates.md) names it, or `spec.replay` of a "
        "connection that the ServiceAccount of jobs consents to",
        "create it there")
    CONSENT_MISSING = _ReasonRow("ConsentMissing", RECONCILING,
        "the connection names a Secret or ConfigMap for jobs that does not exist or lacks the "
        "[consent of its owner](rights.md#consent-of-the-owner)",
        "create it; if the connection may use it, add the annotation that the message shows")
    LEDGER_KEY_LOST = _ReasonRow("LedgerKeyLost", RECONCILING,
        "the operator's Secret lacks the [key of the ledger](rights.md#keys-of-ledgers) of the "
        "policy, so the messages that earlier Replays moved are unknown",
        "add the lost key to the Secret that the message names, from a backup or from the "
        "installation that ran Replays of this policy before")
    JOB_IMAGE_NOT_FOUND = _ReasonRow("JobImageNotFound", RECONCILING,
        "the operator's PodTemplate, which has the image of replay jobs, does not exist "
        "(`--replay-template`)",
        "upgrade the Helm release of the operator, which creates it")
    JOB_RIGHTS_MISSING = _ReasonRow("JobRightsMissing", RECONCILING,
        "the ServiceAccount of a job lacks rights that the run needs; the message names them all",
        "add the namespace to `replay.namespaces` of the Helm chart, or bind a Role like [the "
        "chart's](rights.md#at-kubernetes)", requeue=Requeue.SLOW_BACKOFF)
    SERVICE_ACCOUNT_NOT_FOUND = _ReasonRow("ServiceAccountNotFound", RECONCILING,
        "the Replay's namespace lacks the ServiceAccount that replay jobs run as "
        "(`--replay-service-account`)",
        "add the namespace to `replay.namespaces` of the Helm chart")
    REPLAYS_DISABLED = _ReasonRow("ReplaysDisabled", STALLED,
        "the operator has no image for replay jobs (`--replay-template`)",
        "set `replay.enabled` in the Helm chart")
    SPARK_OPERATOR_NOT_FOUND = _ReasonRow("SparkOperatorNotFound", RECONCILING,
        "the cluster has no kind SparkApplication, and the Replay has `engine: Spark`, or was "
        "launched so",
        "[install the Spark operator](../howto/install.md#replays); the Replay starts within a "
        "minute then")
    APPLICATION_NOT_STARTED = _ReasonRow("ApplicationNotStarted", RECONCILING,
        "the Job or SparkApplication has had no state for a minute: no Job controller runs, or no "
        "Spark operator serves the namespace",
        "[configure a Spark operator for it](../howto/install.md#replays)")
    DRIVER_NOT_STARTED = _ReasonRow("DriverNotStarted", RECONCILING,
        "the driver does not run two minutes after its submission: its pod lacks a Secret, an "
        "image or a node with room, or a quota or an admission webhook refuses it. The message "
        "names the pod and, in the namespaces of `replay.namespaces`, the cause",
        "provide it, and the driver starts automatically; see `kubectl describe` of the pod for "
        "more. After a change of the operator's settings delete the Job or SparkApplication: the "
        "operator creates it again", requeue=Requeue.SLOW_BACKOFF)
    EXECUTORS_NOT_STARTED = _ReasonRow("ExecutorsNotStarted", RECONCILING,
        "the driver runs, but no executor has run for two minutes or longer: their pods lack an "
        "image, a volume or a node with room, or a quota refuses them. The message names a pod and "
        "the cause, in the namespaces of `replay.namespaces` only",
        "provide it, and the Replay resumes automatically; if there is no pod, see the log of the "
        "driver", requeue=Requeue.SLOW_BACKOFF)
    TOO_MANY_RUNS = _ReasonRow("TooManyRuns", RECONCILING,
        "as many Replays of the namespace run as [`limits.runs`](rights.md#limits) allow, or two "
        "Inspections",
        "wait", requeue=Requeue.ON_CHANGE)
    REPLAY_IN_PROGRESS = _ReasonRow("ReplayInProgress", RECONCILING,
        "another Replay of the same policy has priority", "wait", requeue=Requeue.ON_CHANGE)
    IN_REVIEW = _ReasonRow("InReview", RECONCILING,
        "a Replay with `mode: Review` has shown its plan, and waits for a confirmation",
        "set `spec.mode` to `Run`, or `spec.cancel` to true", requeue=Requeue.ON_CHANGE)
    SUSPENDED = _ReasonRow("Suspended", RECONCILING,
        "`spec.suspend` is true: the Replay is not launched, or its run sends nothing",
        "set it to false", requeue=Requeue.ON_CHANGE)
    APPROVAL_REQUIRED = _ReasonRow("ApprovalRequired", RECONCILING,
        "a Replay would move more messages than its RetryPolicy or connection allows [without "
        "approval](replays.md#approval)",
        "read `status`, then create a [ReplayApproval](replays.md#approval), or cancel the Replay",
        requeue=Requeue.ON_CHANGE)
    TARGET_FULL = _ReasonRow("TargetFull", RECONCILING,
        "the target topic that the message names is [over its backlog "
        "quota](../design/replay-runs.md#waiting-for-brokers-and-full-targets), and the broker "
        "accepts no more messages; the run waits",
        "let its consumers catch up, or raise the quota: the run resumes automatically within half "
        "a minute", requeue=Requeue.ON_CHANGE)
    SUBSCRIPTION_AWAITED = _ReasonRow("SubscriptionAwaited", RECONCILING,
        "the target of a running Replay, or one of its partitions, no longer has [the durable "
        "subscription](replays.md#requirements) that has to keep messages, and nothing is sent",
        "create it: the run resumes within half a minute", requeue=Requeue.ON_CHANGE)
    BATCH_MIXES_KEYS = _ReasonRow("BatchMixesKeys", STALLED,
        "the Replay requests [batches](replays.md#batches) to the source topic, which the policy's "
        "subscription reads by key",
        "create another Replay with `sending: Individual` or with target `Retry`")
    REPLAY_NOT_SAFE = _ReasonRow("ReplayNotSafe", STALLED,
        "the RetryPolicy's [`replay.safety`](replays.md#safety) forbids to handle its messages "
        "again, or requires `confirmations: [Reconciled]`",
        "create a dry run, or another Replay that confirms it")
    TARGET_NOT_ALLOWED = _ReasonRow("TargetNotAllowed", STALLED,
        "the [target](replays.md#target) of a Replay is outside the rules of its connection, no "
        "rule for it names the replay role, or it is a topic that redrive manages for a "
        "RetryPolicy",
        "create another Replay, or add a rule for that topic and the replay role to `spec.allow` "
        "of the BrokerConnection", requeue=Requeue.SLOW_BACKOFF)
    TARGET_NOT_FOUND = _ReasonRow("TargetNotFound", STALLED,
        "the target of a Replay does not exist", "create it", requeue=Requeue.SLOW_BACKOFF)
    TARGET_NOT_SUBSCRIBED = _ReasonRow("TargetNotSubscribed", STALLED,
        "the target of a Replay, or one of its partitions, lacks a durable subscription of an "
        "application, or [the policy's](replays.md#requirements): moved messages would be lost",
        "create it", requeue=Requeue.SLOW_BACKOFF)
    TARGET_EVICTS = _ReasonRow("TargetEvicts", STALLED,
        "a backlog quota in force at the target of a Replay [drops messages "
        "unread](replays.md#target)",
        "make the quota refuse messages instead", requeue=Requeue.SLOW_BACKOFF)
    TARGET_EXPIRES = _ReasonRow("TargetExpires", STALLED,
        "messages of the target of a Replay [expire](replays.md#target) within the hour, or before "
        "the run is over; also a warning Event where they expire within ten days",
        "raise the TTL, or the `subscriptionExpirationTime`, there", requeue=Requeue.SLOW_BACKOFF)
    TARGET_DOES_NOT_DEDUPLICATE = _ReasonRow("TargetDoesNotDeduplicate", STALLED,
        "a Replay is to move messages exactly once, to a target that does not deduplicate",
        "switch deduplication on there, or create another Replay with `guarantee: AtLeastOnce`",
        requeue=Requeue.SLOW_BACKOFF)
    APPLICATION_NOT_OURS = _ReasonRow("ApplicationNotOurs", STALLED,
        "a Job or SparkApplication with the name that the Replay needs has another owner",
        "delete it")
    DEADLINE_EXCEEDED = _ReasonRow("DeadlineExceeded", STALLED,
        "a Replay has not ended two minutes after its `deadline`, and its job reports nothing; a "
        "job that runs ends at the deadline (`ReplayFailed`)",
        "inspect its Job or SparkApplication and its pods, delete it, and create another Replay")
    MESSAGES_REFUSED = _ReasonRow("MessagesRefused", WARNING,
        "a Replay has ended, and [refused](replays.md#refused-messages) some of the dead letters "
        "that it selected; they stay in the dead-letter topic",
        "correct the causes in `status.run.refusals`, and create another Replay for these "
        "dead letters")
    ALREADY_ENDED = _ReasonRow("AlreadyEnded", STALLED,
        "a Replay was created with the annotation `redrive.io/ended-at`, such as a copy of an "
        "ended one or one from a backup; it is not launched",
        "create another Replay without that annotation if messages are to be moved")
    ALL_REFUSED = _ReasonRow("AllRefused", STALLED,
        "a Replay refused every dead letter that it selected, and moved none",
        "correct the causes in `status.run.refusals`, and create another Replay")
    CANCELED = _ReasonRow("Canceled", STALLED,
        "the Replay was [canceled](replays.md#suspend-and-cancel)",
        "create another Replay for the remaining dead letters")
    STARTED_TOO_LATE = _ReasonRow("StartedTooLate", STALLED,
        "the Replay was not launched before its `startBefore`",
        "create another Replay with a later `startBefore`, if its messages are still to be moved")
    REPLAY_FAILED = _ReasonRow("ReplayFailed", STALLED,
        "the Job or SparkApplication has failed permanently, or ended before its run; the message "
        "has the error of the job, or the cause from the Spark operator, and the field of the "
        "SparkApplication with the full text. Or the BrokerConnection of its launch no longer "
        "permits the Replay",
        "fix the cause and create another Replay: it continues after the messages that were moved")
    # fmt: on


def requeue_of(error: RedriveError) -> Requeue:
    """Return the time at which an object with *error* is reconciled again."""
    return error.requeue or Reason.of(error).requeue
