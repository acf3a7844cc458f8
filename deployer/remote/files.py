"""Files on a target: written atomically, read with a limit, hashed."""

from __future__ import annotations

import hashlib

from deployer import errors
from deployer.remote.transport import Answer, Transport

# $1 path, $2 octal mode, $3 size, $4 sha256; stdin: the content.
WRITE = r"""path=$1
case $path in /*) ;; *) printf 'not an absolute path\n' >&2; exit 64 ;; esac
[ ! -d "$path" ] || { printf 'it is a folder\n' >&2; exit 73; }
# A symlink stays: the file that it points to is replaced.
if [ -L "$path" ]; then path=$(readlink -f "$path") || exit 73; fi
(umask 022 && mkdir -p "${path%/*}/") || exit 73
umask 077
new=$(mktemp "${path%/*}/.deployer-new.XXXXXXXXXX") || exit 73
trap 'rm -f "$new"' EXIT
trap 'exit 129' HUP
trap 'exit 130' INT
trap 'exit 143' TERM
cat >"$new" || exit 74
size=$(wc -c <"$new")
[ "$size" -eq "$3" ] || { printf '%s of %s bytes arrived\n' "$size" "$3" >&2; exit 74; }
if command -v sha256sum >/dev/null; then
  sum=$(sha256sum <"$new") || exit 74
  [ "${sum%% *}" = "$4" ] || { printf 'the sha256 differs after writing\n' >&2; exit 74; }
fi
if [ -e "$path" ]; then
  owner=$(stat -c %u:%g "$path") && chown "$owner" "$new" || exit 74
fi
chmod "$2" "$new" || exit 74
flush() { sync -f "$1" 2>/dev/null || sync; }
flush "$new" && mv -f "$new" "$path" && flush "$path"
"""

# $1 path, $2 most bytes. One byte more is sent when there are more.
READ = r"""[ -e "$1" ] || { [ -L "$1" ] || exit 44; }
[ -f "$1" ] || { printf 'not a regular file\n' >&2; exit 45; }
exec head -c "$(($2 + 1))" <"$1"
"""

# $1.. paths; prints one hash a line, `-` for what cannot be read.
SHA256 = r"""if command -v sha256sum >/dev/null; then
  for path in "$@"; do
    if sum=$(sha256sum <"$path"); then printf '%s\n' "${sum%% *}"; else printf -- '-\n'; fi
  done
elif command -v python3 >/dev/null; then
  exec python3 -c '
import hashlib, sys
for path in sys.argv[1:]:
    found = hashlib.sha256()
    try:
        with open(path, "rb") as file:
            while block := file.read(1 << 20):
                found.update(block)
        print(found.hexdigest())
    except OSError as error:
        print(error, file=sys.stderr)
        print("-")
' "$@"
else
  printf 'there is neither sha256sum nor python3 on this machine\n' >&2
  exit 69
fi
"""


def write_atomic(
    transport: Transport, path: str, content: bytes, mode: int = 0o644, *, timeout_s: float = 120.0
) -> None:
    """Replaces `path` by a checked, flushed temp file and a rename; readers see old or new.

    The owner of a file that exists is kept. The content goes by stdin. Raises RemoteCommandFailed;
    `path` is then unchanged.
    """
    answer = transport.run(
        WRITE,
        args=(path, f"{mode:o}", str(len(content)), hashlib.sha256(content).hexdigest()),
        stdin=content,
        timeout_s=timeout_s,
    )
    if answer.exit != 0:
        raise _failed(transport, f"could not write {path}", answer)


def read_file(
    transport: Transport, path: str, max_bytes: int = 1024 * 1024, *, timeout_s: float = 60.0
) -> bytes | None:
    """The content, None when there is no such file.

    Raises RemoteCommandFailed when it cannot be read or is larger than `max_bytes`.
    """
    answer = transport.run(READ, args=(path, str(max_bytes)), timeout_s=timeout_s)
    if answer.exit == 44:
        return None
    if answer.exit != 0:
        raise _failed(transport, f"could not read {path}", answer)
    if len(answer.stdout) > max_bytes:
        raise errors.RemoteCommandFailed(
            f"{path} is larger than {max_bytes} bytes", where=transport.name
        )
    return answer.stdout


def sha256(transport: Transport, *paths: str, timeout_s: float = 600.0) -> dict[str, str | None]:
    """The sha256 of each path in hex, None for one that cannot be read.

    Raises RemoteCommandFailed when the target has no tool for it.
    """
    answer = transport.run(SHA256, args=paths, timeout_s=timeout_s)
    sums = answer.text.split("\n")[:-1]
    if answer.exit != 0 or len(sums) != len(paths):
        raise _failed(transport, "could not hash files", answer)
    return {path: None if found == "-" else found for path, found in zip(paths, sums, strict=True)}


def _failed(transport: Transport, what: str, answer: Answer) -> errors.RemoteCommandFailed:
    lines = tuple(answer.error_text.splitlines()[-10:]) or (f"exit {answer.exit}",)
    return errors.RemoteCommandFailed(what, where=transport.name, evidence=lines)
