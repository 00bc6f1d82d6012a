"""Text forms of values: durations, sizes, patterns, and fields that convert when set; pure.

Durations are written as in manifests: `1s`, `5m`, `2h`, `10d`, or combined as in `1h30m`. Sizes
have units like Kubernetes quantities.

`Patterns` matches names of topics, roles, images and hosts. It does not use regular expressions:
they backtrack for each `*`, and eight of them against 255 characters would take too long.
"""

from __future__ import annotations

import inspect
import operator
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Generic, SupportsIndex, TypeVar, cast

from redrive.errors import InvalidSpecError

_SECONDS = {"d": 86_400, "h": 3_600, "m": 60, "s": 1}
# Eight digits: a timedelta cannot hold more days.
DURATION_PATTERN = r"^([0-9]{1,8}d)?([0-9]{1,8}h)?([0-9]{1,8}m)?([0-9]{1,8}s)?$"
_WRITTEN = re.compile(DURATION_PATTERN)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def time_text(milliseconds: int) -> str | None:
    """Return a time in RFC 3339; None for one after the year 9999, as any producer may write."""
    try:
        instant = _EPOCH + timedelta(milliseconds=milliseconds)
    except OverflowError:
        return None
    return instant.strftime("%Y-%m-%dT%H:%M:%SZ")


def parse_duration(text: str) -> timedelta:
    """Parse a duration of whole seconds, largest unit first, each unit at most once.

    Raises:
        InvalidSpecError: *text* is not a duration.
    """
    is_text = isinstance(text, str)  # not so in a program without a type checker
    written = _WRITTEN.fullmatch(text) if is_text and text.isascii() else None
    if not text or written is None:
        raise InvalidSpecError(
            "a duration must be whole numbers with the units d, h, m, s, largest first",
            got=text[:64] if is_text else text,
            remedy="write it like 90s, 1m30s, 2h or 10d",
        )
    return timedelta(seconds=sum(int(p[:-1]) * _SECONDS[p[-1]] for p in written.groups() if p))


def check_duration(text: str) -> str:
    """Return *text* if it is a duration of at least 1s.

    Raises:
        InvalidSpecError: it is not a duration, or it is 0s.
    """
    if not parse_duration(text):
        raise InvalidSpecError(
            "a duration must be at least 1s", got=text, remedy="increase it, or leave it out"
        )
    return text


def check_count(value: object, name: str, least: int = 1) -> None:
    """Pass if *value* is a whole number from *least* on.

    Raises:
        InvalidSpecError: it is not. The message contains *name*.
    """
    is_whole = isinstance(value, SupportsIndex) and not isinstance(value, bool)
    if not is_whole or operator.index(cast("SupportsIndex", value)) < least:
        raise InvalidSpecError(
            f"{name} must be a whole number, at least {least}",
            got=value,
            remedy="pass such a number, or leave it out",
        )


def text_of(value: object) -> str | None:
    """Return a result of the program's code as text that can be sent; None if it is no text.

    A class of the program may raise at the access to any attribute; `isinstance` reads one.
    """
    if not issubclass(type(value), str):
        return None
    return str.encode(cast("str", value), "utf-8", "replace").decode()


def is_function(value: object) -> bool:
    """Return True if *value* can be called for a result, unlike a coroutine function."""
    if not callable(value):
        return False
    try:
        return not any(map(inspect.iscoroutinefunction, (value, type(value).__call__)))
    except TypeError:  # of a mock, whose attributes have other types
        return True


def check_instance(value: object, kind: type, name: str, *, optional: bool = False) -> None:
    """Pass if *value* is of a *kind*, or None where it is *optional*. A bool is not an int.

    Raises:
        InvalidSpecError: it is not. The message contains *name*.
    """
    is_kind = isinstance(value, kind) and not (kind is int and isinstance(value, bool))
    if not (is_kind or (optional and value is None)):
        raise InvalidSpecError(
            f"{name} must be of the type {kind.__name__}",
            got=type(value).__name__,
            remedy="pass such an object, or leave it out",
        )


_NEAR = 0.75
"""Least similarity of a misspelled name; names of other things are less similar."""


def check_listed(
    options: Iterable[str], names: Collection[str], owner: str, remedies: Mapping[str, str]
) -> None:
    """Pass if each of *options* is one of *names*, the options of *owner*.

    Args:
        remedies: for names that users may expect here.

    Raises:
        InvalidSpecError: one is not. The message has its remedy, or else the nearest name.
    """
    for option in options:
        if option not in names:
            import difflib  # noqa: PLC0415 - a correct program needs none

            near = difflib.get_close_matches(option, names, 1, cutoff=_NEAR)
            remedy = remedies.get(option) or (f"use {near[0]}" if near else None)
            listed = f"the options are {', '.join(sorted(names))}"
            raise InvalidSpecError(
                f"there is no such option of {owner}",
                got=option,
                remedy=f"{remedy}; {listed}" if remedy else listed,
            )


def to_timedelta(duration: float | timedelta, name: str) -> timedelta:
    """Return a *duration* in seconds, or a timedelta, as a timedelta.

    Args:
        name: name of the duration for the message.

    Raises:
        InvalidSpecError: it is neither, or exceeds a timedelta.
    """
    if isinstance(duration, timedelta):
        return duration
    try:
        if not isinstance(duration, bool):
            return timedelta(seconds=duration)
    except (TypeError, ValueError, OverflowError):
        pass
    raise InvalidSpecError(
        f"{name} must be a number of seconds, or a timedelta",
        got=duration,
        remedy="pass a value such as 1.5 or timedelta(minutes=5)",
    )


UNLIMITED = timedelta(days=36_500)
"""Time-out that never ends: a hundred years, which a thread can still wait."""


def to_limit(duration: float | timedelta | None, name: str) -> timedelta:
    """Return a time-out as `to_timedelta` does; `UNLIMITED` for None.

    Raises:
        InvalidSpecError: it is neither None nor a duration. The message contains *name*.
    """
    return UNLIMITED if duration is None else to_timedelta(duration, name)


def format_duration(duration: timedelta) -> str:
    """Format *duration*, cut to whole seconds, in its shortest form."""
    seconds = int(duration.total_seconds())
    words = []
    for unit, size in _SECONDS.items():
        count, seconds = divmod(seconds, size)
        if count:
            words.append(f"{count}{unit}")
    return "".join(words) if words else "0s"


SIZE_PATTERN = "^[1-9][0-9]{0,14}(Ki|Mi|Gi|Ti|k|M|G|T)$"
"""Pattern of `parse_size` for other systems; RE2 and Python interpret it equally."""
_UNITS: dict[str, int] = {
    unit: base**power
    for base, units in ((1024, ("Ki", "Mi", "Gi", "Ti")), (1000, ("k", "M", "G", "T")))
    for power, unit in enumerate(units, start=1)
}


def parse_size(text: str) -> int:
    """Parse a size, and return bytes.

    Raises:
        InvalidSpecError: it is not written like `512Mi` or `10Gi`.
    """
    if not re.fullmatch(SIZE_PATTERN, text, re.ASCII):
        raise InvalidSpecError(
            "a size must be a whole number with one of the units Ki, Mi, Gi, Ti, k, M, G, T",
            got=text[:64],
            remedy="write it like 512Mi or 10Gi",
        )
    digits = text.rstrip("KMGTki")
    return int(digits) * _UNITS[text.removeprefix(digits)]


def size_text(size: int) -> str:
    """Return a number of bytes for people, with three digits."""
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if size >= unit:
            number = size / unit
            return f"{number:.0f} {name}" if number >= 100 else f"{number:.3g} {name}"  # noqa: PLR2004
    return f"{size} B"


_Segments = tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Patterns:
    """Patterns in which `*` stands for any characters but one.

    Patterns without `*` are looked up; others take at most as many steps as the length of the
    pattern times that of the name.

    Attributes:
        patterns: one of them must match.
        but: the character that `*` does not match.
    """

    patterns: tuple[str, ...]
    but: str
    _exact: frozenset[str] = field(init=False, repr=False, compare=False)
    _begins: tuple[str, ...] = field(init=False, repr=False, compare=False)
    _segments: tuple[_Segments, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Split the patterns."""
        starred = [pattern for pattern in self.patterns if "*" in pattern]
        segments = (
            tuple(tuple(segment.split("*")) for segment in pattern.split(self.but))
            for pattern in starred
        )
        object.__setattr__(self, "_exact", frozenset(self.patterns).difference(starred))
        object.__setattr__(self, "_begins", tuple(p.partition("*")[0] for p in starred))
        object.__setattr__(self, "_segments", tuple(segments))

    def match(self, name: str) -> bool:
        """Return True if a pattern matches the whole *name*."""
        if name in self._exact:
            return True
        if not name.startswith(self._begins):
            return False
        parts = name.split(self.but)
        return any(
            len(segments) == len(parts) and all(map(_matches, segments, parts))
            for segments in self._segments
        )


def _matches(pieces: tuple[str, ...], text: str) -> bool:
    """Return True if *text* consists of *pieces* with any text between them.

    The first match of a piece leaves most text to the later pieces, so no other match is tried.
    """
    if len(pieces) == 1:
        return pieces[0] == text
    first, *middle, last = pieces
    at, end = len(first), len(text) - len(last)
    if at > end or not (text.startswith(first) and text.endswith(last)):
        return False
    for piece in middle:
        position = text.find(piece, at, end)
        if position < 0:
            return False
        at = position + len(piece)
    return True


_T = TypeVar("_T")
_Given_contra = TypeVar("_Given_contra", contravariant=True)
_Read_co = TypeVar("_Read_co", covariant=True)
_NONE_GIVEN = object()


class _Conversion:
    """Field that is converted when it is set. Reads need no call: it has no `__get__`."""

    def __init__(self, convert: Callable[[Any], Any], name: str = "") -> None:
        self.convert = convert
        self._name = name

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __set__(self, instance: object, value: Any) -> None:  # noqa: ANN401
        instance.__dict__[self._name] = self.convert(value)


class Converted(_Conversion, Generic[_Given_contra, _Read_co]):
    """Field of a dataclass that is read as one type and may be set as another, even if frozen.

    `reads_directly` decorates the dataclass.

    Args:
        convert: raises InvalidSpecError for an invalid value.
        default: is converted, too; a field without it is required.
    """

    def __init__(self, convert: Callable[[Any], _Read_co], default: object = _NONE_GIVEN) -> None:
        super().__init__(convert)
        self._default = default

    def __get__(self, instance: object, owner: type) -> _Read_co:
        if instance is not None:  # otherwise each value would read as the default
            msg = f"{owner.__name__} lacks the decorator reads_directly"
            raise TypeError(msg)
        if self._default is _NONE_GIVEN:
            raise AttributeError(self._name)  # shows dataclasses that there is no default
        return cast("_Read_co", self._default)

    if TYPE_CHECKING:

        def __set__(self, instance: object, value: _Given_contra) -> None: ...


def reads_directly(cls: type[_T]) -> type[_T]:
    """Decorate a dataclass whose `Converted` fields have given their defaults to its decorator."""
    for name, converted in tuple(vars(cls).items()):
        if isinstance(converted, Converted):
            setattr(cls, name, _Conversion(converted.convert, name))
    return cls
