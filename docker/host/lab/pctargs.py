"""Argument forms of the lab's `pct`, and how it refuses them."""

from __future__ import annotations

from typing import NoReturn

import ctconf
from ctconf import die


def usage(command: str, unknown: str = "") -> NoReturn:
    """An option error, as Getopt::Long and pct print it."""
    first = f"Unknown option: {unknown}\n" if unknown else ""
    die(f"{first}400 unable to parse option\npct {command} <vmid> [OPTIONS]", 2)


def reject(
    command: str,
    errors: dict[str, str],
    head: str = "400 Parameter verification failed.",
    code: int = 2,
) -> NoReturn:
    """Values that the schema refuses, one after the other."""
    lines = "".join(f"{key}: {text}\n" for key, text in errors.items())
    die(f"{head}\n{lines}pct {command} <vmid> [OPTIONS]", code)


def options(command: str, words: list[str], booleans: set[str], values: set[str]) -> dict[str, str]:
    """`--name value`, `--name=value` or `-name value`; booleans may stand alone."""
    found: dict[str, str] = {}
    words = list(words)
    while words:
        word = words.pop(0)
        if not word.startswith("-") or word == "--":
            die(f"400 too many arguments\npct {command} <vmid> [OPTIONS]", 2)
        name, eq, value = word.lstrip("-").partition("=")
        if name in booleans:
            if not eq:
                value = words.pop(0) if words and words[0] in ("0", "1") else "1"
        elif name in values or "*" in values:
            if not eq:
                if not words:
                    die(
                        f"Option {name} requires an argument\n400 unable to parse option\n"
                        f"pct {command} <vmid> [OPTIONS]",
                        2,
                    )
                value = words.pop(0)
        else:
            usage(command, name)
        found[name] = f"{found[name]},{value}" if name in found and name == "delete" else value
    return found


def as_task(work) -> None:  # type: ignore[no-untyped-def]
    """A task: whatever went wrong is 255."""
    try:
        work()
    except SystemExit as ended:
        raise ctconf.Ended(255 if ended.code else 0) from None
