"""The command lines of a copy from another machine: ssh, what it is asked, and rsync. Pure."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence

from deployer.agents.fetch.manifest import File, Peer

CIPHER = "aes128-gcm@openssh.com"
"""1.3 to 1.4 times as fast as OpenSSH's own choice on CPUs with AES."""
CONNECT_S = 10
IO_S = 60
"""rsync ends when nothing comes for so long."""
_OPTIONS = (
    *("BatchMode=yes", "StrictHostKeyChecking=yes", "Compression=no"),
    *("ServerAliveInterval=10", "ServerAliveCountMax=3"),
    *("ControlMaster=no", "ControlPath=none", "ClearAllForwardings=yes"),
    *("ForwardAgent=no", "ForwardX11=no", "PermitLocalCommand=no"),
    "LogLevel=INFO",  # below it ssh does not say why it ends
)

# $1: marker of the lines that are ours; $2: the folder; then the files, below it.
_LOOK = r"""
mark=$1 folder=$2
shift 2
command -v rsync >/dev/null 2>&1 || { echo "$mark norsync"; exit 0; }
cd "$folder/" 2>/dev/null || { echo "$mark nofolder"; exit 0; }
number=0
for name do
  size=$(stat -L -c %s "./$name" 2>/dev/null) && [ -f "./$name" ] && [ -r "./$name" ] || size=-1
  echo "$mark $number $size"
  number=$((number + 1))
done
echo "$mark end"
"""


def ssh_words(peer: Peer, cipher: str) -> list[str]:
    """`ssh` with every option but the host. `cipher`: '' leaves the choice to ssh."""
    words = ["ssh", "-T", "-x", *(part for text in _OPTIONS for part in ("-o", text))]
    words += ["-o", f"ConnectTimeout={CONNECT_S}"]
    if cipher:
        words += ["-c", cipher]
    if peer.identity_file:
        words += ["-i", peer.identity_file, "-o", "IdentitiesOnly=yes"]
    if peer.known_hosts:
        words += ["-o", f"UserKnownHostsFile={peer.known_hosts}"]
        words += ["-o", "GlobalKnownHostsFile=/dev/null"]
    return [*words, "-p", str(peer.port), "-l", peer.user]


def look_words(peer: Peer, cipher: str) -> list[str]:
    """ssh that runs, whatever the login shell is, the script that comes by its stdin."""
    return [*ssh_words(peer, cipher), "--", peer.address, "exec sh -s"]


def look_script(peer: Peer, mark: str, files: Sequence[File]) -> str:
    """What goes to that stdin. Every answer line begins with `mark`."""
    names = shlex.join([mark, peer.path, *(file.path for file in files)])
    return f"set -- {names}\n{_LOOK}"


def parse_look(mark: str, output: str, files: Sequence[File]) -> tuple[str, list[File]]:
    """(why it cannot be used, the files that it has in the right size)."""
    noise = output.partition(mark)[0].strip()
    if noise and mark in output:
        shown = "".join(c if c.isprintable() else "?" for c in noise)[:80]
        return f"its login shell prints {shown!r} before every command, which rsync cannot bear", []
    there: list[File] = []
    ended = False
    for line in output.splitlines():
        words = line.split()
        if words[:1] != [mark]:
            continue
        if words[1:] == ["norsync"]:
            return "rsync is not installed there", []
        if words[1:] == ["nofolder"]:
            return "the folder is not there, or may not be entered", []
        if words[1:] == ["end"]:
            ended = True
        elif len(words) == 3 and words[1].isdigit() and int(words[1]) < len(files):
            file = files[int(words[1])]
            if words[2] == str(file.size):
                there.append(file)
    if not ended:
        return "its answer was cut off", []
    return ("" if there else f"it has none of the {len(files)} files in the right size"), there


def copy_words(
    peer: Peer, cipher: str, into: str, *, resume: bool, kib_per_s: int = 0
) -> list[str]:
    """One rsync into the folder `into`; names come by stdin, 0-separated, and are taken literally.

    `resume`: what is there is checked and continued, else each file is sent whole. Either way the
    file itself is written, so that no death loses bytes.
    """
    words = [*_common(peer, cipher, kib_per_s), "--from0", "--files-from=-"]
    words += ["--append-verify"] if resume else ["-W", "--inplace"]
    return [*words, "--", _source(peer, ""), into.rstrip("/") + "/"]


def patch_words(
    peer: Peer, cipher: str, name: str, target: str, *, kib_per_s: int = 0
) -> list[str]:
    """One rsync that fills the gaps of `target`: only blocks that are not there yet are sent.

    A byte that is right at its place stays so, whenever this is killed.
    """
    words = [*_common(peer, cipher, kib_per_s), "--inplace", "--no-whole-file"]
    return [*words, "--", _source(peer, name), target]


def _common(peer: Peer, cipher: str, kib_per_s: int) -> list[str]:
    shell = " ".join(rsh_quote(word) for word in ssh_words(peer, cipher))
    words = ["rsync", "-L", "-s", f"--timeout={IO_S}", "-e", shell]
    return [*words, f"--bwlimit={kib_per_s}"] if kib_per_s else words


def _source(peer: Peer, name: str) -> str:
    """`host:path`. Not a shell but rsync itself expands wildcards of the path."""
    host = f"[{peer.address}]" if ":" in peer.address else peer.address
    path = peer.path.rstrip("/") + "/" + name
    if re.search(r"[*?\[]", path):
        path = re.sub(r"([\\*?\[\]])", r"\\\1", path)
    return f"{host}:{path}"


def rsh_quote(word: str) -> str:
    """One word for rsync's -e: its quotes are doubled inside quotes, nothing else is special."""
    if re.fullmatch(r"[\w@%+=:,./-]+", word):
        return word
    return "'" + word.replace("'", "''") + "'"
