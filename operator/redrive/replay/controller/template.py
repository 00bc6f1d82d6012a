"""What the chart, a connection and a Replay say about a job's pods → one template. Pure.

Called by `admission`. The chart permits images, and the connection what a Replay may change.
"""

from __future__ import annotations

from collections.abc import Iterator

from redrive.api.job import JobDefaults, JobOverrides, JobRequest, JobTemplate, is_among
from redrive.api.pods import PodSize, mebibytes, requested_cores
from redrive.kube.context import Settings
from redrive.replay.controller.errors import JobNotPermittedError


def resolve(
    settings: Settings, connection: JobTemplate | None, replay: JobRequest | None
) -> JobDefaults:
    """Return the template of a job's pods: what the Replay says comes first, the chart's last.

    Raises:
        JobNotPermittedError: the connection names an image that the operator does not permit, or
            the Replay asks for what its connection does not permit.
    """
    template = settings.replay_job
    if connection is not None:
        _check_image(connection.image, settings, "the PulsarConnection")
        template = connection.on_top_of(template)
    if replay is None:
        return template
    allowed = template.overrides or JobOverrides()
    _check_image(replay.image, settings, "the Replay")
    if problem := next(_beyond(replay, allowed), None):
        raise JobNotPermittedError(
            "the connection does not permit what the Replay asks for in spec.job",
            got=problem,
            remedy="make another Replay without it, or extend job.overrides of the "
            "PulsarConnection; this Replay starts by itself then",
        )
    return replay.on_top_of(template)


def _check_image(image: str | None, settings: Settings, asking: str) -> None:
    """Check that the operator permits an image: it runs with the rights of the ServiceAccount."""
    own = {None, settings.replay_image, settings.replay_job.image}
    if image in own or settings.replay_job.permits(str(image)):
        return
    raise JobNotPermittedError(
        f"{asking} names an image for replay jobs that the operator does not permit",
        got=image,
        remedy="have it permitted with replay.job.images of the Helm chart, or leave it out",
    )


def _beyond(asked: JobRequest, allowed: JobOverrides) -> Iterator[str]:
    """Yield what is asked for and not allowed."""
    if asked.image is not None and not is_among(asked.image, allowed.images):
        yield f"image {asked.image}"
    for name, size in (("driver", asked.driver), ("executor", asked.executor)):
        yield from (f"{name}.{problem}" for problem in _too_big(size or PodSize(), allowed))
    most = allowed.max_executors or 0
    if (asked.executors or 0) > most:
        yield f"executors: {asked.executors}"
    if asked.dynamic_allocation and asked.dynamic_allocation.max_executors > most:
        yield f"dynamicAllocation.maxExecutors: {asked.dynamic_allocation.max_executors}"
    chosen = asked.node_selector is not None or asked.tolerations is not None
    if chosen and not allowed.placement:
        yield "nodeSelector or tolerations"
    for name in asked.spark_conf or ():
        if name not in allowed.spark_conf:
            yield f"sparkConf: {name}"


def _too_big(size: PodSize, allowed: JobOverrides) -> Iterator[str]:
    cores = allowed.max_cores or 0
    if (size.cores or 0) > cores:
        yield f"cores: {size.cores}"
    if size.core_request is not None and requested_cores(size.core_request) > cores:
        yield f"coreRequest: {size.core_request}"
    if size.memory is not None and (
        allowed.max_memory is None or mebibytes(size.memory) > mebibytes(allowed.max_memory)
    ):
        yield f"memory: {size.memory}"
