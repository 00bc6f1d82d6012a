"""Anyone's DataFrames: topics of a real broker, read and written by a real Spark."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pulsar
import pyarrow as pa
import pytest
from pyspark.errors import PySparkException, StreamingQueryException
from pyspark.sql import Column, DataFrame, Row, SparkSession
from pyspark.sql.functions import col, lit
from pyspark.sql.streaming.readwriter import DataStreamWriter
from pyspark.sql.types import StructType

from redrive.errors import RedriveError
from redrive.kube.resources import TOPIC_OWNER
from redrive.policy.naming import TopicName
from redrive.reading.positions import encode_nested
from redrive.spark import options
from redrive.spark import rows as source_rows
from redrive.spark.options import COLUMN_NAMES, MORE_COLUMN_NAMES
from sandbox.pulsar import SUPERUSER, Broker
from tests.support import raw_entries
from tests.support.documented import SPARK, blocks
from tests.support.raw_entries import RawEntry, store
from tests.support.waiting import wait_until

READER = "analyst"
EVERY_COLUMN = ",".join((*COLUMN_NAMES, *MORE_COLUMN_NAMES))
WORKER_IS_LATE = "Python worker failed to connect back"
TOKEN_PLUGIN = "org.apache.pulsar.client.impl.auth.AuthenticationToken"  # noqa: S105  a class


@dataclass
class Desk:
    """A notebook's session, a broker, and a role that may consume in one namespace."""

    spark: SparkSession
    broker: Broker
    namespace: str
    client: pulsar.Client
    sent: list[dict[str, Any]] = field(default_factory=list)

    def topic(self, name: str, partitions: int = 0, subscription: str = "keep") -> str:
        """Create a topic, with a subscription that keeps messages unless it is empty."""
        topic = f"persistent://{self.namespace}/{name}"
        self.admin("PUT", topic, "/partitions" if partitions else "", partitions or None)
        if subscription:
            at = f"/subscription/{subscription}"
            self.admin("PUT", topic, at, {"ledgerId": -1, "entryId": -1})
        return topic

    def unload(self, topic: str) -> None:
        """Close the ledgers of a topic: later messages go to new ones."""
        self.admin("PUT", topic, "/unload")

    def trim(self, topic: str) -> None:
        """Delete the ledgers that nothing keeps."""
        self.admin("POST", topic, "/trim")

    def backlog(self, topic: str, subscription: str) -> int:
        """Return how many messages a subscription of a partitioned topic has not acknowledged."""
        stats = json.loads(self.admin("GET", topic, "/partitioned-stats"))
        backlog: int = stats["subscriptions"][subscription]["msgBacklog"]
        return backlog

    def admin(self, method: str, topic: str, subject: str, body: object = None) -> str:
        """Ask the broker as its super-user, below *topic*."""
        at = f"/admin/v2/persistent/{topic.removeprefix('persistent://')}{subject}"
        answer = self.broker.request(method, at, body)
        answer.check(f"{method} {subject} of {topic}")
        return answer.body

    def send(self, topic: str, count: int, *, batched: bool = False, **fields: Any) -> None:  # noqa: ANN401
        """Send messages, whose values are their numbers among all that were sent."""
        producer = self.client.create_producer(
            topic, batching_enabled=batched, batching_max_publish_delay_ms=60_000
        )
        results: list[pulsar.Result] = []
        for _ in range(count):
            number = len(self.sent)
            event = 1_700_000_000_000 + number * 1_000
            message = {
                "partition_key": f"k{number % 7}",
                "event_timestamp": event,
                "properties": {"number": str(number)},
            } | fields
            producer.send_async(
                str(number).encode(), lambda result, _: results.append(result), **message
            )
            self.sent.append({"number": number, "event": event, "topic": topic})
        producer.flush()
        producer.close()
        assert results == [pulsar.Result.Ok] * count

    def options(self, *, admin: bool = True, token: str = "") -> dict[str, str]:
        """Return the options of every read and write here."""
        return {
            "service.url": self.broker.service_url,
            "pulsar.client.authPluginClassName": TOKEN_PLUGIN,
            "pulsar.client.authParams": f"token:{token or self.broker.token(READER)}",
        } | ({"admin.url": self.broker.admin_url} if admin else {})

    def read(self, *, admin: bool = True, token: str = "", **others: str) -> DataFrame:
        """Return the rows of a read with further options."""
        options = self.options(admin=admin, token=token) | others
        return self.spark.read.format("pulsar").options(**options).load()


def numbers(frame: DataFrame) -> list[int]:
    """Return the numbers of the rows, in order."""
    return sorted(int(row.value) for row in frame.select("value").collect())


def read_all(writing: DataStreamWriter, checkpoint: Path) -> None:
    """Run a stream from its checkpoint on until it has read all there is.

    It is started again, twice at the most, when Spark did not wait for its own process: the one
    that asks a source for its offsets has ten seconds to connect, whatever is configured
    (`PythonWorkerFactory.createSimpleWorker`). A busy machine takes longer at times.
    """
    writing = writing.option("checkpointLocation", str(checkpoint)).trigger(availableNow=True)
    for starts_left in (2, 1, 0):
        query = writing.start()
        try:
            assert query.awaitTermination(240)
        except StreamingQueryException as error:
            if not starts_left or WORKER_IS_LATE not in str(error):
                raise
        else:
            return
        finally:
            query.stop()


@pytest.fixture
def desk(notebook: SparkSession, broker: Broker, pulsar_namespace: str) -> Iterator[Desk]:
    path = f"/admin/v2/namespaces/{pulsar_namespace}/permissions/{READER}"
    broker.request("POST", path, ["consume", "produce"]).check("grant")
    client = pulsar.Client(
        broker.service_url,
        authentication=pulsar.AuthenticationToken(broker.token(SUPERUSER)),
        logger=pulsar.ConsoleLogger(pulsar.LoggerLevel.Error),
    )
    yield Desk(notebook, broker, pulsar_namespace, client)
    client.close()


def test_batch_has_all_fields_of_messages(desk: Desk) -> None:
    topic = desk.topic("orders")
    desk.send(topic, 3)
    desk.send(topic, 2, batched=True)
    rows = desk.read(topic=topic, columns=EVERY_COLUMN).collect()
    assert [int(row.value) for row in rows] == [0, 1, 2, 3, 4]
    assert [bytes(row["__key"]) for row in rows] == [b"k0", b"k1", b"k2", b"k3", b"k4"]
    assert {row["__topic"] for row in rows} == {topic}
    assert [row["__messageProperties"] for row in rows] == [{"number": str(n)} for n in range(5)]
    events = [row["__eventTime"].timestamp() * 1_000 for row in rows]
    assert events == [sent["event"] for sent in desk.sent]
    published = [row["__publishTime"].timestamp() * 1_000 for row in rows]
    assert published == sorted(published)
    assert min(published) > max(events)
    assert [row["__entry"] for row in rows] == [0, 1, 2, 3, 3]
    assert [row["__batchIndex"] for row in rows] == [0, 0, 0, 0, 1]
    assert {row["__encrypted"] for row in rows} == {False}
    ids = [pulsar.MessageId.deserialize(bytes(row["__messageId"])) for row in rows]
    assert [message_id.ledger_id() for message_id in ids] == [row["__ledger"] for row in rows]
    assert desk.read(topic=topic).columns == list(COLUMN_NAMES)


def test_key_of_bytes_is_read_as_bytes(desk: Desk) -> None:
    """Java stores such a key in base64, with a mark."""
    topic = desk.topic("orders")
    in_base64 = encode_nested(6, b"AP8B") + raw_entries.numbers(key_in_base64=1)
    entries = [RawEntry(in_base64), RawEntry(encode_nested(6, b"AP8B"))]
    store(desk.broker, TopicName.parse(topic), entries)
    rows = desk.read(topic=topic, columns="__key").collect()
    assert [bytes(row["__key"]) for row in rows] == [b"\x00\xff\x01", b"AP8B"]


def test_times_that_python_does_not_have_are_null(desk: Desk) -> None:
    """Each client reads rows in its own time zone."""
    last = 253_402_214_400_000 - 1
    topic = desk.topic("orders")
    times = [last, last + 1, 253_402_300_800_000, 2**63 // 1_000, 2**63 - 1, 2**64 - 1]
    for event in times:
        desk.send(topic, 1, event_timestamp=event)
    frame = desk.read(topic=topic, columns="value,__eventTime")
    times_read = {int(row.value): row["__eventTime"] for row in frame.collect()}
    assert times_read[0].year == 9999
    assert [times_read[number] for number in range(1, len(times))] == [None] * 5
    assert numbers(frame.where("__eventTime > '2026-01-01'")) == [0]
    assert numbers(frame.where("__eventTime is null")) == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("admin", [True, False], ids=["admin", "binary protocol alone"])
def test_positions_bound_the_messages_of_a_read(desk: Desk, admin: bool) -> None:  # noqa: FBT001
    topic = desk.topic("orders")
    desk.send(topic, 6)
    desk.send(topic, 4, batched=True)
    rows = desk.read(topic=topic, columns=EVERY_COLUMN).collect()
    starting = json.dumps({topic: f"{rows[2]['__ledger']}:{rows[2]['__entry']}"})
    ending = json.dumps({topic: list(bytes(rows[7]["__messageId"]))})
    desk.send(topic, 1)
    frame = desk.read(admin=admin, topic=topic, startingOffsets=starting, endingOffsets=ending)
    assert numbers(frame) == [2, 3, 4, 5, 6, 7]
    frame = desk.read(admin=admin, topic=topic, startingOffsets=starting)
    assert numbers(frame) == [2, 3, 4, 5, 6, 7, 8, 9, 10]


def test_pattern_reads_all_partitions_of_its_topics(desk: Desk) -> None:
    desk.send(desk.topic("orders-eu", partitions=3), 20)
    desk.send(desk.topic("orders-us"), 5)
    desk.topic("orders-none", partitions=2)
    desk.send(desk.topic("bills"), 5)
    frame = desk.read(topicsPattern=f"persistent://{desk.namespace}/orders-.*")
    assert numbers(frame) == list(range(25))
    names = [f"persistent://{desk.namespace}/{name}" for name in ("orders-us", "bills")]
    assert numbers(desk.read(topics=",".join(names))) == list(range(20, 30))
    whole = f"persistent://{desk.namespace}/orders-eu"
    assert numbers(desk.read(topics=f"{whole},{whole}-partition-0")) == list(range(20))


def test_pattern_leaves_derived_and_system_topics_out(desk: Desk) -> None:
    desk.send(desk.topic("orders"), 5)
    for name, partitions in (("orders-late", 0), ("orders-dead", 2)):
        desk.send(topic := desk.topic(name, partitions), 3)
        desk.admin("PUT", topic, "/properties", {TOPIC_OWNER: "here/shop/orders"})
    for name in ("orders-billing-RETRY", "orders-billing-DLQ", "orders-billing-DLQ-LEDGER"):
        desk.send(desk.topic(name), 3)
    orders = f"persistent://{desk.namespace}/orders.*"
    assert numbers(desk.read(topicsPattern=orders)) == list(range(5))
    everything = f"persistent://{desk.namespace}/.*"
    assert numbers(desk.read(topicsPattern=everything)) == list(range(5))
    derived = desk.read(topicsPattern=everything, includeDerivedTopics="true")
    assert numbers(derived) == list(range(20))
    for only in (".*-DLQ", ".*-late"):
        with pytest.raises(PySparkException, match="set includeDerivedTopics to true"):
            desk.read(topicsPattern=f"persistent://{desk.namespace}/{only}").count()


def test_a_refused_token_is_named_and_not_shown(desk: Desk) -> None:
    topic = desk.topic("orders")
    token = "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiJub2JvZHkifQ.c2lnbmF0dXJl"  # noqa: S105  of no role
    with pytest.raises(PySparkException, match=r"[Tt]oken|[Aa]uthenticat") as failed:
        desk.read(token=token, topic=topic).count()
    assert "eyJ" not in str(failed.value)


def test_missing_topic_is_named(desk: Desk) -> None:
    with pytest.raises(PySparkException, match="orders-missing"):
        desk.read(topic=f"persistent://{desk.namespace}/orders-missing").count()


def test_conditions_select_the_same_rows_as_python(desk: Desk) -> None:
    topic = desk.topic("orders", partitions=2)
    for _ in range(3):
        desk.send(topic, 40)
        desk.send(topic, 20, batched=True)
        desk.unload(topic)  # the next ones lie in other ledgers
    frame = desk.read(topic=topic, columns=EVERY_COLUMN)
    rows = frame.collect()
    assert len(rows) == 180
    by_number = sorted(rows, key=lambda row: int(row.value))
    middle, other = by_number[140], by_number[40]
    ledgers = len({row["__ledger"] for row in rows})
    # With how many tasks read it: of the partitions, or, of some entries of each, of the ledgers.
    conditions: list[tuple[Column, Callable[[Row], bool], int]] = [
        (col("__partition") == 1, lambda row: row["__partition"] == 1, 1),
        (col("__topic") == f"{topic}-partition-0", lambda row: row["__partition"] == 0, 1),
        (col("__ledger") < middle["__ledger"], lambda row: row["__ledger"] < middle["__ledger"], 2),
        (
            (col("__ledger") == middle["__ledger"]) & (col("__entry") <= middle["__entry"]),
            lambda row: (
                row["__ledger"] == middle["__ledger"] and row["__entry"] <= middle["__entry"]
            ),
            1,
        ),
        (col("__entry").isin(1, 3), lambda row: row["__entry"] in {1, 3}, ledgers),
        (~(col("__entry") == 1), lambda row: row["__entry"] != 1, 2),
        (
            (col("__entry") < 2) | (col("__partition") == 0),
            lambda row: row["__entry"] < 2 or row["__partition"] == 0,
            2,
        ),
        (
            col("__messageId") == lit(bytes(middle["__messageId"])),
            lambda row: row["__messageId"] == middle["__messageId"],
            1,
        ),
        (
            (col("__publishTime") >= lit(other["__publishTime"]))
            & (col("__publishTime") < lit(middle["__publishTime"])),
            lambda row: other["__publishTime"] <= row["__publishTime"] < middle["__publishTime"],
            2,
        ),
        (
            col("__eventTime") > lit(other["__eventTime"]),
            lambda row: row["__eventTime"] > other["__eventTime"],
            2,
        ),
    ]
    for condition, holds, tasks in conditions:
        wanted = sorted(int(row.value) for row in rows if holds(row))
        assert wanted
        selected = frame.where(condition)  # planned once for both
        assert sorted(int(row.value) for row in selected.collect()) == wanted, condition
        assert selected.rdd.getNumPartitions() == tasks, condition
    assert ledgers == 6
    assert frame.rdd.getNumPartitions() == 2


def test_stream_resumes_and_repeats_a_batch_exactly(desk: Desk, tmp_path: Path) -> None:
    topic = desk.topic("orders", partitions=2, subscription="notebook")
    batches: dict[int, list[list[int]]] = {}

    def run() -> int:
        stream = desk.spark.readStream.format("pulsar").options(
            **desk.options(),
            topic=topic,
            startingOffsets="earliest",
            maxBytesPerTrigger="1000",
            predefinedSubscription="notebook",
        )
        writing = stream.load().writeStream.foreachBatch(
            lambda frame, number: batches.setdefault(number, []).append(numbers(frame))
        )
        read_all(writing, tmp_path)
        return max(batches)

    desk.send(topic, 60)
    desk.send(topic, 20, batched=True)
    last = run()
    assert last >= 2  # admission by bytes
    # As after a crash behind its last batch, of which nothing says that it is done.
    for file in (tmp_path / "commits").glob(f"*{last}*"):
        file.unlink()
    desk.unload(topic)
    desk.send(topic, 40)
    run()
    assert [len(runs) for runs in batches.values()].count(2) == 1
    assert batches[last][0] == batches[last][1] != []
    assert sorted(n for runs in batches.values() for n in runs[0]) == list(range(120))
    assert desk.backlog(topic, "notebook") < 120
    written = (tmp_path / "offsets" / "0").read_text().splitlines()[-1]
    assert json.loads(written).keys() == {f"{topic}-partition-{index}" for index in (0, 1)}


def test_subscription_moved_under_a_stream_is_detected(desk: Desk, tmp_path: Path) -> None:
    """Skipping all messages stands for their expiry: only then may the broker delete them."""
    topic = desk.topic("orders", subscription="notebook")
    values: list[int] = []

    def run() -> None:
        stream = desk.spark.readStream.format("pulsar").options(
            **desk.options(), topic=topic, predefinedSubscription="notebook"
        )
        writing = stream.load().writeStream.foreachBatch(
            lambda frame, _: values.extend(numbers(frame))
        )
        read_all(writing, tmp_path)

    def next_ledger() -> None:
        desk.unload(topic)
        desk.trim(topic)

    def skip_all() -> None:
        desk.admin("POST", topic, "/subscription/notebook/skip_all")

    def backlog() -> int:
        stats = json.loads(desk.admin("GET", topic, "/stats"))
        waiting: int = stats["subscriptions"]["notebook"]["msgBacklog"]
        return waiting

    desk.send(topic, 3)
    skip_all()
    run()  # it begins behind all of it
    assert backlog() == 1
    next_ledger()
    next_ledger()
    run()
    desk.send(topic, 4)
    next_ledger()
    desk.send(topic, 5)
    run()
    assert values == list(range(3, 12))
    desk.send(topic, 6)
    skip_all()
    next_ledger()
    desk.send(topic, 1)
    with pytest.raises(PySparkException, match="no longer has the messages after"):
        run()


def test_written_rows_are_read_back_and_plans_hide_the_token(desk: Desk) -> None:
    topic = desk.topic("orders", partitions=2)
    frame = desk.spark.range(500).selectExpr(
        "cast(id as string) as value",
        "concat('k', id % 5) as __key",
        "timestamp_millis(1700000000000 + id) as __eventTime",
        "map('number', cast(id as string)) as __messageProperties",
    )
    frame.write.format("pulsar").mode("append").options(**desk.options(), topic=topic).save()
    read = desk.read(topic=topic)
    rows = sorted(read.collect(), key=lambda row: int(row.value))
    assert [int(row.value) for row in rows] == list(range(500))
    assert [row["__key"].decode() for row in rows] == [f"k{n % 5}" for n in range(500)]
    events = [round(row["__eventTime"].timestamp() * 1_000) for row in rows]
    assert events == [1_700_000_000_000 + n for n in range(500)]
    assert [row["__messageProperties"] for row in rows] == [{"number": str(n)} for n in range(500)]
    plans = [read._jdf.queryExecution().toString()]  # noqa: SLF001
    store = desk.spark._jsparkSession.sharedState().statusStore()  # noqa: SLF001
    ran = store.executionsList()
    plans += [ran.apply(at).physicalPlanDescription() for at in range(ran.size())]
    assert any("pulsar" in plan.lower() for plan in plans)
    assert not [plan for plan in plans if "eyJ" in plan]


def test_rows_name_their_topics_and_unknown_columns_fail(desk: Desk) -> None:
    bills, orders = desk.topic("bills"), desk.topic("orders")
    frame = desk.spark.createDataFrame(
        [(b"1", orders), (None, bills)], "value BINARY, __topic STRING"
    )
    frame.write.format("pulsar").mode("append").options(**desk.options()).save()
    assert [row.value for row in desk.read(topics=f"{bills},{orders}").collect()] == [None, b"1"]
    writing = desk.spark.range(3).write.format("pulsar").options(**desk.options(), topic=orders)
    with pytest.raises(PySparkException, match="the column id cannot be written"):
        writing.mode("append").save()
    with pytest.raises(PySparkException, match="cannot be overwritten"):
        frame.write.format("pulsar").options(**desk.options()).mode("overwrite").save()


@pytest.mark.timeout(180)  # the client would hang
@pytest.mark.parametrize("keys", [1, 2, 50])
def test_many_long_properties_are_written(desk: Desk, keys: int) -> None:
    """Such as the stack traces of dead letters; a batch of them exceeds the largest message."""
    topic = desk.topic("orders")
    frame = desk.spark.range(0, 3_000, 1, 1).selectExpr(
        "cast(id as string) as value",
        f"concat('k', id % {keys}) as __key",
        "map('trace', concat(id, repeat('x', 6000))) as __messageProperties",
    )
    frame.write.format("pulsar").mode("append").options(**desk.options(), topic=topic).save()
    rows = desk.read(topic=topic).selectExpr("value", "__messageProperties['trace'] as trace")
    assert sorted(int(row.value) for row in rows.collect()) == list(range(3_000))
    assert all(row.trace == row.value.decode() + "x" * 6_000 for row in rows.collect())


@pytest.mark.timeout(180)
@pytest.mark.parametrize("large", ["value", "key", "property"])
def test_row_larger_than_a_message_is_refused(desk: Desk, large: str) -> None:
    """Among rows of other keys: with them in one batch, the client ends its process."""
    topic = desk.topic("orders", partitions=2)

    def text(name: str) -> str:
        long = "id = 50" if name == large else "false"
        return f"if({long}, repeat('x', 6000000), cast(id as string))"

    frame = desk.spark.range(0, 100, 1, 1).selectExpr(
        f"{text('value')} as value",
        f"{text('key')} as __key",
        f"map('p', {text('property')}) as __messageProperties",
    )
    with pytest.raises(PySparkException, match=f"bytes than a message of {topic}") as failed:
        frame.write.format("pulsar").mode("append").options(**desk.options(), topic=topic).save()
    sizes = {
        "value": "'value': 6000000, 'key and properties': 5",
        "key": "'value': 2, 'key and properties': 6000003",
        "property": "'value': 2, 'key and properties': 6000003",
    }
    assert sizes[large] in str(failed.value)
    assert "raise maxMessageSize" in str(failed.value)


@pytest.mark.timeout(120)  # the client would reconnect without limit
@pytest.mark.parametrize("count", [5, 3_000], ids=["few", "more than a queue"])
def test_refused_messages_end_a_write(
    desk: Desk, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source_rows, "MAX_SECONDS", 3.0)
    topic = desk.topic("orders")
    desk.admin("POST", topic, "/maxMessageSize", 1_000)
    wait_until(lambda: desk.admin("GET", topic, "/maxMessageSize") == "1000")
    time.sleep(1)  # it is shown, and goes to the topic
    written = options.write_options(desk.options(admin=False) | {"topic": topic})
    writer = source_rows.TopicWriter(written, StructType().add("value", "binary"))
    batch = pa.RecordBatch.from_pydict({"value": [b"v" * 2_000] * count})
    with pytest.raises(RedriveError, match="stored no message") as failed:
        writer.write(iter([batch]))
    assert failed.value.reason == "NotWritten"


def test_missing_right_of_a_role_is_named(desk: Desk) -> None:
    topic = desk.topic("orders")
    desk.send(topic, 1)
    stranger = desk.broker.token("stranger")
    with pytest.raises(PySparkException, match="permission to consume there"):
        desk.read(admin=False, token=stranger, topic=topic).count()
    writing = desk.spark.range(3).selectExpr("cast(id as string) as value").write.format("pulsar")
    with pytest.raises(PySparkException, match="permission to produce there"):
        writing.mode("append").options(**desk.options(token=stranger), topic=topic).save()


def test_read_from_a_deleted_position_fails(desk: Desk) -> None:
    topic = desk.topic("orders", subscription="")
    desk.send(topic, 3)
    first = desk.read(topic=topic, columns="__ledger").first()
    assert first is not None
    desk.unload(topic)
    desk.send(topic, 3)
    desk.trim(topic)
    starting = json.dumps({topic: f"{first['__ledger']}:1"})
    with pytest.raises(PySparkException, match="no longer has the messages after"):
        desk.read(topic=topic, startingOffsets=starting).count()
    frame = desk.read(topic=topic, startingOffsets=starting, failOnDataLoss="false")
    assert numbers(frame) == [3, 4, 5]


def test_examples_of_the_guide_run(desk: Desk, tmp_path: Path) -> None:
    topic = desk.topic("orders", subscription="checks")
    results = [desk.topic(name) for name in ("copied", "checked")]
    desk.send(topic, 5)
    (tmp_path / "token").write_text(desk.broker.token(READER))
    names: dict[str, Any] = {"spark": desk.spark}
    for example in blocks(SPARK, language="python"):
        code = example.text
        for shown, real in [
            ("pulsar://pulsar:6650", desk.broker.service_url),
            ("http://pulsar:8080", desk.broker.admin_url),
            ("persistent://shop/prod", f"persistent://{desk.namespace}"),
            ("/var/run/pulsar", str(tmp_path)),
        ]:
            code = code.replace(shown, real)
        exec(code, names)  # noqa: S102  an example of the guide
    assert names["everything"].count() == 5
    for result in results:
        assert numbers(desk.read(topic=result)) == list(range(5))
