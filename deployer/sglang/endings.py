"""How the process of a log ended, where the shell or the supervisor above it wrote so. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence

SIGNALS = {
    -9: "Killed|\u5df2\u6740\u6b7b|\u5f37\u5236\u7d42\u4e86|\u5f37\u5236\u7d50\u675f"
    "|\uc8fd\uc5c8\uc74c"
    "|Get\u00f6tet|Processus arr\u00eat\u00e9|Terminado \\(killed\\)|\u0423\u0431\u0438\u0442\u043e"
    "|Ucciso|Morto|Unicestwiony|D\u00f6dad|Ge\u00eblimineerd|\u0412\u0431\u0438\u0442\u043e",
    -15: "Terminated|\u5df2\u7ec8\u6b62|\u7d42\u6b62|\uc885\ub8cc\ub428|Beendet|Terminato"
    "|\u0417\u0430\u0432\u0435\u0440\u0448\u0435\u043d\u043e|Zako\u0144czony|Be\u00ebindigd",
    -6: "Aborted|Abgebrochen|Abandon|Abortado|Annullato|\u4e2d\u6b62|\u5df2\u653e\u5f03",
    -7: "Bus error|Bus-Zugriffsfehler|Erreur du bus|\u603b\u7ebf\u9519\u8bef",
    -11: "Segmentation fault|\u6bb5\u9519\u8bef|Speicherzugriffsfehler|Erreur de segmentation"
    "|Violaci\u00f3n de segmento|\u041e\u0448\u0438\u0431\u043a\u0430 \u0441\u0435\u0433\u043c"
    "\u0435\u043d\u0442\u0438\u0440\u043e\u0432\u0430\u043d\u0438\u044f|Errore di segmentazione",
    -4: "Illegal instruction|Ung\u00fcltiger Maschinenbefehl|\u975e\u6cd5\u6307\u4ee4",
}
"""Signal -> glibc's words for it (`libc.mo` of glibc 2.36), in the tongues of its shells."""
SHELL = re.compile(
    r"^(?:\S+: (?:line |\u7b2c )?\d+(?: ?\u884c)?: +)?(?:\[\d+\] *[+-]? *)?(?:\d+ +)?(?:"
    + "|".join(f"(?P<s{-signal}>{words})" for signal, words in SIGNALS.items())
    + r")(?: \([^)]*\))?(?:\s*$|\s{2,}\S.*$)"
)
"""`Killed`; `run.sh: line 5:  1234 Killed                  python3 -m ...`."""
COMPOSE = re.compile(r"^[\w.-]+ exited with code (?P<code>\d+)(?: \(restarting\))?\s*$")
SYSTEMD = re.compile(
    r"\.(?:service|scope): Main process exited, code=(?P<how>exited|killed|dumped), "
    r"status=(?P<status>\d+)"
)
LAST = 12


def told_exit(lines: Sequence[str]) -> int | None:
    """The exit code that the last lines tell: 0..255, or -n for signal n; None: they tell none."""
    for line in reversed([line for line in lines if line.strip()][-LAST:]):
        text = line.strip()
        if shell := SHELL.match(text):
            return next(-int(name[1:]) for name, word in shell.groupdict().items() if word)
        if compose := COMPOSE.match(text):
            return as_signal(int(compose["code"]))
        if systemd := SYSTEMD.search(text):
            status = int(systemd["status"])
            return as_signal(status) if systemd["how"] == "exited" else -status
    return None


def as_signal(code: int) -> int:
    """A shell tells of signal n as 128 + n."""
    return 128 - code if 128 < code <= 192 else code


def is_end(line: str) -> bool:
    """Does the line only say that the process ended?"""
    text = line.strip()
    return bool(SHELL.match(text) or COMPOSE.match(text) or SYSTEMD.search(text))
