"""The file of job templates: changes, invalid forms, and validation by the API server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from prometheus_client import REGISTRY

from redrive.api.job import ConnectionJobs, JobTemplate
from redrive.kube import resources
from redrive.kube.client import KubernetesError, UnavailableError
from redrive.kube.job_templates import JobTemplates, executor_bound
from redrive.kube.resources import Key, Resource
from redrive.reasons import Reason
from tests.support.fake_kubernetes import FakeKubernetes
from tests.support.reasons import raises

REFUSED = KubernetesError("no", got='unknown field "template.spec.nodeSelectors"', remedy="x")


class Operator:
    """Job templates with their file and an API server."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "templates.yaml"
        self.api = FakeKubernetes()
        self.templates = JobTemplates(self.file)
        self.changes = 0
        self.templates.listen(self._changed)

    def _changed(self) -> None:
        self.changes += 1

    async def write(self, text: str) -> None:
        """Write the file, and have it read."""
        self.file.write_text(text)
        await self.read()

    async def read(self) -> None:
        await self.templates.read(self.api, "redrive")


@pytest.fixture
def operator(tmp_path: Path) -> Operator:
    return Operator(tmp_path)


async def test_default_template_exists_without_a_file() -> None:
    templates = JobTemplates(None)
    await templates.read(FakeKubernetes(), "redrive")
    assert templates.names == ("default",)
    assert templates.find("default") == JobTemplate()


async def test_changed_file_replaces_templates(operator: Operator) -> None:
    await operator.write("large: {executors: 2}\ndefault: {maxExecutors: 9}")
    assert operator.templates.find("large").executors == 2
    assert operator.templates.find("default").max_executors == 9
    await operator.write("large: {executors: 3}")
    assert operator.templates.find("large").executors == 3
    assert operator.templates.find("default") == JobTemplate()
    await operator.write("")
    with raises(Reason.JOB_TEMPLATE_NOT_FOUND, match=r"got 'large'.*with one of default"):
        operator.templates.find("large")
    assert operator.changes == 3
    await operator.read()
    assert operator.changes == 3


async def test_each_pod_is_validated_by_a_dry_run(operator: Operator) -> None:
    selector = {"nodeSelector": {"disk": "ssd"}}
    await operator.write(f"large: {{executor: {{spec: {selector}}}, image: 'r/i:1'}}")
    assert operator.api.writes == []
    driver, executor, job = operator.api.dry_runs
    assert driver["metadata"]["namespace"] == "redrive"
    assert executor["template"]["spec"]["nodeSelector"] == {"disk": "ssd"}
    (container,) = executor["template"]["spec"]["containers"]
    assert container["image"] == "r/i:1"
    (container,) = job["template"]["spec"]["containers"]
    assert container["resources"]["limits"] == {"memory": "1434Mi"}


def refuse(error: Exception) -> Any:  # noqa: ANN401  a hook
    def before(verb: str, resource: Resource, _: Key) -> None:
        if (verb, resource) == ("dry_run", resources.POD_TEMPLATES):
            raise error

    return before


@pytest.mark.parametrize(
    "text", ["large: {executors: 9}", "large: {drivers: {}}", "large: {executors: 1}"]
)
async def test_last_valid_form_stays_in_use(operator: Operator, text: str) -> None:
    await operator.write("large: {executors: 2}")
    operator.api.before = refuse(REFUSED)
    await operator.write(text)
    assert operator.templates.find("large").executors == 2
    problem = operator.templates.problem("large")
    assert problem is not None
    assert problem.reason == "JobTemplateInvalid"
    assert "its last valid form stays in use" in problem.message
    assert metric("large") == 0
    operator.api.before = lambda *_: None
    await operator.write("large: {executors: 4}")
    assert operator.templates.problem("large") is None
    assert operator.templates.find("large").executors == 4
    assert metric("large") == 1


async def test_template_that_was_never_valid_is_refused(operator: Operator) -> None:
    await operator.write("large: {executors: 9}\nsmall: {}")
    with raises(Reason.JOB_TEMPLATE_INVALID, match="large: `executors` must be at most"):
        operator.templates.find("large")
    assert operator.templates.find("small") == JobTemplate()
    assert operator.templates.names == ("default", "large", "small")


@pytest.mark.parametrize("text", ["a: [", "[a]", "a: 1", "A: {}", "1: {}"])
async def test_wrong_file_stops_nothing(operator: Operator, text: str) -> None:
    await operator.write("large: {}")
    await operator.write(text)
    if text == "A: {}":  # the others of the file are read
        assert "must be lower-case letters" in operator.templates.problem("A").message  # type: ignore[union-attr]
        return
    assert operator.templates.find("large") == JobTemplate()
    problem = operator.templates.problem("large")
    assert problem is not None
    assert "templates.yaml cannot be read" in problem.message
    assert metric("large") == 0
    await operator.write("large: {}")
    assert operator.templates.problem("large") is None


async def test_missing_file_is_a_problem(operator: Operator) -> None:
    await operator.read()
    problem = operator.templates.problem("default")
    assert problem is not None
    assert "No such file" in problem.message
    assert operator.templates.find("default") == JobTemplate()


async def test_unavailable_api_server_is_asked_again(operator: Operator) -> None:
    operator.api.before = refuse(UnavailableError("away", remedy="wait"))
    await operator.write("large: {}")
    with raises(Reason.JOB_TEMPLATE_NOT_FOUND):
        operator.templates.find("large")
    assert operator.templates.problem("large") is None
    operator.api.before = lambda *_: None
    await operator.read()
    assert operator.templates.find("large") == JobTemplate()


def metric(name: str) -> float | None:
    return REGISTRY.get_sample_value("redrive_job_template_valid", {"template": name})


def test_lowest_bound_of_executors_wins() -> None:
    template = JobTemplate(max_executors=8)
    assert executor_bound(template, ConnectionJobs(), 100) == 8
    assert executor_bound(template, ConnectionJobs(max_executors=5), 100) == 5
    assert executor_bound(template, ConnectionJobs(max_executors=5), 3) == 3
