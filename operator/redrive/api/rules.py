"""Rules on fields: refused at admission by CEL, and again when an object is read.

An annotation of a field's type says both at once. Messages have the three parts that
`redrive.errors` gives to all of them: what is wrong, what was got, what to do.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import CoreSchema, core_schema

from redrive.errors import InvalidSpecError, RedriveError

VALIDATIONS = "x-kubernetes-validations"
_T = TypeVar("_T")
_U = TypeVar("_U")


@dataclass(frozen=True)
class Rule:
    """A rule that the API server checks an object against.

    Attributes:
        holds: a CEL expression over `self`, and over `oldSelf` where it is about a change.
        problem: what is wrong where it does not hold.
        remedy: what to do about it.
        got: a CEL expression for what was found, as a string; empty where nothing can be shown.
    """

    holds: str
    problem: str
    remedy: str
    got: str = ""

    def to_schema(self) -> dict[str, Any]:
        """Write the rule as an entry of `x-kubernetes-validations`."""
        written = {"rule": self.holds, "message": f"{self.problem}; {self.remedy}"}
        if self.got:
            before, after = json.dumps(f"{self.problem}; got "), json.dumps(f"; {self.remedy}")
            # Literals side by side become one. Where the message can't be made, because what was
            # found holds a line break, the API server takes the one above.
            message = f"{before} + {self.got} + {after}".replace('" + "', "")
            written["messageExpression"] = message
        return written

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        written = handler(schema)
        written.setdefault(VALIDATIONS, []).append(self.to_schema())
        return written


@dataclass(frozen=True)
class Form:
    """The form of a string, by a regular expression that RE2 and Python read alike.

    The expression has to match the whole string: the schema's `pattern`, or a CEL rule where what
    was found may have to be hidden.

    Attributes:
        hides: an expression for what is not shown if it is found anywhere in the string: it may
            hold a secret. Empty shows whatever was found.
    """

    regex: str
    problem: str
    remedy: str
    hides: str = ""

    def __get_pydantic_core_schema__(
        self, source: type[Any], handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        return core_schema.no_info_after_validator_function(refusing(self._check), handler(source))

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        whole = f"^(?:{self.regex})$"
        if not self.hides:
            return handler(schema) | {"pattern": whole}
        # The API server repeats what does not match a pattern.
        got = f"(self.matches({json.dumps(self.hides)}) ? {json.dumps(_HIDDEN)} : {QUOTED})"
        rule = Rule(f"self.matches({json.dumps(whole)})", self.problem, self.remedy, got=got)
        return rule.__get_pydantic_json_schema__(schema, handler)

    def _check(self, text: str) -> str:
        if re.fullmatch(self.regex, text, re.ASCII):
            return text
        if self.hides and re.search(self.hides, text):
            raise InvalidSpecError(f"{self.problem}; got {_HIDDEN}", remedy=self.remedy)
        raise InvalidSpecError(self.problem, got=text[:128], remedy=self.remedy)


_HIDDEN = "what may hold a secret, so it is not shown"
QUOTED = '"\'" + self + "\'"'
"""The CEL expression that shows a string as Python would."""


def refusing(check: Callable[[_T], _U]) -> Callable[[_T], _U]:
    """Make *check*, which raises one of our errors, a validator that pydantic can place."""

    def validator(value: _T) -> _U:
        try:
            return check(value)
        except RedriveError as error:
            raise ValueError(str(error)) from error

    return validator
