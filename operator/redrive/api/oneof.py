"""A choice between fields: exactly one of them is given."""

from __future__ import annotations

from typing import Any, ClassVar, Self

from pydantic import model_validator

from redrive.api.model import ApiModel
from redrive.api.rules import VALIDATIONS, Rule, refusing
from redrive.errors import InvalidSpecError


def exactly_one(what: str, *fields: str) -> Rule:
    """Return the rule that exactly one of *fields* is given, which is what a message names."""
    given = ", ".join(f"has(self.{field})" for field in fields)
    count = f"[{given}].filter(given, given).size()"
    return Rule(
        f"{count} == 1",
        f"{what} is exactly one of {', '.join(fields)}",
        "keep one of them",
        got=f"({count} == 0 ? 'none of them' : 'more than one of them')",
    )


def one_given(rule: Rule, *, beside: int = 0) -> dict[str, Any]:
    """Return the schema of an object of which *rule* wants one field: what tools see without CEL.

    Args:
        rule: see `exactly_one`.
        beside: how many other fields it has, all required.
    """
    fields = 1 + beside
    return {VALIDATIONS: [rule.to_schema()], "minProperties": fields, "maxProperties": fields}


def check_one(rule: Rule, *fields: object) -> None:
    """Check by *rule*, of `exactly_one`, that one of these *fields* is given: not None.

    Raises:
        InvalidSpecError: none is, or more than one.
    """
    given = sum(field is not None for field in fields)
    if given != 1:
        got = "more than one of them" if given else "none of them"
        raise InvalidSpecError(rule.problem, got=got, remedy=rule.remedy)


class OneOf(ApiModel):
    """A choice: exactly one field is given."""

    ONE: ClassVar[Rule]

    @model_validator(mode="after")
    def _check(self) -> Self:
        refusing(OneOf._check_one)(self)
        return self

    def _check_one(self) -> None:
        check_one(self.ONE, *(getattr(self, name) for name in type(self).model_fields))
