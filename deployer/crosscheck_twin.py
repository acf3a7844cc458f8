"""A value that a list has twice. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from deployer.document import Document
from deployer.errors import DocumentError
from deployer.yamltree import At


def refuse_twin(document: Document, at: At, values: Sequence[str], index: int, place: At) -> None:
    """Raises DocumentError when this value stands in the list before."""
    if values[index] in values[:index]:
        first = document.position((*at, values.index(values[index])))
        raise _twin(document, place, values[index], first.line)


def _twin(document: Document, place: At, value: str, line: int) -> DocumentError:
    return document.error(
        place,
        f"{document.name(place)}: {value} is listed twice; it stands at line {line} already",
        fix="remove one of the two",
    )
