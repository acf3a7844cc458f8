"""How the plan of a step looks: what would change, why, what it runs, how it is undone."""

from __future__ import annotations

from deployer import events as ev

MARKS = {"nothing": "=", "changes": "~", "blocked": "!", "unknown": "?"}

SCRIPT_LINES = 12
"""Of what a change runs, without -v: the values of a script stand first, its body is ours."""
DIFF_LINES = 60
"""A diff is of the user's own file: nearly always shown whole."""


def planned_lines(event: ev.StepPlanned, *, verbose: bool) -> list[str]:
    """The lines of one step. `verbose`: all that every change runs."""
    lines = [f"{MARKS[event.state]} {event.step:<10} {_head(event)}"]
    lines += [f"      {note}" for note in event.notes]
    because = event.reason
    for change in event.changes:
        lines.append(f"    + {change['title']}  [{change['where']}]")
        if change["reason"] != because:
            because = change["reason"]
            lines.append(f"      because {because}")
        lines += [f"      | {text}" for text in _runs(change["runs"], verbose=verbose)]
        if change["undo"]:
            lines.append(f"      undo: {change['undo']}")
    if event.fix:
        lines.append(f"    -> {event.fix}")
    return lines


def _runs(text: str, *, verbose: bool) -> list[str]:
    lines = text.splitlines()
    limit = DIFF_LINES if any(line.startswith("@@ ") for line in lines) else SCRIPT_LINES
    # One line more takes no more room than the line that tells of it.
    if verbose or len(lines) <= limit + 1:
        return lines
    shown = lines[:limit]
    while shown and not shown[-1].strip():
        shown.pop()
    return [*shown, f"... {len(lines) - len(shown)} more lines; -v shows them"]


def _head(event: ev.StepPlanned) -> str:
    if event.state == "nothing":
        return f"nothing to do: {event.reason}"
    if event.state == "changes":
        count = len(event.changes)
        return f"{count} change{'s' if count != 1 else ''}: {event.reason}"
    if event.state == "blocked":
        return f"blocked: {event.reason}"
    return event.reason
