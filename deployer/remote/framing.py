"""The envelope of every remote command: any noise around it, one framed answer out of it. Pure.

`frame` turns a script into the argv of a small constant `/bin/sh -c` program. It prints a begin
mark and, when the script has ended however it did, an end mark with the exit status, on stdout and
on stderr alike; what login files print lies outside the marks. The mark is a random word that
stands in the command line in two halves only, so a script that prints its own `ps` line cannot
close its frame. When both end marks were seen the answer is complete, even if a background child
still holds the channel.

The text of the script is encoded so that it needs no character that some login shell (csh, fish)
treats specially inside single quotes.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field

from deployer.remote.transport import Answer
from deployer.shell import words

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

ARGUMENT_LIMIT = 100 * 1024
"""Most bytes of an encoded script that travel as an argument (the kernel's limit is 128 KiB)."""

NOISE_KEPT = 4096
"""Bytes of noise before the begin mark that are kept as evidence."""

_ENVIRONMENT = (
    f"PATH={PATH}; LC_ALL=C; HOME=${{HOME:-/root}}; export PATH LC_ALL HOME; "
    "unset LANGUAGE CDPATH ENV BASH_ENV; umask 022; cd /; "
)
# The frame outlives a signal to the whole group (a command, not "", so the script gets defaults).
_BEGIN = (
    "trap : HUP INT QUIT TERM; exec 3>&2 2>/dev/null; "
    'printf "%s%s:begin;" "$1" "$2"; printf "%s%s:begin;" "$1" "$2" >&3; '
)
_FROM_ARGUMENT = 'p=$(printf "%b." "$3"); /bin/sh -c "${p%.}" sh 2>&3 3>&-; '
# `read` takes single bytes from a pipe, so what follows the line is left to the script. The script
# itself comes through another pipe: it may be longer than one argument can be.
_FROM_STDIN = (
    "IFS= read -r p; "
    '{ printf "%b" "$p" | { exec 4<&0 0<&5 5<&-; exec /bin/sh /proc/self/fd/4 2>&3 3>&-; }; } '
    "5<&0; "
)
_END = 's=$?; printf "%s%s:end:%s;" "$1" "$2" "$s"; printf "%s%s:end:%s;" "$1" "$2" "$s" >&3'

_ESCAPES = {
    byte: "\\n" if byte == 0x0A else f"\\0{byte:03o}"
    for byte in range(256)
    if not 0x20 <= byte < 0x7F or byte in b"'!\\"
}


@dataclass(frozen=True)
class Frame:
    """A framed command: what to run, what to send, and the mark to look for."""

    argv: tuple[str, ...]
    """Plain ASCII without newline, backslash-quote trouble or `!`; `/bin/sh` first."""
    stdin: bytes = field(repr=False)
    mark: bytes

    @property
    def command(self) -> str:
        """`argv` as one line for any login shell."""
        return "exec " + words(self.argv)


def new_mark() -> str:
    """A word that no output contains by chance or intent."""
    return secrets.token_hex(16)


def encode(text: str) -> str:
    """`text` for `printf %b`, without any character that is special between single quotes.

    Undecodable bytes of file names (`os.fsdecode`) travel as what they were. Raises ValueError for
    a NUL byte and for other lone surrogates.
    """
    if "\0" in text:
        raise ValueError("a NUL byte cannot be part of a script or an argument")
    return text.encode("utf-8", "surrogateescape").decode("latin-1").translate(_ESCAPES)


def frame(
    script: str,
    args: Sequence[str] = (),
    stdin: bytes = b"",
    *,
    mark: str | None = None,
    argument_limit: int = ARGUMENT_LIMIT,
) -> Frame:
    """`script` with `args` as "$1".. and `stdin`, then EOF, on its standard input.

    Raises ValueError for a NUL byte or a lone surrogate in the script or an argument.
    """
    mark = mark or new_mark()
    halves = (mark[: len(mark) // 2], mark[len(mark) // 2 :])
    text = encode(f"set -- {words(args)}; {script}" if args else script)
    as_argument = len(text) <= argument_limit
    program = _ENVIRONMENT + _BEGIN + (_FROM_ARGUMENT if as_argument else _FROM_STDIN) + _END
    argv = ("/bin/sh", "-c", program, "sh", *halves)
    if as_argument:
        return Frame((*argv, text), stdin, mark.encode())
    return Frame(argv, text.encode() + b"\n" + stdin, mark.encode())


class StreamParser:
    """Cuts one stream of an answer out of its noise, incrementally.

    `exit` is the status from the end mark, None until it was seen.
    """

    def __init__(self, mark: bytes) -> None:
        self._mark = mark
        self._begin = mark + b":begin;"
        self._end = mark + b":end:"
        self._pending = b""
        self._chunks: list[bytes] = []
        self.begun = False
        self.exit: int | None = None
        self.noise = b""

    @property
    def payload(self) -> bytes:
        """All bytes between the marks so far."""
        return b"".join(self._chunks)

    @property
    def complete(self) -> bool:
        """The end mark was seen."""
        return self.exit is not None

    def feed(self, data: bytes) -> bytes:
        """Takes bytes as they came; returns the new bytes of the payload among them."""
        if self.complete:
            return b""
        self._pending += data
        if not self.begun:
            noise, found, rest = self._pending.partition(self._begin)
            if not found:
                keep = len(self._begin) - 1
                self.noise = (self.noise + noise[:-keep])[-NOISE_KEPT:]
                self._pending = noise[-keep:]
                return b""
            self.begun = True
            self.noise = (self.noise + noise)[-NOISE_KEPT:]
            self._pending = rest
        return self._take()

    def unframed(self) -> bytes:
        """What was seen of a stream whose end mark never came; for evidence only."""
        if self.begun:
            return self.payload + self._pending
        return self.noise + self._pending

    def _take(self) -> bytes:
        at = self._pending.find(self._end)
        if at < 0:
            cut = len(self._pending) - self._held_back()
        else:
            cut = at
            digits, found, _ = self._pending[at + len(self._end) :].partition(b";")
            if found and digits.isdigit():
                self.exit = int(digits)
        new, self._pending = self._pending[:cut], self._pending[cut:]
        if self.complete:
            self._pending = b""
        if new:
            self._chunks.append(new)
        return new

    def _held_back(self) -> int:
        """Length of the longest tail that may be the start of the end mark."""
        for length in range(min(len(self._end) - 1, len(self._pending)), 0, -1):
            if self._end.startswith(self._pending[-length:]):
                return length
        return 0


class AnswerParser:
    """Both streams of one framed command."""

    def __init__(self, mark: bytes) -> None:
        self.out = StreamParser(mark)
        self.err = StreamParser(mark)

    @property
    def complete(self) -> bool:
        """Both end marks were seen: nothing of the answer is still to come."""
        return self.out.complete and self.err.complete

    def answer(self) -> Answer:
        """The whole answer; ValueError before it is complete."""
        if self.out.exit is None or not self.err.complete:
            raise ValueError("the answer is not complete")
        return Answer(self.out.exit, self.out.payload, self.err.payload)

    def evidence(self, lines: int = 5) -> tuple[str, ...]:
        """The last lines that came on either stream, for the message of an incomplete answer."""
        seen = []
        for stream in (self.out, self.err):
            text = stream.unframed()[-2000:].decode("utf-8", "replace")
            seen += [line for line in text.splitlines() if line.strip()][-lines:]
        return tuple(seen)
