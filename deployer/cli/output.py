"""Where events and results go: what happens on stderr; results, a plan too, on stdout."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TextIO

import click

from deployer.cli.inorder import InOrder
from deployer.cli.options import Options
from deployer.cli.plain import PlainRenderer
from deployer.events import Bus, Event, Subscriber

if TYPE_CHECKING:
    from deployer.cli.live import LiveRenderer
    from deployer.cli.table import TableRenderer


def wants_plain(stream: TextIO | None = None) -> bool:
    """No TTY, CI or NO_COLOR: plain lines. `stream`: default stderr."""
    return (
        not (stream or sys.stderr).isatty()
        or bool(os.environ.get("CI"))
        or "NO_COLOR" in os.environ
        or os.environ.get("TERM") == "dumb"
    )


class JsonLines:
    """Each event as one line on stdout."""

    def __call__(self, event: Event) -> None:
        """Writes and flushes: a reader acts on events as they come."""
        sys.stdout.write(json.dumps(event.to_dict(), ensure_ascii=False, default=str) + "\n")
        sys.stdout.flush()


class Locked:
    """Serialises subscribers, since hosts run in parallel threads."""

    def __init__(self, inner: Subscriber, lock: threading.Lock) -> None:
        self.inner = inner
        self.lock = lock

    def __call__(self, event: Event) -> None:
        """Hands the event on, one at a time."""
        with self.lock:
            self.inner(event)


class Output:
    """The bus with the subscribers that the options ask for.

    `names`: the deployments, when several hosts are in one run; they share a table then, or their
    plans are shown one after the other in this order.
    """

    def __init__(
        self,
        options: Options,
        *,
        show_plan: bool,
        names: Sequence[str] = (),
    ) -> None:
        self.bus = Bus()
        self._lock = threading.Lock()
        self._live: LiveRenderer | TableRenderer | None = None
        self._plans = names if show_plan else ()
        self._ordered: InOrder | None = None
        if options.jsonl:
            self._subscribe(JsonLines())
        if options.as_json:
            return
        # A plan is what was asked for: it goes where a pipe or a file takes it.
        result = show_plan and not options.jsonl
        if wants_plain(sys.stdout if result else sys.stderr):
            write = click.echo if result else _to_stderr
            self._show(
                PlainRenderer(write, show_plan=show_plan, verbose=options.verbose, many=bool(names))
            )
            return
        if names and not show_plan:
            from deployer.cli.table import TableRenderer

            self._live = TableRenderer(names, verbose=options.verbose)
        else:
            from deployer.cli.live import LiveRenderer

            self._live = LiveRenderer(
                show_plan=show_plan, verbose=options.verbose, to_stdout=result
            )
        self._show(self._live)

    def _show(self, renderer: Subscriber) -> None:
        if self._plans:
            renderer = self._ordered = InOrder(self._plans, renderer)
        self._subscribe(renderer)

    def _subscribe(self, subscriber: Subscriber) -> None:
        self.bus.subscribe(Locked(subscriber, self._lock))

    @contextlib.contextmanager
    def question(self) -> Iterator[None]:
        """What is drawn in place is away within the block."""
        with self._lock:
            if self._live is not None:
                self._live.pause()
        try:
            yield
        finally:
            with self._lock:
                if self._live is not None:
                    self._live.resume()

    def close(self) -> None:
        """Shows what still waits, and takes away what is drawn in place."""
        with self._lock:
            if self._ordered is not None:
                self._ordered.close()
            if self._live is not None:
                self._live.close()


def open_bus(options: Options, *, show_plan: bool) -> tuple[Bus, Callable[[], None]]:
    """The bus with the subscribers that the options ask for, and what ends them."""
    output = Output(options, show_plan=show_plan)
    return output.bus, output.close


def _to_stderr(line: str) -> None:
    click.echo(line, err=True)


def print_json(document: Any) -> None:
    """One JSON document on stdout."""
    click.echo(json.dumps(document, ensure_ascii=False, indent=2, default=str))
