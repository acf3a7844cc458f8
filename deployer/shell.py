"""The one builder of shell text. Every value that reaches a remote shell passes `quote`."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping


def quote(value: str) -> str:
    """One POSIX sh word that expands to exactly `value`; NUL cannot be passed and is refused."""
    if "\0" in value:
        raise ValueError("a NUL byte cannot be part of a shell word")
    return shlex.quote(value)


def words(argv: Iterable[str]) -> str:
    """`argv` as one line of quoted sh words."""
    return " ".join(quote(word) for word in argv)


def assignments(values: Mapping[str, str]) -> str:
    """`NAME='value'` lines; names must be shell identifiers."""
    for name in values:
        if not (name.isascii() and name.isidentifier()):
            raise ValueError(f"not a shell variable name: {name!r}")
    return "".join(f"{name}={quote(value)}\n" for name, value in values.items())
