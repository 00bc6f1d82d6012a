from __future__ import annotations

import pytest

from redrive.admin import errors


@pytest.mark.parametrize(
    ("status", "answer", "kind"),
    [
        (401, "<html><title>Error 401 Authentication required</title>", "AuthenticationFailed"),
        (401, '{"reason":"Unauthorized to validateTopicOperation for …"}', "Forbidden"),
        (401, '{"reason":"Don\'t have permission to administrate …"}', "Forbidden"),
        (403, '{"reason":"Unauthorized to validateNamespaceOperation for …"}', "Forbidden"),
        (404, '{"reason":"Namespace does not exist"}', "NotFound"),
        (405, "", "Unsupported"),
        (409, '{"reason":"This topic already exists"}', "BrokerConflict"),
        (429, "", "BrokerFailed"),
        (500, "…", "BrokerFailed"),
        (422, "", "BrokerRefused"),
        (503, '{"reason":"The topic is being moved"}', "BrokerFailed"),
        (502, "<html><title>502 Bad Gateway</title>", "BrokerUnreachable"),
        (503, "<html><title>503 Service Temporarily Unavailable</title>", "BrokerUnreachable"),
        (504, "", "BrokerUnreachable"),
    ],
)
def test_an_answer_has_the_reason_that_a_condition_shows(
    status: int, answer: str, kind: str
) -> None:
    assert errors.error_for("read x", status, answer).reason == kind


def test_the_message_has_the_call_the_answer_in_one_line_and_the_remedy() -> None:
    error = errors.error_for("read namespace a/b", 500, '{"reason":"\\n --- broken\\n\\n  here"}')
    assert str(error) == (
        "the broker refused to read namespace a/b; got '500 --- broken here'; "
        "it is tried again; look into the broker's log if it stays"
    )


def test_what_can_not_be_printed_of_an_answer_is_not() -> None:
    error = errors.error_for("read x", 500, '{"reason": "\\u001b[31mred\\u0000\u202eder"}')
    assert "got '500 \ufffd[31mred\ufffd\ufffdder'" in str(error)


@pytest.mark.parametrize(
    "answer",
    [
        "hidden",
        "<html><title>hidden</title>",
        '{"message": "hidden"}',
        '{"kind": "Status", "reason": "hidden"}',
        '{"reason": {"hidden": 1}}',
        '["reason", "hidden"]',
    ],
)
def test_what_is_no_error_of_pulsar_is_never_shown(answer: str) -> None:
    for status in (400, 401, 404, 500, 503):
        error = errors.error_for("read x", status, answer)
        assert "hidden" not in str(error)
        assert f"{status} and {len(answer)} characters" in str(error)
