"""A field that holds one of a few words."""

from __future__ import annotations

import enum
from typing import TypeVar

from pydantic import BeforeValidator, PlainSerializer, WithJsonSchema

from redrive.api.rules import refusing
from redrive.errors import InvalidSpecError

E = TypeVar("E", bound=enum.StrEnum)


def one_of(kind: type[E], problem: str, remedy: str) -> tuple[object, ...]:
    """Return the annotations of a field that holds one of the words of *kind*."""

    def parse(value: object) -> E:
        found = next((word for word in kind if word == value), None)
        if found is None:
            raise InvalidSpecError(problem, got=str(value)[:64], remedy=remedy)
        return found

    schema = WithJsonSchema({"type": "string", "enum": [word.value for word in kind]})
    return schema, BeforeValidator(refusing(parse)), PlainSerializer(str)
