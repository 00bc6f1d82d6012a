"""Context of the operator: settings, caches and clients that all journeys share."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from redrive.admin.guards import Fence
from redrive.admin.http import Http
from redrive.api import Body, LauncherName
from redrive.api.job import MAX_EXECUTORS
from redrive.kube import resources
from redrive.kube.cache import Cache
from redrive.kube.client import Kubernetes, NotFoundError
from redrive.kube.connections import Connections, NamespaceLabels, following, selected_namespaces
from redrive.kube.credentials import CredentialReader
from redrive.kube.informer import load, when_available
from redrive.kube.job_templates import JobTemplates
from redrive.kube.resources import Key, PolicyKey, Resource, keep_of

logger = logging.getLogger(__name__)


def wall_clock() -> datetime:
    """Read the clock; the only place of the operator that does."""
    return datetime.now(UTC)  # noqa: TID251  others take a time, or this function, as argument


@dataclass(frozen=True)
class Settings:
    """Settings of this operator.

    Attributes:
        cluster_id: distinguishes this cluster from others that use the same brokers. Empty means
            the result of `Kubernetes.cluster_id`.
        namespaces: the Kubernetes namespaces to serve; empty means all.
        replay_template: the PodTemplate with the image of replay jobs; None runs no Replays. Tools
            that replace images change container fields only.
        replay_application: path of the replay job in that image, as a `local://` URL.
        replay_service_account: ServiceAccount of the driver, in the Replay's namespace.
        job_service_account: ServiceAccount of a Job, in the Replay's namespace.
        inspection_service_account: ServiceAccount of an Inspection, in its namespace.
        clear_payloads: True if an admission policy checks the verb `reveal` of Inspections.
        job_max_messages: maximum number of dead letters for which engine `Auto` uses a Job.
        job_templates: file of job templates; None means the template `default` only.
        max_executors: maximum number of executors of a Replay, regardless of its template.
        replay_launchers: Spark operators that may be used, if they are installed.
        credentials: folder that has a folder of files for each namespace; None without one.
    """

    cluster_id: str
    namespaces: tuple[str, ...]
    replay_template: Key | None
    replay_application: str
    replay_service_account: str
    job_service_account: str = "redrive-job"
    inspection_service_account: str = "redrive-inspection"
    clear_payloads: bool = False
    job_max_messages: int = 10_000
    job_templates: Path | None = None
    max_executors: int = MAX_EXECUTORS
    replay_launchers: tuple[LauncherName, ...] = (LauncherName.KUBEFLOW,)
    credentials: Path | None = None


@dataclass(frozen=True)
class Context:
    """Caches of the watched objects, and clients.

    The caches are complete from the start: a part of the policies cannot show who owns a topic.

    Attributes:
        applications: Jobs, and SparkApplications of each allowed Spark operator; empty without
            Replays.
        config_maps: ConfigMaps that redrive created.
        began: start time of this operator.
        namespaces: labels of Kubernetes namespaces, for connections that select by them.
        job_templates: pods of replay jobs.
        missing: kinds that are not installed yet.
        reviewed: latest time at which a ServiceAccount had certain rights.
    """

    settings: Settings
    kubernetes: Kubernetes
    connections: Cache
    policies: Cache
    replays: Cache
    inspections: Cache
    applications: Mapping[Resource, Cache]
    config_maps: Cache
    brokers: Connections
    namespaces: NamespaceLabels
    job_templates: JobTemplates
    clock: Callable[[], datetime]
    missing: tuple[Resource, ...]
    began: datetime
    rocketmq_policies: Cache = dataclasses.field(default_factory=Cache)
    reviewed: dict[tuple[Key, object], datetime] = dataclasses.field(
        default_factory=dict, init=False
    )

    @property
    def policy_caches(self) -> Mapping[str, Cache]:
        """Return the caches of policies, by the kind that a reference names."""
        caches = (self.policies, self.rocketmq_policies)
        return dict(zip(resources.POLICY_KINDS, caches, strict=True))

    @property
    def caches(self) -> Mapping[Resource, Cache]:
        """Return the caches that kopf's watches fill, by kind."""
        return {
            resources.CONNECTIONS: self.connections,
            resources.POLICIES: self.policies,
            resources.ROCKETMQ_POLICIES: self.rocketmq_policies,
            resources.REPLAYS: self.replays,
            resources.INSPECTIONS: self.inspections,
            **self.applications,
            resources.CONFIG_MAPS: self.config_maps,
        }

    def find_policy(self, policy: PolicyKey) -> Body | None:
        """Return a policy of any kind; None if it does not exist."""
        return self.policy_caches[policy.kind].get(policy.key)

    @classmethod
    @asynccontextmanager
    async def open(
        cls,
        settings: Settings,
        fence: Fence | None = None,
        job_templates: JobTemplates | None = None,
    ) -> AsyncIterator[Context]:
        """Connect, and list all objects.

        If several namespaces are served, unreadable ones are skipped.

        Args:
            settings: settings of this operator.
            fence: must be open for each write to brokers and Kubernetes; None allows all writes.
            job_templates: templates of an earlier context, with their last valid forms.

        Raises:
            KubernetesError: redrive's own kinds are not installed, or may not be read.
            ClusterUnknown: the settings have no cluster id, and it may not be read.
        """
        async with (
            Kubernetes.connect(fence) as kubernetes,
            Http.open(fence) as http,
            following(kubernetes) as namespaces,
            AsyncExitStack() as stack,
        ):
            if not settings.cluster_id:
                cluster_id = await when_available(kubernetes.cluster_id)
                settings = dataclasses.replace(settings, cluster_id=cluster_id)
            reader = CredentialReader(kubernetes, http, settings.credentials)
            connections = await load(kubernetes, resources.CONNECTIONS, settings.namespaces)
            policies = await load(kubernetes, resources.POLICIES, settings.namespaces)
            rocketmq_policies = await load(
                kubernetes, resources.ROCKETMQ_POLICIES, settings.namespaces
            )
            # Before they are requested: otherwise all such policies would be reconciled at startup.
            for users in (policies, rocketmq_policies):
                await namespaces.read(selected_namespaces(connections, users))
            applications, missing = await _load_applications(kubernetes, settings)
            templates = job_templates or JobTemplates(settings.job_templates)
            if settings.replay_template is not None:
                namespace = settings.replay_template.namespace
                await stack.enter_async_context(templates.following(kubernetes, namespace))
            yield cls(
                settings=settings,
                kubernetes=kubernetes,
                connections=connections,
                policies=policies,
                replays=await load(kubernetes, resources.REPLAYS, settings.namespaces),
                inspections=await load(kubernetes, resources.INSPECTIONS, settings.namespaces),
                applications=applications,
                config_maps=await load(kubernetes, resources.CONFIG_MAPS, settings.namespaces),
                brokers=Connections(connections, http, reader, wall_clock, namespaces, fence=fence),
                namespaces=namespaces,
                job_templates=templates,
                clock=wall_clock,
                missing=missing,
                began=wall_clock(),
                rocketmq_policies=rocketmq_policies,
            )


async def _load_applications(
    kubernetes: Kubernetes, settings: Settings
) -> tuple[Mapping[Resource, Cache], tuple[Resource, ...]]:
    """List Jobs and SparkApplications if Replays are enabled; also return missing kinds."""
    if settings.replay_template is None:
        return {}, ()
    jobs = await load(kubernetes, resources.JOBS, settings.namespaces)
    applications: dict[Resource, Cache] = {resources.JOBS: jobs}
    missing: list[Resource] = []
    for launcher in settings.replay_launchers:
        kind = resources.APPLICATIONS[launcher]
        try:
            applications[kind] = await load(kubernetes, kind, settings.namespaces)
        except NotFoundError:
            applications[kind] = Cache(keep=keep_of(kind))
            missing.append(kind)
    if len(missing) == len(settings.replay_launchers):
        logger.warning(
            "SparkApplication of %s is not installed: Replays run as Jobs, and Replays with engine "
            "Spark wait for a Spark operator",
            " or ".join(kind.group for kind in missing),
        )
    return applications, tuple(missing)
