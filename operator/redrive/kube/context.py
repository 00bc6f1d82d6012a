"""All that the operator's journeys share: what is known of the cluster, and the ways to it."""

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
from redrive.api import LauncherName
from redrive.api.job import MAX_EXECUTORS
from redrive.kube import resources
from redrive.kube.cache import Cache
from redrive.kube.client import Kubernetes, NotFoundError
from redrive.kube.connections import Connections, NamespaceLabels, following, selected_namespaces
from redrive.kube.credentials import CredentialReader
from redrive.kube.informer import load, when_available
from redrive.kube.job_templates import JobTemplates
from redrive.kube.resources import Key, Resource, keep_of

logger = logging.getLogger(__name__)


def wall_clock() -> datetime:
    """Read the clock: the operator's one place to do so."""
    return datetime.now(UTC)  # noqa: TID251  all others take the moment, or this function


@dataclass(frozen=True)
class Settings:
    """How this operator was started.

    Attributes:
        cluster_id: what tells this cluster from all others that use the same brokers; empty for
            what `Kubernetes.cluster_id` reads.
        namespaces: the Kubernetes namespaces it serves; none means all.
        replay_template: the PodTemplate whose container has the image of replay jobs; None if
            Replays are not run. Tools that replace images change fields of containers only.
        replay_application: where the replay job lies in that image, as a `local://` URL.
        replay_service_account: which ServiceAccount of the Replay's namespace its driver uses.
        job_service_account: which ServiceAccount of the Replay's namespace a Job uses.
        job_max_messages: highest number of dead letters for which engine `Auto` takes a Job.
        job_templates: the file of job templates; None for the template `default` alone.
        max_executors: highest number of executors of a Replay, whatever its template permits.
        replay_launchers: the Spark operators that may be used, if they are installed.
        credentials: the folder with a folder of files for each namespace; None if there is none.
    """

    cluster_id: str
    namespaces: tuple[str, ...]
    replay_template: Key | None
    replay_application: str
    replay_service_account: str
    job_service_account: str = "redrive-job"
    job_max_messages: int = 10_000
    job_templates: Path | None = None
    max_executors: int = MAX_EXECUTORS
    replay_launchers: tuple[LauncherName, ...] = (LauncherName.KUBEFLOW,)
    credentials: Path | None = None


@dataclass(frozen=True)
class Context:
    """What the watches have shown, and the clients to act with.

    The caches are complete from the start: half the policies do not show who owns a topic.

    Attributes:
        applications: Jobs, and the SparkApplications of each Spark operator that may be used; none
            where replays are off.
        config_maps: those that redrive made.
        began: when this operator began to act.
        namespaces: the labels of Kubernetes namespaces, where a connection selects by them.
        job_templates: the pods of replay jobs.
        missing: kinds that are not installed, and are waited for.
    """

    settings: Settings
    kubernetes: Kubernetes
    connections: Cache
    policies: Cache
    replays: Cache
    applications: Mapping[Resource, Cache]
    config_maps: Cache
    brokers: Connections
    namespaces: NamespaceLabels
    job_templates: JobTemplates
    clock: Callable[[], datetime]
    missing: tuple[Resource, ...]
    began: datetime

    @property
    def caches(self) -> Mapping[Resource, Cache]:
        """Return what kopf's watches have shown, by kind."""
        return {
            resources.CONNECTIONS: self.connections,
            resources.POLICIES: self.policies,
            resources.REPLAYS: self.replays,
            **self.applications,
            resources.CONFIG_MAPS: self.config_maps,
        }

    @classmethod
    @asynccontextmanager
    async def open(
        cls,
        settings: Settings,
        fence: Fence | None = None,
        job_templates: JobTemplates | None = None,
    ) -> AsyncIterator[Context]:
        """Connect, and list all objects there are.

        Of several namespaces to serve, one that may not be read is left out.

        Args:
            settings: how this operator was started.
            fence: what every write has to pass, to brokers and to Kubernetes; None lets all pass.
            job_templates: those of an earlier context, with their last valid forms.

        Raises:
            KubernetesError: redrive's own kinds are not installed, or may not be read.
            ClusterUnknown: the settings have no id of the cluster, and it may not be read.
        """
        async with (
            Kubernetes.connect(fence) as kubernetes,
            Http.open(fence) as http,
            following(kubernetes) as namespaces,
            AsyncExitStack() as stack,
        ):
            if not settings.cluster_id:
                found = await when_available(kubernetes.cluster_id)
                settings = dataclasses.replace(settings, cluster_id=found)
            reader = CredentialReader(kubernetes, http, settings.credentials)
            connections = await load(kubernetes, resources.CONNECTIONS, settings.namespaces)
            policies = await load(kubernetes, resources.POLICIES, settings.namespaces)
            # Before anything asks for them: else all policies there would be reconciled at a start.
            await namespaces.read(selected_namespaces(connections, policies))
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
                applications=applications,
                config_maps=await load(kubernetes, resources.CONFIG_MAPS, settings.namespaces),
                brokers=Connections(connections, http, reader, wall_clock, namespaces),
                namespaces=namespaces,
                job_templates=templates,
                clock=wall_clock,
                missing=missing,
                began=wall_clock(),
            )


async def _load_applications(
    kubernetes: Kubernetes, settings: Settings
) -> tuple[Mapping[Resource, Cache], tuple[Resource, ...]]:
    """List Jobs and SparkApplications, where replays are on; return missing kinds, too."""
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
            "this cluster knows no SparkApplication of %s: Replays run as Jobs, and those with "
            "engine Spark wait for a Spark operator",
            " or ".join(kind.group for kind in missing),
        )
    return applications, tuple(missing)
