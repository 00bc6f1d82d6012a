"""Which rule speaks for an exception: by its class, by what it was raised from, or by a predicate.

Called by `failure`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator

ErrorRule = type[BaseException] | Callable[[BaseException], bool]
"""A class of exceptions, or what tells for an exception whether the rule is for it."""

_ALL = (Exception, BaseException)
"""Either stands for all failures: an exception of a handler that is no `Exception` is one too."""
_MAX_CAUSES = 20


def nearest(error: BaseException, rules: Collection[ErrorRule]) -> tuple[ErrorRule | None, ...]:
    """Return the one of *rules* that speaks for *error*; of a group, one for each of its parts.

    A predicate comes before classes, and a class before its bases. What *error* was raised *from*
    is asked where no rule names it more closely than `Exception`; None if there is no rule.
    """
    catch_all = next((kind for kind in _ALL if kind in rules), None)
    return _named(error, rules, _MAX_CAUSES) or (catch_all,)


def parts(error: BaseException) -> Iterator[BaseException]:
    """Go through the exceptions of a group, and of groups in it; else there is *error* alone."""
    if isinstance(error, BaseExceptionGroup):
        for part in error.exceptions:
            yield from parts(part)
    else:
        yield error


def _named(
    error: BaseException, rules: Collection[ErrorRule], causes: int
) -> tuple[ErrorRule | None, ...]:
    own = _own(error, rules)
    if own is not None:
        return (own,)
    if isinstance(error, BaseExceptionGroup):
        return tuple(rule for part in error.exceptions for rule in nearest(part, rules))
    if error.__cause__ is None or not causes:
        return ()
    return _named(error.__cause__, rules, causes - 1)


def _own(error: BaseException, rules: Collection[ErrorRule]) -> ErrorRule | None:
    for rule in rules:
        if not isinstance(rule, type) and rule(error):
            return rule
    return next((kind for kind in type(error).__mro__ if kind not in _ALL and kind in rules), None)
