"""Files of Inspections in an object store: complete, or absent."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from pyarrow import fs, parquet

from redrive.inspection.export import destined_file
from tests.support.reasons import raises
from tests.support.replay_shop import SECONDS, Shop, shop
from tests.support.s3_server import s3_server

__all__ = ["shop"]
KEYS = {"access-key-id": "archivist", "secret-access-key": "of-the-archive"}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with s3_server() as url:
        yield url


@pytest.fixture(scope="module")
def store(url: str) -> fs.S3FileSystem:
    """A client of the store, whose bucket `archive` exists."""
    access, secret = KEYS.values()
    store = fs.S3FileSystem(
        access_key=access,
        secret_key=secret,
        endpoint_override=url.removeprefix("http://"),
        scheme="http",
        allow_bucket_creation=True,
    )
    store.create_dir("archive")
    return store


def files(store: fs.S3FileSystem, folder: str) -> dict[str, int]:
    """Return the names of all files below a folder, with their sizes."""
    selector = fs.FileSelector(folder, recursive=True, allow_not_found=True)
    return {f.path: f.size for f in store.get_file_info(selector) if f.type is fs.FileType.File}


def test_file_of_many_parts_is_complete_or_absent(url: str, store: fs.S3FileSystem) -> None:
    name, part = "archive/shop/orders/now.jsonl", bytes(6 * 2**20)
    with destined_file(f"s3://{name}", url, KEYS) as file:
        for _ in range(4):
            file.write(part)
        assert name not in files(store, "archive/shop")
    assert files(store, "archive/shop") == {name: 4 * len(part)}
    with (
        pytest.raises(ValueError, match="invalid literal"),
        destined_file(f"s3://{name}", url, KEYS) as file,
    ):
        file.write(int("x").to_bytes())
    assert files(store, "archive/shop") == {name: 4 * len(part)}
    problem = "got 'NO_SUCH_BUCKET'; check the destination"
    with (
        raises("NotExported", match=problem),
        destined_file("s3://absent/now.jsonl", url, KEYS) as file,
    ):
        file.write(part)


@pytest.mark.timeout(2 * SECONDS)
def test_inspection_writes_parquet_to_store(shop: Shop, url: str, store: fs.S3FileSystem) -> None:
    shop.lend("Secret", "archive-keys", stringData=KEYS)
    archive = {"endpointURL": url, "secretRef": {"name": "archive-keys"}}
    shop.declare_inspection(
        destinations=[
            {"name": "archive", "uri": "s3://archive/prod", **archive},
            {"name": "absent", "uri": "s3://absent/prod", **archive},
        ]
    )
    shop.bury(5, "WarehouseDown")
    shop.inspect("kept", export={"destination": "archive", "format": "Parquet"})
    shop.inspect("lost", export={"destination": "absent", "format": "JSONLines"})

    kept, lost = shop.inspection("kept"), shop.inspection("lost")

    (name,) = files(store, f"archive/prod/{shop.name}")
    assert kept["run"]["file"] == f"s3://{name}"
    rows = parquet.read_table(name, filesystem=store).to_pylist()
    assert [row["cause"] for row in rows] == ["WarehouseDown"] * 5
    assert "NO_SUCH_BUCKET" in lost["Failed"]["message"]
    assert lost["run"]["failure"]["reason"] == "NotExported"
