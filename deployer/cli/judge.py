"""`deploy judge RESPONSE.json`: is this answer good text? Offline: needs no inventory."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from deployer.cli.options import Options, common
from deployer.cli.output import print_json
from deployer.errors import GateFailed, UsageError
from deployer.sglang.answer import Answer, read_answers
from deployer.sglang.quality import Verdict, judge, tokens

LIMIT = 64 << 20
"""Bytes: no answer of a model is longer."""


@click.command("judge")
@click.argument("response", type=click.Path(allow_dash=True, path_type=Path))
@common
def command(options: Options, response: Path) -> int:
    """Judge the answer in RESPONSE, a JSON file ('-': standard input).

    It holds prompt, content, reasoning_content and finish_reason (each may be absent), or is a
    chat completion. Exit code 0: good text. 5: bad. 2: no such JSON.
    """
    options.no_events("judge")
    answers = read_answers(_read(response), str(response))
    verdicts = [(answer, _judged(answer)) for answer in answers]
    answer, verdict = next((pair for pair in verdicts if not pair[1].good), verdicts[0])
    if options.as_json:
        print_json(_document(answer, verdict, verdicts))
    else:
        for line in _lines(answer, verdict):
            click.echo(line)
    return 0 if verdict.good else GateFailed.exit_code


def _judged(answer: Answer) -> Verdict:
    return judge(
        answer.prompt,
        answer.content,
        answer.reasoning,
        answer.finish_reason,
        answer_required=True,
    )


def _read(path: Path) -> bytes:
    try:
        if str(path) == "-":
            data = sys.stdin.buffer.read(LIMIT + 1)
        else:
            with path.open("rb") as file:
                data = file.read(LIMIT + 1)
    except OSError as error:
        raise UsageError(
            f"cannot read the response: {error.strerror}",
            where=str(path),
            fix="give a JSON file, or -",
        ) from error
    if len(data) > LIMIT:
        raise UsageError(f"more than {LIMIT} bytes", where=str(path), fix="give one answer")
    return data


def _document(
    answer: Answer, verdict: Verdict, verdicts: list[tuple[Answer, Verdict]]
) -> dict[str, Any]:
    return {
        "good": verdict.good,
        "why": _whole(verdict.why),
        "part": verdict.part,
        "position": verdict.position if not verdict.good else None,
        "excerpt": _whole(verdict.evidence),
        "finish_reason": answer.finish_reason,
        "content_characters": len(answer.content or ""),
        "reasoning_characters": len(answer.reasoning or ""),
        "choices": [{"good": each.good, "why": _whole(each.why)} for _, each in verdicts],
    }


def _lines(answer: Answer, verdict: Verdict) -> list[str]:
    if verdict.good:
        said = len(tokens(answer.content or ""))
        thought = len(tokens(answer.reasoning or ""))
        return [
            f"good: {said} words of answer, {thought} of reasoning"
            f" (finish_reason {answer.finish_reason or 'not given'})"
        ]
    lines = [f"bad: {_whole(verdict.why)}"]
    if verdict.position >= 0:
        lines.append(f"  at character {verdict.position} of {verdict.part or 'the answer'}")
    lines += [f"  | {_whole(line)}" for line in verdict.evidence.splitlines() if line.strip()]
    return lines


def _whole(text: str) -> str:
    """Half characters, which JSON can hold and no terminal can show, made visible."""
    return text.encode("utf-8", "replace").decode("utf-8")
