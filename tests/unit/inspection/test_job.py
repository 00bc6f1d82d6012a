"""Job of an Inspection: its argument, errors that it may show, and encrypted messages."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import itertools
import json
import traceback
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import NoReturn

import pytest

from redrive.api import Body
from redrive.api.inspection import InspectionRun
from redrive.errors import InvalidSpecError, RedriveError
from redrive.inspection import __main__ as program
from redrive.inspection.job import InspectionJob, PulsarMessages
from redrive.inspection.payloads import CauseCount, MessageRecord
from redrive.inspection.reader import InspectedTopic, TopicReading
from redrive.inspection.record import Recorder
from redrive.inspection.sealing import Recipient, seal
from redrive.kube import informer, logs, resources
from redrive.kube.client import Kubernetes, NotFoundError, UnavailableError
from redrive.kube.resources import Key
from redrive.reading.rows import DeadLetterRow
from redrive.replay import transport
from tests.support.dead_letter_rows import dead_letter
from tests.support.fake_kubernetes import FakeKubernetes

JOB = InspectionJob(
    namespace="shop",
    name="now",
    uid="u",
    source=PulsarMessages(
        topic="persistent://shop/prod/orders-$(TOKEN)-DLQ",
        subscription="redrive",
        service_url="pulsar://pulsar:6650",
        admin_url="http://pulsar:8080",
    ),
    seconds=60,
    replays=[["after-fix", "Run"]],
    shown=["$.needs"],
)
TOPIC = "persistent://shop/prod/orders-DLQ"
SOURCE = dataclasses.replace(JOB.source, topic=TOPIC)
PLANTED = "ann@example.com"


def test_argument_is_decoded_and_expands_no_variable() -> None:
    assert "$" not in JOB.encode()
    assert InspectionJob.decode(JOB.encode()) == JOB


@pytest.mark.parametrize("text", ["", "[]", "{}", JOB.encode().replace("uid", "other")])
def test_argument_of_another_form_is_refused(text: str) -> None:
    with pytest.raises(InvalidSpecError, match="use an image of the operator's version"):
        InspectionJob.decode(text)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ValueError(f"invalid payload {PLANTED}"), "ValueError"),
        (
            RedriveError("the topic is gone", remedy="-", reason="TopicUnreadable"),
            "TopicUnreadable",
        ),
    ],
)
def test_text_of_an_unknown_error_is_never_shown(
    error: Exception,
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """An error of a library may quote the message that it could not read."""
    runs: list[InspectionRun] = []

    def fail(_: InspectionJob) -> NoReturn:
        raise error

    monkeypatch.setattr(program, "_read", fail)
    monkeypatch.setattr(program, "_write", lambda _, run: runs.append(run))
    monkeypatch.setattr(logs, "to_stderr", lambda _: None)  # the log of the tests
    with pytest.raises(SystemExit) as end:
        program.main([JOB.encode()])
    (run,) = runs
    assert end.value.code == 1
    assert run.failure is not None
    assert run.failure.reason == reason
    assert run.failure.message in caplog.text
    assert PLANTED not in caplog.text + run.failure.message


def test_unwritten_failure_does_not_show_an_unknown_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Python prints the context of an error that ends the program."""

    def fail(_: InspectionJob) -> NoReturn:
        raise ValueError(PLANTED)

    def refuse(*_: object) -> NoReturn:
        raise NotFoundError("no Inspection", remedy="create it")

    monkeypatch.setattr(program, "_read", fail)
    monkeypatch.setattr(program, "_write", refuse)
    monkeypatch.setattr(logs, "to_stderr", lambda _: None)  # the log of the tests
    with pytest.raises(NotFoundError) as end:
        program.main([JOB.encode()])
    assert (end.value.__context__, end.value.__cause__) == (None, None)
    assert PLANTED not in "".join(traceback.format_exception(end.value))


def test_unavailable_api_server_delays_a_status_update(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may restart between the read of the Inspection and the write of its status."""
    key, api, calls = Key(JOB.namespace, JOB.name), FakeKubernetes(), list[str]()
    metadata = {**key._asdict(), "uid": JOB.uid, "resourceVersion": "1"}
    api.add(resources.INSPECTIONS, {"metadata": metadata, "spec": {}})

    def restart(verb: str, *_: object) -> None:
        calls.append(verb)
        if len(calls) in {1, 3}:
            raise UnavailableError("no answer", remedy="wait")

    @asynccontextmanager
    async def connect() -> AsyncIterator[Kubernetes]:
        yield api

    api.before = restart
    monkeypatch.setattr(Kubernetes, "connect", connect)
    monkeypatch.setattr(informer, "RETRY_SECONDS", 0)
    program._write(JOB, InspectionRun(finished=True))  # noqa: SLF001  of the program
    assert calls == ["get", "get", "apply_status", "get", "apply_status"]
    assert api.objects[resources.INSPECTIONS][key]["status"]["run"]["finished"]


class ListedReading(TopicReading):
    """A reading of three messages with planted data."""

    def selected(self, on_read: Callable[[], object]) -> Iterator[DeadLetterRow]:
        for entry in range(3):
            on_read()
            self.matched += 1
            yield dead_letter(entry, "Down", key=PLANTED, value=PLANTED.encode())


def run_of(
    result: Body, monkeypatch: pytest.MonkeyPatch, job: InspectionJob = JOB
) -> InspectionRun:
    """Run the program for an Inspection with *result*, and return its last report."""
    reports = list[InspectionRun]()

    def write(_: InspectionJob, run: InspectionRun) -> Body:
        reports.append(run)
        return {"metadata": {"name": "now"}, "spec": {"policyRef": {"name": "orders"}, **result}}

    monkeypatch.setattr(program, "_write", write)
    monkeypatch.setattr(InspectedTopic, "plan", lambda topic, *_: ListedReading(topic, 3, 3))
    credentials = SimpleNamespace(object_store_keys=dict)
    monkeypatch.setattr(program, "job_credentials", lambda: credentials)
    monkeypatch.setattr(logs, "to_stderr", lambda _: None)  # the log of the tests
    program.main([dataclasses.replace(job, source=SOURCE).encode()])
    return reports[-1]


@pytest.mark.parametrize("payload", ["Masked", "Clear"])
def test_messages_are_for_the_recipient_only(payload: str, monkeypatch: pytest.MonkeyPatch) -> None:
    recipient = Recipient()
    messages = {"recipient": recipient.public_key, "limit": 2, "payload": payload}
    run = run_of({"messages": messages}, monkeypatch)
    assert run.finished
    assert PLANTED not in str(run.to_manifest())
    newest, older = recipient.open(run.sealed or "", JOB.uid, MessageRecord)
    assert [newest["id"], older["id"]] == ["7:2:0:0", "7:1:0:0"]
    assert newest["keyHash"] == older["keyHash"]
    clear = {"key": PLANTED, "payload": PLANTED, "causeMessage": f"no {PLANTED}"}
    shown = {name: value for name, value in newest.items() if PLANTED in str(value)}
    assert shown == (clear if payload == "Clear" else {})
    assert run.causes[0].messages == 3


def test_masked_messages_show_keys_if_the_connection_permits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recipient = Recipient()
    messages = {"recipient": recipient.public_key, "limit": 1}
    job = dataclasses.replace(JOB, shown=["$.needs"], shows_keys=True)
    run = run_of({"messages": messages}, monkeypatch, job)
    assert PLANTED not in str(run.to_manifest())
    (newest,) = recipient.open(run.sealed or "", JOB.uid, MessageRecord)
    assert [name for name, value in newest.items() if PLANTED in str(value)] == ["key"]


@pytest.mark.parametrize("payload", ["Masked", "Clear"])
def test_examples_of_causes_are_for_the_recipient_only(
    payload: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipient = Recipient()
    run = run_of({"causes": {"recipient": recipient.public_key, "payload": payload}}, monkeypatch)
    assert PLANTED not in str(run.to_manifest())
    (cause,) = recipient.open(run.sealed or "", JOB.uid, CauseCount)
    assert (cause["cause"], cause["messages"], cause["consumers"]) == ("Down", 3, ["fulfilment-a"])
    assert cause["example"] == (f"no {PLANTED}" if payload == "Clear" else "no ?")


@pytest.mark.parametrize(("form", "payload"), [("JSONLines", "Clear"), ("HTML", "Masked")])
def test_file_has_messages_that_no_status_has(
    form: str, payload: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    export = {"destination": "archive", "format": form, "payload": payload}
    file = tmp_path / "shop" / "orders" / "now"
    replays = [["after-fix", "Run", "Completed", "3", "0", "", "2026-11-26T13:33:20Z"]]
    job = dataclasses.replace(JOB, file=f"file://{file}", replays=replays)
    run = run_of({"export": export}, monkeypatch, job)
    text = file.read_text("utf-8")
    assert (run.finished, run.matched, run.file) == (True, 3, f"file://{file}")
    assert PLANTED not in str(run.to_manifest())
    if form == "HTML":
        assert PLANTED not in text
        assert all(words in text for words in ("Keys and texts are masked.", "after-fix", "Down"))
        assert "3 of 3 entries were read" in text
    else:
        assert [json.loads(line)["key"] for line in text.splitlines()] == [PLANTED] * 3


def test_messages_are_read_at_the_rate_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses, times = list[float](), SimpleNamespace(monotonic=lambda: sum(pauses))
    times.sleep = pauses.append
    for module in (program, transport):
        monkeypatch.setattr(module, "time", times)
    run = run_of({"rateLimit": {"messages": 2, "per": "10s"}}, monkeypatch)
    assert run.matched == 3
    assert pauses == [5.0] * 3


class SparseReading(TopicReading):
    """A reading of messages of which none is selected, one each second."""

    def selected(self, on_read: Callable[[], object]) -> Iterator[DeadLetterRow]:
        for _ in range(3_600):
            self.messages += 1
            on_read()
        return iter(())


def test_deadline_and_reports_need_no_selected_message(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds, reports = itertools.count(), list[InspectionRun]()

    def write(_: InspectionJob, run: InspectionRun) -> Body:
        reports.append(run)
        return {"metadata": {"name": "now"}, "spec": {"policyRef": {"name": "orders"}}}

    monkeypatch.setattr(program, "_write", write)
    monkeypatch.setattr(InspectedTopic, "plan", lambda topic, *_: SparseReading(topic, 9, 9))
    monkeypatch.setattr(program, "job_credentials", lambda: None)
    monkeypatch.setattr(logs, "to_stderr", lambda _: None)  # the log of the tests
    monkeypatch.setattr(program, "time", SimpleNamespace(monotonic=lambda: next(seconds)))
    with pytest.raises(SystemExit):
        program.main([dataclasses.replace(JOB, source=SOURCE).encode()])
    first, *progress, failure = reports
    assert [run.messages for run in (first, *progress)] == [None, *range(6, 60, 6)]
    assert failure.failure is not None
    assert failure.failure.reason == "DeadlineExceeded"


UID = "6f1c"
RECORD = Recorder(lambda _: None)
REVEALED = Recorder(lambda _: None, reveals=True)


def records(count: int) -> list[MessageRecord]:
    """Return different records, which compression makes hardly smaller."""
    return [RECORD(dead_letter(n, hashlib.sha256(bytes([n])).hexdigest())) for n in range(count)]


def test_recipient_opens_the_records_of_its_inspection() -> None:
    recipient, sent = Recipient(), records(3)
    sealed = seal(sent, recipient.public_key, UID, 2**18)
    assert recipient.open(sealed, UID, MessageRecord) == sent
    assert b"keyHash" not in base64.b64decode(sealed)


def test_sealed_records_differ_each_time() -> None:
    recipient = Recipient()
    assert seal([], recipient.public_key, UID, 200) != seal([], recipient.public_key, UID, 200)


@pytest.mark.parametrize("part", ["sender", "content", "empty", "text"])
def test_changed_records_are_refused(part: str) -> None:
    recipient = Recipient()
    sealed = bytearray(base64.b64decode(seal(records(1), recipient.public_key, UID, 2**18)))
    sealed[0 if part == "sender" else 40] ^= 1
    text = {"empty": "", "text": "?"}.get(part, base64.b64encode(sealed).decode())
    with pytest.raises(RedriveError, match="can't be decrypted"):
        recipient.open(text, UID, MessageRecord)


def test_records_for_others_are_refused() -> None:
    recipient = Recipient()
    sealed = seal(records(1), recipient.public_key, UID, 2**18)
    with pytest.raises(RedriveError, match="can't be decrypted"):
        Recipient().open(sealed, UID, MessageRecord)
    with pytest.raises(RedriveError, match="can't be decrypted"):
        recipient.open(sealed, "another", MessageRecord)


def test_records_of_another_version_are_refused() -> None:
    recipient = Recipient()
    (record,) = records(1)
    del record["origin"]  # type: ignore[misc]  # as a job of another version
    sealed = seal([record], recipient.public_key, UID, 2**18)
    with pytest.raises(RedriveError, match="see redrive version"):
        recipient.open(sealed, UID, MessageRecord)


@pytest.mark.parametrize("share", [0.9, 0.5, 0.1])
def test_first_records_that_fit_are_sealed(share: float) -> None:
    recipient, sent = Recipient(), records(50)
    length = len(seal(sent, recipient.public_key, UID, 2**18))
    most = int(length * share)
    sealed = seal(sent, recipient.public_key, UID, most)
    opened = recipient.open(sealed, UID, MessageRecord)
    assert len(sealed) <= most
    assert opened == sent[: len(opened)]
    assert len(opened) > 50 * share - 10


def test_record_that_does_not_fit_leaves_none() -> None:
    recipient = Recipient()
    sealed = seal(records(1), recipient.public_key, UID, 90)
    assert recipient.open(sealed, UID, MessageRecord) == []


def test_record_that_does_not_fit_alone_is_left_out() -> None:
    recipient, (*sent, last) = Recipient(), records(4)
    values = {str(n): hashlib.sha256(bytes([n])).hexdigest() for n in range(200)}
    long = REVEALED(dead_letter(9, properties=values))
    sealed = seal([long, *sent, long, last], recipient.public_key, UID, 4_000)
    assert recipient.open(sealed, UID, MessageRecord) == [*sent, last]


def test_first_record_that_fits_alone_is_kept() -> None:
    recipient, (first, second, third) = Recipient(), records(3)
    first["trace"] = [hashlib.sha256(bytes([n])).hexdigest() for n in range(100)]
    length = len(seal([first], recipient.public_key, UID, 2**18))
    sealed = seal([first, second, third], recipient.public_key, UID, length)
    assert recipient.open(sealed, UID, MessageRecord) == [first]


def test_sealed_records_are_never_too_long_to_open() -> None:
    recipient = Recipient()
    # JSON writes six characters for each: 6 MiB of a record, and 36 MiB of the one left out.
    sent = [REVEALED(dead_letter(n, properties={"x": "\x01" * 2**20})) for n in range(6)]
    long = REVEALED(dead_letter(9, properties={"x": "\x01" * 6 * 2**20}))
    sealed = seal([long, *sent], recipient.public_key, UID, 2**18)
    assert recipient.open(sealed, UID, MessageRecord) == sent[:5]


def test_recipient_without_order_is_refused() -> None:
    with pytest.raises(InvalidSpecError, match="must be a public key of X25519"):
        seal([], base64.b64encode(bytes(32)).decode(), UID, 200)
