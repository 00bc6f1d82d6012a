"""Engines of Replays: Jobs of Kubernetes, and the Spark operators of Kubeflow and Apache.

An engine is a `Launcher`: it builds the manifest of an application, and reads its state.

Kubeflow Spark operator (`sparkoperator.k8s.io/v1beta2`, from 2.1): all settings of pods are in
templates, because its optional webhook adds other fields to pods. `cores`, `memory` and
`memoryOverhead` repeat Spark properties for its check of quotas. A failed submission is reported
as the output of spark-submit with the stack traces of its JVM, about 12 kB; `root_cause` selects
one line.

Apache Spark operator (`spark.apache.org/v1`): it deletes the driver once a run has ended, even if
`resourceRetainPolicy` retains it and the run may be repeated.

Job (`batch/v1`): the Job controller replaces pods with growing pauses after failures. It does not
count evictions.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, NamedTuple

from redrive.api import Body, LauncherName
from redrive.api.conditions import moment_of
from redrive.api.job import SPARK_ROLES, Role
from redrive.api.replay import Mode, ReplayEngine, ReplaySpec
from redrive.api.replay_status import FINAL, Phase, ReplayStatus
from redrive.kube import resources
from redrive.kube.context import Context
from redrive.kube.resources import Key, Resource, in_order, is_owned_by
from redrive.reasons import Reason
from redrive.replay.controller import launch
from redrive.replay.controller.launch import JobApplication


@dataclass(frozen=True)
class SparkRun:
    """State of a Job or SparkApplication.

    Attributes:
        kind: kind of the object.
        key: its namespace and name.
        created: its creation time.
        state: state in the words of the engine; empty until a controller has processed the object.
        phase: phase for that state; Completed and Failed are final.
        error: error that the engine reports, in one line; empty without one.
        submitted: time since which a driver is awaited; None if it runs or is not awaited.
        pods: label selector of its pods; `spark-role` distinguishes driver and executors.
        serving: instruction to make the controller serve the namespace.
    """

    kind: str
    key: Key
    created: datetime
    state: str
    phase: Phase
    error: str
    submitted: datetime | None
    pods: str
    serving: str


@dataclass(frozen=True)
class Launcher:
    """A Spark operator, or the Job controller of Kubernetes.

    Attributes:
        name: name of the Spark operator; None for Jobs.
        resource: kind of its objects.
        manifest: function that returns the object to create.
        run: function that returns the state of a created object.
    """

    name: LauncherName | None
    resource: Resource
    manifest: Callable[[JobApplication], Body]
    run: Callable[[Body], SparkRun]

    def run_of(self, owner: Body, kind: Resource, application: Body) -> SparkRun:
        """Return the state of *application*, which has the name for *owner*, an object of *kind*.

        Raises:
            ApplicationNotOurs: *owner* does not own it.
        """
        if not is_owned_by(application, owner):
            raise Reason.APPLICATION_NOT_OURS.error(
                f"a {self.resource.kind} that this {kind.kind} does not own has the name that this "
                f"{kind.kind} needs",
                got=application["metadata"]["name"],
                remedy=f"delete that {self.resource.kind}",
            )
        return self.run(application)


_EARLIEST = datetime.min.replace(tzinfo=UTC)
MAX_LENGTH = 500
"""Length to which a line is cut."""

_HEAD = re.compile(r'^(?:Caused by: |Exception in thread "[^"]*" |.*StackTrace: )')
"""Start of a line of a stack trace with an error, whose message follows."""
_THREAD = "Exception in thread "
_FRAME = re.compile(r"^\s+(?:at |\.\.\. \d+ )")
_ANSWER = re.compile(r"Failure executing: \w+ at: \S+ Message: (.+?)(?:\. Received status: .*)?$")
"""Answer of the API server, as the JVM client of Kubernetes reports it."""
_OWN = re.compile(r"(?:^|: )(Error: .+)")
"""Error of spark-submit itself, before its usage."""
_LOG = re.compile(
    r"^\d\d/\d\d/\d\d \d\d:\d\d:\d\d (?!ERROR )\w+ |^WARNING: |^Using Spark's default "
)


def root_cause(error: str, place: str) -> str:
    """Return the line of *error* with the cause, and the place of the whole text.

    It is, in this order, the answer of the API server in a stack trace, its root cause, the error
    of spark-submit itself, or the last line that is no progress log.

    Args:
        error: text of the Spark operator.
        place: field of the SparkApplication with the text; named only if the text is cut.
    """
    whole = error.strip()
    line = " ".join(_essence(whole.splitlines()).split())
    if line == whole and len(line) <= MAX_LENGTH:
        return line
    shown = line if len(line) <= MAX_LENGTH else f"{line[:MAX_LENGTH]}…"
    return f"{shown} (the rest is in {place} of the SparkApplication)"


def _essence(lines: list[str]) -> str:
    errors = _errors(lines)
    if errors:
        answers = [match[1] for match in map(_ANSWER.search, errors) if match]
        return (answers or errors)[-1]
    own = [match[1] for match in map(_OWN.search, lines) if match]
    plain = [line for line in lines if line.strip() and not _LOG.match(line)]
    return next(iter((*own, *reversed(plain), *reversed(lines))), "")


def _errors(lines: list[str]) -> list[str]:
    """Return the errors of the last stack trace, one line each, with the root cause last."""
    threads = [number for number, line in enumerate(lines) if line.startswith(_THREAD)]
    errors: list[str] = []
    within = False
    for line in lines[threads[-1] if threads else 0 :]:
        if head := _HEAD.match(line):
            errors.append(line[head.end() :])
            within = True
        elif _FRAME.match(line):
            within = False
        elif within:  # a message of several lines
            errors[-1] = f"{errors[-1]} {line.strip()}"
    return errors


_PHASES = {
    "RUNNING": Phase.RUNNING,
    "SUCCEEDING": Phase.RUNNING,
    "FAILING": Phase.RUNNING,
    "COMPLETED": Phase.COMPLETED,
    "FAILED": Phase.FAILED,
}
"""Phases of the states of the Kubeflow operator. All other states precede RUNNING."""


def kubeflow_manifest(job: JobApplication) -> Body:
    """Return the SparkApplication to create."""
    driver, executor = (_pod(job, role) for role in SPARK_ROLES)
    spec = {
        "type": "Python",
        "pythonVersion": "3",
        "mode": "cluster",
        "sparkVersion": launch.SPARK_VERSION,
        "image": job.image,
        **({"imagePullPolicy": job.pull_policy} if job.pull_policy else {}),
        "mainApplicationFile": job.program.name,
        "arguments": [job.program.argument],
        "sparkConf": dict(job.spark_conf),
        "restartPolicy": {
            "type": "OnFailure",
            "onFailureRetries": job.retries,
            "onFailureRetryInterval": job.retry_seconds,
            "onSubmissionFailureRetries": job.retries,
            "onSubmissionFailureRetryInterval": job.retry_seconds,
        },
        "driver": {**driver, "serviceAccount": job.program.service_account},
        "executor": {**executor, "instances": job.executors},
    }
    return {**resources.SPARK_APPLICATIONS.typed, "metadata": job.metadata, "spec": spec}


def kubeflow_run(application: Body) -> SparkRun:
    """Return the state of *application*."""
    key = Key.of(application)
    status = application.get("status") or {}
    current = status.get("applicationState") or {}
    state = current.get("state", "")
    submitted = status.get("lastSubmissionAttemptTime") if state == "SUBMITTED" else None
    return SparkRun(
        kind=resources.SPARK_APPLICATIONS.kind,
        key=key,
        created=_created(application),
        state=state,
        phase=_PHASES.get(state, Phase.SUBMITTED),
        error=root_cause(current.get("errorMessage", ""), ".status.applicationState.errorMessage"),
        submitted=moment_of(submitted),
        pods=f"sparkoperator.k8s.io/app-name={key.name}",
        serving=f"have the Spark operator serve the namespace {key.namespace} "
        "(spark.jobNamespaces in its Helm chart), or start it",
    )


def _pod(job: JobApplication, role: Role) -> dict[str, Any]:
    pod = job.pods[role]
    return {
        "cores": pod.cores,
        "memory": pod.memory,
        "memoryOverhead": pod.memory_overhead,
        "template": pod.template,
    }


KUBEFLOW = Launcher(
    LauncherName.KUBEFLOW, resources.SPARK_APPLICATIONS, kubeflow_manifest, kubeflow_run
)


_TERMINATED = ("ResourceReleased", "TerminatedWithoutReleaseResources")
"""Last states of the Apache operator. The state before them has the result of the run."""
_STARTING = ("Submitted", "ScheduledToRestart", "DriverRequested")
_FAILURES = frozenset(
    {
        "DriverStartTimedOut",
        "DriverReadyTimedOut",
        "ExecutorsStartTimedOut",
        "DriverEvicted",
        "Failed",
        "SchedulingFailure",
    }
)


def apache_manifest(job: JobApplication) -> Body:
    """Return the SparkApplication to create."""
    restarts = {
        "restartPolicy": "OnFailure",
        "maxRestartAttempts": job.retries,
        "restartBackoffMillis": job.retry_seconds * 1000,
    }
    return {
        **resources.APACHE_SPARK_APPLICATIONS.typed,
        "metadata": job.metadata,
        "spec": {
            "runtimeVersions": {"sparkVersion": launch.SPARK_VERSION},
            "pyFiles": job.program.name,
            "driverArgs": [job.program.argument],
            "sparkConf": {**job.spark_conf, **_properties(job)},
            "applicationTolerations": {"restartConfig": restarts},
            "driverSpec": {"podTemplateSpec": job.pods[Role.DRIVER].template},
            "executorSpec": {"podTemplateSpec": job.pods[Role.EXECUTOR].template},
        },
    }


def apache_run(application: Body) -> SparkRun:
    """Return the state of *application*."""
    key = Key.of(application)
    status = application.get("status") or {}
    current = status.get("currentState") or {}
    state = current.get("currentStateSummary", "")
    ended = _before_last(status) if state in _TERMINATED else current
    requested = current.get("lastTransitionTime") if state == "DriverRequested" else None
    return SparkRun(
        kind=resources.APACHE_SPARK_APPLICATIONS.kind,
        key=key,
        created=_created(application),
        state=state,
        phase=_phase(state, ended.get("currentStateSummary", "")),
        error=_error(ended, current),
        submitted=moment_of(requested),
        pods=f"spark.operator/spark-app-name={key.name}",
        serving=f"have the Spark operator watch the namespace {key.namespace} "
        "(workloadResources.namespaces.data in its Helm chart), or start it",
    )


def _created(application: Body) -> datetime:
    """Return the creation time; the earliest one if an API server sent none."""
    return moment_of(application["metadata"].get("creationTimestamp")) or _EARLIEST


def _phase(state: str, ended: str) -> Phase:
    if state in _TERMINATED:
        return Phase.COMPLETED if ended == "Succeeded" else Phase.FAILED
    if state == "Succeeded":
        return Phase.COMPLETED
    return Phase.SUBMITTED if not state or state in _STARTING else Phase.RUNNING


def _before_last(status: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the last state with a result of the run."""
    history = status.get("stateTransitionHistory") or {}
    states = [history[number] for number in in_order(history)]
    results = [state for state in states if state.get("currentStateSummary") not in _TERMINATED]
    return results[-1] if results else {}


def _error(ended: Mapping[str, Any], current: Mapping[str, Any]) -> str:
    if ended.get("currentStateSummary") not in _FAILURES:
        return ""
    place = ".status.stateTransitionHistory"
    causes = [root_cause(state.get("message") or "", place) for state in (ended, current)]
    return "; ".join(dict.fromkeys(filter(None, causes))) or str(ended["currentStateSummary"])


def _properties(job: JobApplication) -> dict[str, str]:
    policy = {"spark.kubernetes.container.image.pullPolicy": job.pull_policy}
    return {
        "spark.kubernetes.container.image": job.image,
        **(policy if job.pull_policy else {}),
        "spark.kubernetes.authenticate.driver.serviceAccountName": job.program.service_account,
    }


APACHE = Launcher(
    LauncherName.APACHE, resources.APACHE_SPARK_APPLICATIONS, apache_manifest, apache_run
)


RESTARTING = "Restarting"
"""State of a Job of which a pod has failed. The Job controller pauses before the next pod."""
_ENDED_SECONDS = 86_400
"""Time for which an ended Job with a time limit is kept, longer than an operator is away."""


def job_manifest(job: JobApplication) -> Body:
    """Return the Job to create."""
    pod = job.pods[Role.JOB].sized()
    own, *others = pod["spec"]["containers"]
    own = {
        **own,
        "image": job.image,
        "args": ["drain", "python3", "-m", job.program.name, job.program.argument],
    }
    spec = {
        **pod["spec"],
        "containers": [own, *others],
        "serviceAccountName": job.program.service_account,
        "restartPolicy": "Never",
    }
    evicted = {"type": "DisruptionTarget", "status": "True"}
    return {
        **resources.JOBS.typed,
        "metadata": job.metadata,
        "spec": {
            "backoffLimit": job.retries,
            **({} if job.program.seconds is None else _limits(job.program.seconds)),
            "podFailurePolicy": {"rules": [{"action": "Ignore", "onPodConditions": [evicted]}]},
            # The next pod starts after the last one has ended, not while it settles messages.
            "podReplacementPolicy": "Failed",
            "template": {**pod, "spec": spec},
        },
    }


def _limits(seconds: int) -> dict[str, int]:
    """Return the limits of a Job by which it ends and is deleted, even without its owner."""
    return {"activeDeadlineSeconds": seconds, "ttlSecondsAfterFinished": _ENDED_SECONDS}


def job_run(job: Body) -> SparkRun:
    """Return the state of *job*."""
    key = Key.of(job)
    status = job.get("status") or {}
    conditions = {
        condition["type"]: condition
        for condition in status.get("conditions") or ()
        if condition.get("status") == "True"
    }
    state, phase = "Starting" if "startTime" in status else "", Phase.SUBMITTED
    if status.get("failed"):
        state = RESTARTING
    if status.get("ready"):
        state, phase = "Running", Phase.RUNNING
    if "Complete" in conditions:
        state, phase = "Complete", Phase.COMPLETED
    if "Failed" in conditions:
        state, phase = "Failed", Phase.FAILED
    failure = conditions.get("Failed", {})
    return SparkRun(
        kind=resources.JOBS.kind,
        key=key,
        created=_created(job),
        state=state,
        phase=phase,
        error=": ".join(filter(None, map(failure.get, ("reason", "message")))),
        submitted=moment_of(status.get("startTime")) if phase is Phase.SUBMITTED else None,
        pods=f"batch.kubernetes.io/job-name={key.name}",
        serving="start the Job controller of the cluster (kube-controller-manager)",
    )


JOB = Launcher(None, resources.JOBS, job_manifest, job_run)


SPARK_OPERATORS = (KUBEFLOW, APACHE)
"""Spark operators in order of preference."""
LAUNCHERS = (*SPARK_OPERATORS, JOB)


class Launched(NamedTuple):
    """The Job or SparkApplication of a Replay, and its launcher."""

    launcher: Launcher
    application: Body


def choose_operator(ctx: Context) -> Launcher:
    """Return the first Spark operator whose kind is installed.

    Raises:
        SparkOperatorNotFound: no kind of an enabled Spark operator is installed.
    """
    enabled = [launcher for launcher in SPARK_OPERATORS if launcher.resource in ctx.applications]
    for launcher in enabled:
        if launcher.resource not in ctx.missing:
            return launcher
    groups = " or ".join(launcher.resource.group for launcher in enabled)
    raise Reason.SPARK_OPERATOR_NOT_FOUND.error(
        f"no kind SparkApplication{' of ' * bool(groups)}{groups} is installed in this cluster, so "
        "no Replay can run with engine Spark",
        remedy="install the Spark operator, and this Replay starts automatically; or create "
        "another one with engine Job",
    )


def choose_engine(spec: ReplaySpec, replay: Body, policy: Body, ctx: Context) -> ReplayEngine:
    """Return the engine of a Replay: Job or Spark.

    The choice is permanent: a Replay whose application was deleted keeps its engine.

    Args:
        spec: spec of the Replay.
        replay: the Replay.
        policy: its RetryPolicy, with the last statistics.
        ctx: settings, and the installed kinds.
    """
    chosen = ReplayStatus.of(replay).engine if was_launched(replay) else None
    if chosen is not None and chosen is not ReplayEngine.AUTO:
        return chosen
    if spec.engine is not ReplayEngine.AUTO:
        return spec.engine
    if spec.mode is Mode.AUDIT or all(
        launcher.resource not in ctx.applications or launcher.resource in ctx.missing
        for launcher in SPARK_OPERATORS
    ):
        return ReplayEngine.JOB
    select = spec.select
    backlog = (policy.get("status") or {}).get("backlog") or {}
    bounds = (
        None if select is None else select.limit,
        None if select is None or select.ids is None else len(select.ids),
        backlog.get("deadLetter"),
    )
    least = min((bound for bound in bounds if bound is not None), default=None)
    is_small = least is not None and least <= ctx.settings.job_max_messages
    return ReplayEngine.JOB if is_small else ReplayEngine.SPARK


APPLICATION = "redrive.io/application"
"""Annotation of a Replay with the name of its Job or SparkApplication."""
LAUNCHED_AT = "redrive.io/launched-at"
"""Annotation of a Replay with the time of its launch, from which its deadline counts."""


def was_launched(replay: Body) -> bool:
    """Return True if *replay* has, or had, an application.

    The annotation decides, not the status: a job may write the status of all Replays of its
    namespace. A Replay restored from a backup has another uid, and so another application.
    """
    annotations = replay["metadata"].get("annotations") or {}
    return bool(annotations.get(APPLICATION) == launch.name_of(replay))


def launched_at(replay: Body) -> datetime | None:
    """Return the time of the launch of *replay*; None if it was not launched."""
    annotations = replay["metadata"].get("annotations") or {}
    return moment_of(annotations.get(LAUNCHED_AT)) if was_launched(replay) else None


def find_application(replay: Body, ctx: Context) -> Launched | None:
    """Return the application with the name that *replay* uses, of any engine.

    An application that it owns takes precedence.
    """
    key = Key(Key.of(replay).namespace, launch.name_of(replay))
    caches = ((launcher, ctx.applications.get(launcher.resource)) for launcher in LAUNCHERS)
    bodies = ((launcher, cache.get(key)) for launcher, cache in caches if cache is not None)
    named = [Launched(launcher, body) for launcher, body in bodies if body is not None]
    owned = [launched for launched in named if is_owned_by(launched.application, replay)]
    return next(iter(owned or named), None)


def find_running(replay: Body, ctx: Context) -> Launched | None:
    """Return the application of a Replay if it has not ended; None for one that it does not own."""
    launched = find_application(replay, ctx)
    if launched is None or not is_owned_by(launched.application, replay):
        return None
    is_over = launched.launcher.run(launched.application).phase in FINAL
    return None if is_over else launched
