"""A large file of the controller, sent over in pieces that stay: a cut transfer goes on."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

from deployer import errors
from deployer.remote.transport import Answer, Transport

PIECE_BYTES = 4 * 1024 * 1024
PIECE_TIMEOUT_S = 120.0
"""4 MiB in so long: 35 kB/s is the least."""
HASH_TIMEOUT_S = 600.0

# $1 path, $2 sha256, $3 size. Prints `there`, or how many bytes of `path.part` can be used.
LOOK = r"""command -v sha256sum >/dev/null || { echo 'there is no sha256sum here' >&2; exit 69; }
if [ -f "$1" ] && [ "$(stat -c %s "$1")" = "$3" ]; then
  sum=$(sha256sum <"$1")
  [ "${sum%% *}" != "$2" ] || { echo there; exit 0; }
fi
(umask 077 && mkdir -p "${1%/*}/") || exit 73
have=0
[ ! -f "$1.part" ] || have=$(stat -c %s "$1.part")
[ "$have" -le "$3" ] || { rm -f "$1.part"; have=0; }
free=$(df -Pk "${1%/*}/" | awk 'NR == 2 { print $4 }')
if [ -n "$free" ] && [ "$free" -lt $((($3 - have) / 1024 + 1)) ]; then
  echo "${1%/*} has $free KiB free, the file needs $((($3 - have) / 1024 + 1))" >&2
  exit 74
fi
echo "$have"
"""

# $1 path, $2 offset, $3 bytes; stdin: the piece.
PIECE = r"""umask 077
have=0
[ ! -f "$1.part" ] || have=$(stat -c %s "$1.part")
[ "$have" = "$2" ] || { echo "$1.part has $have bytes, not $2: another transfer?" >&2; exit 75; }
cat >>"$1.part" || exit 74
have=$(stat -c %s "$1.part")
[ "$have" = $(($2 + $3)) ] || { echo "$have bytes arrived, not $(($2 + $3))" >&2; exit 74; }
"""

# $1 path, $2 sha256
FINISH = r"""sum=$(sha256sum <"$1.part") || exit 74
if [ "${sum%% *}" != "$2" ]; then
  rm -f "$1.part"
  echo "what arrived has sha256 ${sum%% *}" >&2
  exit 76
fi
mv -f "$1.part" "$1"
"""


def send_file(
    transport: Transport,
    local: Path,
    path: str,
    sha256: str,
    on_progress: Callable[[int, int], None] | None = None,
    *,
    piece_bytes: int = PIECE_BYTES,
) -> int:
    """Brings `local` to `path` there; returns the bytes that were sent, 0 when it was there.

    The file here is hashed first: another one is never sent. The first bytes of an earlier transfer
    are used, and the whole is hashed there before it gets its name. Raises StepFailed (not that
    file, no such file, no room) and Unreachable.
    """
    size = _checked(local, sha256)
    answer = _run(transport, LOOK, (path, sha256, str(size)), f"{path} cannot be written")
    word = answer.text.strip()
    if word == "there":
        return 0
    offset = begun = int(word)
    with local.open("rb") as file:
        file.seek(offset)
        while piece := file.read(piece_bytes):
            _run(
                transport,
                PIECE,
                (path, str(offset), str(len(piece))),
                f"sending {local.name} stopped at {offset} of {size} bytes",
                stdin=piece,
            )
            offset += len(piece)
            if on_progress is not None:
                on_progress(offset, size)
    _run(transport, FINISH, (path, sha256), f"{path} is not the file that was sent")
    return offset - begun


def _checked(local: Path, sha256: str) -> int:
    found, size = hashlib.sha256(), 0
    try:
        with local.open("rb") as file:
            while block := file.read(1 << 20):
                found.update(block)
                size += len(block)
    except OSError as error:
        raise errors.StepFailed(
            f"{local} cannot be read: {error.strerror}",
            where="this machine",
            fix="correct driver.package.local in the playbook, or put the file there",
        ) from error
    if found.hexdigest() != sha256:
        raise errors.StepFailed(
            f"{local} has sha256 {found.hexdigest()}, the playbook wants {sha256}",
            where="this machine",
            fix="take the file that was meant, or correct the sha256 in the playbook",
        )
    return size


def _run(
    transport: Transport, script: str, args: tuple[str, ...], what: str, *, stdin: bytes = b""
) -> Answer:
    timeout = PIECE_TIMEOUT_S if script is PIECE else HASH_TIMEOUT_S
    answer = transport.run(script, args=args, stdin=stdin, timeout_s=timeout)
    if answer.exit != 0:
        lines = tuple(answer.error_text.splitlines()[-10:]) or (f"exit {answer.exit}",)
        raise errors.RemoteCommandFailed(
            what, where=transport.name, fix="run again; what arrived is used", evidence=lines
        )
    return answer
