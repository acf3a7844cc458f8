"""Options that every command takes, before or after the command's name."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from deployer.errors import UsageError

if TYPE_CHECKING:
    from deployer.deployment import Deployment

LIMIT, PARALLEL = "deployer.limit", "deployer.parallel"

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
    limit: tuple[str, ...] = ()
    parallel: int | None = None

    def no_events(self, command: str) -> None:
        """Raises UsageError for --jsonl: the command has a result, and no events on the way."""
        if self.jsonl:
            raise UsageError(f"{command} has no --jsonl", fix="use --json")

    def only_talks(self, command: str) -> None:
        """Raises UsageError for --json and --jsonl: what it says is for people."""
        if self.as_json or self.jsonl:
            raise UsageError(f"{command} has no --json", fix="leave out --json and --jsonl")

    def select(
        self, words: Sequence[str], all_: bool, variant: str | None = None, *, looks: bool = False
    ) -> list[Deployment]:
        """The deployments of the inventory that are meant. Raises UsageError, DocumentError.

        `looks`: nothing is started or stopped, so --limit may leave one node of several.
        """
        from deployer.catalog import Catalog

        whole = not (looks and self.limit)
        return Catalog.load(self.inventory).select(
            list(words), all_, variant, self.limit, whole=whole
        )


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
            limit=ctx.meta.get(LIMIT, ()),
            parallel=ctx.meta.get(PARALLEL),
        )
        return ctx.invoke(command, options=options, **words)

    return wrapped  # type: ignore[return-value]


def complete_target(ctx: click.Context, parameter: click.Parameter, begun: str) -> list[str]:
    """For the shell: hosts of the inventory and, once one is typed, its deployments."""
    from deployer.catalog import Catalog
    from deployer.errors import DeployError

    given = ctx.params.get("inventory") or ctx.find_root().params.get("inventory")
    try:
        catalog = Catalog.load(Path(given or "inventory"))
    except DeployError:
        # A half-typed line is no place for a message; the command itself will tell.
        return []
    names = list(catalog.hosts)
    if "/" in begun:
        host = catalog.hosts.get(begun.partition("/")[0])
        names = [f"{begun.partition('/')[0]}/{name}" for name in host.deployments] if host else []
    return [name for name in names if name.startswith(begun)]


def targets(command: F) -> F:
    """Adds HOST[/NAME]..., --all, and --limit, which goes into the Options."""
    command = click.argument(
        "words", nargs=-1, metavar="HOST[/NAME]...", shell_complete=complete_target
    )(command)
    command = click.option(
        "--limit",
        multiple=True,
        metavar="PATTERN",
        expose_value=False,
        callback=_keep(LIMIT),
        help="Of these, only hosts or HOST/NAME like PATTERN (* and ?); !PATTERN leaves out.",
    )(command)
    return click.option("--all", "all_", is_flag=True, help="Every host of the inventory.")(command)


def in_parallel(command: F) -> F:
    """Adds --parallel, which goes into the Options."""
    return click.option(
        "--parallel",
        type=click.IntRange(min=1),
        metavar="N",
        expose_value=False,
        callback=_keep(PARALLEL),
        help="At most N hosts at once (default: 64).",
    )(command)


def rolls_out(command: F) -> F:
    """Adds --canary/--no-canary and --max-failures."""
    command = click.option(
        "--max-failures",
        type=click.IntRange(min=1),
        metavar="N",
        help="Begin no further host once N have failed.",
    )(command)
    return click.option(
        "--canary/--no-canary",
        default=None,
        help="With several hosts, the first that has something to do must pass its gates before "
        "the others act (default: as the playbook says; yes).",
    )(command)


def _keep(key: str) -> Callable[[click.Context, click.Parameter, Any], Any]:
    def keep(ctx: click.Context, parameter: click.Parameter, value: Any) -> Any:
        if value is not None:
            ctx.meta[key] = value
        return value

    return keep


def repins(command: F) -> F:
    """Adds --repin."""
    return click.option(
        "--repin",
        is_flag=True,
        help="Ask the Hub what model.revision is now. Without it, a branch stays at the commit "
        "that it was first pinned to.",
    )(command)
