"""Reference of the Python API: a page for each table of docs/reference/python.md, from docstrings.

`make site` writes the pages into its copy of docs/. The repository has only the tables.
"""

from __future__ import annotations

import ast
import enum
import importlib
import inspect
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from datetime import timedelta
from itertools import pairwise
from operator import attrgetter
from textwrap import dedent
from types import FunctionType, SimpleNamespace
from typing import Any, NamedTuple

from redrive.errors import RedriveError
from release import CHECKOUT

OVERVIEW = CHECKOUT / "docs" / "reference" / "python.md"
FOLDER = "reference/python"
_ROW = re.compile(r"^\| `(\w+)` \|", re.MULTILINE)
_SECTION = re.compile(r"(Args|Attributes|Raises|Returns|Yields):")
_ITEM = re.compile(r"(\*{0,2}[\w.]+): (.*)", re.DOTALL)
_NAMED = re.compile(r"`([A-Z]\w+(?:\.\w+)?|load_policy)`")
"""Names in texts that lead to their descriptions; other lower-case names may be arguments."""
_ARGUMENT = re.compile(r"(?<![\w*])\*(\w+)\*(?!\w)")
_ERRORS = {TimeoutError, Exception}
_WIDTH = 88  # of a signature on one line


class Part(NamedTuple):
    """A table of the overview: names of one module, which share a page."""

    title: str
    module: str
    values: Mapping[str, Any]
    text: str

    @property
    def page(self) -> str:
        """Return the name of its page."""
        return f"{self.title.lower().replace(' ', '-')}.md"


def parts() -> list[Part]:
    """Return the tables of the overview."""
    tables = []
    for text in OVERVIEW.read_text("utf-8").split("\n## ")[1:]:
        title, _, table = text.partition("\n")
        (module,) = re.findall(r"^From `([\w.]+)`", table, re.MULTILINE)
        package = importlib.import_module(module)
        values = {name: getattr(package, name) for name in _ROW.findall(table)}
        tables.append(Part(title, module, values, text))
    return tables


def render() -> Mapping[str, str]:
    """Return the overview with links, and the pages, by their places in the site."""
    tables = parts()
    shown = {id(value) for part in tables for value in part.values.values()}
    places = {
        anchor: f"{part.page}#{anchor.replace('.', '').lower()}"
        for part in tables
        for name, value in part.values.items()
        for anchor in [name, *(f"{name}.{member}" for member, _ in _members(value, shown))]
    }
    overview = OVERVIEW.read_text("utf-8")
    for part in tables:
        row = rf"| [`\1`](python/{part.page}#\1) |"
        overview = overview.replace(part.text, _ROW.sub(row, part.text))
    overview = re.sub(r"(?<=md#)\w+(?=\) \|)", lambda anchor: anchor[0].lower(), overview)
    pages = {f"{FOLDER}/{part.page}": _page(part, shown, places) for part in tables}
    return {f"{FOLDER}.md": overview} | pages


def _page(part: Part, shown: AbstractSet[int], places: Mapping[str, str]) -> str:
    blocks = [f"# {part.title}", f"From `{part.module}`. [All names](../python.md)."]
    for name, value in part.values.items():
        blocks += [f"## {name}", *_described(name, value, shown)]
        for member, definition in _members(value, shown):
            blocks += [f"### {name}.{member}", *_member(member, definition)]

    def link(name: re.Match[str]) -> str:
        place = places.get(name[1])
        return name[0] if place is None else f"[{name[0]}]({place.removeprefix(part.page)})"

    return (
        "\n\n".join(
            block if block.startswith(("```", "#")) else _NAMED.sub(link, block) for block in blocks
        )
        + "\n"
    )


def _described(name: str, value: Any, shown: AbstractSet[int]) -> Iterator[str]:  # noqa: ANN401
    """Yield the signature and the description of a class, a function or a type alias."""
    if not isinstance(value, type | FunctionType):
        yield from _alias(name)
        return
    parameters = _parameters(value)
    if isinstance(value, type):
        bases = [base for base in value.__bases__ if id(base) in shown or base in _ERRORS]
        if parameters is not None and not issubclass(value, RedriveError):
            yield _signature(name, parameters, "")
        if bases:
            yield f"Base: {', '.join(f'`{base.__name__}`' for base in bases)}."
    else:
        yield _signature(name, parameters or [], _returned(value))
    yield from blocks_of(inspect.getdoc(value) or "")
    if isinstance(value, enum.EnumMeta):
        members: Iterable[enum.Enum] = value
        yield "Values: " + ", ".join(f"`{member.value}`" for member in members) + "."


def _alias(name: str) -> Iterator[str]:
    """Yield a type alias of `redrive.middleware` and the text below it."""
    chain = sys.modules["redrive.delivery.middleware.chain"]
    body = ast.parse(inspect.getsource(chain)).body
    for statement, below in pairwise(body):
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == name:
            yield f"```python\n{ast.unparse(statement)}\n```"
            assert isinstance(below, ast.Expr)  # noqa: S101  each alias has its text
            yield from blocks_of(inspect.cleandoc(ast.literal_eval(below.value)))


def _members(owner: Any, shown: AbstractSet[int]) -> Iterator[tuple[str, Any]]:  # noqa: ANN401
    """Yield the public methods and properties of a class; bases with a description have theirs."""
    seen = set[str]()
    described = [base for base in getattr(owner, "__mro__", ())[1:] if id(base) in shown]
    for base in getattr(owner, "__mro__", ()):
        if base.__module__.startswith("redrive") and not any(
            map(base.__subclasscheck__, described)
        ):
            for name, value in vars(base).items():
                function = getattr(value, "fget", getattr(value, "__func__", value))
                if isinstance(function, FunctionType) and function.__doc__ and name not in seen:
                    seen.add(name)
                    if not name.startswith("_"):
                        yield name, value


def _member(name: str, member: Any) -> Iterator[str]:  # noqa: ANN401  a method or property
    function: FunctionType = getattr(member, "fget", getattr(member, "__func__", member))
    if isinstance(member, property):
        yield f"```python\n{name}{_returned(function).replace(' ->', ':')}\n```"
    else:
        prefix = "async " if inspect.iscoroutinefunction(function) else ""
        yield _signature(prefix + name, _parameters(function) or [], _returned(function))
    yield from blocks_of(inspect.getdoc(function) or "")


def _signature(name: str, parameters: list[str], returned: str) -> str:
    line = f"{name}({', '.join(parameters)}){returned}"
    if len(line) > _WIDTH:
        line = "".join([f"{name}(\n", *(f"    {part},\n" for part in parameters), f"){returned}"])
    return f"```python\n{line}\n```"


def _returned(function: FunctionType) -> str:
    returns = _definition(function).returns
    return "" if returns is None else f" -> {ast.unparse(returns).strip(chr(39))}"


def _definition(function: FunctionType) -> ast.FunctionDef | ast.AsyncFunctionDef:
    (definition,) = ast.parse(dedent(inspect.getsource(function))).body
    assert isinstance(definition, ast.FunctionDef | ast.AsyncFunctionDef)  # noqa: S101  a method
    return definition


def _parameters(value: type | FunctionType) -> list[str] | None:
    """Return the parameters as text; None if there are none to give."""
    if isinstance(value, FunctionType):
        return list(_arguments(value))
    if isinstance(value, enum.EnumMeta) or getattr(value, "_is_protocol", False):
        return None
    for base in value.__mro__:
        if isinstance(made := vars(base).get("__init__"), FunctionType):
            if made.__code__.co_filename == "<string>":
                break  # of a dataclass
            return list(_arguments(made))
    (definition,) = ast.parse(dedent(inspect.getsource(value))).body
    assert isinstance(definition, ast.ClassDef)  # noqa: S101
    names = vars(sys.modules[value.__module__])
    fields = (part for part in definition.body if isinstance(part, ast.AnnAssign))
    return [_field(part, names) for part in fields] or None


def _arguments(function: FunctionType) -> Iterator[str]:
    arguments, names = _definition(function).args, function.__globals__
    plain = [argument for argument in arguments.args if argument.arg not in {"self", "cls"}]
    defaults = [None] * (len(plain) - len(arguments.defaults)) + list(arguments.defaults)
    for argument, default in zip(plain, defaults, strict=True):
        yield _parameter(argument, default, names)
    if arguments.vararg:
        yield f"*{_parameter(arguments.vararg, None, names)}"
    others = arguments.kwarg and _parameter(arguments.kwarg, None, names)
    options = re.findall(r": Unpack\[(\w+)\]$", others or "")
    if not arguments.vararg and (arguments.kwonlyargs or options):
        yield "*"
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        yield _parameter(argument, default, names)
    if options:
        for option, hint in names[options[0]].__annotations__.items():
            yield f"{option}: {hint.__forward_arg__} = ..."
    elif others:
        yield f"**{others}"


def _parameter(argument: ast.arg, default: ast.expr | None, names: Mapping[str, Any]) -> str:
    """Return a parameter as text; a default that is a constant of redrive has its value."""
    text = argument.arg
    if argument.annotation is not None:
        text += f": {ast.unparse(argument.annotation)}"
    if default is None:
        return text
    constant = ast.unparse(default)
    if isinstance(default, ast.Name | ast.Attribute):
        value = attrgetter(constant)(SimpleNamespace(**names))
        if type(value) in {int, float, str, timedelta}:
            constant = repr(value).removeprefix("datetime.")
        elif constant.startswith("_"):
            constant = "..."
    return f"{text} = {constant}"


def _field(field: ast.AnnAssign, names: Mapping[str, Any]) -> str:
    """Return a field of a dataclass as a parameter; of `Converted` the type that may be set."""
    annotation, default = field.annotation, field.value
    if isinstance(default, ast.Call) and ast.unparse(default.func) == "Converted":
        assert isinstance(annotation, ast.Subscript)  # noqa: S101  it has two types
        assert isinstance(annotation.slice, ast.Tuple)  # noqa: S101
        annotation, default = annotation.slice.elts[0], (*default.args[1:], None)[0]
    return _parameter(ast.arg(ast.unparse(field.target), annotation), default, names)


def blocks_of(docstring: str) -> Iterator[str]:
    """Yield a docstring in blocks of Markdown: paragraphs, code, and a table for each section."""
    for block in docstring.split("\n\n"):
        first, _, rest = block.partition("\n")
        if _SECTION.fullmatch(first):
            yield _table(first[:-1], dedent(rest).strip())
        elif block.startswith("    "):
            yield f"```python\n{dedent(block).rstrip()}\n```"
        else:
            yield _ARGUMENT.sub(r"`\1`", block)


def _table(title: str, text: str) -> str:
    heading = {"Args": "argument", "Attributes": "attribute", "Raises": "error"}.get(title)
    if heading is None:
        return f"{title}: {' '.join(text.split())}"
    rows = [f"| {heading} | meaning |", "|---|---|"]
    for item in re.split(r"\n(?! )", text):
        match = _ITEM.fullmatch(item)
        assert match is not None, item  # noqa: S101  the form of our docstrings
        meaning = _ARGUMENT.sub(r"`\1`", " ".join(match[2].split()))
        rows.append(f"| `{match[1]}` | {meaning.replace('|', chr(92) + '|')} |")
    return "\n".join(rows)
