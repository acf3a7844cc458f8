"""Where events and results go: people read stderr, programs read stdout."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable
from typing import Any

import click

from deployer.cli.options import Options
from deployer.cli.plain import PlainRenderer
from deployer.events import Bus, Event, Subscriber


def wants_plain() -> bool:
    """No TTY, CI or NO_COLOR: plain lines."""
    return (
        not sys.stderr.isatty()
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


def open_bus(options: Options, *, show_plan: bool) -> tuple[Bus, Callable[[], None]]:
    """The bus with the subscribers that the options ask for, and what ends them."""
    lock = threading.Lock()
    bus = Bus()
    end: Callable[[], None] = _nothing
    if options.jsonl:
        bus.subscribe(Locked(JsonLines(), lock))
    if options.as_json:
        return bus, end
    plain = PlainRenderer(_to_stderr, show_plan=show_plan, verbose=options.verbose)
    if wants_plain():
        bus.subscribe(Locked(plain, lock))
    else:
        from deployer.cli.live import LiveRenderer

        live = LiveRenderer(show_plan=show_plan, verbose=options.verbose)
        bus.subscribe(Locked(live, lock))
        end = live.close
    return bus, end


def _nothing() -> None:
    return None


def _to_stderr(line: str) -> None:
    click.echo(line, err=True)


def print_json(document: Any) -> None:
    """One JSON document on stdout."""
    click.echo(json.dumps(document, ensure_ascii=False, indent=2, default=str))
