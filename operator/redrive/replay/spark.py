"""Spark as the engine of a replay job, and its data source of dead letters.

The driver builds the only SparkSession, and registers the data source. Its credentials come from
the environment of driver and executors, see `auth.method.BrokerAccess`, and never from options,
which are visible in plans and in the Spark UI. Each range is a Spark partition. Reading does not
affect the subscription.
"""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import pyarrow as pa
from pyspark import Accumulator, AccumulatorParam, TaskContext
from pyspark.sql import Column, DataFrame, Row, SparkSession
from pyspark.sql import functions as sql
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from redrive.admin.rocketmq import Master
from redrive.api.rocketmq import RocketMQMessages
from redrive.errors import RedriveError
from redrive.policy.envelope import CAUSE_FINGERPRINT, CAUSE_TYPE
from redrive.policy.naming import TopicName
from redrive.reading import bitmap, broker, rows
from redrive.reading.positions import EntryId, Position
from redrive.reading.queues import MessageQueue
from redrive.reading.ranges import Piece, Range
from redrive.replay import mover, selection
from redrive.replay.account import MAX_LEADERS, Leaders
from redrive.replay.job import plan
from redrive.replay.job.plan import GROUPS, PlannedRange, Scan, Scanned
from redrive.replay.job.queue_plan import parts, read_part
from redrive.replay.job.scanned import ScannedMessage, row_of
from redrive.replay.lookup import schema_refusals
from redrive.replay.outcome import RangeResult
from redrive.replay.spec import (
    Choice,
    Chooser,
    FailureCause,
    QueueReplayJob,
    ReplayJob,
    RunJob,
)
from redrive.replay.task import RangeTask, TaskFailure

_PLANNED = (
    "partition", "ledger", "entry", "batch_index", "batch_size", "first_chunk", "delivered",
    "oversized", "encrypted", "unreadable", "schema_version", "ordering_key", "key", "published",
    "cause_type", "cause_fingerprint", "follows", "size", "replays",
)  # fmt: skip
"""Columns that a plan needs. Others are passed to the JVM only if a condition reads them."""

TASK_TRIES = 4
"""Maximum attempts of a task. Spark's default within one pod is 1."""


@contextmanager
def spark_session(job: RunJob) -> Iterator[SparkSession]:
    """Open the Spark session of a job, with the data source of dead letters.

    It runs in this pod if the job has a pod size, otherwise as configured by spark-submit.
    """
    builder = SparkSession.builder
    if job.pod is not None:
        # Python runs beside the JVM, whose heap is a part of the pod's memory.
        heap = f"{job.pod.memory // 2 // 2**20}m"
        builder = builder.master(f"local[{job.pod.cores},{TASK_TRIES}]")
        builder = builder.config("spark.driver.memory", heap).config("spark.ui.enabled", "false")
    spark = (
        builder.appName(f"replay {job.namespace}/{job.name}")
        # Timestamps without a time zone in a selection are in UTC.
        .config("spark.sql.session.timeZone", "UTC")
        # Prevents that '${env:NAME}' in a selection reads the environment of the driver.
        .config("spark.sql.variable.substitute", "false")
        # Repeated expressions would be computed before `_attempted`, and fail the task.
        .config("spark.sql.subexpressionElimination.enabled", "false")
        # A second copy of a task would wait for the producers of the first one.
        .config("spark.speculation", "false")
        .getOrCreate()
    )
    spark.dataSource.register(DeadLetterSource)
    try:
        yield spark
    finally:
        spark.stop()


class Spark:
    """Engine that runs tasks by Spark; each range is moved by its own Spark job.

    A Spark job ends with its task. So the driver gets the result of each range at once and leases
    the next one. PySpark has no other channel to tasks.
    """

    def __init__(self, spark: SparkSession, job: ReplayJob) -> None:
        self._spark = spark
        self._job = job
        # Each task adds its result at its end. A repeated task adds it again.
        self._scanned = spark.sparkContext.accumulator(Scanned(), _Sum())
        dynamic = spark.sparkContext.getConf().get("spark.dynamicAllocation.enabled")
        self._grows = dynamic == "true"

    @property
    def slots(self) -> int:
        """Return the number of concurrent tasks of the current executors; at least 1."""
        return _slots(self._spark)

    @property
    def capacity(self) -> int:
        """Return `slots` and one more, so that a free core has a task at once.

        With dynamic allocation it is twice as many, because Spark requests executors for waiting
        tasks.
        """
        return self.slots * (2 if self._grows else 1) + 1

    @property
    def scanned(self) -> Scanned:
        """Return the current results of scans."""
        return self._scanned.value

    def scan(self, scans: Sequence[Scan]) -> Iterator[PlannedRange]:
        """Plan all ranges in one Spark job.

        Raises:
            PySparkException: a task failed.
        """
        if not scans:
            return
        groups = list(plan.grouped(scans, self.slots))
        if self._job.where is None:
            # No row is passed to the JVM.
            tasks = self._spark.sparkContext.parallelize(groups, len(groups))
            yield from tasks.flatMap(functools.partial(_plan, self._scanned)).collect()
        else:
            choices = {scan.piece.range: scan.choice for scan in scans}
            fold = functools.partial(_fold, self._job, choices, self._scanned)
            messages = selected_rows(self._spark, self._job.where, groups)
            yield from messages.rdd.mapPartitions(fold).collect()

    def cancel(self, error: RedriveError) -> None:  # noqa: ARG002  Spark raises its own
        """End the Spark job of the current scan."""
        self._spark.sparkContext.cancelAllJobs()

    def move(self, task: RangeTask) -> RangeResult:
        """Move one range.

        Raises:
            RedriveError: as for `mover.move`.
            PySparkException: the task was lost.
        """
        return self.move_all([task])[0]

    def move_all(self, tasks: Sequence[RangeTask]) -> Sequence[RangeResult]:
        """Move several ranges in one task; errors are those of `move`."""
        (results,) = self._spark.sparkContext.parallelize([tasks], 1).map(_move_all).collect()
        if isinstance(results, TaskFailure):
            raise results.error()
        return results


def _slots(spark: SparkSession) -> int:
    # `defaultParallelism` is 2 for no executor, or for one with one core.
    context = spark.sparkContext._jsc.sc()  # noqa: SLF001
    profile = context.resourceProfileManager().defaultResourceProfile()
    return max(1, int(context.maxNumConcurrentTasks(profile)))


def scan_queues(
    spark: SparkSession, job: QueueReplayJob, queues: Sequence[MessageQueue]
) -> Iterator[tuple[MessageQueue, ScannedMessage]]:
    """Yield the messages of RocketMQ queues with the selection of a job, see `QueueScan`.

    The driver receives the messages of a few parts for each slot at a time, without their contents.

    Raises:
        PySparkException: a task failed.
    """
    others = set() if job.where is None else selection.columns(job.where) - set(_PLANNED)
    columns, waiting = [*_PLANNED, *sorted(others)], parts(queues)
    while waiting:
        size = GROUPS * _slots(spark)
        wave, waiting = waiting[:size], waiting[size:]
        source = spark.read.format(DeadLetterSource.name()).schema(rows.ddl(columns))
        messages = source.option("parts", encode_parts(job.source, wave)).load()
        if job.where is None:
            every = sql.lit(True)  # noqa: FBT003
            judged = messages.withColumns({"selected": every, "evaluated": every})
        else:
            judged = evaluated(messages, job.where, _PLANNED)
        choose = functools.partial(_choose, replace(job.choice, ids=()))
        for number, message in judged.rdd.mapPartitionsWithIndex(choose).collect():
            yield wave[number], message


def _choose(
    choice: Choice, number: int, messages: Iterable[Row]
) -> Iterator[tuple[int, ScannedMessage]]:
    chooser, leaders = Chooser(choice), Leaders(0)
    return ((number, _scanned_message(row, chooser, leaders)) for row in messages)


def selected_rows(spark: SparkSession, where: str, groups: Sequence[Sequence[Scan]]) -> DataFrame:
    """Return the fields of each message of scans for a plan, and the result of *where*.

    Each group of scans is one task.
    """
    columns = rows.ddl([*_PLANNED, *sorted(selection.columns(where) - set(_PLANNED))])
    source = spark.read.format("redrive-dead-letters").schema(columns)
    messages = source.option("scans", encode_scans(groups)).load()
    return evaluated(messages, where, _PLANNED)


def evaluated(messages: DataFrame, where: str, columns: Sequence[str]) -> DataFrame:
    """Return *columns* of messages, with `selected` and `evaluated`.

    If *where* cannot be computed for a message, or reads a value that is too large, both are false,
    and the query does not fail.
    """
    condition = sql.expr(selection.to_sql(where))
    attempt = _attempted(messages.sparkSession, sql.struct(condition.alias("selected")))
    if "value" in selection.columns(where):
        is_whole = (sql.col("size") <= rows.MAX_VALUE) & ~sql.col("oversized")
        attempt = sql.when(is_whole, attempt)
    return messages.select(*columns, attempt.alias("attempt")).select(
        *columns,
        sql.coalesce("attempt.selected", sql.lit(False)).alias("selected"),  # noqa: FBT003
        sql.col("attempt").isNotNull().alias("evaluated"),
    )


def _attempted(spark: SparkSession, column: Column) -> Column:
    """Return *column*, or NULL for rows for which its evaluation raises an exception.

    Spark's `try_…` functions use this expression, which has no name in SQL.
    """
    jvm = spark._jvm  # noqa: SLF001
    assert jvm is not None  # noqa: S101  a session of this process
    columns = jvm.org.apache.spark.sql.classic.ExpressionUtils
    attempt = jvm.org.apache.spark.sql.catalyst.expressions.TryEval
    return Column(columns.column(attempt(columns.expression(column._jc))))  # noqa: SLF001


class _Sum(AccumulatorParam[Scanned]):
    def zero(self, value: Scanned) -> Scanned:  # noqa: ARG002
        return Scanned()

    def addInPlace(self, value1: Scanned, value2: Scanned) -> Scanned:  # noqa: N802  Spark's name
        return value1 + value2


def _plan(scanned: Accumulator[Scanned], group: Sequence[Scan]) -> list[PlannedRange]:
    return [_counted(planned, scanned) for planned in plan.scan_all(group)]


def _move_all(tasks: Sequence[RangeTask]) -> Sequence[RangeResult] | TaskFailure:
    try:
        context = TaskContext.get()
        return mover.move_all(tasks, again=context is None or context.attemptNumber() > 0)
    except RedriveError as error:
        return TaskFailure.of(error)  # Spark passes only the text of errors


def _fold(
    job: ReplayJob,
    choices: Mapping[Range, Choice],
    scanned: Accumulator[Scanned],
    messages: Iterable[Row],
) -> Iterator[PlannedRange]:
    """Yield the plans of the ranges that a task has read."""
    with broker.connect(job.service_url) as client:
        refusal = schema_refusals(client, job.policy.dead_letter_topic)
        sequences = MAX_LEADERS if job.policy.sequenced else 0
        for source_range, group in itertools.groupby(messages, key=_range):
            choice, leaders = choices[source_range], Leaders(sequences)
            chooser = Chooser(choice)
            seen = (_scanned_message(row, chooser, leaders) for row in group)
            yield _counted(plan.plan(source_range, seen, refusal, choice, leaders.causes), scanned)


def _range(row: Row) -> Range:
    return Range.of(row.partition, Position(row.ledger, row.entry, row.batch_index))


def _scanned_message(row: Row, chooser: Chooser, leaders: Leaders) -> ScannedMessage:
    position = Position(row.ledger, row.entry, row.batch_index)
    if not row.delivered:
        named = chooser.takes_undelivered(position)
        return ScannedMessage.undelivered(position, selected=None if named else named)
    first = None if row.first_chunk is None else EntryId.parse(row.first_chunk)
    failure = FailureCause.of(
        {CAUSE_TYPE: row.cause_type, CAUSE_FINGERPRINT: row.cause_fingerprint}
    )
    counted = leaders.counted(failure, row.ordering_key or row.key, follows=row.follows)
    kinds = first, row.encrypted, row.unreadable, row.schema_version, counted, row.published
    taken = chooser.takes(position, (row.ordering_key, row.key), row.published, failure)
    return ScannedMessage(
        position,
        row.batch_size,
        *kinds,
        row.size,
        replays=row.replays,
        selected=taken and row.selected,
        evaluated=row.evaluated or not taken,
        oversized=row.oversized,
        follows=row.follows,
    )


def _counted(planned: PlannedRange, scanned: Accumulator[Scanned]) -> PlannedRange:
    scanned.add(Scanned.of(planned))
    return planned


@dataclass
class ScanPartition(InputPartition):
    """Spark partition of a group of scans."""

    scans: Sequence[Scan]

    def messages(self) -> Iterator[rows.DeadLetterRow]:
        """Yield the messages of the ranges."""
        with plan.reading(self.scans) as (_, messages):
            for scan, read in zip(self.scans, messages, strict=True):
                index = scan.piece.range.partition
                # `map` holds no message while the next one is decompressed.
                yield from map(row_of, read, itertools.repeat(index))


@dataclass
class QueuePartition(InputPartition):
    """Spark partition of a part of a RocketMQ queue."""

    source: RocketMQMessages
    part: MessageQueue

    def messages(self) -> Iterator[rows.DeadLetterRow]:
        """Yield the messages of the part."""
        return read_part(self.source, self.part)


class DeadLetterReader(DataSourceReader):
    """Reads parts of a topic.

    Args:
        options: options of the data source; `scans` is the text of `encode_scans`, or `parts` that
            of `encode_parts`.
        columns: columns of `rows` that are passed to the JVM.
    """

    def __init__(self, options: Mapping[str, str], columns: Sequence[str]) -> None:
        self._options, self._columns = options, columns

    def partitions(self) -> Sequence[InputPartition]:
        """Return one partition for each group of scans, or each part of a queue."""
        if parts := self._options.get("parts"):
            return decode_parts(parts)
        return [ScanPartition(scans) for scans in decode_scans(self._options["scans"])]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Read the messages of a partition, in batches of bounded size.

        Raises:
            RedriveError: as for `reader.read_entries` or `read_part`.
        """
        if not isinstance(partition, ScanPartition | QueuePartition):
            return  # Spark creates a partition if there is none
        for batch in rows.in_batches(partition.messages()):
            yield rows.to_batch(batch, self._columns)


class DeadLetterSource(DataSource):
    """Data source of dead letters, see `DeadLetterReader`."""

    @classmethod
    def name(cls) -> str:
        """Return the name for `format(…)`."""
        return "redrive-dead-letters"

    def schema(self) -> str:
        """Return the columns of a message, of which a query may select some by its schema."""
        return rows.ddl(rows.COLUMNS)

    def reader(self, schema: StructType) -> DeadLetterReader:
        """Return the reader of a batch query."""
        return DeadLetterReader(self.options, schema.fieldNames())


def encode_scans(groups: Sequence[Sequence[Scan]]) -> str:
    """Return groups of scans as the text of an option."""
    return json.dumps([[_written_scan(scan) for scan in group] for group in groups])


def _written_scan(scan: Scan) -> dict[str, object]:
    return {
        "serviceURL": scan.service_url,
        "adminURL": scan.admin_url,
        "topic": str(scan.topic),
        "range": str(scan.piece.range),
        "entries": bitmap.encode(scan.piece.pending),
        "after": str(scan.piece.after),
        "moved": bitmap.encode(scan.moved),
        "ahead": scan.ahead,
    }


def decode_scans(text: str) -> list[list[Scan]]:
    """Parse the text of `encode_scans`."""
    return [[_read_scan(document) for document in group] for group in json.loads(text)]


def _read_scan(document: Mapping[str, Any]) -> Scan:
    return Scan(
        document["serviceURL"],
        document["adminURL"],
        TopicName.parse_whole(document["topic"]),
        Piece(
            Range.parse(document["range"]),
            bitmap.decode(document["entries"]),
            EntryId.parse(document["after"]),
        ),
        bitmap.decode(document["moved"]),
        document["ahead"],
    )


def encode_parts(source: RocketMQMessages, parts: Sequence[MessageQueue]) -> str:
    """Return parts of RocketMQ queues as the text of an option."""
    ranges = [(part.offsets.start, part.offsets.stop) for part in parts]
    written = [(*p.master, p.topic, p.number, *ends) for p, ends in zip(parts, ranges, strict=True)]
    return json.dumps([asdict(source), written])


def decode_parts(text: str) -> list[QueuePartition]:
    """Parse the text of `encode_parts`."""
    source, parts = json.loads(text)
    messages = RocketMQMessages(**source)
    return [
        QueuePartition(messages, MessageQueue(Master(name, address), topic, queue, range(*ends)))
        for name, address, topic, queue, *ends in parts
    ]
