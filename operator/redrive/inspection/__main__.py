"""Program of the job of an Inspection: `python -m redrive.inspection JOB`. It consumes nothing.

It reads the messages by position, and writes a summary into the status of the Inspection. Status
and log contain no message key, no payload, and no text of an unknown error, which may quote them.
Messages, and texts of causes, are encrypted for the recipient that the Inspection names. A file of
messages is written to a destination that the connection names.
"""

from __future__ import annotations

import asyncio
import logging
import math
import sys
import time
import traceback
from collections.abc import Iterator
from datetime import UTC, datetime
from itertools import chain

from redrive.api import Body
from redrive.api.inspection import (
    MAX_INSPECTED_CAUSES,
    MAX_SEALED,
    ExportFormat,
    InspectedCause,
    InspectedMessages,
    InspectionRun,
    InspectionSpec,
    InspectionStatus,
)
from redrive.api.model import parse_spec
from redrive.api.replay import MessageSelection
from redrive.api.replay_status import FINAL, JobFailure
from redrive.auth.files import job_credentials
from redrive.errors import RedriveError
from redrive.inspection.job import InspectionJob, PulsarMessages
from redrive.inspection.payloads import MAX_PAYLOAD, ShownFields
from redrive.inspection.reader import MAX_BYTES, InspectedTopic, MessageReading, MessageSource
from redrive.inspection.record import MAX_RECORDED_BYTES, Recorder, newest_of
from redrive.inspection.sealing import seal
from redrive.inspection.summary import CauseGroup, Summary, count_of
from redrive.kube import logs, resources
from redrive.kube.client import ConflictError, Kubernetes, NotFoundError
from redrive.kube.informer import when_available
from redrive.kube.resources import Key
from redrive.policy.naming import TopicName
from redrive.policy.values import time_text
from redrive.reading import broker
from redrive.reading.rows import DeadLetterRow
from redrive.reasons import Reason
from redrive.replay.spec import Choice
from redrive.replay.transport import Pace, pause_after_read

REPORT_SECONDS = 5.0
_GONE = "InspectionGone"

logger = logging.getLogger(__name__)


def main(arguments: list[str]) -> None:
    """Run one Inspection."""
    logs.to_stderr("text")
    job = InspectionJob.decode(arguments[0] if len(arguments) == 1 else "")
    try:
        run = _read(job)
        _write(job, run)
    except Exception as error:  # noqa: BLE001  its text may quote a message
        if isinstance(error, RedriveError):
            reason, message = error.reason, str(error)
        else:
            reason = type(error).__name__
            message = f"the job failed with {reason}"
            logger.error("%s", "".join(traceback.format_tb(error.__traceback__)))  # noqa: TRY400
        if reason == _GONE:
            logger.info("the run ends: %s", message)
            return
        failure = JobFailure.of(reason, message)
    else:
        logger.info("read %s messages; %s are selected", run.messages, run.matched)
        return
    # After the block: Python would print the unknown error before an error of these lines.
    logger.error("%s", message)
    _write(job, InspectionRun(failure=failure))
    sys.exit(1)


def _read(job: InspectionJob) -> InspectionRun:
    """Read the messages, and report the progress.

    Raises:
        RedriveError: the Inspection ended, or the topic can't be read in time.
    """
    start = time.monotonic()
    end = start + job.seconds
    spec = parse_spec(InspectionSpec, _write(job, InspectionRun()))
    source = _source(job)
    choice = Choice.of(spec.select or MessageSelection())
    is_file = spec.export is not None
    max_bytes = None if is_file else MAX_BYTES
    reading = broker.waited(lambda: source.plan(choice, spec.newest, max_bytes))
    is_waiting = spec.source is InspectedMessages.RETRY
    max_payload = None if is_file else MAX_PAYLOAD
    recorder = Recorder(
        reading.schema,
        spec.reveals,
        max_payload,
        waiting=is_waiting,
        shown=ShownFields.of(job.shown),
        shows_keys=job.shows_keys,
    )
    has_texts = is_file or spec.causes is not None
    summary, due = Summary(recorder if has_texts else None), time.monotonic() + REPORT_SECONDS
    pace, rate = Pace(), None if spec.rate_limit is None else spec.rate_limit.per_second

    def report() -> None:
        nonlocal due
        pause_after_read(pace, rate)
        now = time.monotonic()
        if now > end:
            raise Reason.DEADLINE_EXCEEDED.error(
                "the reading did not end within its deadline",
                got=spec.deadline,
                remedy="create another Inspection with a longer deadline or fewer newest entries",
            )
        if now > due:
            _write(job, _shown(reading, summary, now - start))
            due = now + REPORT_SECONDS

    def counted() -> Iterator[DeadLetterRow]:
        for row in reading.selected(report):
            summary.add(row)
            yield row

    rows, results = counted(), dict[str, str]()
    if spec.export is not None:
        if (first := next(rows, None)) is not None:
            _export(job, spec, chain([first], rows), recorder, summary, reading)
            results["file"] = job.file
    else:
        limit = 0 if spec.messages is None else spec.messages.limit
        newest = newest_of(rows, limit, MAX_RECORDED_BYTES)
        messages = list(map(recorder, newest))
        records = list(map(count_of, summary.ordered)) if spec.causes else messages
        if records and (result := spec.messages or spec.causes):
            results["sealed"] = seal(records, result.recipient, job.uid, MAX_SEALED)
    seconds = time.monotonic() - start
    return _shown(reading, summary, seconds, is_finished=True).model_copy(update=results)


def _source(job: InspectionJob) -> MessageSource:
    """Return the messages of a job, at the broker of their kind."""
    messages, credentials = job.source, job_credentials()
    if isinstance(messages, PulsarMessages):
        name = TopicName.parse_whole(messages.topic)
        addresses = messages.service_url, messages.admin_url
        return InspectedTopic(name, messages.subscription, *addresses, credentials)
    from redrive.inspection.rocketmq import DeadLetterQueues  # noqa: PLC0415  as for a file

    return DeadLetterQueues(messages, credentials)


def _export(  # noqa: PLR0913, PLR0917  parts of one reading
    job: InspectionJob,
    spec: InspectionSpec,
    rows: Iterator[DeadLetterRow],
    recorder: Recorder,
    summary: Summary,
    reading: MessageReading,
) -> None:
    """Write the file of the messages, or of their report.

    Raises:
        RedriveError: it can't be written.
    """
    # Most Inspections write no file, and these imports take a tenth of their start.
    from redrive.inspection import export, report  # noqa: PLC0415

    keys = job_credentials().object_store_keys()
    with export.destined_file(job.file, job.endpoint_url, keys) as file:
        if spec.export is None or spec.export.format is ExportFormat.HTML:
            at = datetime.fromtimestamp(time.time(), UTC)
            for _ in rows:
                pass  # `rows` counts them in the summary
            facts = report.ReportFacts.of(reading, spec.source, recorder, at, job.replays)
            file.write(report.render_report(facts, summary).encode())
        elif spec.export.format is ExportFormat.PARQUET:
            export.write_parquet(map(recorder, rows), file)
        else:
            export.write_json_lines(map(recorder, rows), file)


def _shown(
    reading: MessageReading, summary: Summary, seconds: float, *, is_finished: bool = False
) -> InspectionRun:
    return InspectionRun(
        total_entries=reading.total,
        planned_entries=reading.planned,
        read_entries=reading.entries,
        read_seconds=math.ceil(seconds),
        messages=reading.messages,
        matched=reading.matched,
        truncated=reading.is_truncated,
        malformed_entries=reading.malformed_entries or None,
        causes=tuple(map(_cause, summary.ordered[:MAX_INSPECTED_CAUSES])),
        distinct_keys=len(summary.keys),
        payload_bytes=summary.payload_bytes,
        finished=is_finished or None,
    )


def _cause(group: CauseGroup) -> InspectedCause:
    times = {"firstTime": time_text(group.first), "lastTime": time_text(group.last)}
    counts = {"messages": group.messages, "following": group.following, "replayed": group.replayed}
    fields = {"cause": group.cause, "fingerprint": group.fingerprint or None, **counts, **times}
    return InspectedCause.model_validate(fields)


def _write(job: InspectionJob, run: InspectionRun) -> Body:
    """Write `status.run`, and return the Inspection. Waits while the API server is unavailable.

    Raises:
        RedriveError: the Inspection has ended, or was deleted.
    """
    return asyncio.run(_written(job, run))


async def _written(job: InspectionJob, run: InspectionRun) -> Body:
    key, status = Key(job.namespace, job.name), {"run": run.to_manifest()}
    async with Kubernetes.connect() as kubernetes:

        async def write() -> Body:
            body = await kubernetes.get(resources.INSPECTIONS, key)
            is_other = body["metadata"]["uid"] != job.uid
            if is_other or InspectionStatus.of(body).phase in FINAL:
                raise _gone(key)
            await kubernetes.apply_status(
                resources.INSPECTIONS, body, status, resources.JOB_MANAGER
            )
            return body

        while True:
            try:
                return await when_available(write)
            except NotFoundError as error:
                raise _gone(key) from error
            except ConflictError:
                continue


def _gone(key: Key) -> RedriveError:
    return RedriveError(
        f"the Inspection {key} has ended, or was deleted",
        remedy="create another Inspection",
        reason=_GONE,
    )


if __name__ == "__main__":
    main(sys.argv[1:])
