"""What stands before each line of a log that somebody carried: journald, Docker, Ray, srun. Pure.

The known ones are taken off by their form. Any other is learned: where most lines, among them such
as SGLang begins at the edge, have one form before it, that form is the carrier's.
"""

from __future__ import annotations

import json
import re
from collections import Counter

STAMP = re.compile(
    r"^(?:[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d(?:\.\d+)? \w[^\s:]* [^\s:]+: "
    r"|\d{4}-\d\d-\d\dT[\d:.,]+(?:Z|[+-]\d\d:?\d\d) (?:std(?:out|err) [FP] )?(?:\S+ \S+\[\d+\]: )?"
    r"|[\w.-]+ +\| |\(\w+ pid=\d+(?:, ip=[\d.]+)?\) |\[pod/\S+\] )"
)
"""journald, a container runtime, compose, Ray, kubectl."""
EDGE = re.compile(
    r"\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d[^\]]*\] |Traceback \(most recent call last\):|  File \"/"
    r"|usage: |INFO:     |[\w./-]+\.py:\d+: \w*Warning: |[\w.]+(?:Error|Exception): "
)
"""How lines begin at the edge of SGLang's own log."""
WIDEST = 100
SHARE = 0.6
LEAST = 3
VARIES = re.compile(r"\d+|\b(?:INFO|WARN(?:ING)?|ERROR|DEBUG|CRITICAL|stdout|stderr)\b")


def uncarried(text: str) -> list[str]:
    """The lines, each without what its carriers wrote; numbered as in the text."""
    lines = [_of_json(line) for line in text.split("\n")]
    lines = [STAMP.sub("", line, count=1) for line in lines]
    form = _learned(lines)
    return [form.sub("", line, count=1) for line in lines] if form else lines


def _of_json(line: str) -> str:
    """Docker's json-file driver keeps each line as the `log` of an object."""
    if not line.startswith('{"') or '"log"' not in line:
        return line
    try:
        found = json.loads(line)
    except ValueError:
        return line
    text = found.get("log") if isinstance(found, dict) else None
    return text.rstrip("\n") if isinstance(text, str) else line


def _learned(lines: list[str]) -> re.Pattern[str] | None:
    told = [line for line in lines if line.strip()]
    forms: Counter[str] = Counter()
    for line in told:
        edge = EDGE.search(line, 1, WIDEST)
        if edge and not EDGE.match(line):
            forms[_form(line[: edge.start()])] += 1
    if not forms:
        return None
    form, times = forms.most_common(1)[0]
    pattern = re.compile(form)
    fits = sum(bool(pattern.match(line)) for line in told)
    # One client's text that looks so is no carrier.
    return pattern if times >= LEAST and fits >= SHARE * len(told) else None


def _form(prefix: str) -> str:
    """A pattern of this prefix, in which numbers and levels may be others."""
    fixed = [re.escape(part) for part in VARIES.split(prefix)]
    parts = [r"\d+" if part[0].isdigit() else r"[A-Za-z]+" for part in VARIES.findall(prefix)]
    joined = "".join(a + b for a, b in zip(fixed, [*parts, ""], strict=True))
    # Where nothing follows, a carrier may leave out its last space.
    return "^" + (joined.removesuffix(r"\ ") + "(?: |$)" if joined.endswith(r"\ ") else joined)
