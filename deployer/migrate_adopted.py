"""What holds the destination's port and was not started by this tool: ended for the migration
(`stop.old_server: adopt`), and started again by `--abort`.

Before anything is changed, its words, environment, folder and user are written down on the target
in a folder that only root reads; they go nowhere else. A unit of systemd is started by its name.
"""

from __future__ import annotations

import json

from deployer.errors import StepFailed
from deployer.migrate_side import Side
from deployer.model import Facts
from deployer.steps.server_facts import PortOwner, ServerFact
from deployer.steps.shards_facts import find_python

FOLDER = "/var/lib/deployer/adopted"
"""In the guest: <deployment>/."""

# $1 folder, $2 pid, $3 its start time, $4 boot id. A worker that has the port is what its parent
# started. What a pipe of it went to has no reader any more: only a log file is written down.
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
rm -rf "$1/kept" && mv "$1/new" "$1/kept"
"""

# $1 folder. Prints one JSON line: pid, or unit, or problem.
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
except OSError as error:
    tell(problem=str(error))
try:
    tell(problem="it ended at once with status %d" % child.wait(timeout=1.0))
except subprocess.TimeoutExpired:
    tell(pid=child.pid)
"""


def strangers(facts: Facts | None) -> tuple[PortOwner, ...]:
    """Who has the port there and is no launch of ours."""
    fact = facts.get(ServerFact) if facts is not None else None
    return tuple(owner for owner in fact.strangers if not owner.job) if fact is not None else ()


def told(owner: PortOwner) -> str:
    """What becomes of it, before it is asked for."""
    return (
        f"pid {owner.pid}, which this tool did not start, ends; --abort starts it again: "
        f"{owner.command[:200]}"
    )


def keep(side: Side, facts: Facts) -> str:
    """Writes down what may be stopped there; its command, '' when the port is free.

    Raises StepFailed when it cannot be written: then nothing may stop it.
    """
    found = strangers(facts)
    if not found:
        return ""
    owner, boot = found[0], facts.need(ServerFact).boot
    args = (f"{FOLDER}/{side.want.name}", str(owner.pid), str(owner.start), boot)
    answer = side.guest.run(KEEP, args=args)
    if answer.exit == 44:
        return ""
    if answer.exit != 0:
        said = (answer.error_text.strip() or f"exit {answer.exit}").splitlines()[-1]
        raise StepFailed(
            f"pid {owner.pid} has the port, and how it was started cannot be written down: {said}",
            where=side.want.id,
            fix="stop it yourself; --abort will then not start it again",
        )
    side.note("prepare", f"{told(owner)} (kept in {args[0]})")
    return owner.command[:500]


def put_back(side: Side) -> None:
    """Starts it again where nobody has the port; what comes of it is told, not raised."""
    fact = side.gather().get(ServerFact)
    folder = f"{FOLDER}/{side.want.name}"
    if fact is None or not fact.asked:
        side.note("undo", "who has the port cannot be seen: nothing is started", "warning")
        return
    if fact.listening:
        who = "; ".join(f"pid {one.pid} ({one.command[:200]})" for one in fact.owners)
        side.note("undo", f"port {side.want.port} is held by {who or 'somebody'} again")
    else:
        script = find_python(side.want.playbook.engine.venv)
        script += '[ -n "$py" ] || exit 45\nexec "$py" -I -S -c "$1" "$2"\n'
        answer = side.guest.run(script, args=(_START, folder))
        said = _said(answer.stdout)
        if "problem" in said or answer.exit != 0:
            why = str(said.get("problem") or answer.error_text or f"exit {answer.exit}").strip()
            text = (
                f"what had the port before could not be started again: {why}; its words: {folder}"
            )
            side.note("undo", text, "warning")
            return
        by = f"unit {said['unit']}" if "unit" in said else f"pid {said.get('pid')}"
        side.note("undo", f"what had the port before is started again: {by}")
    side.guest.run('rm -rf "$1"; rmdir "${1%/*}" 2>/dev/null; exit 0\n', args=(folder,))


def _said(raw: bytes) -> dict[str, object]:
    try:
        said = json.loads(raw)
    except ValueError:
        return {"problem": "no word came back"}
    return said if isinstance(said, dict) else {}
