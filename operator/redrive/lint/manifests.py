"""Manifests in files, folders and streams, with the position of each field.

Scalars have the meaning that they have for kubectl: `on` is a boolean, `4711:3` is a string. A
stream that Helm rendered names its templates in comments, `# Source: shop/templates/a.yaml`:
positions name the template then, and count lines from this comment.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from redrive.api import GROUP, Body
from redrive.api.crds import KINDS
from redrive.errors import RedriveError

try:
    from yaml import CSafeLoader as _SafeLoader
except ImportError:  # PyYAML that was built without libyaml
    from yaml import SafeLoader as _SafeLoader  # type: ignore[assignment]

FieldPath = tuple[str | int, ...]
STREAM = "-"
"""The path of standard input."""
SUFFIXES = frozenset({".yaml", ".yml", ".json"})
_KIND_NAMES = frozenset(kind.kind for kind in KINDS)
_CONCERNS_REDRIVE = re.compile(
    rf"redrive|kind\W+({'|'.join([*_KIND_NAMES, 'Namespace', 'Secret'])})\b", re.IGNORECASE
)
"""Text of a document that may be about redrive; others are not parsed."""
_SEPARATOR = re.compile(r"---(\s|$)")
_SOURCE = re.compile(r"# Source: (\S+)\s*$")
_DISABLED = re.compile(r"(^|\s)#\s*redrive-lint:\s*disable=([\w, -]+)")
_MAX_NODES = 100_000


class Place(NamedTuple):
    """A place in a file; lines and columns count from 1."""

    file: str
    line: int
    column: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}:{self.column}"


class Unreadable(NamedTuple):
    """A document that is no YAML.

    Attributes:
        problem: the error of the parser.
    """

    position: Place
    problem: str


class _Loader(_SafeLoader):
    """Reads scalars as kubectl does (sigs.k8s.io/yaml): no sexagesimal numbers, no timestamps."""

    yaml_implicit_resolvers = {}  # noqa: RUF012  as in the base class
    bool_values = {**_SafeLoader.bool_values, "y": True, "n": False}  # noqa: RUF012


for _tag, _pattern, _first in (
    ("bool", r"y|yes|n|no|true|false|on|off|Y|Yes|N|No|True|False|On|Off|YES|NO|TRUE|FALSE|ON|OFF",
     "yYnNtTfFoO"),
    ("int", r"[-+]?(0b[01_]+|0x[\da-fA-F][\da-fA-F_]*|0o?[0-7_]+|0|[1-9][\d_]*)", "-+0123456789"),
    ("float", r"[-+]?([.]\d+|\d+([.]\d*)?)([eE][-+]?\d+)?", "-+.0123456789"),
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("merge", "<<", "<"),
):  # fmt: skip
    _Loader.add_implicit_resolver(
        f"tag:yaml.org,2002:{_tag}", re.compile(f"^(?:{_pattern})$", re.ASCII), list(_first)
    )


@dataclass(frozen=True)
class Document:
    """One document of a file.

    Attributes:
        text: without the line that separates it from the one before.
        first_line: number of its first line in *file*.
        folder: of the file that was read; objects of one environment lie in one folder.
    """

    file: str
    text: str
    first_line: int
    folder: str

    def position(self, mark: yaml.Mark | None) -> Place:
        """Return the position of *mark*; that of the document where the parser has none."""
        if mark is None:
            return Place(self.file, self.first_line, 1)
        return Place(self.file, self.first_line + mark.line, mark.column + 1)

    def contains(self, position: Place) -> bool:
        """Return True if *position* is in this document."""
        lines = range(self.first_line, self.first_line + self.text.count("\n") + 1)
        return position.file == self.file and position.line in lines

    def disabled(self) -> dict[int, frozenset[str]]:
        """Return the rules that comments disable, by line; line 0 is the whole document.

        A comment beside a field is for its line, one on a line of its own for the next line, and
        one before the first field for the document.
        """
        rules: dict[int, frozenset[str]] = {}
        pending: frozenset[str] = frozenset()
        is_head = True
        for number, line in enumerate(self.text.split("\n"), start=self.first_line):
            match = _DISABLED.search(line)
            names = frozenset(re.split(r"[,\s]+", match[2].strip(", "))) if match else frozenset()
            if not line.strip() or line.lstrip().startswith("#"):
                pending |= names
                continue
            if is_head and pending:
                rules[0], pending = pending, frozenset()
            is_head = False
            if names or pending:
                rules[number] = names | pending
            pending = frozenset()
        return rules


@dataclass(frozen=True)
class Manifest:
    """One object in a document, with the position of each field.

    Attributes:
        body: the object, with the text of each key as key.
        disabled: see `Document.disabled`.
        default_namespace: of an object that names none, as for `kubectl apply -n`.
    """

    document: Document
    node: yaml.MappingNode
    body: Body
    disabled: dict[int, frozenset[str]]
    default_namespace: str

    @property
    def api_version(self) -> str:
        """Return `apiVersion`; empty without one."""
        return _text(self.body.get("apiVersion"))

    @property
    def kind(self) -> str:
        """Return `kind`; empty without one."""
        return _text(self.body.get("kind"))

    @property
    def metadata(self) -> Body:
        """Return `metadata`; empty where it is no object."""
        metadata = self.body.get("metadata")
        return metadata if isinstance(metadata, dict) else {}

    @property
    def name(self) -> str:
        """Return `metadata.name`; empty without one."""
        return _text(self.metadata.get("name"))

    @property
    def namespace(self) -> str:
        """Return `metadata.namespace`, else the default; empty where both are unknown."""
        return _text(self.metadata.get("namespace")) or self.default_namespace

    @property
    def title(self) -> str:
        """Return kind, namespace and name, for messages."""
        return f"{self.kind} {f'{self.namespace}/' if self.namespace else ''}{self.name}"

    def node_at(self, path: FieldPath) -> tuple[yaml.Node, yaml.Node, int]:
        """Return key and value of the field at *path*, and how many steps lead to an existing one.

        A field that is not there is represented by the deepest object on the way that is.
        """
        key: yaml.Node = self.node
        value: yaml.Node = self.node
        for depth, step in enumerate(path):
            for name, child_key, child in _children(value):
                if name == step:
                    key, value = child_key, child
                    break
            else:
                return key, value, depth
        return key, value, len(path)

    def position(self, path: FieldPath) -> Place:
        """Return the position of the value at *path*; that of its key if it is on another line.

        A field that is missing has the position of the deepest object on the way to it.
        """
        key, value, depth = self.node_at(path)
        is_beside = depth == len(path) and key.start_mark.line == value.start_mark.line
        return self.document.position((value if is_beside else key).start_mark)

    def key_position(self, path: FieldPath) -> Place:
        """Return the position of the key at *path*."""
        return self.document.position(self.node_at(path)[0].start_mark)

    def scalars(self, path: FieldPath) -> Iterator[tuple[FieldPath, str]]:
        """Yield path and text of each scalar at or below *path*."""
        _, value, depth = self.node_at(path)
        if depth == len(path):
            yield from _scalars(value, path)

    def duplicate_keys(self) -> Iterator[tuple[str, Place]]:
        """Yield name and position of each key that its object has already."""
        nodes: list[yaml.Node] = [self.node]
        while nodes:
            node = nodes.pop()
            names = set()
            for name, key, child in _children(node):
                nodes.append(child)
                if isinstance(node, yaml.MappingNode):
                    if name in names:
                        yield str(name), self.document.position(key.start_mark)
                    names.add(name)


@dataclass
class Manifests:
    """All that was read.

    Attributes:
        objects: those of redrive's kinds, also with a misspelled kind or group.
        namespaces: Namespaces of Kubernetes, whose labels selectors of connections read.
        secrets: Secrets, which connections may need an annotation of.
        files: files that were read, or templates where Helm rendered them.
        notes: folders and files that were left out, each with its remedy.
        namespace: of objects that name none; empty where it is unknown.
    """

    namespace: str = ""
    objects: list[Manifest] = field(default_factory=list)
    namespaces: list[Manifest] = field(default_factory=list)
    secrets: list[Manifest] = field(default_factory=list)
    unreadable: list[Unreadable] = field(default_factory=list)
    files: set[str] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)

    @classmethod
    def read(cls, paths: Iterable[str], namespace: str = "") -> Manifests:
        """Read files, folders and, for the path `-`, standard input.

        Raises:
            RedriveError: a path does not exist, or may not be read.
        """
        manifests = cls(namespace)
        for path in paths:
            if path == STREAM:
                manifests.add("stdin", sys.stdin.buffer.read())
            elif Path(path).is_dir():
                for file in manifests._files_in(Path(path)):
                    manifests.add(_relative(file), _content(file))
            else:
                manifests.add(_relative(Path(path)), _content(Path(path)))
        return manifests

    def add(self, file: str, content: bytes) -> None:
        """Add the documents of one file."""
        text = content.decode("utf-8-sig", errors="replace")
        documents = list(_documents(file, text))
        self.files.update([document.file for document in documents] or [file])
        for document in documents:
            if _CONCERNS_REDRIVE.search(document.text):
                self._add_document(document)

    def _add_document(self, document: Document) -> None:
        try:
            objects = list(_objects(document, self.namespace))
        except yaml.YAMLError as error:
            if "redrive" in document.text or _KIND_NAMES & set(re.findall(r"\w+", document.text)):
                mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
                problem = getattr(error, "problem", None) or str(error)
                self.unreadable.append(Unreadable(document.position(mark), problem))
            return
        for manifest in objects:
            if manifest.kind == "Namespace" and manifest.api_version == "v1":
                self.namespaces.append(manifest)
            elif manifest.kind == "Secret" and manifest.api_version == "v1":
                self.secrets.append(manifest)
            elif _is_of_redrive(manifest):
                self.objects.append(manifest)

    def _files_in(self, folder: Path) -> Iterator[Path]:
        """Yield the manifests below *folder*, without Helm's templates and kustomize's patches."""
        is_chart = (folder / "Chart.yaml").is_file()
        patches = _patches(folder)
        for path in sorted(folder.iterdir()):
            if path.name.startswith("."):
                continue
            if is_chart and path.name == "templates":
                self.notes.append(
                    f"{path} holds templates of Helm and is left out; render them: "
                    f"helm template {folder} | redrive lint -"
                )
            elif path.resolve() in patches:
                self.notes.append(
                    f"{path} is a patch of kustomize and is left out; build it: "
                    f"kubectl kustomize {folder} | redrive lint -"
                )
            elif path.is_dir():
                yield from self._files_in(path)
            elif path.suffix in SUFFIXES:
                yield path


def _relative(path: Path) -> str:
    """Return *path* relative to the working directory, with slashes; outside of it unchanged."""
    absolute, here = path.absolute(), Path.cwd()
    return (absolute.relative_to(here) if absolute.is_relative_to(here) else path).as_posix()


def _content(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise RedriveError(
            "a path of manifests can't be read",
            got=f"{file}: {error.strerror}",
            remedy="name files and folders that exist, or - for standard input",
            reason="ManifestsUnreadable",
        ) from error


def _patches(folder: Path) -> set[Path]:
    """Return the files that a kustomization in *folder* applies as patches."""
    for name in ("kustomization.yaml", "kustomization.yml", "Kustomization"):
        file = folder / name
        if not file.is_file():
            continue
        try:
            kustomization = yaml.load(_content(file), _Loader)  # noqa: S506  a safe one
        except yaml.YAMLError:
            return set()  # kustomize reports it
        if not isinstance(kustomization, dict):
            return set()
        patches = [*(kustomization.get("patches") or []), *(kustomization.get("components") or [])]
        paths = [patch.get("path") for patch in patches if isinstance(patch, dict)]
        paths += kustomization.get("patchesStrategicMerge") or []
        return {(folder / path).resolve() for path in paths if isinstance(path, str)}
    return set()


def _documents(file: str, text: str) -> Iterator[Document]:
    """Split *text* at its separators, so that an unreadable document leaves the others readable."""
    if text.lstrip().startswith("{"):  # JSON may be indented by tabs
        text = text.replace("\t", " ")
    folder = file.rpartition("/")[0]
    source, first_line, lines = file, 1, list[str]()
    for number, line in enumerate([*text.split("\n"), "---"], start=1):
        if _SEPARATOR.match(line):
            if "".join(lines).strip():
                yield Document(source, "\n".join(lines), first_line, folder)
            source, first_line, lines = file, number, [f"   {line[3:]}"]
        elif match := _SOURCE.match(line):
            source, first_line, lines = match[1], 1, []
        else:
            lines.append(line)


def _objects(document: Document, namespace: str) -> Iterator[Manifest]:
    """Yield the object of *document*, or those of the list in it.

    Raises:
        YAMLError: it is no YAML, or larger than any manifest.
    """
    loader = _Loader(document.text)
    try:
        node = loader.get_single_node()
        if node is None:
            return
        _check_size(node)
        body = _plain(node, loader)
    finally:
        loader.dispose()
    if not isinstance(node, yaml.MappingNode):
        return
    disabled = document.disabled()
    items = body.get("items")
    if _text(body.get("kind")).endswith("List") and isinstance(items, list):
        nodes = next(child for name, _, child in _children(node) if name == "items")
        for (_, _, item_node), item in zip(_children(nodes), items, strict=True):
            if isinstance(item_node, yaml.MappingNode):
                yield Manifest(document, item_node, item, disabled, namespace)
    else:
        yield Manifest(document, node, body, disabled, namespace)


def _check_size(node: yaml.Node) -> None:
    """Refuse a document whose anchors make it large, or let it contain itself."""
    nodes, count = [node], 0
    while nodes:
        parent = nodes.pop()
        for _, _, child in _children(parent):
            nodes.append(child)
        count += 1
        if count > _MAX_NODES:
            raise yaml.MarkedYAMLError(
                problem=f"it has more than {_MAX_NODES} values, those of its anchors included",
                problem_mark=node.start_mark,
            )


def _plain(node: yaml.Node, loader: Any) -> Any:  # noqa: ANN401  as it is written
    """Return the value of *node*, with the text of each key as key; the last of duplicates wins."""
    match node:
        case yaml.MappingNode():
            loader.flatten_mapping(node)
            return {key: _plain(child, loader) for key, _, child in _children(node)}
        case yaml.SequenceNode():
            return [_plain(child, loader) for child in node.value]
        case _ if node.tag in _SCALARS:
            return loader.construct_object(node)
        case _:
            return node.value


_SCALARS = frozenset(
    f"tag:yaml.org,2002:{name}" for name in ("bool", "int", "float", "null", "str")
)


def _children(node: yaml.Node) -> Iterator[tuple[str | int, yaml.Node, yaml.Node]]:
    """Yield name, key and value of each part of *node*; an item of a list is its own key."""
    if isinstance(node, yaml.MappingNode):
        for key, child in node.value:
            yield (key.value if isinstance(key.value, str) else repr(key.value)), key, child
    elif isinstance(node, yaml.SequenceNode):
        for index, child in enumerate(node.value):
            yield index, child, child


def _scalars(node: yaml.Node, path: FieldPath) -> Iterator[tuple[FieldPath, str]]:
    if isinstance(node, yaml.ScalarNode):
        yield path, node.value
    for name, _, child in _children(node):
        yield from _scalars(child, (*path, name))


def _is_of_redrive(manifest: Manifest) -> bool:
    """Return True for redrive's kinds, and for objects that are meant to be of one."""
    group = manifest.api_version.partition("/")[0]
    if group == GROUP:
        return True
    is_near = "redrive" in group or group in {"", manifest.api_version}
    return manifest.kind in _KIND_NAMES and is_near


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""


def shown(path: FieldPath) -> str:
    """Write *path* as messages do: `spec.allow[0].name`."""
    text = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path)
    return text.removeprefix(".")
