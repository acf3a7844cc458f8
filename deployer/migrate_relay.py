"""Weights through the controller, for hosts that see neither each other nor the Hub.

Every block goes by two execs, the next one read while the last is written. It lands in NAME.part,
where the shards step finds it, hashes it and gives it its name: nothing here decides that bytes are
right. What is there already is gone on with, so a killed relay loses one block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

from deployer.errors import StepFailed
from deployer.remote.transport import Answer, Transport
from deployer.state import ManifestFile

BLOCK = 8 << 20
BLOCK_S = 120.0
"""How long one block may take on one side."""

# $1 path, $2 its size, $3 offset, $4 bytes. 44: there is no such file of that size.
_READ = r"""[ -f "$1" ] && [ "$(stat -L -c %s "$1")" = "$2" ] || exit 44
exec tail -c "+$(($3 + 1))" "$1" | head -c "$4"
"""
# $1 path without .part, $2 its size; prints how much of it is there, `done` for a file under its
# name. Of pieces that a map tells apart only the leading one is kept: a relay goes on at an end.
_LOOK = r"""[ ! -e "$1" ] || { echo done; exit 0; }
[ ! -L "$1.part" ] || exit 45
have=0
[ ! -e "$1.part" ] || have=$(stat -c %s "$1.part")
if [ -e "$1.part.map" ]; then
  prefix=$(sed -n 's/^{"prefix": *\([0-9][0-9]*\).*/\1/p' "$1.part.map")
  [ "${prefix:-0}" -ge "$have" ] || have=${prefix:-0}
  if [ -e "$1.part" ]; then
    dd if=/dev/null of="$1.part" bs=1 seek="$have" 2>/dev/null || exit 1
  fi
  rm -f "$1.part.map" || exit 1
fi
[ "$have" -le "$2" ] || have=0
echo "$have"
"""
# $1 path without .part, $2 offset; stdin: the block.
_WRITE = r"""umask 022
mkdir -p "${1%/*}" || exit 1
[ ! -L "$1.part" ] || exit 45
if [ "$2" = 0 ]; then : >"$1.part" || exit 1; fi
[ "$(stat -c %s "$1.part")" = "$2" ] || exit 46
cat >>"$1.part"
"""
Progress = Callable[[int, int], None]
"""Bytes brought, bytes of all files."""


def relay(
    source: tuple[Transport, str],
    destination: tuple[Transport, str],
    files: list[ManifestFile],
    progress: Progress,
) -> int:
    """Brings what the destination lacks; the number of bytes sent. `source`: transport and folder.

    Raises StepFailed, Unreachable; what came is kept.
    """
    total = sum(file.size for file in files)
    sent = there = 0
    for file in files:
        at = _there(destination, file)
        there += file.size if at is None else at
        progress(there, total)
        if at is None:
            continue
        for block in _blocks(source, file, at):
            _write(destination, file, at, block)
            at, sent, there = at + len(block), sent + len(block), there + len(block)
            progress(there, total)
    return sent


def _there(destination: tuple[Transport, str], file: ManifestFile) -> int | None:
    """Bytes of NAME.part to go on after; None when the file is not ours to bring."""
    transport, folder = destination
    answer = transport.run(_LOOK, args=(f"{folder}/{file.path}", str(file.size)))
    said = answer.text.strip()
    if answer.exit != 0 or not (said.isdigit() or said == "done"):
        raise _failed(transport, file, _why(answer))
    return int(said) if said.isdigit() else None


def _blocks(source: tuple[Transport, str], file: ManifestFile, start: int) -> Iterator[bytes]:
    """The file from `start` on; one block is read ahead."""
    transport, folder = source

    def read(at: int) -> bytes:
        want = min(BLOCK, file.size - at)
        path = f"{folder}/{file.path}"
        args = (path, str(file.size), str(at), str(want))
        answer = transport.run(_READ, args=args, timeout_s=BLOCK_S)
        if answer.exit == 44:
            raise _failed(transport, file, f"it is not there with its {file.size} bytes")
        if len(answer.stdout) != want:
            raise _failed(transport, file, f"{len(answer.stdout)} of {want} bytes came")
        return answer.stdout

    with ThreadPoolExecutor(max_workers=1) as pool:
        ahead = pool.submit(read, start) if start < file.size else None
        at = start
        while ahead is not None:
            block = ahead.result()
            at += len(block)
            ahead = pool.submit(read, at) if at < file.size else None
            yield block


def _write(destination: tuple[Transport, str], file: ManifestFile, at: int, block: bytes) -> None:
    transport, folder = destination
    args = (f"{folder}/{file.path}", str(at))
    answer = transport.run(_WRITE, args=args, stdin=block, timeout_s=BLOCK_S)
    if answer.exit != 0:
        raise _failed(transport, file, _why(answer))


def _why(answer: Answer) -> str:
    known = {
        45: "its .part is a symbolic link: remove it",
        46: "its .part was changed by somebody else meanwhile",
    }
    return answer.error_text or known.get(answer.exit) or f"exit {answer.exit}"


def _failed(transport: Transport, file: ManifestFile, why: str) -> StepFailed:
    told = (why.strip() or "no word").splitlines()[-1]
    return StepFailed(
        f"{file.path} could not be brought through this machine: {told}",
        where=transport.name,
        fix="run the same command again; what came is kept",
    )
