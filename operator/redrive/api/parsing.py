"""An object as the API server gives it → its spec as a model, or one readable refusal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from redrive.api.model import ApiModel
from redrive.errors import InvalidSpecError

_M = TypeVar("_M", bound=ApiModel)


class InvalidFieldsError(InvalidSpecError):
    """Fields of a spec hold what they can't; the message names each by its path."""

    def __init__(self, problems: list[str]) -> None:
        Exception.__init__(self, " | ".join(problems))


def parse_spec(model: type[_M], body: Mapping[str, Any]) -> _M:
    """Read the spec of *body*, a whole object of the API.

    Admission has refused nearly all that this refuses; an object may be older than the rule.

    Raises:
        InvalidFieldsError: a field is missing, unknown, or holds what it can't. A value found is
            shown only where a rule of ours was broken: anything else might be a misplaced secret.
    """
    try:
        return model.model_validate(dict(body.get("spec") or {}))
    except ValidationError as error:
        raise InvalidFieldsError([_problem(details) for details in error.errors()]) from error


def _problem(details: ErrorDetails) -> str:
    path = "spec" + "".join(
        f"[{part}]" if isinstance(part, int) else f".{part}" for part in details["loc"]
    )
    match details["type"]:
        case "value_error":
            return f"{path}: {details['ctx']['error']}"
        case "missing":
            return f"{path}: is missing; add it"
        case "extra_forbidden":
            return f"{path}: is not a known field; remove it, or correct its name"
    expected = details["msg"][:1].lower() + details["msg"][1:]
    found = type(details["input"]).__name__
    return f"{path}: {expected}; got a value of type {found}; correct it"
