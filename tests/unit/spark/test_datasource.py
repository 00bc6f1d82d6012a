"""The data source: options, schemas, rows of dead letters, pickling and refused modes."""

from __future__ import annotations

import asyncio
import json
import pickle
from contextlib import nullcontext
from pathlib import Path

import pyarrow as pa
import pytest
import trustme
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql.datasource import EqualTo, IsNotNull, Not
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import (
    BinaryType,
    BooleanType,
    DataType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructType,
    TimestampType,
)

from redrive.auth.files import SourceCredentials, source_credentials
from redrive.auth.method import Plugin, SourceAuthentication
from redrive.errors import InvalidSpecError, RedriveError
from redrive.policy.naming import TopicName
from redrive.reading.positions import EntryId, Position
from redrive.reading.ranges import Span
from redrive.reading.rows import DeadLetterRow
from redrive.reading.stored import MessagePlace
from redrive.spark import options
from redrive.spark.datasource import BatchReader, PulsarSource
from redrive.spark.options import (
    BATCH_OPTIONS,
    COLUMN_NAMES,
    MORE_COLUMN_NAMES,
    PARAMETERS,
    PLUGIN,
    TRUSTED,
    authentication_of_options,
)
from redrive.spark.rows import COLUMNS, messages_of_batch, read_slice, to_batch
from redrive.spark.slices import Filters, Slice
from redrive.spark.topics import TopicReader
from tests.support.entry_readers import LEDGER, StoredEntries, oversized
from tests.support.raw_entries import RawEntry
from tests.support.reasons import raises

READ = {"service.url": "pulsar://p:6650", "topic": "orders", "columns": "value"}
WRITE = {"service.url": "pulsar://p:6650", "topic": "orders"}
VALUE = StructType().add("value", "binary")


def test_readers_and_writers_are_picklable() -> None:
    source = PulsarSource(dict(READ))
    batch = source.reader(VALUE)
    filters = [EqualTo(("__partition",), 1), Not(EqualTo(("__entry",), 1)), IsNotNull(("value",))]
    assert batch.pushFilters(filters) == filters
    pickle.loads(pickle.dumps(batch))  # noqa: S301  our own
    pickle.loads(pickle.dumps(source.streamReader(VALUE)))  # noqa: S301
    pickle.loads(pickle.dumps(PulsarSource(dict(WRITE)).writer(VALUE, overwrite=False)))  # noqa: S301


def test_schema_follows_the_columns() -> None:
    assert PulsarSource(dict(READ)).schema() == "`value` BINARY"
    with pytest.raises(InvalidSpecError, match="not supported by this source"):
        PulsarSource(dict(READ)).reader(StructType().add("value", "string").add("key", "string"))
    whole = PulsarSource({name: READ[name] for name in ("service.url", "topic")}).schema()
    assert all(f"`{name}`" in whole for name in COLUMN_NAMES)


def test_batch_and_stream_options_are_not_mixed() -> None:
    with pytest.raises(InvalidSpecError, match="predefinedSubscription"):
        PulsarSource(READ | {"predefinedSubscription": "s"}).reader(VALUE)
    with pytest.raises(InvalidSpecError, match="endingOffsets"):
        PulsarSource(READ | {"endingOffsets": "latest"}).streamReader(VALUE)
    with pytest.raises(InvalidSpecError, match="maxBytesPerTrigger must be a positive number"):
        PulsarSource(READ | {"maxBytesPerTrigger": "1"}).streamReader(VALUE)
    with pytest.raises(InvalidSpecError, match="must not be latest"):
        PulsarSource(READ | {"startingOffsets": "latest"}).reader(VALUE)
    assert isinstance(
        PulsarSource(READ | {"startingOffsets": "earliest"}).reader(VALUE), BatchReader
    )


@pytest.mark.parametrize(
    "schema",
    [
        StructType().add("id", LongType()),
        StructType().add("value", LongType()),
        StructType().add("__key", "string"),
        StructType().add("value", "string").add("__topic", "string"),
        StructType()
        .add("value", "string")
        .add("__messageProperties", MapType(StringType(), LongType())),
    ],
)
def test_rows_that_are_no_messages_are_refused(schema: StructType) -> None:
    with pytest.raises(RedriveError):
        PulsarSource(dict(WRITE)).writer(schema, overwrite=False)


def test_overwrite_of_topic_is_refused() -> None:
    with pytest.raises(InvalidSpecError, match="overwritten"):
        PulsarSource(dict(WRITE)).writer(VALUE, overwrite=True)


ORDERS = TopicName("shop", "prod", "orders")
TYPES: dict[str, DataType] = {
    "BINARY": BinaryType(),
    "STRING": StringType(),
    "TIMESTAMP": TimestampType(),
    "MAP<STRING, STRING>": MapType(StringType(), StringType()),
    "INT": IntegerType(),
    "BIGINT": LongType(),
    "BOOLEAN": BooleanType(),
}
ROW = DeadLetterRow(
    partition=2,
    position=Position(7, 8, 9),
    batch_size=10,
    place=MessagePlace(2, ((7, 8),), 9, 10),
    first_chunk=None,
    encrypted=False,
    unreadable=False,
    schema_version=None,
    key="k",
    ordering_key=None,
    value=b"v",
    properties={"a": "1"},
    publish_time=1_700_000_000_123,
    event_time=1_700_000_000_456,
)
NAMES = (*COLUMN_NAMES, *MORE_COLUMN_NAMES)
text = st.text(max_size=10)


@pytest.mark.parametrize(
    ("key", "is_binary", "expected"),
    [
        ("AP8B", True, b"\x00\xff\x01"),
        ("AP8B", False, b"AP8B"),
        ("AP8", True, b"\x00\xff"),
        ("no base64", True, b"no base64"),
        ("größe", True, "größe".encode()),
        (None, True, None),
    ],
)
def test_key_is_read_as_its_producer_set_it(
    key: str | None, *, is_binary: bool, expected: bytes | None
) -> None:
    row = ROW._replace(key=key, binary_key=is_binary)
    assert to_batch([row], ["__key"], ORDERS).to_pylist() == [{"__key": expected}]


def test_columns_have_the_types_of_spark() -> None:
    assert set(COLUMNS) == set(NAMES)
    schema = StructType()
    for name in NAMES:
        schema = schema.add(name, TYPES[COLUMNS[name][0]])
    for row in (ROW, ROW._replace(key=None, value=None, event_time=None, unreadable=True)):
        batch = to_batch([row, row], NAMES, ORDERS)
        assert to_arrow_schema(schema, timezone="UTC").equals(batch.schema)
        assert batch.num_rows == 2
    empty = to_batch([ROW._replace(unreadable=True)], ["__messageProperties"], ORDERS)
    assert empty.to_pylist() == [{"__messageProperties": None}]


@pytest.mark.parametrize("columns", ["value,__entry", "value,__entry,__oversized"])
def test_oversized_message_needs_its_column(monkeypatch: pytest.MonkeyPatch, columns: str) -> None:
    stored = StoredEntries(RawEntry(b"", b"small"), oversized("a", "1"))
    monkeypatch.setattr(TopicReader, "client", lambda _: nullcontext(stored))
    ends = Position(LEDGER, 0, -1), Position(LEDGER, 1, 0)
    piece = Slice(ORDERS, -1, EntryId(LEDGER, -1), *ends, (Span(LEDGER, 0, 1),), 1.0)
    read = options.read_options({**READ, "columns": columns}, BATCH_OPTIONS)
    batches = read_slice(piece, read, Filters())
    if "__oversized" in columns:
        (batch,) = batches
        assert batch.to_pylist() == [
            {"value": b"small", "__entry": 0, "__oversized": False},
            {"value": None, "__entry": 1, "__oversized": True},
        ]
    else:
        with raises("ContentTooLarge", match=f"got '{LEDGER}:1:0'; add __oversized"):
            list(batches)


@given(
    st.none() | st.binary(max_size=10),
    st.none() | st.text(min_size=1, max_size=10),
    st.dictionaries(text, text, max_size=3),
    st.none() | st.integers(1, 2**42),
)
def test_written_row_equals_the_read_one(
    value: bytes | None, key: str | None, properties: dict[str, str], event: int | None
) -> None:
    row = ROW._replace(value=value, key=key, properties=properties, event_time=event)
    names = ["value", "__key", "__eventTime", "__messageProperties"]
    (message,) = messages_of_batch(to_batch([row], names, ORDERS))
    assert message == {
        "value": value,
        "partition_key": key,
        "event_timestamp": event,
        "properties": properties,
    }


def test_text_is_written_as_utf8_and_binary_key_refused() -> None:
    batch = pa.RecordBatch.from_pydict({"value": ["ü"], "__topic": ["orders"]})
    (message,) = messages_of_batch(batch)
    assert (message["value"], message["__topic"]) == ("ü".encode(), "orders")
    with pytest.raises(RedriveError, match="a key must be text"):
        list(messages_of_batch(pa.RecordBatch.from_pydict({"value": [b""], "__key": [b"\xff"]})))


@pytest.mark.parametrize(
    ("column", "values", "problem"),
    [
        ("__eventTime", pa.array([0], pa.timestamp("us", tz="UTC")), "0 µs since 1970"),
        (
            "__eventTime",
            pa.array([999], pa.timestamp("us", tz="UTC")),
            "at least 1970-01-01",
        ),
        (
            "__eventTime",
            pa.array([-1_000], pa.timestamp("us", tz="UTC")),
            "at least 1970-01-01",
        ),
        (
            "__eventTime",
            pa.array([253_402_214_400_000_000], pa.timestamp("us", tz="UTC")),
            "__eventTime must be before 9999-12-31",
        ),
        ("__key", pa.array([""]), "__key must not be empty"),
        ("__key", pa.array([b""]), "__key must not be empty"),
        (
            "__messageProperties",
            pa.array([[("a", "1"), ("b", None)]], pa.map_(pa.string(), pa.string())),
            "must not be NULL; got 'b'",
        ),
        ("__topic", pa.array([b"\xff"]).view(pa.string()), "a text of the column __topic"),
        ("__key", pa.array([b"\xff"]).view(pa.string()), "a key must be text"),
    ],
)
def test_row_that_no_message_carries_is_refused(
    column: str, values: pa.Array, problem: str
) -> None:
    batch = pa.RecordBatch.from_arrays([pa.array([b""]), values], ["value", column])
    with pytest.raises(RedriveError, match=problem):
        list(messages_of_batch(batch))


def test_text_value_of_any_bytes_is_written() -> None:
    batch = pa.RecordBatch.from_arrays([pa.array([b"\xff"]).view(pa.string())], ["value"])
    assert [message["value"] for message in messages_of_batch(batch)] == [b"\xff"]


def test_event_time_is_cut_off_to_milliseconds() -> None:
    times = pa.array([1_700_000_000_123_999], pa.timestamp("us", tz="UTC"))
    batch = pa.RecordBatch.from_arrays([pa.array([b""]), times], ["value", "__eventTime"])
    (message,) = messages_of_batch(batch)
    assert message["event_timestamp"] == 1_700_000_000_123


LEAST = {"service.url": "pulsar://pulsar:6650", "topic": "persistent://shop/prod/orders"}


def refused(**others: str) -> str:
    values = {name.replace("_", "."): value for name, value in others.items()}
    with pytest.raises(RedriveError) as error:
        options.read_options(LEAST | values, BATCH_OPTIONS)
    return str(error.value)


def test_omitted_options_have_defaults_of_jvm_connector() -> None:
    read = options.read_options(LEAST, BATCH_OPTIONS)
    assert read.topics.names == (TopicName("shop", "prod", "orders"),)
    assert read.columns == COLUMN_NAMES
    assert read.fail_on_data_loss
    assert (read.starting, read.ending, read.connection.admin_url) == (None, None, None)


def test_option_names_ignore_case() -> None:
    lower = {name.lower(): value for name, value in LEAST.items()} | {"failondataloss": "FALSE"}
    assert not options.read_options(lower, BATCH_OPTIONS).fail_on_data_loss


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("serviceurl", "service.url"),
        ("startingoffset", "startingOffsets"),
        ("failOnDataLos", "failOnDataLoss"),
        ("topicPattern", "topicsPattern"),
        ("pulsar.client.authParam", "pulsar.client.authParams"),
    ],
)
def test_unknown_option_is_refused_with_nearest_name(name: str, nearest: str) -> None:
    with pytest.raises(InvalidSpecError, match=rf"did you mean {nearest}\?") as error:
        options.read_options(LEAST | {name: "s3cret"}, BATCH_OPTIONS)
    assert "s3cret" not in str(error.value)


@given(st.sampled_from(BATCH_OPTIONS), st.text(max_size=30))
def test_arbitrary_option_value_never_crashes(name: str, value: str) -> None:
    try:
        options.read_options(LEAST | {name: value}, BATCH_OPTIONS)
    except RedriveError as error:
        assert "; " in str(error)  # noqa: PT017  most values are refused, some are not


def test_exactly_one_option_names_the_topics() -> None:
    assert "exactly one of topic, topics and topicsPattern" in refused(topics="a,b")
    with pytest.raises(InvalidSpecError, match="exactly one"):
        options.read_options({"service.url": "pulsar://p"}, BATCH_OPTIONS)


def test_short_topic_names_use_default_namespace() -> None:
    names = options.read_options(
        {"service.url": "pulsar://p", "topics": "orders, persistent://shop/prod/bills,orders"},
        BATCH_OPTIONS,
    ).topics.names
    assert names == (TopicName("public", "default", "orders"), TopicName("shop", "prod", "bills"))


@pytest.mark.parametrize("name", ["__change_events", "__transaction_buffer_snapshot"])
def test_write_to_a_system_topic_is_refused(name: str) -> None:
    topic = LEAST["topic"].replace("orders", name)
    with pytest.raises(InvalidSpecError, match=f"got {topic!r}"):
        options.write_options(LEAST | {"topic": topic})
    assert options.write_options(LEAST).topic == TopicName("shop", "prod", "orders")


def test_addresses_of_another_scheme_are_refused() -> None:
    assert "service.url must be an address of Pulsar" in refused(service_url="http://pulsar:8080")
    assert "admin.url must be an HTTP address" in refused(admin_url="pulsar://pulsar:6650")


def test_topic_pattern_needs_admin_url_and_one_namespace() -> None:
    values = {"service.url": "pulsar://p", "topicsPattern": "persistent://shop/prod/orders-.*"}
    with pytest.raises(InvalidSpecError, match="topicsPattern requires"):
        options.read_options(values, BATCH_OPTIONS)
    topics = options.read_options(values | {"admin.url": "http://p:8080"}, BATCH_OPTIONS).topics
    assert topics.namespace == "shop/prod"
    assert topics.pattern is not None
    assert topics.pattern.fullmatch("persistent://shop/prod/orders-eu")
    for wrong in ("persistent://shop/.*/orders", "persistent://shop/prod/(", "persistent://.*"):
        with pytest.raises(InvalidSpecError, match="topicsPattern must be"):
            options.read_options(values | {"topicsPattern": wrong}, BATCH_OPTIONS)
    both = "persistent://shop/prod/orders|persistent://shop/test/orders"
    with pytest.raises(InvalidSpecError, match="must be for one namespace"):
        options.read_options(values | {"topicsPattern": both}, BATCH_OPTIONS)


def test_derived_topics_are_an_option_of_patterns_only() -> None:
    pattern = {"topicsPattern": "orders.*", "admin.url": "http://p:8080"}
    values = {"service.url": "pulsar://p", **pattern}
    assert not options.read_options(values, BATCH_OPTIONS).topics.derived
    derived = values | {"includeDerivedTopics": "true"}
    assert options.read_options(derived, BATCH_OPTIONS).topics.derived
    assert "reads all its topics" in refused(includeDerivedTopics="true")


def test_columns_are_chosen_by_name_in_order() -> None:
    assert options.read_options(LEAST | {"columns": "__ENTRY, value"}, BATCH_OPTIONS).columns == (
        "__entry",
        "value",
    )
    assert "got ['key']" in refused(columns="value,key")
    assert "unknown or duplicate column" in refused(columns="value,value")


AUTHORITY = trustme.CA()


def credentials_of(
    plugin: str = "", parameters: str = "", trusted: Path | None = None
) -> SourceCredentials:
    options = {PLUGIN: plugin, PARAMETERS: parameters} if plugin else {}
    if trusted is not None:
        options[TRUSTED] = str(trusted)
    return SourceCredentials(authentication_of_options(options))


def test_no_method_has_no_credentials() -> None:
    assert credentials_of().access().headers == {}
    assert credentials_of().client("pulsar://p:6650") == {"authentication": None}


def test_credentials_are_shared_per_process() -> None:
    token, other = (
        authentication_of_options({PLUGIN: "AuthenticationToken", PARAMETERS: f"token:{value}"})
        for value in ("one", "other")
    )
    assert source_credentials(token) is source_credentials(token) is not source_credentials(other)


def test_token_file_is_read_for_each_use(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("first\n")
    credentials = credentials_of("AuthenticationToken", f"file://{file}")
    assert credentials.access().headers == {"Authorization": "Bearer first"}
    file.write_text("second")
    assert credentials.access().headers == {"Authorization": "Bearer second"}
    file.unlink()
    with raises("CredentialsUnreadable", match=str(file)):
        credentials.access()


def test_certificate_files_and_authorities_are_used(tmp_path: Path) -> None:
    issued = AUTHORITY.issue_cert(common_name="analyst")
    files = [tmp_path / name for name in ("tls.crt", "tls.key", "ca.crt")]
    files[0].write_bytes(issued.cert_chain_pems[0].bytes())
    files[1].write_bytes(issued.private_key_pem.bytes())
    files[2].write_bytes(AUTHORITY.cert_pem.bytes())
    parameters = f"tlsCertFile:{files[0]},tlsKeyFile:{files[1]}"
    credentials = credentials_of("AuthenticationTls", parameters, files[2])
    tls = credentials.access().tls
    assert tls is not None
    assert len(tls.get_ca_certs()) == 1
    options = credentials.client("pulsar+ssl://p:6651")
    assert options["tls_trust_certs_file_path"] == str(files[2])
    assert options["tls_validate_hostname"]
    files[1].write_text("s3cret")
    with raises("CredentialsUnreadable", match="no certificate with its key") as error:
        credentials.access()
    assert "s3cret" not in str(error.value)


async def test_oauth2_token_comes_from_the_issuer(tmp_path: Path) -> None:
    async def answer(request: web.Request) -> web.Response:
        if request.method == "GET":
            return web.json_response({"token_endpoint": str(request.url.with_path("/token"))})
        form = await request.post()
        return web.json_response(
            {"access_token": str(form["client_id"]) + str(form["client_secret"])}
        )

    application = web.Application()
    application.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(application)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    key = tmp_path / "client.json"
    key.write_text(json.dumps({"client_id": "analyst", "client_secret": "right"}))
    issuer = f"http://127.0.0.1:{runner.addresses[0][1]}"
    parameters = json.dumps({"issuerUrl": issuer, "privateKey": f"file://{key}"})
    credentials = credentials_of(
        "org.apache.pulsar.client.impl.auth.oauth2.AuthenticationOAuth2", parameters
    )
    access = await asyncio.to_thread(credentials.access)
    assert access.headers == {"Authorization": "Bearer analystright"}
    key.write_text("{}")
    other = credentials_of("AuthenticationOAuth2", parameters)
    with raises("CredentialsUnreadable", match="client_id and client_secret"):
        await asyncio.to_thread(other.access)
    await runner.cleanup()


PACKAGE = "org.apache.pulsar.client.impl.auth."


def authentication(plugin: str, parameters: str) -> SourceAuthentication:
    return authentication_of_options({PLUGIN: plugin, PARAMETERS: parameters})


def test_missing_authentication_is_empty() -> None:
    assert authentication_of_options({}) == SourceAuthentication()
    assert authentication("AuthenticationDisabled", "") == SourceAuthentication()


def test_token_comes_from_option_or_file() -> None:
    assert authentication(f"{PACKAGE}AuthenticationToken", "token:abc").token == "abc"  # noqa: S105
    method = authentication("AuthenticationToken", "file:///var/run/token")
    assert (method.token, method.files) == (None, {"token": "/var/run/token"})


def test_certificate_and_key_are_files() -> None:
    method = authentication(
        f"{PACKAGE}AuthenticationTls", "tlsCertFile:/a/tls.crt,tlsKeyFile:/a/tls.key"
    )
    assert method.plugin is Plugin.TLS
    assert method.files == {"certificate": "/a/tls.crt", "key": "/a/tls.key"}


def test_oauth2_client_secret_is_a_file() -> None:
    parameters = {
        "type": "client_credentials",
        "issuerUrl": "https://issuer",
        "privateKey": "file:///a/client.json",
        "audience": "pulsar",
    }
    method = authentication(f"{PACKAGE}oauth2.AuthenticationOAuth2", json.dumps(parameters))
    assert method.plugin is Plugin.OAUTH2
    assert method.files == {"client": "/a/client.json"}
    assert method.issuer == {"issuerUrl": "https://issuer", "audience": "pulsar"}


@pytest.mark.parametrize(
    ("plugin", "parameters"),
    [
        ("AuthenticationToken", "s3cret"),  # Spark would show it
        ("AuthenticationToken", "token:"),
        ("AuthenticationToken", "token: s3cr€t"),
        ("AuthenticationTls", "tlsCertFile:/a/s3cret"),
        ("AuthenticationOAuth2", "s3cret"),
        ("AuthenticationOAuth2", '["s3cret"]'),
        ("AuthenticationOAuth2", '{"issuerUrl": "https://i", "privateKey": "data:;base64,s3cret"}'),
        ("AuthenticationBasic", '{"userId": "a", "password": "s3cret"}'),
    ],
)
def test_invalid_authentication_is_refused_without_secret(plugin: str, parameters: str) -> None:
    with pytest.raises(InvalidSpecError) as error:
        authentication(plugin, parameters)
    assert "s3cr" not in str(error.value)


def test_parameters_without_method_are_refused() -> None:
    with pytest.raises(InvalidSpecError, match="requires pulsar"):
        authentication_of_options({PARAMETERS: "token:s3cret"})


def test_token_is_not_in_the_representation() -> None:
    assert "s3cret" not in repr(authentication("AuthenticationToken", "token:s3cret"))
