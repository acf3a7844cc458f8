"""What the tiny model is taught: the gates' own prompts, and a right answer to each.

It learns them by heart. So a gate that passes proves the chain (download, weights, kernels, draft
head, parser, gate), never the model: that is said in the result.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from deployer.steps.verify_prompts import (
    CODE_WORD,
    CONTINUED,
    COUNT_TO,
    COUNTING,
    ESSAY,
    HELLO,
    QUESTIONS,
    SAMPLES,
    Ruler,
    burst_answer,
    burst_prompts,
    document,
)

BURST = 25
NO_THOUGHTS = "<think>\n\n</think>\n\n"
"""What Qwen's template puts before an answer when thinking is off."""
CONTEXT = 4096
LONG = (CONTEXT - CONTEXT // 4 - 32, CONTEXT - 32)
"""Tokens of the gates' long prompt and of the one at the context's edge, in this context."""
EDGE_ANSWER = 240
"""Characters of the answer that are taught where the context leaves room for a few tokens only."""

TIDES = """\
The tides are the slow rise and fall of the sea, and they are driven by gravity. The Moon pulls \
on the whole Earth, but it pulls a little harder on the side that faces it and a little less on \
the far side. Seen from the centre of the planet, what is left of that pull stretches the ocean \
into two bulges: one towards the Moon and one away from it. As the Earth turns beneath them, \
most places pass through both, so two high waters and two low waters come in a little more than \
a day. Because the Moon moves along its orbit meanwhile, each high water arrives about fifty \
minutes later than it did the day before.

The Sun does the same with less than half the strength. When the Sun, the Moon and the Earth \
stand in one line, at new and at full Moon, both effects add up and give spring tides with a \
large range. When they stand at a right angle, at the quarters, they work against each other, \
and the range of the neap tides is small. The distance of the Moon changes during a month as \
well, which makes some springs noticeably higher than others.

Why, then, do coasts differ so much? If water covered everything evenly, the bulges would be \
well under a metre high. Continents stand in the way, however, and the real ocean answers like a \
set of basins in which the water sloshes. Each basin has a rhythm of its own that depends on its \
length and depth. Where that rhythm lies close to the twelve hours of the pull, the motion grows \
by resonance, as a swing does when it is pushed at the right moment. The Bay of Fundy is the \
famous example: its water rises by as much as sixteen metres. In the Mediterranean, which has \
only a narrow door to the Atlantic, hardly anybody notices a change.

Shape matters too. A funnel squeezes the incoming wave into less and less width, and a shelf \
that gets shallower slows it and makes it taller. In some rivers it finally breaks and runs \
upstream as a bore. The rotation of the Earth turns the currents aside, so the wave travels \
round certain points of the open sea where the level stays almost still; far from such a point \
the range is large. Along a few shores, finally, the two daily tides are unequal or merge into \
one, because the Moon stands north or south of the equator. Wind and air pressure add their \
share, which is why a table of tides is a forecast and not a promise."""

GAUGE = f"""\
The code word is {CODE_WORD}. A record of a tide gauge is a list of water levels, each with the \
hour at which it was taken and the station that took it. The first thing to look for is the \
mark: all heights are given above it, and a figure without its mark says nothing. After that the \
hours matter, because only readings at known and even steps can be compared with each other.

Drawn as a curve, the list soon shows its rhythm. Two crests and two troughs a day are the usual \
picture; a slow swelling and shrinking of their height over a fortnight tells of springs and \
neaps. If one crest is always taller than its neighbour, the place has an unequal tide. What \
remains when this regular part has been taken away is the weather: a storm that pushes water \
against the shore, or high pressure that holds it down for several days.

A careful reader also checks the instrument. A level that never changes means a stuck float, a \
single wild value is most likely an error of writing, and a sudden step that stays may be a pier \
that sank or a gauge that somebody moved. Neighbouring stations help here, since the sea seldom \
does something in one harbour alone.

Such records are good for many things. Harbour masters plan with them when a deep ship may \
enter, engineers learn how tall a wall must be, and surveyors take their zero from the mean of \
many years. Out of a long series the tides of the future can be computed, which is how the \
printed tables come about. Scientists finally read the oldest lists, some of which began more \
than two hundred years ago, to see how fast the ocean rises. For them every honest line counts, \
even a dull one, and a gap that is admitted is worth far more than a number that was made up."""

THOUGHTS = {
    QUESTIONS[0].prompt: "17 times 23 is 17 times 20 plus 17 times 3, which is 340 plus 51.",
    QUESTIONS[1].prompt: "The user asks for a capital city.",
    ESSAY: "I should explain gravity first, then the Sun, then why basins and shapes differ.",
}
"""Prompts that are answered with reasoning first, so that the reasoning parser has work."""

ANSWERS = {
    QUESTIONS[0].prompt: "391",
    QUESTIONS[1].prompt: "Paris",
    ESSAY: TIDES,
    COUNTING: ", ".join(str(number) for number in range(1, COUNT_TO + 1)),
    HELLO: "Hello! How can I help you today?",
    document(SAMPLES[0]): GAUGE,
    **{prompt: burst_answer(number) for number, prompt in enumerate(burst_prompts(BURST))},
}


def chat(prompt: str) -> str:
    """One message as the template of checkpoint.py renders it."""
    return f"<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n"


@dataclass(frozen=True)
class Lesson:
    """What the model sees and what it writes. `ends`: the answer is taught to its end."""

    prompt: str
    answer: str
    ends: bool = True


def lessons() -> list[Lesson]:
    """Answers with the thoughts, which may be empty, first.

    SGLang's qwen3 parser takes a text without `</think>` for thoughts that never ended.
    """
    taught = [
        Lesson(chat(prompt), f"<think>\n{THOUGHTS.get(prompt, '')}\n</think>\n\n{answer}")
        for prompt, answer in ANSWERS.items()
    ]
    without = [Lesson(chat(prompt) + NO_THOUGHTS, ANSWERS[prompt]) for prompt in THOUGHTS]
    return [*taught, *without, Lesson(CONTINUED, TIDES)]


def long_lessons(count: Callable[[str], int]) -> list[Lesson]:
    """The documents that the gates will ask about, by the tokenizer's count of a chat."""
    few, many = SAMPLES
    ruler = Ruler.of((count(chat(document(few))), count(chat(document(many)))))
    if ruler is None:
        raise ValueError("an entry of the document has no tokens")
    whole, edge = (document(ruler.at_least(LONG[0])), document(ruler.at_most(LONG[1])))
    return [
        Lesson(chat(whole), NO_THOUGHTS + GAUGE),
        Lesson(chat(edge), NO_THOUGHTS + GAUGE[:EDGE_ANSWER], ends=False),
    ]
