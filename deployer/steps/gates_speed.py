"""How fast it is, by our clock and by the server's own figures; against the last known-good."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from deployer.state import Launch
from deployer.steps.gates_bench import Bench, GateFault
from deployer.steps.gates_judge import Fault, Record, texts
from deployer.steps.gates_text import asked
from deployer.steps.verify_prompts import ESSAY

HIGHER_IS_BETTER = {
    "tokens_per_s": "tokens/s",
    "parallel_tokens_per_s": "tokens/s in parallel",
    "accept_length": "accept length",
}
LOWER_IS_BETTER = {"ttft_s": "s to the first token"}
NOTHING_S = 0.15
"""Differences of a time below it are no news."""


@dataclass(frozen=True)
class Baseline:
    """The launch that figures are compared with. `same`: it had the very same arguments."""

    launch: str
    figures: Mapping[str, float]
    same: bool


def speed(bench: Bench) -> str:
    """One streamed text, then as many at once as clients are expected."""
    rules = bench.rules
    one = asked(bench, bench.request(ESSAY, bench.max_tokens, stream=True))
    answer = bench.ask(one)
    bench.essays.append((one, texts(answer)))
    bench.figures["tokens_per_s"] = decode_rate(answer)
    if isinstance(answer.get("ttft_s"), float):
        bench.figures["ttft_s"] = round(answer["ttft_s"], 3)
    request = bench.request(ESSAY, bench.max_tokens, None, stream=True)
    answers, seconds = bench.many([asked(bench, request)] * rules.parallel, rules.parallel)
    total = sum(float(each.get("tokens") or 0) for each in answers)
    bench.figures["parallel_requests"] = float(rules.parallel)
    bench.figures["parallel_tokens_per_s"] = round(total / seconds, 1)
    waits = [each["ttft_s"] for each in answers if isinstance(each.get("ttft_s"), float)]
    if waits:
        bench.figures["parallel_ttft_s"] = round(median(waits), 3)
    info = bench.one({"do": "server_info", "timeout_s": 20}, 60).get("info") or {}
    own = info.get("last_gen_throughput")
    if isinstance(own, int | float) and own > 0:
        bench.figures["server_tokens_per_s"] = round(float(own), 1)
    figures = bench.figures
    first = f", first token after {figures['ttft_s']:g} s" if "ttft_s" in figures else ""
    return (
        f"{figures['tokens_per_s']:g} tokens/s alone{first}; "
        f"{figures['parallel_tokens_per_s']:g} tokens/s of {rules.parallel} together"
    )


def decode_rate(answer: Record) -> float:
    """Tokens a second after the first; of an answer in one piece, over its whole time."""
    count = float(answer.get("tokens") or 0)
    spent = answer.get("decode_s")
    if isinstance(spent, float) and spent > 0 and count > 1:
        return round((count - 1) / spent, 1)
    return round(count / max(float(answer.get("seconds") or 0), 0.001), 1)


def compared(bench: Bench) -> str | None:
    """A clear drop against the last known-good launch is said; a failure only when asked for."""
    launches = bench.context.state.launches
    base = baseline(launches, bench.job.id, bench.variant, bench.context.state.known_good)
    if base is None:
        return None
    drops = worse(base.figures, bench.figures, bench.rules.max_slowdown)
    which = f"launch {base.launch}" + ("" if base.same else ", which had other arguments")
    if not drops:
        return f"no slower than {which}"
    told = f"slower than {which}: {'; '.join(drops)}"
    if bench.rules.slow_is_failure:
        raise GateFault(Fault("speed", told, "", "see what else uses the GPUs, clocks and power"))
    bench.note(told, "warning")
    return told


def baseline(
    launches: Sequence[Launch], current: str, variant: str, known_good: str
) -> Baseline | None:
    """The newest proven launch of the same arguments, else of the same variant; never a guess.

    That of the launch itself counts when it was verified before.
    """
    own = next((one for one in launches if one.id == current), None)
    mark = own.fingerprint if own is not None else ""
    proven = [
        one
        for one in launches
        if "tokens_per_s" in one.figures
        and (one.verdict in {"good", "stopped"} or one.id == known_good)
    ]
    same = [one for one in proven if mark and one.fingerprint == mark]
    alike = [one for one in proven if one.variant == variant and one.id != current]
    for found in (same, alike):
        if found:
            chosen = next((one for one in found if one.id == known_good), found[-1])
            return Baseline(chosen.id, dict(chosen.figures), chosen in same)
    return None


def worse(before: Mapping[str, float], now: Mapping[str, float], share: float) -> list[str]:
    """The figures that are worse by more than this share, in words."""
    found = []
    for name, words in HIGHER_IS_BETTER.items():
        old, new = before.get(name), now.get(name)
        if name == "parallel_tokens_per_s" and before.get("parallel_requests") != now.get(
            "parallel_requests"
        ):
            continue
        if old and new is not None and new < old * (1 - share):
            found.append(f"{new:g} {words}, before {old:g}")
    for name, words in LOWER_IS_BETTER.items():
        old, new = before.get(name), now.get(name)
        if old and new is not None and new > old * (1 + share) and new - old > NOTHING_S:
            found.append(f"{new:g} {words}, before {old:g}")
    return found
