from __future__ import annotations

from pathlib import Path

import pytest

from redrive import Policy, load_policy
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
    """Where the ConfigMap would be mounted, and no variable from outside."""
    monkeypatch.delenv("REDRIVE_POLICY", raising=False)
    monkeypatch.setattr(policy_file, "MOUNTED", tmp_path / "mounted" / "policy.json")
    (tmp_path / "mounted").mkdir()
    return tmp_path / "mounted" / "policy.json"


@pytest.mark.parametrize("kind", [str, Path])
def test_the_file_given_wins_over_the_variable_and_the_variable_over_the_mount(
    tmp_path: Path, mounted: Path, monkeypatch: pytest.MonkeyPatch, kind: type[str | Path]
) -> None:
    written(mounted, "by-mount")
    assert load_policy().subscription == "by-mount"

    monkeypatch.setenv("REDRIVE_POLICY", str(written(tmp_path / "v.json", "by-variable")))
    assert load_policy().subscription == "by-variable"

    given = written(tmp_path / "g.json", "by-argument")
    assert load_policy(kind(given)).subscription == "by-argument"


def test_what_the_operator_wrote_is_what_the_consumer_runs_with(tmp_path: Path) -> None:
    assert load_policy(written(tmp_path / "p.json")) == POLICY


def test_a_missing_file_is_named_with_the_ways_to_give_one(mounted: Path) -> None:
    with pytest.raises(PolicyFileError) as missing:
        load_policy()

    for words in (str(mounted), "No such file", "mount the ConfigMap", "$REDRIVE_POLICY"):
        assert words in str(missing.value)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "holds JSON"),
        (b"\xff", "can't be read"),
        (b'{"version": 99}', "upgrade the library"),
        (codec.encode(POLICY).replace("1s", "0s").encode(), "from 1 s to 864000 s"),
    ],
)
def test_a_file_that_is_no_policy_is_named_with_what_is_wrong_in_it(
    tmp_path: Path, content: bytes, says: str
) -> None:
    file = tmp_path / "policy.json"
    file.write_bytes(content)

    with pytest.raises(PolicyFileError) as refused:
        load_policy(file)

    assert str(file) in str(refused.value)
    assert says in str(refused.value)
