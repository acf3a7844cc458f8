"""How the answer of `deploy fit` looks, for people and for programs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from deployer.playbook import ArgValue, Playbook
from deployer.sglang import compat
from deployer.sglang.engineversion import Engine
from deployer.sglang.fit import Alternative, Fit, Machine

BAR_WIDTH = 50


@dataclass(frozen=True)
class Answer:
    """All that is printed."""

    name: str
    playbook: Playbook
    variant: str
    machine: Machine
    fit: Fit
    problems: tuple[compat.Problem, ...]
    others: tuple[Alternative, ...]
    most_full: int
    assumed: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def exit_code(self) -> int:
        """0: it starts and fits; 1: it does not, or must not be used."""
        return 1 if self.fit.refusal is not None or self.problems else 0


def document(answer: Answer) -> dict[str, Any]:
    """The JSON form."""
    machine = answer.machine
    return {
        "playbook": answer.name,
        "variant": answer.variant,
        "engine": answer.playbook.engine.version,
        "gpu": {"total_mib": machine.gpu.total_mib, "free_gib": machine.gpu.free},
        "weights_gib": {"target": machine.load.target, "draft": machine.load.draft},
        **_fit_document(answer.fit),
        "most_full_context_requests": answer.most_full,
        "problems": [
            {"rule": one.rule, "reason": one.reason, "change": one.change, "source": one.source}
            for one in answer.problems
        ],
        "alternatives": [
            {
                "title": other.title,
                "args": dict(other.args),
                "trade_off": other.trade,
                **_fit_document(other.fit),
            }
            for other in answer.others
        ],
        "assumed": list(answer.assumed),
        "notes": list(answer.notes),
        "exit_code": answer.exit_code,
    }


def lines(answer: Answer) -> list[str]:
    """What a person reads."""
    gpu, fit = answer.machine.gpu, answer.fit
    out = [
        f"{answer.name} ({answer.variant}) on SGLang {answer.playbook.engine.version}, "
        f"{fit.flags.tp} x {gpu.total_mib} MiB"
    ]
    for problem in answer.problems:
        out += [f"  PROBLEM   {problem.reason}", f"            -> {problem.change}"]
    if fit.refusal is not None:
        out += [f"  NO START  {fit.refusal.error}", f"            -> {fit.refusal.fix}"]
    if fit.resolved is not None:
        out += [f"  SGLang    {change}" for change in fit.resolved.changes]
    out += _effective(answer)
    for other in answer.others:
        out.append(f"  or        {other.title}: {_words(other.args)}")
        out.append(f"            {_figures(other.fit)}; {other.trade}")
    out += [f"  assumed   {line}" for line in answer.assumed]
    out += [f"  note      {line}" for line in answer.notes]
    return out


def _effective(answer: Answer) -> list[str]:
    fit = answer.fit
    pools, resolved = fit.pools, fit.resolved
    if pools is None or resolved is None:
        return []
    asked = resolved.max_running
    short = f" (asked for {asked})" if asked is not None and pools.max_running < asked else ""
    how = " (SGLang's own)" if resolved.mem_fraction_auto else ""
    one = min(pools.tokens, answer.machine.shape.context)
    out = [
        f"  runs      {pools.max_running} requests at once{short}, {pools.tokens:,} KV tokens",
        f"            mem-fraction-static {resolved.mem_fraction:.4g}{how}, "
        f"context {pools.context:,}, chunked prefill {resolved.chunked_prefill:,}",
    ]
    if pools.slots is not None and pools.slot_bytes is not None:
        out.append(
            f"            {pools.slots} state slots of {pools.slot_bytes / (1 << 20):.2f} MiB, "
            f"{pools.slots_per_request} a request"
        )
    if resolved.engine < Engine.V0_5_13 and asked is not None and pools.max_running < asked:
        # Later releases keep them for those that will run.
        idle = pools.intermediate * (asked - pools.max_running) / asked
        if idle > 0:
            out.append(
                f"            draft states are kept for all {asked} asked for: {idle:.2f} GiB "
                f"of them for requests that never run; max-running-requests {pools.max_running} "
                "frees them"
            )
    out.append(
        f"  fits      {pools.tokens // pools.context} requests of the full {pools.context:,} "
        f"tokens in the KV cache, {pools.full_requests} of them run at once"
    )
    share = pools.tokens // pools.max_running
    out.append(
        f"            {pools.max_running} at once: {share:,} tokens each; "
        f"largest context-length that one request fills: {one:,}"
    )
    if pools.slots is not None and answer.most_full > pools.full_requests:
        slots = answer.most_full * resolved.slots_per_request
        out.append(
            f"            most full requests at once: {answer.most_full}, "
            f"with max-running-requests {answer.most_full} and max-mamba-cache-size {slots}"
        )
    out += _bars(answer)
    for need, size in fit.slack_needs.items():
        out.append(f"            the slack must also hold: {need}, {size:.2f} GiB")
    if fit.slack_short > 0:
        out.append(
            f"  WARNING   that is {fit.slack_short:.2f} GiB more than the slack: "
            "lower mem-fraction-static"
        )
    return out


def _bars(answer: Answer) -> list[str]:
    """One bar a GPU; tensor parallel ranks are equal, so all bars are."""
    pools = answer.fit.pools
    if pools is None:
        return []
    total = answer.machine.gpu.total_mib / 1024
    parts = [
        ("w", "weights", pools.weights),
        ("s", "states", pools.states),
        ("d", "draft states", pools.intermediate),
        ("k", "KV cache", pools.kv),
        (".", "slack (graphs, activations, draft)", pools.slack),
        ("x", "taken before", max(0.0, total - answer.machine.gpu.free)),
    ]
    bar, done = "", 0.0
    for mark, _, size in parts:
        done += size
        bar += mark * (max(0, min(BAR_WIDTH, round(done / total * BAR_WIDTH))) - len(bar))
    bar = bar.ljust(BAR_WIDTH)
    out = [f"  GPU {index:<6}[{bar}] {total:.1f} GiB" for index in range(answer.fit.flags.tp)]
    legend = ", ".join(f"{mark} {name} {size:.2f}" for mark, name, size in parts if size > 0)
    return [*out, f"            {legend} GiB"]


def _figures(fit: Fit) -> str:
    if fit.pools is None:
        return "does not start"
    return f"{fit.pools.max_running} requests, {fit.pools.tokens:,} KV tokens"


def _words(args: Mapping[str, ArgValue]) -> str:
    parts = [
        f"without {flag}"
        if value is False
        else f"{flag}: {str(value).lower() if value is True else value}"
        for flag, value in args.items()
    ]
    return ", ".join(parts)


def _fit_document(fit: Fit) -> dict[str, Any]:
    pools, resolved = fit.pools, fit.resolved
    refusal = None
    if fit.refusal is not None:
        refusal = {
            "error": fit.refusal.error,
            "phase": fit.refusal.phase,
            "fix": fit.refusal.fix,
        }
    effective = None
    memory = None
    if pools is not None:
        effective = {
            "slots": pools.slots,
            "slots_per_request": pools.slots_per_request,
            "state_bytes_per_slot": pools.slot_bytes,
            "kv_bytes_per_token": pools.kv_token_bytes,
            "max_total_num_tokens": pools.tokens,
            "max_running_requests": pools.max_running,
            "context_length": pools.context,
            "full_context_requests": pools.full_requests,
        }
        memory = {
            "weights": pools.weights,
            "states": pools.states,
            "draft_states": pools.intermediate,
            "kv": pools.kv,
            "slack": pools.slack,
            "slack_needs": dict(fit.slack_needs),
            "slack_short": fit.slack_short,
        }
    return {
        "mem_fraction_static": resolved.mem_fraction if resolved else None,
        "mem_fraction_auto": resolved.mem_fraction_auto if resolved else None,
        "changes": list(resolved.changes) if resolved else [],
        "effective": effective,
        "memory_gib": memory,
        "refusal": refusal,
    }
