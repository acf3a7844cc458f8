"""Gates under load: a burst of many requests, and one that fills the context to its end."""

from __future__ import annotations

import re

from deployer.steps.gates_bench import Bench, GateFault
from deployer.steps.gates_judge import Fault, Record, refused, text_fault, whole
from deployer.steps.gates_text import asked, ruler
from deployer.steps.verify_prompts import burst_answer, burst_prompts, document

SHORT_TOKENS = 160
EDGE_TOKENS = 32
"""What is left for the answer at the edge of the context."""
EDGE_TRIES = 4
PREFILL_PER_S = 500
"""Tokens of a prompt that the slowest server worth having takes in a second."""
LIMIT_NAMED = re.compile(
    r"(?:context length|maximum allowed length|maximum context|longer than|exceeds?)", re.IGNORECASE
)
GIVEN = re.compile(r"\((\d+) tokens\)|: (\d+) tokens from the input", re.IGNORECASE)
ALLOWED = re.compile(r"(?:context length(?: of)?|allowed length)\s*\(?(\d+) tokens", re.IGNORECASE)


def burst(bench: Bench) -> str:
    """Many short requests, several at a time."""
    rules = bench.rules
    questions = [
        asked(bench, bench.request(prompt, min(SHORT_TOKENS, bench.max_tokens)))
        for prompt in burst_prompts(rules.burst)
    ]
    answers, seconds = bench.many(questions, rules.parallel)
    right = sum(burst_answer(number) in whole(one) for number, one in enumerate(answers))
    bench.figures["burst_requests_per_s"] = round(len(answers) / seconds, 2)
    return (
        f"{len(answers)} of {rules.burst}, {rules.parallel} at a time, {right} sums right, "
        f"{len(answers) / seconds:.3g} requests/s"
    )


def context_edge(bench: Bench) -> str | None:
    """One request as long as the context and the pool allow. Refused with its limit is fine."""
    if not bench.rules.context_edge:
        return None
    limit = _limit(bench)
    if limit < 2 * EDGE_TOKENS:
        return "not asked: the server does not tell its context"
    measure, _ = ruler(bench)
    if isinstance(measure, str):
        return f"not asked: {measure}"
    target, told = limit - EDGE_TOKENS, ""
    for _ in range(EDGE_TRIES):
        entries = measure.at_most(target)
        if entries == 0:
            return f"not asked: {limit} tokens are too few for the shortest document"
        patience = max(bench.rules.request_timeout_s, target / PREFILL_PER_S)
        filling = measure.left(target, entries)
        request = bench.request(document(entries, filling), EDGE_TOKENS, timeout_s=patience)
        answer = bench.answer(request)
        if answer.get("status") != 400:
            return _judged(bench, request, answer, limit)
        told = str(answer.get("error", ""))
        if not LIMIT_NAMED.search(told):
            raise GateFault(
                Fault("request", "refused at the context's edge without a reason", told)
            )
        given, allowed = _number(GIVEN, told), _number(ALLOWED, told)
        if given:
            measure = measure.corrected(entries, given - filling)
        room = min(limit, allowed or limit) - EDGE_TOKENS
        # A limit that was kept is not the one that speaks: step back from it.
        target = room if room < target else target - 2 * EDGE_TOKENS
    return f"refused, with the limit named: {told[:200]}"


def _judged(bench: Bench, request: Record, answer: Record, limit: int) -> str:
    fault = refused(answer)
    if fault is None:
        fault = text_fault(str(request["prompt"]), answer, model_type=bench.model_type)
    if fault is not None:
        raise GateFault(fault, [asked(bench, request)] if fault.kind == "output" else [])
    counted = answer.get("prompt_tokens")
    return f"{counted} tokens of {limit} answered in {float(answer['seconds']):.1f} s"


def _limit(bench: Bench) -> int:
    """Tokens of prompt and answer that one request may have."""
    pool = bench.info.get("max_total_num_tokens")
    known = [one for one in (bench.context_tokens, pool) if isinstance(one, int) and one > 0]
    return min(known, default=0)


def _number(pattern: re.Pattern[str], text: str) -> int:
    match = pattern.search(text)
    return next((int(one) for one in match.groups() if one), 0) if match else 0
