"""A field of a dataclass that is read as one type, and may be given as another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar, cast

_Given_contra = TypeVar("_Given_contra", contravariant=True)
_Read_co = TypeVar("_Read_co", covariant=True)
_NONE_GIVEN = object()


class Converted(Generic[_Given_contra, _Read_co]):
    """The default of such a field, and what converts it: also in a frozen class.

    Args:
        convert: raises InvalidSpecError for what can't be read.
        default: is converted too; left out, the field has none.
    """

    def __init__(self, convert: Callable[[Any], _Read_co], default: object = _NONE_GIVEN) -> None:
        self._convert = convert
        self._default = default
        self._name = ""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: object, owner: type) -> _Read_co:
        if instance is not None:
            return cast("_Read_co", instance.__dict__[self._name])
        if self._default is _NONE_GIVEN:
            raise AttributeError(self._name)  # so dataclasses learn that there is no default
        return cast("_Read_co", self._default)

    def __set__(self, instance: object, given: _Given_contra) -> None:
        instance.__dict__[self._name] = self._convert(given)
