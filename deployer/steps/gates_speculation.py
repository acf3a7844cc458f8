"""Is speculation sane? The accept figures against what was said."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from deployer.sglang.acceptance import Acceptance, Drafts, acceptance, of_meta
from deployer.sglang.mtphead import ALGORITHM_FLAGS
from deployer.sglang.quality import tokens
from deployer.steps.gates_bench import Asked, Bench, GateFault
from deployer.steps.gates_judge import Fault, Record, texts, whole
from deployer.steps.verify_prompts import CONTINUED

REPETITIVE = 0.6
"""Share of different four-word phrases below which a text is suspect."""
PROBE_TOKENS = 256
ZERO_RUN = 20
"""So many of token id 0 in a row no model means: it is what an empty page of the cache gives."""


def wanted(bench: Bench) -> bool:
    """Does the launch speculate, by the server's word or by its arguments?"""
    told = bench.info.get("speculative_algorithm")
    return bool(told or any(bench.args.get(flag) for flag in ALGORITHM_FLAGS))


def speculation(bench: Bench) -> str:
    """Drafts that are always accepted, with repetition, mean a broken verification."""
    request: Record = {
        "do": "generate",
        "prompt": CONTINUED,
        "max_tokens": min(PROBE_TOKENS, bench.max_tokens),
        "timeout_s": bench.rules.request_timeout_s,
    }
    probe = bench.answer(request)
    if fault := zero_run(probe):
        raise GateFault(fault, [Asked(request, zero_run)])
    if not wanted(bench):
        return "none"
    found = measured(bench, probe)
    if not found:
        return "on, but the server tells no figures of it"
    whole_run = found[0]
    bench.figures["accept_length"] = whole_run.length
    bench.figures["accept_rate"] = round(whole_run.rate, 3)
    for one in found:
        if not one.agrees:
            bench.note(
                f"the server's accept rate {one.told_rate:g} ({one.source}) does not follow from "
                f"its accept length {one.length:g}",
                "warning",
            )
    worst = min(bench.essays, key=lambda one: least_varied(one[1]), default=None)
    high = max(one.rate for one in found)
    limit = bench.rules.max_accept_rate
    if high >= limit and worst is not None and least_varied(worst[1]) < REPETITIVE:
        fault = Fault(
            "output",
            f"accept rate {high:.2f} with repetitive text ({least_varied(worst[1]):.0%} different "
            "phrases): the drafts are not verified",
            min(worst[1], key=variety)[-400:],
        )
        raise GateFault(fault, [_varied(worst[0])])
    words = "; ".join(
        f"{one.source}: length {one.length:.2f}, rate {one.rate:.2f}" for one in found
    )
    if high >= limit:
        bench.note(f"accept rate {high:.2f}: suspiciously high (limit {limit:g})", "warning")
        return f"{words}; suspiciously high (limit {limit:g})"
    if whole_run.rate < bench.rules.min_accept_rate:
        bench.note(
            f"accept rate {whole_run.rate:.2f}: drafts are hardly ever right, speculation only "
            "costs; see that the checkpoint's MTP head is its own, or launch without",
            "warning",
        )
    return words


def measured(bench: Bench, probe: Record) -> list[Acceptance]:
    """From /server_info and /metrics over the last traffic, and from one answer's own meta."""
    info: Record = bench.one({"do": "server_info", "timeout_s": 20}, 60).get("info") or {}
    gauges: Record = bench.one({"do": "metrics", "timeout_s": 20}, 60).get("gauges") or {}
    arguments = {flag.replace("-", "_"): value for flag, value in bench.args.items()}
    told = {name: value for name, value in info.items() if value is not None}
    drafts = Drafts.of({**arguments, **told})
    if drafts is None:
        return []
    found = [
        acceptance(info.get("avg_spec_accept_length"), None, drafts, bench.version, "server_info"),
        acceptance(
            gauges.get("spec_accept_length") or None,
            gauges.get("spec_accept_rate"),
            drafts,
            bench.version,
            "metrics",
        ),
        of_meta(probe.get("meta") or {}, drafts, bench.version),
    ]
    return [one for one in found if one is not None]


def variety(text: str) -> float:
    """The share of different four-word phrases."""
    words = tokens(text)
    phrases = [tuple(words[i : i + 4]) for i in range(len(words) - 3)]
    return len(set(phrases)) / len(phrases) if phrases else 1.0


def least_varied(parts: Sequence[str]) -> float:
    """The variety of the part that has least of it."""
    return min((variety(text) for text in parts), default=1.0)


def _varied(one: Asked) -> Asked:
    def judged(answer: Record) -> Fault | None:
        fault = one.judged(answer)
        if fault is None and least_varied(texts(answer)) < REPETITIVE:
            return Fault("output", "repetitive text", whole(answer)[-400:])
        return fault

    return replace(one, judged=judged)


def zero_run(probe: Record) -> Fault | None:
    """Token id 0 over and over in an answer of /generate."""
    run = probe.get("run") or {}
    if run.get("id") == 0 and int(run.get("length") or 0) >= ZERO_RUN:
        why = f"token id 0 {run['length']} times in a row, from token {run['begin']} of an answer"
        return Fault("output", why, str(probe.get("text", ""))[:400])
    return None
