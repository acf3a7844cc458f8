"""The server prints its arguments, API keys among them: they are masked before they are shown; so
are those on the command line of a server that somebody else started.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

NAME = "api_key"
"""Ends `admin_api_key` too."""

_START = r"""(api_key['"]?[=:] ?)(['"])"""
_INSIDE = r"(?:\\.|(?!\2)[^\\\n])*"
_VALUE = re.compile(rf"{_START}{_INSIDE}(\2|\\?(?=\n|\Z))")
_OPEN = re.compile(rf"""api_key['"]?(?:[=:] ?)?\Z|{_START}{_INSIDE}\\?\Z""")


class KeyMask:
    """Masks `api_key='...'` in a text that comes in pieces; a cut value is kept back."""

    def __init__(self) -> None:
        self._kept = ""

    def feed(self, text: str) -> str:
        """What can be shown by now."""
        text = self._kept + text
        end = _shown_end(text)
        self._kept = text[end:]
        return _masked(text[:end])

    def flush(self) -> str:
        """What was kept back; a value without its end is masked up to there."""
        text, self._kept = self._kept, ""
        return _masked(text)


_SECRET_FLAG = re.compile(r"--?[\w-]*(?:api[-_]?key|password|passwd|token|secret)\Z", re.IGNORECASE)


def masked_words(words: Sequence[str]) -> list[str]:
    """A command line without the values of flags that name a secret: `--api-key ***`."""
    shown, hide = [], False
    for word in words:
        flag, equals, _ = word.partition("=")
        secret = _SECRET_FLAG.match(flag) is not None
        if hide and not word.startswith("--"):
            shown.append("***")
        else:
            shown.append(f"{flag}=***" if secret and equals else word)
        hide = secret and not equals
    return shown


def _masked(text: str) -> str:
    return _VALUE.sub(lambda found: f"{found[1]}{found[2]}***{found[3]}", text)


def _shown_end(text: str) -> int:
    """Up to where `text` has no key that may go on in the next piece."""
    found = _OPEN.search(text, text.rfind("\n") + 1)
    if found:
        return found.start()
    for size in range(len(NAME) - 1, 0, -1):
        if text.endswith(NAME[:size]):
            return len(text) - size
    return len(text)
