"""Text that no writer meant: lost or wrong encodings, raw tokens, marks without a word. Pure."""

from __future__ import annotations

import re
import unicodedata

from deployer.sglang.garbage import GARBAGE
from deployer.sglang.salad import joining_share
from deployer.sglang.scripts import script_of

INVISIBLE = re.compile(r"[\u00ad\u200b-\u200f\u2060-\u2064\ufeff]")
HIGH = "\u20ac\u201a\u0192\u201e\u2026\u2020\u2021\u02c6\u2030\u0160\u2039\u0152\u017d"
HIGH += "\u2018\u2019\u201c\u201d"
HIGH += "\u2022\u2013\u2014\u02dc\u2122\u0161\u203a\u0153\u017e\u0178\x80-\xbf"
"""How the bytes 0x80 to 0xBF look when UTF-8 is read as Latin-1 or as Windows-1252."""
MOJIBAKE = re.compile(
    "\u00c3[\u00c2\u0192\u0178\u0153\u2013\u02c6\u2030"
    + "\x80-\xbf]|\u00e2\u20ac.|\u00c2[\xa0-\xbf]"
)
MOJIBAKE_RUN = re.compile(
    f"(?:[\xc2-\xdf][{HIGH}]|[\xe0-\xef][{HIGH}]{{2}}|\xf0[{HIGH}]{{3}}){{3,}}"
)
RAW_TOKENS = re.compile(r"[\u0120\u010a](?=\S)|(?<=\w)\u2581(?=\w)")
BYTE_TOKENS = re.compile(r"(?:<0x[0-9A-F]{2}>){2,}")
RESERVED = re.compile(
    r"\[control_\d+\]|<(?:unused|extra_id_|unk|pad|mask|special_)\d*>|\[(?:PAD|UNK|MASK)\]"
    r"|<\|(?:reserved_special_token|extra|fim|dummy|place)\w*\|>"
)
"""Tokens that no vocabulary means to be said."""
SPECIAL = re.compile(r"<\|?(?:endoftext|im_start|im_end|eot_id|begin_of_text|end_of_text)\|?>")
CONTROL = re.compile(r"[\x00-\x08\x0e-\x1a\x7f]")
SPACED = re.compile(r"([^\W\d_])(?= +([^\W\d_]))")
ENDED = re.compile(r"(?:<\|(?:endoftext|eot_id|end_of_text)\|>|</s>)(?=\w)")
"""An end that did not end the answer: the next word stands right behind it."""
CODECS = ("cp1252", "latin-1", "cp1251", "gbk", "cp949", "shift_jis", "koi8-r", "mac-roman")
"""As which UTF-8 is read by mistake."""
FOREIGN = re.compile(r"[^\x00-\x7f\ufffd]{4,}")
HIGH_WORDS = re.compile(r"(?:[\xc0-\xff]{4,}[\s,.]+){2,}[\xc0-\xff]{4,}")
"""Words of accented letters only: an eight-bit alphabet read as Latin-1."""


def broken_text(text: str) -> tuple[str, int] | None:
    """(why, place in characters) of the first thing that is broken; None: nothing is."""
    for test in (
        _replaced,
        _mojibake,
        _control,
        _raw_tokens,
        _special,
        _scripts,
        *GARBAGE,
        _no_word,
    ):
        if found := test(text):
            return found
    return None


def _replaced(text: str) -> tuple[str, int] | None:
    count = text.count("\ufffd")
    # A cut at max_tokens may leave one torn character at the very end.
    torn_end = text.endswith("\ufffd") and count <= 2
    if count and not torn_end and (count >= 3 or count / len(text) > 0.01):
        return f"{count} undecodable characters", text.index("\ufffd")
    return None


def _mojibake(text: str) -> tuple[str, int] | None:
    why = "text in the wrong encoding (mojibake)"
    if run := MOJIBAKE_RUN.search(text):
        return why, run.start()
    hits = [match.start() for match in MOJIBAKE.finditer(text)]
    if len(hits) >= 3 and len(hits) / len(text) > 0.005:
        return why, hits[0]
    if words := HIGH_WORDS.search(text):
        return why, words.start()
    return _misread(text)


def _misread(text: str) -> tuple[str, int] | None:
    """Runs that, written in another encoding, are UTF-8: no text is so by accident."""
    runs = list(FOREIGN.finditer(text))[:200]
    for codec in CODECS:
        hits = [run.start() for run in runs if _is_utf8_in(run.group(), codec)]
        if len(hits) >= 3 and len(hits) > 0.3 * len(runs):
            return "text in the wrong encoding (mojibake)", hits[0]
    return None


def _is_utf8_in(run: str, codec: str) -> bool:
    try:
        meant = run.encode(codec).decode("utf-8")
    except UnicodeError:
        return False
    return 2 <= len(meant) < len(run) and any(letter.isalpha() for letter in meant)


def _control(text: str) -> tuple[str, int] | None:
    hits = [match.start() for match in CONTROL.finditer(text)]
    return (f"{len(hits)} control characters", hits[0]) if len(hits) >= 3 else None


def _raw_tokens(text: str) -> tuple[str, int] | None:
    hits = [match.start() for match in RAW_TOKENS.finditer(text)]
    if len(hits) >= 4 and len(hits) / len(text) > 0.04:
        return "the tokenizer's own marks instead of spaces", hits[0]
    raw = list(BYTE_TOKENS.finditer(text))
    if raw and sum(len(match.group()) for match in raw) / len(text) > 0.2:
        return "raw byte tokens instead of characters", raw[0].start()
    return None


def _special(text: str) -> tuple[str, int] | None:
    ended = list(ENDED.finditer(text))
    if len(ended) >= 2:
        return "the answer goes on behind its end", ended[0].start()
    reserved = list(RESERVED.finditer(text))
    if len(reserved) >= 4 and sum(len(hit.group()) for hit in reserved) / len(text) > 0.1:
        return "tokens of a vocabulary that are never said", reserved[0].start()
    hits = list(SPECIAL.finditer(text))
    # A text about chat templates shows them too, but consists of other words.
    row = re.search(rf"(?:{SPECIAL.pattern}\s*){{3,}}|(?:<\|\w+\|>\s*){{4,}}", text)
    if row:
        return "special tokens in a row", row.start()
    if len(hits) >= 3 and sum(len(hit.group()) for hit in hits) / len(text) > 0.3:
        return "special tokens instead of words", hits[0].start()
    return None


SCRIPT_WINDOW = 60
"""Gaps between words that are looked at together."""


def _scripts(text: str) -> tuple[str, int] | None:
    """Words of many scripts in one sentence; in a list of greetings a mark or line parts them."""
    gaps = [
        (script_of(match[1]), script_of(match[2]), match.start()) for match in SPACED.finditer(text)
    ]
    # In parts, so that a good beginning does not hide a bad end.
    for start in range(0, max(1, len(gaps) - SCRIPT_WINDOW // 2), SCRIPT_WINDOW // 2):
        part = gaps[start : start + SCRIPT_WINDOW]
        switches = [at for before, after, at in part if before != after]
        scripts = {script for before, after, _ in part for script in (before, after)}
        if len(scripts) >= 4 and len(switches) >= 8 and len(switches) / len(part) > 0.3:
            said = text[part[0][2] : part[-1][2] + 1].lower()
            latin = re.findall(r"[a-z\u00df-\u024f]+", said)
            most = sum(map(len, latin)) > 0.75 * sum(map(str.isalpha, said))
            if most and joining_share(latin) > 0.25:
                # Sentences that tell how others say it.
                continue
            return f"{len(scripts)} scripts mixed in one text", switches[0]
    return None


def _no_word(text: str) -> tuple[str, int] | None:
    visible = set(INVISIBLE.sub("", "".join(text.split())))
    lines = [line.rstrip() for line in text.split("\n") if line.strip()]
    drawing = len(lines) >= 5 and (len(visible) > 1 or len(set(lines)) >= 4)
    if 0 < len(visible) <= 3 and not drawing and all(_is_mark(mark) for mark in visible):
        return "only punctuation", 0
    return None


def _is_mark(character: str) -> bool:
    return unicodedata.category(character)[0] in "PZC" or character in "|+=~^`<>$"
