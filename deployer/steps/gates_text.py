"""Gates about what the model says: known answers, long texts, counting, a long prompt."""

from __future__ import annotations

from collections.abc import Callable

from deployer.sglang.reasoning import way_out
from deployer.steps.gates_bench import Asked, Bench, GateFault
from deployer.steps.gates_judge import Fault, Record, reading, refused, text_fault, texts, whole
from deployer.steps.verify_prompts import (
    CODE_WORD,
    COUNT_TO,
    COUNTING,
    ESSAY,
    QUESTIONS,
    SAMPLES,
    Question,
    Ruler,
    counted_up_to,
    document,
    first_gap,
)

CUT_COUNT = 20
"""How far a count that max_tokens cut must have come."""


def asked(
    bench: Bench,
    request: Record,
    *,
    min_tokens: int = 0,
    right: Callable[[str], str] | None = None,
    to_its_end: bool = False,
) -> Asked:
    """A request and the usual judgement of its answer."""
    parser, kind = bench.parser, bench.model_type

    def judged(answer: Record) -> Fault | None:
        return text_fault(
            str(request["prompt"]),
            answer,
            parser=parser,
            model_type=kind,
            min_tokens=min_tokens,
            right=right,
            to_its_end=to_its_end,
        )

    return Asked(request, judged)


def answers(bench: Bench) -> str:
    """Questions with a known answer; tells whether the model thinks, and where its thoughts go."""
    kinds = set()
    for question in QUESTIONS:
        request = bench.request(question.prompt, bench.max_tokens)
        answer = bench.ask(asked(bench, request, right=_known(question), to_its_end=True))
        parts = reading(answer)
        kinds.add(parts.kind)
        bench.thinks = bench.thinks or bool(parts.reasoning)
    if "leaked" in kinds:
        bench.note(
            "the model's thoughts come to clients as content; to part them, "
            + way_out("leaked", "", bench.model_type),
            "warning",
        )
    thoughts = ", after thinking" if bench.thinks else ""
    return f"{len(QUESTIONS)} of {len(QUESTIONS)} right{thoughts}"


def quality(bench: Bench) -> str:
    """A long text: at temperature 0, with the model's own sampling, with and without thinking."""
    rules = bench.rules
    modes: list[bool | None] = [None]
    if rules.thinking == "auto" and (bench.thinks or bench.parser):
        modes.append(not bench.thinks)
    told, least = [], min(rules.min_tokens, bench.max_tokens)
    for mode in modes:
        essays = [
            asked(
                bench,
                bench.request(ESSAY, bench.max_tokens, temperature, thinking=mode),
                min_tokens=least,
            )
            for temperature in (0.0, None)
        ]
        if mode is not None:
            first = bench.answer(essays[0].request)
            if first.get("status") == 400:
                # The template or the engine does not know it: nothing is wrong with the model.
                bench.note(f"thinking {_on(mode)} cannot be asked for: {first.get('error', '')}")
                continue
            bench.settle(essays[0], first)
            found = [first, *bench.many(essays[1:], 1)[0]]
        else:
            found, _ = bench.many(essays, min(2, rules.parallel))
        bench.essays += [(one, texts(answer)) for one, answer in zip(essays, found, strict=True)]
        words = "as it comes" if mode is None else f"thinking {_on(mode)}"
        if mode is not None and mode != any(reading(one).reasoning for one in found):
            words += " (without effect)"
        told.append(f"{words}: {min(int(one.get('tokens') or 0) for one in found)}+ tokens")
    return "temperature 0 and the model's own sampling; " + ", ".join(told)


def counting(bench: Bench) -> str:
    """Counting shows a lost or doubled token at once."""
    limit = max(bench.max_tokens, 4 * COUNT_TO)
    if bench.context_tokens:
        limit = min(limit, bench.context_tokens * 3 // 4)
    request = bench.request(COUNTING, limit)
    parser, kind = bench.parser, bench.model_type

    def judged(answer: Record) -> Fault | None:
        if fault := text_fault(COUNTING, answer, parser=parser, model_type=kind):
            return fault
        parts = reading(answer)
        reached = counted_up_to(parts.content) or counted_up_to(parts.reasoning)
        cut = answer.get("finish_reason") == "length"
        if reached >= COUNT_TO or (cut and (reached >= CUT_COUNT or not parts.content)):
            return None
        wanted, at = first_gap(parts.content or parts.reasoning)
        where = f"; {wanted} does not come, at character {at}" if at >= 0 else ""
        return Fault("output", f"counts only to {reached}{where}", whole(answer)[-400:])

    answer = bench.ask(Asked(request, judged))
    reached = counted_up_to(reading(answer).content) or counted_up_to(whole(answer))
    cut = answer.get("finish_reason") == "length" and reached < COUNT_TO
    return f"counts to {reached}" + (" (cut by max_tokens)" if cut else "")


def ruler(bench: Bench) -> tuple[Ruler | str, Record]:
    """How long an entry of the document is, by usage.prompt_tokens, or why that is not known.

    Besides it the answer to a short document.
    """
    few, many = SAMPLES
    short = bench.ask(asked(bench, bench.request(document(few), _room(bench))))
    longer = bench.answer(bench.request(document(many), 1))
    if longer.get("status") == 400:
        return f"the context of {bench.context_tokens} tokens is too short", short
    if fault := refused(longer):
        raise GateFault(fault)
    counts = [one.get("prompt_tokens") for one in (short, longer)]
    found = Ruler.of((int(counts[0] or 0), int(counts[1] or 0)))
    return found or "the server does not tell usage.prompt_tokens", short


def long_prompt(bench: Bench) -> str | None:
    """A long answer to a prompt past the first pages of the cache, as far as the context allows."""
    rules = bench.rules
    if rules.long_prompt_tokens == 0:
        return None
    measure, short = ruler(bench)
    if isinstance(measure, str):
        return f"not asked: {measure}"
    limit = _room(bench)
    target = rules.long_prompt_tokens
    if bench.context_tokens:
        target = min(target, bench.context_tokens - limit - 32)
    least = min(rules.min_tokens, limit)
    for _ in range(3):
        entries = measure.at_least(max(target, 1))
        request = bench.request(document(entries), limit, stream=True)
        one = asked(bench, request, min_tokens=least)
        answer = bench.ask(one)
        counted = int(answer.get("prompt_tokens") or 0)
        if counted >= target - 8:
            break
        measure = measure.corrected(entries, counted)
    bench.essays.append((one, texts(answer)))
    if isinstance(answer.get("ttft_s"), float):
        bench.figures["long_ttft_s"] = round(answer["ttft_s"], 3)
    known, found = (CODE_WORD in whole(text).lower() for text in (short, answer))
    if known and not found and reading(answer).content:
        why = (
            f"of a prompt of {counted} tokens the first line is lost (of one of "
            f"{short.get('prompt_tokens')} tokens it is known)"
        )
        raise GateFault(Fault("output", why, whole(answer)[:400]), (_with_word(one),))
    short_of = "" if target >= rules.long_prompt_tokens else f" (context {bench.context_tokens})"
    word = "found" if found else "not found"
    return f"{counted} tokens{short_of}, {answer.get('tokens')} answered, code word {word}"


def _known(question: Question) -> Callable[[str], str]:
    return lambda text: "" if question.right(text) else f"wrong answer to {question.prompt!r}"


def _with_word(one: Asked) -> Asked:
    def judged(answer: Record) -> Fault | None:
        fault = one.judged(answer)
        if fault is None and reading(answer).content and CODE_WORD not in whole(answer).lower():
            return Fault("output", "the first line is lost", whole(answer)[:400])
        return fault

    return Asked(one.request, judged)


def _room(bench: Bench) -> int:
    """Tokens of an answer to the long prompt; of a small context no more than a quarter."""
    room = bench.max_tokens
    return min(room, bench.context_tokens // 4) if bench.context_tokens else room


def _on(mode: bool) -> str:
    return "on" if mode else "off"
