"""From plain data to a model; what does not fit is told by key, place, expectation and finding."""

from __future__ import annotations

import types
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError

from deployer.document import Document
from deployer.errors import DocumentError
from deployer.names import PCI_ADDRESS, PLAIN_WORDS, did_you_mean, listed
from deployer.yamltree import At, Position, found, place

M = TypeVar("M", bound=BaseModel)

_EXPECTED = {
    "string_type": "text",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "dict_type": "a mapping",
    "mapping_type": "a mapping",
    "model_type": "a mapping",
    "model_attributes_type": "a mapping",
    "list_type": "a list",
    "finite_number": "a finite number",
}
_COMPARED = {
    "greater_than": ("gt", "more than"),
    "greater_than_equal": ("ge", "at least"),
    "less_than": ("lt", "less than"),
    "less_than_equal": ("le", "at most"),
}


def validate(document: Document, model: type[M]) -> M:
    """The document as `model`. Types are not converted: "30000" is no port.

    Raises DocumentError: the first problem of the file in `what`, the others as evidence.
    """
    try:
        return model.model_validate(document.data, strict=True)
    except ValidationError as error:
        problems = _problems(document, model, error)
    (position, what, fix), *others = problems
    raise DocumentError(
        what,
        where=place(document.path, position),
        fix=fix,
        evidence=tuple(f"line {other.line}: {text}" for other, text, _ in others),
    )


_Problem = tuple[Position, str, str]


def _problems(document: Document, model: type[BaseModel], error: ValidationError) -> list[_Problem]:
    """One problem a place, in the file's order; missing keys last: a misspelling tells more."""
    places: dict[At, list[Any]] = {}
    for detail in error.errors(include_url=False, include_context=True):
        at = _at(document, detail["loc"], detail["type"])
        places.setdefault(at, []).append(detail)
    missing = [at for at, details in places.items() if details[0]["type"] == "missing"]
    there = [at for at in places if at not in missing]
    ordered = [
        sorted((_problem(document, model, at, places[at]) for at in group), key=_in_file)
        for group in (there, missing)
    ]
    return ordered[0] + ordered[1]


def _in_file(problem: _Problem) -> tuple[int, int]:
    return problem[0].line, problem[0].column


def _at(document: Document, loc: tuple[int | str, ...], kind: str) -> At:
    """pydantic's location without the names of union members and of key checks."""
    if kind == "missing":
        return loc
    at: At = ()
    value: Any = document.data
    for part in loc:
        is_entry = isinstance(value, dict) and part in value
        is_item = isinstance(value, list) and isinstance(part, int) and part < len(value)
        if not (is_entry or is_item):
            break
        value = value[part]
        at = (*at, part)
    return at


FORWARDS = ("forward", "forwards", "port_forward", "port_forwards", "dnat", "nat")
NO_FORWARD = (
    "a port forward is a rule of a firewall, no part of a container's config, and no rule of yours "
    "is changed: use cutover.hook (`deploy help migrate` shows one for nft)"
)


def _problem(document: Document, model: type[BaseModel], at: At, details: list[Any]) -> _Problem:
    detail = details[0]
    kind = detail["type"]
    name = document.name(at)
    parent = document.name(at[:-1]) or "the top of the file"
    if kind == "extra_forbidden":
        known = _fields(model, at[:-1])
        near = did_you_mean(str(at[-1]), known)
        fix = "correct the spelling" if near else f"known keys here: {listed(known, 20)}"
        if "cutover" in at[-3:-1] and at[-1] in FORWARDS:
            near, fix = "", NO_FORWARD
        what = f"unknown key `{at[-1]}` in {parent}{near}"
        return document.position(at, key=True), what, fix
    if kind == "missing":
        value = _value(document, at[:-1])
        near = did_you_mean(str(at[-1]), value if isinstance(value, dict) else ())
        what = f"the key `{at[-1]}` is missing in {parent}"
        fix = f"add `{at[-1]}:`" + (near.replace("did you mean", "is it").lstrip(";"))
        return document.position(at[:-1], key=True), what, fix
    is_key = "[key]" in detail["loc"]
    value = at[-1] if is_key and at else _value(document, at)
    expected, fix = _expected(detail, value, at, union=len(details) > 1)
    what = f"{name or 'the file'}: expected {expected}, found {found(value)}"
    return document.position(at, key=is_key), what, fix


def _expected(detail: Any, value: Any, at: At, *, union: bool) -> tuple[str, str]:
    """What should stand there in plain words, and what to do."""
    kind, context = detail["type"], detail.get("ctx", {})
    last = at[-1] if at else ""
    fix = "correct the value"
    if value is None:
        fix = "write a value, or remove the key to get its default"
    if union:
        return "true, false, a number or text", fix
    if kind == "string_type" and isinstance(value, bool | int | float):
        return "text", "put the value in quotes"
    if kind in ("int_type", "float_type", "bool_type") and isinstance(value, str):
        return _number_words(_EXPECTED[kind], last), "write it without quotes" if (
            value.replace(".", "", 1).isdecimal() or value in ("true", "false")
        ) else fix  # fmt: skip
    if kind in _COMPARED:
        name, words = _COMPARED[kind]
        if last == "port":
            return "a port number from 1 to 65535", fix
        if "[key]" in detail["loc"]:
            return "a container id (vmid) from 100 to 999999999", fix
        return f"a number of {words} {context[name]}", fix
    if kind in _EXPECTED:
        return _number_words(_EXPECTED[kind], last), fix
    if kind == "string_pattern_mismatch":
        pattern = context["pattern"]
        if pattern == PCI_ADDRESS:
            return PLAIN_WORDS[pattern], _pci_fix(str(value))
        return PLAIN_WORDS.get(pattern, f"text like {pattern}"), fix
    if kind == "literal_error":
        options = context["expected"].replace("'", "")
        near = did_you_mean(str(value), options.replace(" or ", ", ").split(", "))
        return options, near.lstrip("; ") or fix
    if kind in ("too_short", "string_too_short"):
        unit = "entry" if kind == "too_short" else "character"
        return f"at least {context['min_length']} {unit}", fix
    if kind == "string_too_long":
        return f"at most {context['max_length']} characters", fix
    return str(detail["msg"]), fix


def _number_words(expected: str, last: object) -> str:
    return "a port number from 1 to 65535" if last == "port" else expected


def _pci_fix(value: str) -> str:
    """The address that was probably meant."""
    text = value.strip().lower()
    if text.count(":") == 1:
        text = f"0000:{text}"
    head, colon, rest = text.partition(":")
    if colon and head.startswith("0000") and len(head) == 8:
        text = f"{head[4:]}:{rest}"  # nvidia-smi prints an eight-digit domain
    return f'write "{text}"; `lspci -D` prints the full form'


def _value(document: Document, at: At) -> Any:
    value: Any = document.data
    for part in at:
        value = value[part]
    return value


def _fields(model: type[BaseModel], at: At) -> list[str]:
    """The keys that the model knows at `at`."""
    kind: Any = model
    for part in at:
        kind = _model(kind)
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            field = kind.model_fields.get(str(part))
            kind = field.annotation if field else None
        else:
            kind = (get_args(kind) or (None,))[-1]
    kind = _model(kind)
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return list(kind.model_fields)
    return []


def _model(kind: Any) -> Any:
    """`kind` without Annotated and `| None`."""
    while True:
        if get_origin(kind) is Annotated:
            kind = get_args(kind)[0]
        elif get_origin(kind) in (Union, types.UnionType):
            kind = next(arg for arg in get_args(kind) if arg is not type(None))
        else:
            return kind
