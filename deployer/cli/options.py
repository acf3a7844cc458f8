"""Options that every command takes, before or after the command's name."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import click

from deployer.errors import UsageError

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class Options:
    """The global options, merged from both places."""

    inventory: Path
    as_json: bool
    jsonl: bool
    yes: bool
    verbose: bool
    timeout: float | None


def common(command: F) -> F:
    """Adds the global options to a command and hands them over as `options`."""

    @click.option("-i", "--inventory", metavar="DIR", default=None, help="Inventory folder.")
    @click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout.")
    @click.option("--jsonl", is_flag=True, help="Events as JSON lines on stdout.")
    @click.option("--yes", is_flag=True, help="Do not ask before changing something.")
    @click.option("-v", "--verbose", is_flag=True, help="More detail.")
    @click.option(
        "--timeout",
        type=click.FloatRange(min=1),
        default=None,
        metavar="SECONDS",
        help="Deadline of the whole command.",
    )
    @click.pass_context
    @functools.wraps(command)
    def wrapped(ctx: click.Context, /, **words: Any) -> Any:
        given = {
            name: words.pop(name)
            for name in ("inventory", "as_json", "jsonl", "yes", "verbose", "timeout")
        }
        before: dict[str, Any] = ctx.find_root().obj or {}
        merged = {name: value or before.get(name) for name, value in given.items()}
        if merged["as_json"] and merged["jsonl"]:
            raise UsageError("--json and --jsonl exclude each other", fix="give one of them")
        options = Options(
            inventory=Path(merged["inventory"] or "inventory"),
            as_json=bool(merged["as_json"]),
            jsonl=bool(merged["jsonl"]),
            yes=bool(merged["yes"]),
            verbose=bool(merged["verbose"]),
            timeout=merged["timeout"],
        )
        return ctx.invoke(command, options=options, **words)

    return wrapped  # type: ignore[return-value]


def targets(command: F) -> F:
    """Adds HOST[/NAME]... and --all."""
    command = click.argument("words", nargs=-1, metavar="HOST[/NAME]...")(command)
    return click.option("--all", "all_", is_flag=True, help="Every host of the inventory.")(command)


def repins(command: F) -> F:
    """Adds --repin."""
    return click.option(
        "--repin",
        is_flag=True,
        help="Ask the Hub what model.revision is now. Without it, a branch stays at the commit "
        "that it was first pinned to.",
    )(command)
