from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from redrive import Policy, PolicyFile, load_policy
from redrive.delivery import policy_file
from redrive.delivery.policy_file import PolicyFileError
from redrive.policy import codec
from redrive.policy.naming import TopicName

POLICY = Policy(topic=TopicName.parse_whole("persistent://shop/prod/orders"), subscription="größe")


def written(file: Path, subscription: str = POLICY.subscription) -> Path:
    text = codec.encode(Policy(topic=POLICY.topic, subscription=subscription))
    file.write_text(text, encoding="utf-8")
    return file


@pytest.fixture(autouse=True)
def mounted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The path of the mounted ConfigMap, without a variable of the environment."""
    monkeypatch.delenv("REDRIVE_POLICY", raising=False)
    monkeypatch.setattr(policy_file, "MOUNTED", tmp_path / "mounted" / "policy.json")
    (tmp_path / "mounted").mkdir()
    return tmp_path / "mounted" / "policy.json"


@pytest.mark.parametrize("kind", [str, Path])
def test_policy_file_is_of_argument_then_variable_then_mount(
    tmp_path: Path, mounted: Path, monkeypatch: pytest.MonkeyPatch, kind: type[str | Path]
) -> None:
    written(mounted, "by-mount")
    assert load_policy().subscription == "by-mount"

    monkeypatch.setenv("REDRIVE_POLICY", str(written(tmp_path / "v.json", "by-variable")))
    assert load_policy().subscription == "by-variable"

    path = written(tmp_path / "g.json", "by-argument")
    assert load_policy(kind(path)).subscription == "by-argument"


def test_policy_file_is_loaded_as_written(tmp_path: Path) -> None:
    assert load_policy(written(tmp_path / "p.json")) == POLICY


def test_missing_policy_file_is_named_with_remedies(mounted: Path) -> None:
    with pytest.raises(PolicyFileError) as missing:
        load_policy()

    for words in (str(mounted), "No such file", "mount the ConfigMap", "$REDRIVE_POLICY"):
        assert words in str(missing.value)


@pytest.mark.parametrize("other", [3, POLICY, b"policy.json"], ids=["number", "policy", "bytes"])
def test_policy_file_is_given_by_its_path(other: Any) -> None:  # noqa: ANN401
    with pytest.raises(PolicyFileError, match=r"given by its path; got .*pass a path"):
        PolicyFile(other)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "must be JSON"),
        (b"\xff", "can't be read"),
        pytest.param(b"[" * 100_000, "must be JSON", id="deep list"),
        pytest.param(
            b'{"version": 1, "x": ' + b'{"a":' * 100_000, "must be JSON", id="deep object"
        ),
        (b'{"version": 99}', "upgrade the library"),
        (codec.encode(POLICY).replace("1s", "0s").encode(), "from 1 s to 864000 s"),
    ],
)
def test_invalid_policy_file_is_named_with_its_error(
    tmp_path: Path, content: bytes, message: str
) -> None:
    file = tmp_path / "policy.json"
    file.write_bytes(content)

    with pytest.raises(PolicyFileError) as refused:
        load_policy(file)

    assert str(file) in str(refused.value)
    assert message in str(refused.value)


@pytest.fixture
def config_map(tmp_path: Path) -> Callable[[Policy], Path]:
    """Change a mounted ConfigMap as kubelet does: a new folder, and a link swapped in one step."""
    mount = tmp_path / "mount"
    mount.mkdir()
    (mount / "policy.json").symlink_to("..data/policy.json")

    def change(policy: Policy) -> Path:
        folder = mount / f"..{policy.generation}"
        folder.mkdir()
        (folder / "policy.json").write_text(codec.encode(policy))
        (mount / "..new").symlink_to(folder.name)
        (mount / "..new").replace(mount / "..data")
        return mount / "policy.json"

    return change


def test_changed_config_map_is_read_at_most_once_a_second(
    config_map: Callable[[Policy], Path], caplog: pytest.LogCaptureFixture
) -> None:
    first, second = (replace(POLICY, name="shop/orders", generation=n) for n in (1, 2))
    file = PolicyFile(config_map(first))
    assert file.current(10.0) == first

    config_map(second)
    assert file.current(10.9) == first
    with caplog.at_level(logging.INFO):
        assert file.current(11.0) == second
        assert file.current(12.0) == second
    assert [record.getMessage() for record in caplog.records] == [
        "policy shop/orders: generation 2 in place of 1"
    ]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "must be JSON"),
        pytest.param("[" * 100_000, "must be JSON", id="deep list"),
        (None, "No such file"),
        (codec.encode(Policy(POLICY.topic, "other")), "is for other topics now: restart"),
        (codec.encode(Policy(TopicName("a", "b", "c"), "größe")), "for other topics now"),
    ],
)
def test_invalid_change_is_logged_once_and_ignored(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, content: str | None, message: str
) -> None:
    path = written(tmp_path / "p.json")
    file = PolicyFile(path)
    path.unlink()
    if content is not None:
        path.write_text(content)
    for second in range(3):
        assert file.current(second) == POLICY
    (record,) = caplog.records
    assert record.levelno == logging.ERROR
    assert message in record.getMessage()
    assert "stays in force" in record.getMessage()

    path.unlink(missing_ok=True)
    changed = replace(POLICY, max_retries=3)
    path.write_text(codec.encode(changed))
    assert file.current(10) == changed


def test_policy_file_must_exist_at_start(tmp_path: Path) -> None:
    with pytest.raises(PolicyFileError):
        PolicyFile(tmp_path / "none.json")
