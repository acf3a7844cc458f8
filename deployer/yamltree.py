"""YAML text as a tree of bounded size whose nodes know their place.

Reads parser events, so that nesting, aliases and size are checked before anything is built.
Values follow YAML 1.2, with 1.1's yes/no/on/off: `0000:21:00.0` and dates stay text.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from deployer.errors import DocumentError
from deployer.names import shown

MAX_DEPTH = 32
MAX_NODES = 20_000
"""Values of one file, aliases counted as often as they are used."""

PARSER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

Key = str | int
At = tuple[Key, ...]

_STR_TAGS = (None, "!", "tag:yaml.org,2002:str")
_PLAIN_TAGS = (None, "!", "tag:yaml.org,2002:map", "tag:yaml.org,2002:seq")
_CONSTANTS: dict[str, bool | None] = {
    spelling: value
    for word, value in {
        "null": None, "true": True, "yes": True, "on": True, "false": False, "no": False,
        "off": False,
    }.items()
    for spelling in (word, word.capitalize(), word.upper())
}  # fmt: skip
_CONSTANTS.update({"": None, "~": None})
_INT = re.compile(r"[-+]?(0|[1-9][0-9_]{0,24})", re.ASCII)
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]{1,3})?", re.ASCII)
_LEADING_ZERO = re.compile(r"[-+]?0[0-9]+", re.ASCII)
_UNPRINTABLE = re.compile("[^\t\n\r\x20-\x7e\x85\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_UNUSABLE = re.compile("[\0\ud800-\udfff]")


@dataclass(frozen=True)
class Position:
    """Line and column, counted from 1."""

    line: int
    column: int


def tree(path: Path, text: str) -> Node:
    """The tree of `text`, a mapping; `path` is only named in errors. Raises DocumentError."""
    bad = _UNPRINTABLE.search(text)
    if bad:
        raise DocumentError(
            f"a control character (U+{ord(bad.group()):04X}) that YAML does not allow",
            where=place(path, position_after(text[: bad.start()])),
            fix="remove it",
        )
    try:
        return _Builder(path, text).root()
    except yaml.YAMLError as error:
        raise _syntax_error(path, text, error) from None
    except (ValueError, OverflowError) as error:  # an escape beyond Unicode, an absurd %YAML
        raise DocumentError(
            f"not valid YAML: {error}", where=place(path, Position(1, 1)), fix="correct the YAML"
        ) from None


@dataclass
class Node:
    """A parsed value. `size` counts all values in it; `depth` is its nesting below."""

    value: Any
    position: Position
    size: int = 1
    depth: int = 1
    keys: dict[Key, Position] = field(default_factory=dict)


class _Builder:
    """Turns parser events into nodes; an alias is the node itself, so a bomb stays small."""

    def __init__(self, path: Path, text: str) -> None:
        self._path = path
        self._parser = PARSER(text)
        self._anchors: dict[str, Node] = {}

    def root(self) -> Node:
        """The one document of the file; it must be a mapping."""
        self._parser.get_event()
        if self._parser.check_event(yaml.StreamEndEvent):
            raise self._fail("the file is empty", Position(1, 1), "write it; see `deploy help`")
        self._parser.get_event()
        node = self._node(1)
        self._parser.get_event()
        if not self._parser.check_event(yaml.StreamEndEvent):
            raise self._fail(
                "a second document (`---`) begins here",
                _mark(self._parser.peek_event()),
                "keep one document a file",
            )
        if node.value is None:
            raise self._fail("the file is empty", node.position, "write it; see `deploy help`")
        if not isinstance(node.value, dict):
            raise self._fail(
                f"expected a mapping at the top of the file, found {found(node.value)}",
                node.position,
                "begin with a key, as the samples do (`deploy help inventory`)",
            )
        return node

    def _node(self, depth: int) -> Node:
        event = self._parser.get_event()
        position = _mark(event)
        if isinstance(event, yaml.AliasEvent):
            if event.anchor not in self._anchors:
                raise self._fail(
                    f"the alias *{event.anchor} has no anchor before it",
                    position,
                    f"define &{event.anchor} first",
                )
            return self._anchors[event.anchor]
        if depth > MAX_DEPTH:
            raise self._fail(
                f"nested more than {MAX_DEPTH} levels deep", position, "flatten the file"
            )
        if isinstance(event, yaml.ScalarEvent):
            node = Node(self._scalar(event, position), position)
        else:
            if event.tag not in _PLAIN_TAGS:
                raise self._tag(event.tag, position)
            is_list = isinstance(event, yaml.SequenceStartEvent)
            node = self._list(position, depth) if is_list else self._mapping(position, depth)
        if event.anchor:
            self._anchors[event.anchor] = node
        return node

    def _list(self, position: Position, depth: int) -> Node:
        node = Node([], position)
        while not self._parser.check_event(yaml.SequenceEndEvent):
            spot = _mark(self._parser.peek_event())
            child = self._node(depth + 1)
            node.value.append(child)
            self._grow(node, child, spot)
        self._parser.get_event()
        return node

    def _mapping(self, position: Position, depth: int) -> Node:
        node = Node({}, position)
        seen: dict[str, Position] = {}
        merged: list[Node] = []
        while not self._parser.check_event(yaml.MappingEndEvent):
            event = self._parser.peek_event()
            spot = _mark(event)
            is_merge = isinstance(event, yaml.ScalarEvent) and event.value == "<<" and (
                not event.style
            )  # fmt: skip
            key = self._node(depth + 1).value
            child = self._node(depth + 1)
            self._grow(node, child, spot)
            if is_merge:
                merged.extend(self._merged(child, spot))
                continue
            if isinstance(key, bool) or not isinstance(key, str | int):
                raise self._fail(
                    f"a key must be text or a whole number, found {found(key)}",
                    spot,
                    "put the key in quotes",
                )
            if str(key) in seen:
                raise self._fail(
                    f"duplicate key `{key}`; it stands at line {seen[str(key)].line} already",
                    spot,
                    "remove or rename one of the two",
                )
            seen[str(key)] = spot
            node.value[key] = child
            node.keys[key] = spot
        self._parser.get_event()
        for source in merged:
            for key, child in source.value.items():
                if key not in node.value:
                    node.value[key], node.keys[key] = child, source.keys[key]
        return node

    def _merged(self, child: Node, spot: Position) -> list[Node]:
        """The mappings that `<<` names."""
        sources = child.value if isinstance(child.value, list) else [child]
        if not all(isinstance(source.value, dict) for source in sources):
            raise self._fail("`<<` needs a mapping to merge", spot, "give it an alias like *base")
        return list(sources)

    def _grow(self, node: Node, child: Node, spot: Position) -> None:
        node.size += child.size
        node.depth = max(node.depth, child.depth + 1)
        if node.size > MAX_NODES or node.depth > MAX_DEPTH:
            raise self._fail(
                f"too much in one file: over {MAX_NODES} values or {MAX_DEPTH} levels, "
                "aliases counted as often as they are used",
                spot,
                "use fewer aliases, or split the file",
            )

    def _scalar(self, event: Any, position: Position) -> Any:
        text: str = event.value
        if event.tag not in _STR_TAGS:
            raise self._tag(event.tag, position)
        if _UNUSABLE.search(text):
            raise self._fail(
                "text with a NUL or a lone surrogate", position, "remove the escape sequence"
            )
        return text if event.style or event.tag else plain_value(text)

    def _tag(self, tag: str, position: Position) -> DocumentError:
        return self._fail(f"the tag {tag!r} is not used here", position, "remove the tag")

    def _fail(self, what: str, position: Position, fix: str) -> DocumentError:
        return DocumentError(what, where=place(self._path, position), fix=fix)


def plain_value(text: str) -> bool | int | float | str | None:
    """What an unquoted scalar means; what is no constant and no finite number stays text."""
    if text in _CONSTANTS:
        return _CONSTANTS[text]
    if _INT.fullmatch(text):
        return int(text.replace("_", "") or 0)
    if _FLOAT.fullmatch(text) and not _LEADING_ZERO.fullmatch(text):
        number = float(text)
        # A number of too many digits is an id that somebody forgot to quote.
        if math.isfinite(number) and ("." in text or "e" in text.lower()):
            return number
    return text


def found(value: Any) -> str:
    """A value in an error message: short, one line, in YAML's own words."""
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list):
        return "a list"
    if isinstance(value, str):
        return '"' + (value if len(value) <= 60 else value[:57] + "...").encode(
            "unicode_escape"
        ).decode("ascii").replace('"', '\\"') + '"'  # fmt: skip
    return str(value)


def _syntax_error(path: Path, text: str, error: yaml.YAMLError) -> DocumentError:
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    position = Position(mark.line + 1, mark.column + 1) if mark else Position(1, 1)
    problem = str(getattr(error, "problem", None) or error).splitlines()[0]
    context = getattr(error, "context", None)
    what = f"not valid YAML: {problem}" + (f" ({context})" if context else "")
    fix = "correct the YAML here or just above; quote text that holds `: ` or ` #`"
    if mark and _character(text, position) == "\t":
        what, fix = "not valid YAML: a tab in the indentation", "indent with spaces"
    return DocumentError(what, where=place(path, position), fix=fix)


def _character(text: str, position: Position) -> str:
    """The character at `position`; empty beyond the end of the text."""
    lines = text.split("\n")
    line = lines[position.line - 1] if position.line <= len(lines) else ""
    return line[position.column - 1 : position.column]


def _mark(event: Any) -> Position:
    return Position(event.start_mark.line + 1, event.start_mark.column + 1)


def position_after(text: str) -> Position:
    return Position(text.count("\n") + 1, len(text) - text.rfind("\n"))


def place(path: Path, position: Position) -> str:
    return f"{shown(path)}:{position.line}:{position.column}"
