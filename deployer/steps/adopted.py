"""What had the port before and was not started by this tool: written down before it is ended
(`stop.old_server: adopt`), and started again when nothing of ours can take its place.

Its words, environment, folder and user are kept on the target in a folder that only root reads;
they go nowhere else. A unit of systemd is stopped and started by its name.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from dataclasses import dataclass

from deployer.deployment import Deployment
from deployer.errors import StepFailed
from deployer.model import ProbeOutput
from deployer.remote.transport import Transport
from deployer.sglang.masking import masked_words
from deployer.state import DeploymentState, Migration
from deployer.steps.server_facts import PortOwner, parse_server
from deployer.steps.server_script import server_script_text
from deployer.steps.shards_facts import find_python

FOLDER = "/var/lib/deployer/adopted"
"""In the guest: <deployment>/kept/."""
SHOWN = 500
"""Characters of its command line in a message."""

Progress = Callable[[str, float, float], None]
"""What is waited for, seconds so far, seconds at most."""

# $1 folder, $2 pid, $3 its start time, $4 boot id. Prints the unit whose main process it is. A
# worker that has the port is what its parent started. What a pipe of it went to has no reader any
# more: only a log file is written down.
KEEP = r"""umask 077
pid=$2
is_server() { tr '\0' ' ' <"/proc/$1/cmdline" | grep -q 'sglang[./]launch_server\|sglang serve'; }
read -r boot </proc/sys/kernel/random/boot_id
read -r line <"/proc/$pid/stat" || exit 44
set -- "$1" "$3" "$4" ${line##*) }
[ "$boot" = "$3" ] && [ "${23}" = "$2" ] || exit 44
while [ "$5" -gt 1 ] && [ "$(readlink "/proc/$5/exe")" = "$(readlink "/proc/$pid/exe")" ] &&
  is_server "$5"; do
  pid=$5
  read -r line <"/proc/$pid/stat" || exit 44
  set -- "$1" "$2" "$3" ${line##*) }
done
mkdir -p "$1" || exit 1
rm -rf "$1/new" && mkdir "$1/new" || exit 1
cat "/proc/$pid/cmdline" >"$1/new/words" && cat "/proc/$pid/environ" >"$1/new/environ" || exit 1
readlink "/proc/$pid/cwd" >"$1/new/cwd" && readlink "/proc/$pid/exe" >"$1/new/exe" || exit 1
stat -c '%u %g' "/proc/$pid" >"$1/new/owner" || exit 1
readlink "/proc/$pid/fd/1" >"$1/new/out" 2>/dev/null || :
unit=$(sed -n 's/.*\/\([^/]*\.service\)$/\1/p' "/proc/$pid/cgroup" 2>/dev/null | tail -n 1)
[ -n "$unit" ] && main=$(systemctl show -p MainPID "$unit" 2>/dev/null) || main=
[ "$main" != "MainPID=$pid" ] || echo "$unit" >"$1/new/unit"
rm -rf "$1/kept" && mv "$1/new" "$1/kept" || exit 1
[ ! -f "$1/kept/unit" ] || cat "$1/kept/unit"
"""

# $1 folder. Prints one JSON line: pid and start time, or unit, or problem.
_START = r"""
import json, os, shutil, subprocess, sys
kept = sys.argv[1] + "/kept/"
def read(name):
    with open(kept + name, "rb") as file:
        return file.read()
def words(name):
    return [word for word in read(name).split(b"\0") if word]
def tell(**said):
    print(json.dumps(said))
    sys.exit(0)
if not os.path.isdir(kept):
    tell(problem="what it was is not written down")
if os.path.exists(kept + "unit"):
    unit = read("unit").decode().strip()
    done = subprocess.run(["systemctl", "start", unit], capture_output=True)
    if done.returncode:
        tell(problem=done.stderr.decode(errors="replace"))
    tell(unit=unit)
raw = read("words").split(b"\0")
argv = raw[:-1] if raw[-1:] == [b""] else raw
environ = dict(word.split(b"=", 1) for word in words("environ") if b"=" in word)
cwd, exe = read("cwd").rstrip(b"\n"), read("exe").rstrip(b"\n")
uid, gid = map(int, read("owner").split())
out = read("out").rstrip(b"\n") if os.path.exists(kept + "out") else b""
path = environ.get(b"PATH", b"/usr/local/bin:/usr/bin:/bin").decode()
program = os.path.join(cwd, argv[0]) if b"/" in argv[0] else os.fsencode(
    shutil.which(os.fsdecode(argv[0]), path=path) or exe)
if not os.path.exists(program):
    program = exe
def become():
    if os.getuid() == 0 and (uid or gid):
        os.setgroups([gid])
        os.setgid(gid)
        os.setuid(uid)
regular = out.startswith(b"/") and os.path.isfile(out)
log = open(out if regular else os.devnull, "ab")
try:
    child = subprocess.Popen(argv, executable=program, env=environ, cwd=cwd, preexec_fn=become,
        stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
except (OSError, subprocess.SubprocessError) as error:
    tell(problem=str(error))
with open("/proc/%d/stat" % child.pid) as file:
    start = int(file.read().rpartition(")")[2].split()[19])
try:
    tell(problem="it ended at once with status %d" % child.wait(timeout=1.0))
except subprocess.TimeoutExpired:
    tell(pid=child.pid, start=start)
"""

# $1 pid, $2 its start time. Exit 0: it lives (a zombie does not).
_LIVES = r"""read -r line <"/proc/$1/stat" || exit 1
set -- "$2" ${line##*) }
[ "$2" != Z ] && [ "${21}" = "$1" ]
"""


@dataclass(frozen=True)
class Written:
    """It is written down. `unit`: of systemd, '' when it is the main process of none."""

    unit: str = ""


@dataclass(frozen=True)
class Again:
    """How the start went: by `unit`, or as process `pid` with kernel start time `start`."""

    pid: int = 0
    start: int = 0
    unit: str = ""
    problem: str = ""

    @property
    def name(self) -> str:
        """For messages."""
        return f"unit {self.unit}" if self.unit else f"pid {self.pid}"


def folder(want: Deployment) -> str:
    """Where it is kept, on the target."""
    return f"{FOLDER}/{want.name}"


def keep(guest: Transport, want: Deployment, owner: PortOwner, boot: str) -> Written | None:
    """Writes down what has the port; None when it is gone by now.

    Raises StepFailed when it cannot be written: then nothing may stop it. Unreachable.
    """
    args = (folder(want), str(owner.pid), str(owner.start), boot)
    answer = guest.run(KEEP, args=args)
    if answer.exit == 44:
        return None
    if answer.exit != 0:
        said = (answer.error_text.strip() or f"exit {answer.exit}").splitlines()[-1]
        raise StepFailed(
            f"pid {owner.pid} has the port, and how it was started cannot be written down: {said}",
            where=want.id,
            fix="stop it yourself; it will then not be started again",
        )
    return Written(answer.text.strip())


def stop_unit(guest: Transport, unit: str) -> str:
    """Tells systemd to end it, which would start it again else; what came of it, in words.

    Does not wait: its processes are ended, and seen to end, as any other's.
    """
    answer = guest.run('systemctl stop --no-block -- "$1"', args=(unit,))
    if answer.exit != 0:
        said = (answer.error_text.strip() or f"exit {answer.exit}").splitlines()[-1]
        return f"unit {unit} could not be told to stop, and may start it again: {said}"
    return (
        f"unit {unit} is told to stop; the next boot starts it again, unless you "
        f"`systemctl disable {unit}`"
    )


def kept(guest: Transport, want: Deployment) -> str:
    """The command line of what is written down, quoted for a shell; '' when nothing is."""
    return command_line(guest.run(KEPT, args=(folder(want),)).stdout)


def for_abort_only(state: DeploymentState) -> Migration | None:
    """The finished migration that wrote down what is there: only its --abort starts that again."""
    one = state.migration
    return one if one is not None and one.outcome == "done" and one.adopted else None


KEPT = '[ ! -f "$1/kept/words" ] || cat "$1/kept/words"\n'
"""$1 folder. Prints its words, each with a NUL at its end."""


def command_line(words: bytes) -> str:
    """The answer of KEPT, quoted for a shell, without a key's value; '' for nothing. Pure."""
    raw = words.decode("utf-8", "replace").removesuffix("\0")
    return shlex.join(masked_words(raw.split("\0")))[:SHOWN] if raw else ""


def start_again(guest: Transport, want: Deployment) -> Again:
    """Starts it; whether it serves is for `listens_again`. Raises Unreachable."""
    script = find_python(want.playbook.engine.venv)
    script += '[ -n "$py" ] || exit 45\nexec "$py" -I -S -c "$1" "$2"\n'
    answer = guest.run(script, args=(_START, folder(want)))
    if answer.exit == 45:
        return Again(problem="there is no python3 to start it with")
    try:
        said = json.loads(answer.stdout)
        again = Again(
            int(said.get("pid", 0)),
            int(said.get("start", 0)),
            str(said.get("unit", "")),
            " ".join(str(said.get("problem", "")).split()),
        )
    except (ValueError, AttributeError, TypeError):
        lines = answer.error_text.strip().splitlines()
        return Again(problem=lines[-1] if lines else f"exit {answer.exit}")
    return again


def listens_again(
    guest: Transport,
    want: Deployment,
    again: Again,
    progress: Progress,
    now: Callable[[], float],
    sleep: Callable[[float], None],
) -> str:
    """Waits until the port is listened on, serve.ready_timeout_s at most; why not, '' when it is.

    It ends at once when the process is dead. Raises Unreachable.
    """
    began, limit_s = now(), want.playbook.serve.ready_timeout_s
    script = server_script_text(want)
    while True:
        answer = guest.run(script, timeout_s=30)
        fact = parse_server(ProbeOutput(answer.exit, answer.stdout, answer.stderr))
        if fact.asked and fact.listening:
            return ""
        if again.pid:
            lives = guest.run(_LIVES, args=(str(again.pid), str(again.start)))
        else:
            lives = guest.run('systemctl is-active -q -- "$1"', args=(again.unit,))
        if lives.exit != 0:
            return "it ended before it listened"
        spent = now() - began
        if spent >= limit_s:
            return f"it lives, and does not listen on port {want.port} after {limit_s:g} s"
        progress(f"waiting for {again.name}, which had port {want.port} before", spent, limit_s)
        sleep(1.0)


def forget(guest: Transport, want: Deployment) -> None:
    """Removes what is written down. Raises Unreachable."""
    guest.run(FORGET, args=(folder(want),))


FORGET = 'rm -rf "$1"; rmdir "${1%/*}" 2>/dev/null; exit 0\n'
"""$1 folder."""


def back_again(
    guest: Transport,
    want: Deployment,
    progress: Progress,
    now: Callable[[], float],
    sleep: Callable[[float], None],
) -> tuple[str, bool]:
    """Starts again what is written down and waits for it; what came of it, and whether it serves.

    ('', False) when nothing is written down. Raises Unreachable.
    """
    command = kept(guest, want)
    if not command:
        return "", False
    again = start_again(guest, want)
    problem = again.problem or listens_again(guest, want, again, progress, now, sleep)
    if problem:
        return (
            f"what had port {want.port} before could not be started again: {problem}; its command "
            f"line: {command} (its environment and folder: {folder(want)}/kept)"
        ), False
    forget(guest, want)
    return (
        f"what had port {want.port} before, which this tool did not start, serves again as "
        f"{again.name}: {command}"
    ), True
