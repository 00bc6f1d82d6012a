"""Spark as the engine of a replay job.

Spark as the engine of a replay.

Called in the driver; the only builder of a SparkSession.

The data source `pulsar`, as Spark finds it: `spark.read.format("pulsar")`; a topic as rows.

Register it once in a session: `spark.dataSource.register(PulsarDataSource)`. Its credentials
are those that the environment of driver and executors leads to, see `spec.BrokerAccess`, never
options: these show in plans and in Spark's pages.

One Spark partition for each range. Reading takes nothing away: it goes around the subscription,
which the topic's messages stay in.
"""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import pyarrow as pa
from pyspark import Accumulator, AccumulatorParam, TaskContext
from pyspark.sql import Column, DataFrame, Row, SparkSession
from pyspark.sql import functions as sql
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from redrive.errors import RedriveError
from redrive.policy.naming import TopicName
from redrive.reading import bitmap, broker, rows
from redrive.reading.positions import EntryId, Position
from redrive.reading.ranges import Piece, Range
from redrive.replay import mover, selection
from redrive.replay.job import plan
from redrive.replay.job.plan import PlannedRange, Scan, Scanned, ScannedMessage, TaskFailure
from redrive.replay.lookup import schema_refusals
from redrive.replay.outcome import RangeResult
from redrive.replay.records import RangePlan
from redrive.replay.spec import Choice, Chooser, FailureCause, ReplayJob
from redrive.replay.task import RangeTask

_PLANNED = (
    "partition", "ledger", "entry", "batch_index", "batch_size", "first_chunk", "delivered",
    "oversized", "encrypted", "unreadable", "schema_version", "key", "published", "cause_type",
    "cause_fingerprint", "size", "replays",
)  # fmt: skip
"""The columns that a plan is made of. A condition may read others; what neither does, such as the
values for most, does not cross into the JVM."""

TASK_TRIES = 4
"""So often Spark runs a task; within one pod its own default is once."""


@contextmanager
def spark_session(job: ReplayJob) -> Iterator[SparkSession]:
    """Open the Spark session of a job, which knows the data source `pulsar`.

    All of it runs in this pod if the job has a size of one, else where spark-submit says.
    """
    builder = SparkSession.builder
    if job.pod is not None:
        # Python runs beside the JVM, whose heap is a part of the pod's memory.
        heap = f"{job.pod.memory // 2 // 2**20}m"
        builder = builder.master(f"local[{job.pod.cores},{TASK_TRIES}]")
        builder = builder.config("spark.driver.memory", heap).config("spark.ui.enabled", "false")
    spark = (
        builder.appName(f"replay {job.namespace}/{job.name}")
        # A moment without a time zone in a selection is meant in UTC.
        .config("spark.sql.session.timeZone", "UTC")
        # Else '${env:NAME}' in a selection stands for what the driver's environment holds.
        .config("spark.sql.variable.substitute", "false")
        # What a condition has twice would be computed before `_attempted`, and fail the task.
        .config("spark.sql.subexpressionElimination.enabled", "false")
        # A second copy of a task would wait for the producers of the first.
        .config("spark.speculation", "false")
        .getOrCreate()
    )
    spark.dataSource.register(PulsarDataSource)
    try:
        yield spark
    finally:
        spark.stop()


class Spark:
    """The engine that has Spark run the tasks; each range is a row, moved by a job of its own.

    A job ends when its task does. So the driver learns of each range at once, leases the next one
    then, and needs no channel to tasks, which PySpark has none of.
    """

    def __init__(self, spark: SparkSession, job: ReplayJob) -> None:
        self._spark = spark
        self._job = job
        # Each task adds to it when it ends; one that runs again adds once more.
        self._scanned = spark.sparkContext.accumulator(Scanned(), _Sum())
        dynamic = spark.sparkContext.getConf().get("spark.dynamicAllocation.enabled")
        self._grows = dynamic == "true"

    @property
    def slots(self) -> int:
        """Return how many tasks the executors that are there run at a time; at least 1."""
        # Not `defaultParallelism`, which is 2 for one executor with one core, or none.
        context = self._spark.sparkContext._jsc.sc()  # noqa: SLF001
        profile = context.resourceProfileManager().defaultResourceProfile()
        return max(1, int(context.maxNumConcurrentTasks(profile)))

    @property
    def capacity(self) -> int:
        """Return `slots` and one more, with which a core begins before the driver sees it free.

        With dynamic allocation twice as many: Spark asks for executors by what waits.
        """
        return self.slots * (2 if self._grows else 1) + 1

    @property
    def scanned(self) -> Scanned:
        """Return what scans have found by now."""
        return self._scanned.value

    def scan(self, scans: Sequence[Scan]) -> Iterator[PlannedRange]:
        """Plan ranges, all of them in one job.

        Raises:
            PySparkException: a task failed.
        """
        if not scans:
            return
        if self._job.where is None:
            # No value has to cross into the JVM for that.
            plan_each = functools.partial(_plan, self._scanned)
            ranges = self._spark.sparkContext.parallelize(scans, len(scans))
            written = ranges.map(plan_each).collect()
        else:
            choices = {scan.piece.range: scan.choice for scan in scans}
            fold = functools.partial(_fold, self._job, choices, self._scanned)
            written = (
                selected_rows(self._spark, self._job.where, scans).rdd.mapPartitions(fold).collect()
            )
        for each in map(json.loads, written):
            yield PlannedRange(
                Range.parse(each["range"]),
                RangePlan.from_json(each["plan"]),
                each["causes"],
                tuple(Position(*sample) for sample in each["samples"]),
                each["size"],
            )

    def move(self, task: RangeTask) -> RangeResult:
        """Move one range.

        Raises:
            RedriveError: as `mover.move` does.
            PySparkException: the task is lost.
        """
        (result,) = self._spark.sparkContext.parallelize([task], 1).map(_move).collect()
        if isinstance(result, TaskFailure):
            raise result.error()
        return result


def selected_rows(spark: SparkSession, where: str, scans: Sequence[Scan]) -> DataFrame:
    """Return what a plan has to know of each message of *scans*, and whether *where* takes it."""
    columns = rows.ddl([*_PLANNED, *sorted(selection.columns(where) - set(_PLANNED))])
    source = spark.read.format("pulsar").schema(columns)
    found = source.option("scans", encode_scans(scans)).load()
    return evaluated(found, where, _PLANNED)


def evaluated(found: DataFrame, where: str, columns: Sequence[str]) -> DataFrame:
    """Return *columns* of messages, and for each `selected` and `evaluated`.

    No message fails the query: one for which *where* can't be computed is neither.
    """
    condition = sql.expr(selection.to_sql(where))
    attempt = _attempted(found.sparkSession, sql.struct(condition.alias("selected")))
    return found.select(*columns, attempt.alias("attempt")).select(
        *columns,
        sql.coalesce("attempt.selected", sql.lit(False)).alias("selected"),  # noqa: FBT003
        sql.col("attempt").isNotNull().alias("evaluated"),
    )


def _attempted(spark: SparkSession, column: Column) -> Column:
    """Return *column*, NULL for each row for which its evaluation raises an exception.

    Spark's own `try_…` functions are made of this expression, which SQL has no name for.
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


def _plan(scanned: Accumulator[Scanned], scan: Scan) -> str:
    return _written(plan.scan(scan), scanned)


def _move(task: RangeTask) -> RangeResult | TaskFailure:
    try:
        context = TaskContext.get()
        return mover.move(task, again=context is None or context.attemptNumber() > 0)
    except RedriveError as error:
        return TaskFailure(type(error), str(error))  # of an error Spark passes on a text alone


def _fold(
    job: ReplayJob,
    choices: Mapping[Range, Choice],
    scanned: Accumulator[Scanned],
    found: Iterable[Row],
) -> Iterator[str]:
    """Plan the range that a task has read."""
    with broker.connect(job.service_url) as client:
        refusal = schema_refusals(client, job.policy.dead_letter_topic)
        for of, group in itertools.groupby(found, key=_range):
            chooser = Chooser(choices[of])
            seen = (_scanned_message(row, chooser) for row in group)
            yield _written(plan.plan(of, seen, refusal, choices[of]), scanned)


def _range(row: Row) -> Range:
    return Range.of(row.partition, Position(row.ledger, row.entry, row.batch_index))


def _scanned_message(row: Row, chooser: Chooser) -> ScannedMessage:
    position = Position(row.ledger, row.entry, row.batch_index)
    if not row.delivered:
        named = chooser.takes_undelivered(position)
        return ScannedMessage.undelivered(position, selected=None if named else named)
    first = None if row.first_chunk is None else EntryId.parse(row.first_chunk)
    failure = FailureCause(row.cause_type or "", row.cause_fingerprint or "")
    kinds = first, row.encrypted, row.unreadable, row.schema_version, failure.cause
    taken = chooser.takes(position, row.key, row.published, failure)
    return ScannedMessage(
        position,
        row.batch_size,
        *kinds,
        row.size,
        replays=row.replays,
        selected=taken and row.selected,
        evaluated=row.evaluated or not taken,
        oversized=row.oversized,
    )


def _written(planned: PlannedRange, scanned: Accumulator[Scanned]) -> str:
    scanned.add(Scanned.of(planned))
    return json.dumps(
        {
            "range": str(planned.range),
            "plan": planned.plan.to_json(),
            "causes": planned.causes,
            "samples": planned.samples,
            "size": planned.size,
        }
    )


@dataclass
class ScanPartition(InputPartition):
    """What one task reads."""

    scan: Scan


class PulsarReader(DataSourceReader):
    """Reads parts of a topic.

    Options:
        scans: which, as `encode` wrote them.

    Args:
        options: see there.
        columns: of `rows`: no other one crosses into the JVM.
    """

    def __init__(self, options: Mapping[str, str], columns: Sequence[str]) -> None:
        self._options, self._columns = options, columns

    def partitions(self) -> Sequence[InputPartition]:
        """Decide what each task reads."""
        return [ScanPartition(scan) for scan in decode_scans(self._options["scans"])]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Read one range, in batches of bounded size.

        Raises:
            RedriveError: see `reading.messages`.
        """
        if not isinstance(partition, ScanPartition):
            return  # Spark makes one up where there is nothing to read.
        with broker.connect(partition.scan.service_url) as client:
            for batch in rows.in_batches(plan.read_dead_letters(client, partition.scan)):
                yield rows.to_batch(batch, self._columns)


class PulsarDataSource(DataSource):
    """Reads a topic, see `PulsarReader`."""

    @classmethod
    def name(cls) -> str:
        """Return what stands in `format(…)`."""
        return "pulsar"

    def schema(self) -> str:
        """Return the columns of a message; a query may name some of them as its schema."""
        return rows.ddl(rows.COLUMNS)

    def reader(self, schema: StructType) -> PulsarReader:
        """Read in a batch query."""
        return PulsarReader(self.options, schema.fieldNames())


def encode_scans(scans: Sequence[Scan]) -> str:
    """Write *scans* as an option."""
    return json.dumps(
        [
            {
                "serviceURL": scan.service_url,
                "adminURL": scan.admin_url,
                "topic": str(scan.topic),
                "range": str(scan.piece.range),
                "resting": bitmap.encode(scan.piece.resting),
                "after": str(scan.piece.after),
                "moved": bitmap.encode(scan.moved),
                "ahead": scan.ahead,
            }
            for scan in scans
        ]
    )


def decode_scans(text: str) -> list[Scan]:
    """Read what `encode` wrote."""
    return [
        Scan(
            each["serviceURL"],
            each["adminURL"],
            TopicName.parse_whole(each["topic"]),
            Piece(
                Range.parse(each["range"]),
                bitmap.decode(each["resting"]),
                EntryId.parse(each["after"]),
            ),
            bitmap.decode(each["moved"]),
            each["ahead"],
        )
        for each in json.loads(text)
    ]
