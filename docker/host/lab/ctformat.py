"""Values of container keys in the lab: as pct keeps them, and the texts of what does not fit."""

from __future__ import annotations

from urllib.parse import unquote_to_bytes

import ctschema


def decoded(text: str) -> str:
    """A description line: percent codes and bytes (latin-1 here) are one UTF-8 text."""
    return unquote_to_bytes(text.encode("latin-1")).decode("utf-8", "replace")


def encoded(text: str) -> str:
    """As pct writes a description: UTF-8; controls, non-ASCII, `%` and `:` as percent codes."""
    return "".join(
        chr(byte) if 32 <= byte <= 126 and byte not in b"%:" else f"%{byte:02X}"
        for byte in text.encode("utf-8")
    )


def known(key: str) -> bool:
    """Whether the schema has this key."""
    return ctschema.rule_of(key) is not None


def is_boolean(key: str) -> bool:
    """Whether a key's value is 0 or 1, whatever word was given."""
    rule = ctschema.rule_of(key)
    return rule is not None and rule.kind == "boolean"


def typed(key: str, value: str) -> tuple[str, str]:
    """The value as pct keeps it when it reads the file, and its complaint ('' for none).

    A complaint ends with a line end, as Perl's do.
    """
    rule = ctschema.rule_of(key)
    if rule is None:
        return value, f"unknown setting '{key}'\n"
    return ctschema.read(rule, value)


def device(value: str) -> tuple[str, dict[str, str]]:
    """The path ('' for none) and the sub-keys of a devN value. Raises ctschema.Refused."""
    found = ctschema.parts_of(ctschema.NUMBERED["dev"][1], value)
    return found.pop("path", ""), found


def parameter_error(key: str, value: str) -> str:
    """What `pct set` says of a value; '' if it fits. Words for booleans do."""
    rule = ctschema.rule_of(key)
    if rule is not None and rule.kind == "boolean":
        value = ctschema.read(rule, value)[0]
    return result_error(key, value)


def result_error(key: str, value: str) -> str:
    """What the check of what `pct config` returns says of a value; '' if it fits."""
    rule = ctschema.rule_of(key)
    return ctschema.fault(rule, value, key) if rule is not None else ""


def mount(key: str, value: str) -> tuple[str, str]:
    """The volume of an mpN or rootfs value, and the value as pct writes it. Raises Refused."""
    rule = ctschema.rule_of(key)
    assert rule is not None
    found = ctschema.parts_of(rule, value)
    return found["volume"], ctschema.printed(rule, found)
