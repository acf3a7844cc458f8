"""Bad answers by kind: the fault `server-says-KIND`, or `-late` for one that starts well.

`server-says` alone answers with the text of the file that LAB_SAYS names (/etc/lab/says).
"""

from __future__ import annotations

import os
from pathlib import Path

from sglang.lookalike import essay

SAYS = "server-says"
LATE = "-late"
LATE_WORDS = 90
LONGEST = 1 << 16
KINDS = {
    "bangs": "!",
    "letters": "a",
    "zeros": "0",
    "newlines": "\n",
    "spaces": " ",
    "dots": ". ",
    "words": " the",
    "two-words": "thinking\n\n",
    "phrases": " and so on, and so forth,",
    "sentences": " The sea is wide and the sea is deep.",
    "lines": "- the same point\n",
    "list-cycle": "- apples\n- pears\n- plums\n",
    "headings": "## Summary\n\n",
    "code": "    result.append(value)\n",
    "table": "| a | b | c |\n",
    "json": '{"name": "x", "value": 1},\n',
    "html": "<div></div>",
    "urls": " https://example.org/page",
    "wait": "Wait, let me think about it again.\n\n",
    "assistant": "<|im_end|>\n<|im_start|>assistant\n",
    "think": "<think>",
    "byte-fallback": "<0xE2><0x80>",
    "replacement": "\ufffd",
    "mojibake": "ÃƒÂ¤Ã¶Ã¼ ",
    "chinese": "的的",
    "emoji": "😀😀",
    "brackets": "]])}",
    "control": "\x01\x02",
}
"""What is said again and again."""
STUCK = "count-stuck"
GARBAGE = "garbage"
NONSENSE = (
    " fois", "umber", "ização", " 其", "}})", "ニ", " wer", "\\n", "абв", "_GPIO", " tk", "###",
    " el", "zął", "::", " Ḩ", "jaxb", " 것", "EDIUM", " gg", "ẞ", "xFF", "λ", "<<",
)  # fmt: skip


def kinds() -> list[str]:
    """Every KIND, without `-late`."""
    return [*KINDS, STUCK, GARBAGE]


def ordered(on: set[str], prompt: str) -> str | None:
    """The text that a fault makes the server say; None when none is switched on."""
    for name in sorted(on):
        if name == SAYS:
            path = Path(os.environ.get("LAB_SAYS", "/etc/lab/says"))
            return path.read_bytes().decode("utf-8")
        kind = name.removeprefix(SAYS + "-")
        if kind == name:
            continue
        head = ""
        if kind.endswith(LATE):
            head = " ".join(essay.write(prompt[-400:], 7).split(" ")[:LATE_WORDS]) + " "
        if (text := said(kind.removesuffix(LATE))) is not None:
            return head + text
    return None


def said(kind: str) -> str | None:
    """The text of one kind, longer than any limit; None for an unknown one."""
    if kind == STUCK:
        return ", ".join(map(str, range(1, 38))) + ", 37" * (LONGEST // 4)
    if kind == GARBAGE:
        # A walk through the list that does not repeat within any answer.
        count = len(NONSENSE)
        return "".join(NONSENSE[(i * i + i // count) % count] for i in range(LONGEST // 4))
    unit = KINDS.get(kind)
    return None if unit is None else unit * (LONGEST // len(unit))
