"""Numbers of a vocabulary where words should stand. Pure."""

from __future__ import annotations

import re
from itertools import pairwise

from deployer.sglang.verdict import GOOD, Verdict, bad

RUN = re.compile(r"\d{1,6}(?:[ \t,;]+\d{1,6}){29,}")
"""Thirty or more plain numbers on one line."""
LARGE = 1000
VOCABULARY = 300_000
MONOTONE = (0.35, 0.65)
"""Share of steps upwards in numbers that follow no order."""


def token_ids(text: str) -> Verdict:
    """Large whole numbers in no order: a tokenizer's ids. Lists of primes or squares rise."""
    for run in RUN.finditer(text):
        numbers = [int(number) for number in re.findall(r"\d+", run.group())]
        large = sum(LARGE <= number < VOCABULARY for number in numbers)
        steps = [(a, b) for a, b in pairwise(numbers) if a != b]
        rising = sum(a < b for a, b in steps) / len(steps) if steps else 0.5
        if large >= 0.45 * len(numbers) and MONOTONE[0] < rising < MONOTONE[1]:
            return bad("a run of token numbers instead of words", run.start())
    return GOOD
