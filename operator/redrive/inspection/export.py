"""Files of records: JSON lines and Parquet, private and complete, or absent."""

from __future__ import annotations

import json
import os
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa
from pyarrow import fs, parquet

from redrive.errors import RedriveError
from redrive.inspection.payloads import MessageRecord

BATCH_RECORDS, BATCH_BYTES = 1_000, 16 * 2**20
"""Records of one batch of Parquet; a batch ends before it if it has more bytes."""
_OWNER_ONLY = 0o600
_OWNER_AND_GROUP = 0o027
"""Permissions that a file on a volume lacks: pods with the group of the volume may read it."""
_CONNECT_SECONDS, _REQUEST_SECONDS = 10, 60
_AWS_ERROR = re.compile(r"AWS Error ([A-Z_]+)")
_TIME = pa.timestamp("ms", tz="UTC")
_TEXT, _COUNT = pa.string(), pa.int64()
_COLUMNS: dict[str, pa.DataType] = {
    "id": _TEXT,
    "time": _TIME,
    "dueTime": _TIME,
    "key": _TEXT,
    "keyHash": _TEXT,
    "attempts": _COUNT,
    "replays": _COUNT,
    "deadReason": _TEXT,
    "cause": _TEXT,
    "fingerprint": _TEXT,
    "causeMessage": _TEXT,
    "trace": pa.list_(_TEXT),
    "consumer": _TEXT,
    "origin": _TEXT,
    "properties": pa.map_(_TEXT, _TEXT),
    "payloadForm": _TEXT,
    "payloadSize": _COUNT,
    "payloadEncoding": _TEXT,
    "payload": _TEXT,
}
SCHEMA = pa.schema(list(_COLUMNS.items()))


@contextmanager
def private_file(path: Path) -> Iterator[BinaryIO]:
    """Open a file that only its owner may read, and that replaces *path* when it is complete.

    Raises:
        RedriveError: it can't be written, or *path* is a device, a pipe or a symbolic link.
    """
    if path.is_symlink() or (path.exists() and not path.is_file()):
        raise RedriveError(
            f"{path} must be a regular file",
            remedy="choose another file, not a link or a device",
            reason="NotExported",
        )
    part = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    try:
        file = open(part, "xb", opener=_open_private)  # noqa: SIM115  closed below
    except OSError as error:
        raise _not_exported(path, error) from error
    try:
        with file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except OSError as error:
        raise _not_exported(path, error) from error
    finally:
        part.unlink(missing_ok=True)


def _not_exported(path: Path, error: OSError) -> RedriveError:
    return RedriveError(
        f"{path} can't be written",
        got=str(error),
        remedy="choose another file",
        reason="NotExported",
    )


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags, _OWNER_ONLY)


@contextmanager
def destined_file(
    address: str, endpoint_url: str = "", keys: Mapping[str, str] | None = None
) -> Iterator[BinaryIO]:
    """Open a file in an object store or on a volume, which appears there when it is complete.

    Args:
        address: `s3://bucket/folder/name`, or `file:///folder/name`.
        endpoint_url: of the object store; empty for AWS.
        keys: `access-key-id` and `secret-access-key`; none for those of the environment.

    Raises:
        RedriveError: it can't be written. The text names the address, and no content.
    """
    scheme, _, path = address.partition("://")
    part = f"{path}.{secrets.token_hex(4)}.part"
    mask = os.umask(_OWNER_AND_GROUP)
    try:
        try:
            if scheme == "file":
                files: fs.FileSystem = _volume(Path(path))
            else:
                files = _object_store(path.partition("/")[0], endpoint_url, keys or {})
            stream = files.open_output_stream(part)
        finally:
            os.umask(mask)
        try:
            yield stream
            stream.close()
            files.move(part, path)
        except BaseException:
            with suppress(OSError):
                stream.close()
            with suppress(OSError):  # also of a stream that can't be closed
                files.delete_file(part)
            raise
    except OSError as error:
        # Not its text: a server wrote it.
        code = _AWS_ERROR.search(str(error))
        words = code[1] if code else os.strerror(error.errno) if error.errno else "no answer"
        raise RedriveError(
            f"the file {address} can't be written",
            got=words,
            remedy="check the destination in the BrokerConnection, its Secret and its rights",
            reason="NotExported",
        ) from error


def _volume(path: Path) -> fs.FileSystem:
    """Make the folders of a file below that of its destination, which exists."""
    for folder in (path.parents[1], path.parent):
        folder.mkdir(exist_ok=True)
    return fs.LocalFileSystem()


def _object_store(bucket: str, endpoint_url: str, keys: Mapping[str, str]) -> fs.FileSystem:
    scheme, _, endpoint = endpoint_url.rstrip("/").rpartition("://")
    return fs.S3FileSystem(
        access_key=keys.get("access-key-id"),
        secret_key=keys.get("secret-access-key"),
        region=None if endpoint else fs.resolve_s3_region(bucket),
        endpoint_override=endpoint or None,
        scheme=scheme or "https",
        connect_timeout=_CONNECT_SECONDS,
        request_timeout=_REQUEST_SECONDS,
    )


def write_json_lines(records: Iterable[MessageRecord], file: BinaryIO) -> int:
    """Write a line of JSON for each record; return their number."""
    count = 0
    for record in records:
        file.write(json.dumps(record).encode() + b"\n")
        count += 1
    return count


def write_parquet(records: Iterable[MessageRecord], file: BinaryIO) -> int:
    """Write records with typed columns, in batches of bounded size; return their number."""
    count = 0
    with parquet.ParquetWriter(file, SCHEMA, compression="zstd") as writer:
        for batch in _batches(records):
            rows = list(map(_row, batch))
            writer.write_batch(pa.RecordBatch.from_pylist(rows, schema=SCHEMA))
            count += len(batch)
    return count


def _batches(records: Iterable[MessageRecord]) -> Iterator[Sequence[MessageRecord]]:
    batch: list[MessageRecord] = []
    size = 0
    for record in records:
        batch.append(record)
        size += len(record["payload"])
        if len(batch) == BATCH_RECORDS or size >= BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _row(record: MessageRecord) -> dict[str, Any]:
    times = {name: _moment(record[name]) for name in ("time", "dueTime")}
    properties = [(item["name"], item["value"]) for item in record["properties"]]
    return {**record, **times, "properties": properties}


def _moment(text: str | None) -> datetime | None:
    return None if text is None else datetime.fromisoformat(text)
