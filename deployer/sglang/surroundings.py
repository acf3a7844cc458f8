"""What stands round a repetition and makes it right: a fence, a colon, rows of data. Pure."""

from __future__ import annotations

import re

FENCE = re.compile(r"^[ \t]*(?:```|~~~)", re.MULTILINE)
BRACKETS = (("{", "}"), ("[", "]"), ("(", ")"))
KEY = re.compile(r"\"[^\"\n]*\"\s*:|'[^'\n]*'\s*:|[.\w]+\s*[:=](?!=)")
VALUE = re.compile(r"\b\d+(?:\.\d+)?\b|\"\"|''")
PHRASE = re.compile(r"(?:[^\W\d_]+ ){4}[^\W\d_]+")
"""Five words; a row of data says less."""


def fenced(text: str, begin: int, end: int) -> bool:
    """Does it stand in a code fence that is closed again?"""
    opened = sum(1 for _ in FENCE.finditer(text, 0, begin)) % 2 == 1
    inside = re.search(r"[^`~\s]", text[begin:end])
    return bool(opened and inside and not FENCE.search(text[begin:end]) and FENCE.search(text, end))


def announced(text: str, begin: int) -> bool:
    """Does a colon stand before it, as before a quotation?"""
    return text[:begin].rstrip(" \t\n*_\"'“«>`").endswith((":", "："))


def in_code(text: str, match: re.Match[str]) -> bool:
    """Does it stand between two backticks of one line?"""
    before = text[: match.start()].rpartition("\n")[2]
    return before.count("`") % 2 == 1 and "`" in text[match.end() :].partition("\n")[0]


def underlines(text: str, match: re.Match[str]) -> bool:
    """Is it a mark alone on its line, as long as the heading above it? (reStructuredText)"""
    if match[1].isalnum() or match[1].isspace():
        return False
    before, newline, line = text[: match.start()].rpartition("\n")
    heading = before.rpartition("\n")[2].strip()
    alone = newline and not line.strip() and not text[match.end() :].partition("\n")[0].strip()
    return bool(alone and heading) and abs(len(heading) - len(match.group())) <= 2


def is_data(run: str) -> bool:
    """Rows of code or of a table, not of sentences: a third of it is marks and figures."""
    visible = [mark for mark in run if not mark.isspace()]
    rows = [row for row in run.split("\n") if row.strip()]
    marks = sum(not mark.isalpha() for mark in visible)
    return len(rows) >= 4 and marks > len(visible) / 3 and not PHRASE.search(run)


def blank_rows(run: str) -> bool:
    """Rows of a form that is still to be filled: nothing but zeros, nulls and empty texts.

    A document of them may be cut by the limit; rows that say something would be a loop.
    """
    rows = [row for row in run.split("\n") if row.strip()]
    if len(rows) < 4 or any(run.count(a) > run.count(b) + 1 for a, b in BRACKETS):
        return False
    said = KEY.sub("", run)
    if re.search(
        r"[^\W_]",
        re.sub(
            r"<[^<>=]*(?:>|\Z)|\A[^<>\n]*>|\b(?:null|none|nan|true|false)\b",
            "",
            VALUE.sub("", said),
            flags=re.IGNORECASE,
        ),
    ):
        return False
    return len(set(re.findall(r"\d+(?:\.\d+)?", said))) <= 2


def opened(before: str) -> bool:
    """Is a fence or a bracket open there, or a key of YAML or a header of CSV right before?"""
    if sum(1 for _ in FENCE.finditer(before)) % 2:
        return True
    if any(before.count(one) > before.count(other) for one, other in BRACKETS[:2]):
        return True
    return bool(
        re.search(r":[ \t]*\n[ \t]*(?:- )?\S*[ \t]*\Z|\w,\w[^\n]*\n?[ ,]*\Z", before[-200:])
    )
