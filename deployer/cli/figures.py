"""What a launch's gates measured, in words. The names of the figures stay in `--json`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from deployer.cli.plain import number

KNOWN = frozenset(
    {
        "tokens_per_s",
        "parallel_tokens_per_s",
        "parallel_requests",
        "server_tokens_per_s",
        "ttft_s",
        "parallel_ttft_s",
        "long_ttft_s",
        "burst_requests_per_s",
        "max_total_num_tokens",
        "planned_tokens",
        "max_running_requests",
        "planned_requests",
        "context_len",
        "memory_growth_mib",
        "accept_length",
        "accept_rate",
    }
)
"""Figures that have words here; another one is told by its name."""
SPEED = (
    ("tokens_per_s", "{} tokens/s alone"),
    ("parallel_tokens_per_s", "{} tokens/s {together}"),
    ("ttft_s", "first token after {} s"),
)
MORE_SPEED = (
    ("parallel_ttft_s", "{} s {together}"),
    ("long_ttft_s", "{} s after the long prompt"),
    ("burst_requests_per_s", "{} requests/s in the burst"),
    ("server_tokens_per_s", "{} tokens/s by the server's own count"),
)


def figure_lines(figures: Mapping[str, float]) -> list[str]:
    """All figures, a line a subject: `speed: 569.4 tokens/s alone, ...`."""
    told = (
        ("speed", list(_told(figures, SPEED + MORE_SPEED))),
        ("room", list(_room(figures))),
        ("speculation", list(_speculation(figures))),
        ("other", [f"{_words(name)} {_figure(figures[name])}" for name in _unknown(figures)]),
    )
    return [f"{subject}: {', '.join(parts)}" for subject, parts in told if parts]


def short_figures(figures: Mapping[str, float]) -> str:
    """The few that two launches are compared by, on one line; '' when there are none."""
    requests = figures.get("max_running_requests")
    room = [f"{_figure(requests)} requests at once"] if requests is not None else []
    return ", ".join([*_told(figures, SPEED), *room, *_speculation(figures)])


def _told(figures: Mapping[str, float], rows: Iterable[tuple[str, str]]) -> Iterator[str]:
    """The words of those that are there."""
    requests = figures.get("parallel_requests")
    together = f"of {_figure(requests)} together" if requests is not None else "together"
    for name, words in rows:
        if name in figures:
            yield words.format(_figure(figures[name]), together=together)


def _room(figures: Mapping[str, float]) -> Iterator[str]:
    for seen, planned, what in (
        ("max_total_num_tokens", "planned_tokens", "KV tokens"),
        ("max_running_requests", "planned_requests", "requests at once"),
    ):
        if seen in figures:
            plan = f" ({_figure(figures[planned])} planned)" if planned in figures else ""
            yield f"{_figure(figures[seen])} {what}{plan}"
        elif planned in figures:
            yield f"{_figure(figures[planned])} {what} planned"
    if "context_len" in figures:
        yield f"context {_figure(figures['context_len'])}"
    if "memory_growth_mib" in figures:
        yield f"GPU memory {figures['memory_growth_mib']:+.0f} MiB under load"


def _speculation(figures: Mapping[str, float]) -> Iterator[str]:
    if "accept_length" in figures:
        yield f"accept length {_figure(round(figures['accept_length'], 2))}"
    if "accept_rate" in figures:
        yield f"accept rate {_figure(round(figures['accept_rate'], 2))}"


def _unknown(figures: Mapping[str, float]) -> list[str]:
    return [name for name in figures if name not in KNOWN]


def _words(name: str) -> str:
    return name.replace("_", " ")


def _figure(value: float) -> str:
    """`57,809,833`, `569.4`, `0.025`."""
    return f"{value:,.0f}" if abs(value) >= 1000 else number(value)
