"""Job templates of the operator: their file, read again when it changes.

The API server validates the pods of each template by a dry-run creation of a PodTemplate. If a
template becomes invalid, its last valid form stays in use. `problem` returns the error, and objects
that use the template show it. An invalid file never stops the operator.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import yaml
from prometheus_client import Gauge

from redrive.api import job
from redrive.api.conditions import StatusWarning
from redrive.api.model import parse
from redrive.errors import InvalidSpecError
from redrive.kube import resources
from redrive.kube.client import Kubernetes, KubernetesError, UnavailableError
from redrive.kube.observability import in_background
from redrive.reasons import Reason

READ_SECONDS = 10.0
"""Interval at which the file is read."""
VALID = Gauge(
    "redrive_job_template_valid",
    "1 if the file of job templates has a valid form of a template, otherwise 0.",
    ("template",),
)

_L = TypeVar("_L", bound=Callable[[], None])

logger = logging.getLogger(__name__)


def executor_bound(template: job.JobTemplate, jobs: job.ConnectionJobs, operator: int) -> int:
    """Return the lowest limit of the number of executors.

    Args:
        template: template of a Replay.
        jobs: settings of its connection.
        operator: limit of the operator.
    """
    return min(template.max_executors, operator, jobs.max_executors or operator)


class JobTemplates:
    """The last valid form of each job template, and the problems of the file.

    The template `default` exists even without a file.
    """

    def __init__(self, file: Path | None) -> None:
        """Start with the template `default`.

        Args:
            file: YAML, an object of templates by name; None without a file.
        """
        self._file = file
        self._valid: dict[str, job.JobTemplate] = {job.DEFAULT_TEMPLATE: job.JobTemplate()}
        self._problems: dict[str, str] = {}
        self._file_problem = ""
        self._text: str | None = None
        self._listeners: list[Callable[[], None]] = []

    def listen(self, listener: _L) -> _L:
        """Call *listener* when templates or their problems changed; usable as a decorator."""
        self._listeners.append(listener)
        return listener

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of all templates, including invalid ones."""
        return tuple(sorted(self._valid.keys() | self._problems.keys()))

    def get(self, name: str) -> job.JobTemplate | None:
        """Return the last valid form of a template; None without one."""
        return self._valid.get(name)

    def find(self, name: str) -> job.JobTemplate:
        """Return the last valid form of a template.

        Raises:
            JobTemplateInvalid: it never had one.
            JobTemplateNotFound: there is no such template.
        """
        template = self._valid.get(name)
        if template is not None:
            return template
        if problem := self.problem(name):
            raise Reason.JOB_TEMPLATE_INVALID.error(
                problem.message, remedy="correct it; this Replay starts automatically then"
            )
        raise Reason.JOB_TEMPLATE_NOT_FOUND.error(
            "the operator has no such job template",
            got=name,
            remedy="add it to jobTemplates of the Helm chart, and this Replay starts automatically "
            f"within two minutes, or create another Replay with one of {', '.join(self.names)}",
        )

    def problem(self, name: str) -> StatusWarning | None:
        """Return the error of the current form of a template; None if it is valid."""
        problem = self._problems.get(name) or self._file_problem
        if not problem:
            return None
        use = "; its last valid form stays in use" if name in self._valid else ""
        return StatusWarning(
            Reason.JOB_TEMPLATE_INVALID, f"the job template {name} is invalid: {problem}{use}"
        )

    async def read(self, kubernetes: Kubernetes, namespace: str) -> None:
        """Read the file if it changed.

        If the API server is unavailable, a template is validated by the next call.

        Args:
            kubernetes: validates templates.
            namespace: the Kubernetes namespace of the dry run, the operator's own.
        """
        if self._file is None:
            return
        before = (dict(self._valid), dict(self._problems), self._file_problem)
        try:
            text = await asyncio.to_thread(self._file.read_text, "utf-8")
            if text == self._text:
                return
            forms = _parsed(text)
        except (OSError, UnicodeDecodeError, yaml.YAMLError, InvalidSpecError) as error:
            self._text = None
            self._file_problem = f"the file {self._file} cannot be read: {error}"
            if self._file_problem != before[-1]:
                logger.warning("job templates: %s", self._file_problem)
        else:
            self._file_problem = ""
            self._text = text if await self._take(forms, kubernetes, namespace) else None
        VALID.clear()
        for name in self.names:
            VALID.labels(name).set(self.problem(name) is None)
        if before != (self._valid, self._problems, self._file_problem):
            for listener in self._listeners:
                listener()

    async def _take(self, forms: Mapping[str, Any], kubernetes: Kubernetes, namespace: str) -> bool:
        """Validate each template; return False if one was not validated yet."""
        is_done = True
        for name in (*self._valid.keys() - forms.keys(), *self._problems.keys() - forms.keys()):
            self._valid.pop(name, None)
            self._problems.pop(name, None)
        self._valid.setdefault(job.DEFAULT_TEMPLATE, job.JobTemplate())
        for name, form in sorted(forms.items()):
            try:
                parse(job.ReplayJobTemplate, {"name": name}, "name")
                template = parse(job.JobTemplate, form, name)
                await _validate(template, kubernetes, namespace)
            except UnavailableError as error:
                logger.info("job template %s is not validated yet: %s", name, error)
                is_done = False
            except (KubernetesError, InvalidSpecError) as error:
                self._problems[name] = str(error)
                logger.warning("job template %s is invalid: %s", name, error)
            else:
                self._valid[name] = template
                self._problems.pop(name, None)
        return is_done

    @asynccontextmanager
    async def following(self, kubernetes: Kubernetes, namespace: str) -> AsyncIterator[None]:
        """Read the file now and while the block runs; see `read`."""
        await self.read(kubernetes, namespace)
        try:
            async with in_background(self._follow(kubernetes, namespace), "job templates"):
                yield
        finally:
            self._listeners.clear()  # of the block

    async def _follow(self, kubernetes: Kubernetes, namespace: str) -> None:
        while True:
            await asyncio.sleep(READ_SECONDS)
            try:
                await self.read(kubernetes, namespace)
            except Exception:
                logger.exception("job templates: failed")


def _parsed(text: str) -> Mapping[str, Any]:
    forms = yaml.safe_load(text)
    if forms is None:
        return {}
    if not isinstance(forms, dict) or not all(
        isinstance(name, str) and isinstance(form, dict | None) for name, form in forms.items()
    ):
        raise InvalidSpecError(
            "the file of job templates must be an object of templates by name",
            got=type(forms).__name__,
            remedy="write a template like `default: {executors: 2}`",
        )
    return {name: form or {} for name, form in forms.items()}


async def _validate(template: job.JobTemplate, kubernetes: Kubernetes, namespace: str) -> None:
    """Validate all pods by the API server, without storing them.

    Raises:
        KubernetesError: it refuses one, or does not answer.
    """
    for role in job.Role:
        pod = job.pod_of(template, role).sized()
        first, *others = pod["spec"]["containers"]
        first = {**first, "image": template.image or "redrive"}
        body = {
            **resources.POD_TEMPLATES.typed,
            "metadata": {"generateName": "job-template-", "namespace": namespace},
            "template": {**pod, "spec": {**pod["spec"], "containers": [first, *others]}},
        }
        await kubernetes.dry_run(resources.POD_TEMPLATES, body)
