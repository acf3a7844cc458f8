"""The lab's `pct`: argument forms, texts and exit codes of pve-container 6.1.10.

Not Proxmox code: tests/unit/test_pct_cases.py holds it to recorded answers of the real one. What
runs a container stands behind the names of ct.py (running, init_pid, device, plug, start, kill,
shut_down, enter_argv, attach): another kind of container puts its own ct.py in that place.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys

import ct
import ctconf
import ctdisk
import ctformat
import pctset
import pctsnap
from ctconf import die, load, locked, refuse_lock, save, warn
from pctargs import as_task, options, reject

VERBS = {
    "config",
    "create",
    "delsnapshot",
    "destroy",
    "exec",
    "listsnapshot",
    "pending",
    "pull",
    "push",
    "reboot",
    "rollback",
    "set",
    "shutdown",
    "snapshot",
    "start",
    "status",
    "stop",
    "unlock",
}


def show_list() -> None:
    """`pct list`: nothing at all when there are no containers."""
    names = os.listdir(ctconf.CONF)
    ids = sorted(int(name[:-5]) for name in names if re.fullmatch(r"[1-9]\d+\.conf", name))
    if ids:
        print("{:<10} {:<10} {:<12} {:<20}".format("VMID", "Status", "Lock", "Name"))
    for vmid in ids:
        keys = load(str(vmid)).current.keys
        status = "running" if ct.running(str(vmid)) else "stopped"
        name = keys.get("hostname", f"CT{vmid}")
        print(f"{vmid:<10} {status:<10} {keys.get('lock', ''):<12} {name:<20}")


def show_config(vmid: str, words: list[str]) -> None:
    """`pct config`: the values are checked against the schema, and one misfit ends it."""
    given = options("config", words, {"current"}, {"snapshot"})
    conf = load(vmid)
    section = conf.shown()
    if "snapshot" in given:
        if given["snapshot"] not in conf.snapshots:
            die(f"snapshot '{given['snapshot']}' does not exist")
        section = conf.snapshots[given["snapshot"]]
    elif given.get("current") == "1":
        section = conf.current
    keys = dict(section.keys)
    if section.description:
        keys["description"] = section.description
    keys.pop("digest", None)
    errors = {
        key: text
        for key, value in keys.items()
        if key not in ("parent", "snaptime") and (text := ctformat.result_error(key, value))
    }
    if errors:
        reject("config", errors, "400 Result verification failed", 255)
    if section.description:
        keys["description"] = ctformat.encoded(section.description)
    lines = [f"{key}: {value}" for key, value in sorted(keys.items())]
    lines += [f"{key}: {value}" for key, value in section.raw]
    say("".join(line + "\n" for line in lines))


def say(text: str) -> None:
    """On stdout, with the file's own bytes."""
    sys.stdout.flush()
    stream = getattr(sys.stdout, "buffer", None)
    if stream is None:
        sys.stdout.write(text)
    else:
        stream.write(text.encode("latin-1"))
        stream.flush()


def show_pending(vmid: str) -> None:
    """`pct pending`: cur, new and del lines; raw lines are not in it."""
    conf = load(vmid)
    have, waiting = (
        {
            **{k: v for k, v in part.keys.items() if k not in ("delete", "digest")},
            **({"description": ctformat.encoded(part.description)} if part.description else {}),
        }
        for part in (conf.current, conf.pending)
    )
    lines = []
    for key in sorted({*have, *waiting}):
        if key in have:
            word = "del" if key in conf.deletes else "cur"
            lines.append(f"{word} {key}: {have[key]}\n")
        if key in waiting and not (key in have and key in conf.deletes):
            lines.append(f"new {key}: {waiting[key]}\n")
    say("".join(lines))


def start(vmid: str, words: list[str]) -> None:
    """`pct start`."""
    options("start", words, {"debug", "skiplock"}, set())
    if ct.running(vmid):
        die(f"CT {vmid} already running")
    if ha_managed(vmid):
        print(f"Requesting HA start for CT {vmid}")
        ha_request(vmid, "started")
        return
    as_task(lambda: boot(vmid))


def boot(vmid: str) -> None:
    """The work of `pct start`: what is pending is applied, then the guest starts."""
    conf = load(vmid)
    with locked(vmid):
        refuse_lock(conf)
        if conf.pending.keys or conf.pending.raw:
            conf.current = conf.merged()
            conf.pending = ctconf.Section()
            save(conf)
        pctset.check_generated(conf)
        ct.start(vmid, conf)


def stop(vmid: str, command: str, words: list[str]) -> None:
    """`pct stop` and `pct shutdown`: both say "not running" before they read the file."""
    given = options(command, words, {"forceStop", "skiplock", "overrule-shutdown"}, {"timeout"})
    if not ct.running(vmid):
        die(f"CT {vmid} not running")
    if ha_managed(vmid):
        print(f"Requesting HA stop for CT {vmid}")
        ha_request(vmid, "stopped")
        return
    refuse_lock(load(vmid))
    if command == "stop":
        as_task(lambda: ct.kill(vmid))
        return
    force = given.get("forceStop") == "1"
    as_task(lambda: ct.shut_down(vmid, float(given.get("timeout", 60)), force))


def reboot(vmid: str, words: list[str]) -> None:
    """`pct reboot`: stop by force after the timeout, and start."""
    given = options("reboot", words, set(), {"timeout"})
    if not ct.running(vmid):
        die(f"VM {vmid} not running")
    as_task(lambda: ct.shut_down(vmid, float(given.get("timeout", 60)), True))
    as_task(lambda: boot(vmid))


def ha_managed(vmid: str) -> bool:
    """Whether the HA manager owns the container (its state is not `ignored`)."""
    try:
        with open(f"{os.path.dirname(ctconf.CONF)}/ha/resources.cfg") as file:
            text = file.read()
    except FileNotFoundError:
        return False
    block = re.search(rf"^ct: {vmid}\n((?:[ \t].*\n)*)", text, re.MULTILINE)
    return bool(block) and not re.search(r"^\s+state\s+ignored\s*$", block[1], re.MULTILINE)


def ha_request(vmid: str, state: str) -> None:
    """What the HA manager does later: here by a process of its own, after a moment."""
    verb = "boot" if state == "started" else "kill"
    code = (
        "import sys, time; sys.path.insert(0, '/usr/lib/lab'); time.sleep(1); import ct, pct; "
        f"{'pct.boot' if verb == 'boot' else 'ct.kill'}({vmid!r})"
    )
    subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def execute(vmid: str, words: list[str]) -> None:
    """`pct exec`: the command's own exit code; needs `--` before words that begin with a dash."""
    keep = "1"
    while words and words[0] != "--" and words[0].startswith("-"):
        name, eq, value = words.pop(0).lstrip("-").partition("=")
        if name != "keep-env":
            options("exec", [f"--{name}"], set(), set())
        keep = value if eq else (words.pop(0) if words and words[0] in ("0", "1") else "1")
    if words[:1] == ["--"]:
        words.pop(0)
    elif dashed := next((word for word in words if word.startswith("-")), ""):
        options("exec", [f"--{dashed.lstrip('-')[:1]}"], set(), set())
    load(vmid)
    if not words:
        die("missing command at /usr/share/perl5/PVE/CLI/pct.pm line 170.", 2)
    if not ct.running(vmid) or ct.init_pid(vmid) is None:
        die(f"container '{vmid}' not running!")
    if keep == "1":
        inherited = dict(os.environ)
        with open("/proc/self/environ", "rb") as file:
            if b"LC_CTYPE=" not in file.read():
                inherited.pop("LC_CTYPE", None)  # Python's own, not the caller's
        env = {**inherited, "PATH": "/sbin:/bin:/usr/sbin:/usr/bin", "container": "lxc"}
    else:
        path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        env = {"PATH": path, "container": "lxc"}
    ct.attach(vmid, words, env)


def copy(vmid: str, command: str, words: list[str]) -> None:
    """`pct push` and `pct pull`: a copy that failed inside still ends with 0."""
    if len(words) < 2:
        die(f"400 not enough arguments\npct {command} <vmid> <file> <destination> [OPTIONS]")
    source, target = words[:2]
    given = options(command, words[2:], set(), {"user", "group", "perms"})
    load(vmid)
    if not ct.running(vmid):
        die(
            "can only push files to a running CT"
            if command == "push"
            else "can only pull files from a running VM "
            "at /usr/share/perl5/PVE/CLI/pct.pm line 597."
        )
    inside = [*ct.enter_argv(vmid), "/bin/sh", "-c"]
    if command == "push":
        if not os.path.isfile(source):
            die(f"failed to open {source}: No such file or directory", 2)
        script = 'cat >"$1" && chmod "$2" "$1" && { [ -z "$3" ] || chown "$3" "$1"; }'
        owner = given.get("user", "") + (f":{given['group']}" if "group" in given else "")
        with open(source, "rb") as file:
            argv = [*inside, script, "sh", target, given.get("perms", "0644"), owner]
            if subprocess.run(argv, stdin=file, check=False).returncode:
                warn(f"failed to open {target} in container")
        return
    with open(target, "wb") as file:
        subprocess.run([*inside, 'cat "$1"', "sh", source], stdout=file, check=False)


def unlock(vmid: str) -> None:
    """`pct unlock`: the `lock:` key only."""
    with locked(vmid):
        conf = load(vmid)
        if "lock" not in conf.current.keys:
            die("no lock found trying to remove any lock")
        conf.current.keys.pop("lock")
        save(conf)


def create(vmid: str, words: list[str]) -> None:
    """`pct create`: the id is reserved under `lock: create`, then the template is unpacked."""
    if not words or words[0].startswith("-"):
        die("400 not enough arguments\npct create <vmid> <ostemplate> [OPTIONS]")
    template, rest = words[0], words[1:]
    given = options("create", rest, {"start", "force", "unique"}, {"*"})
    for name in ("ssh-public-keys", "password", "storage", "pool"):
        value = given.get(name)
        if name == "ssh-public-keys" and value is not None and not os.path.isfile(value):
            die(f"400 Parameter verification failed.\nssh-public-keys: unable to read '{value}'", 2)
    extra = {"ssh-public-keys", "password", "storage", "pool", "start", "force", "unique"}
    keys = {name: value for name, value in given.items() if name not in extra}
    pctset.check_parameters("create", keys)
    archive = ctdisk.template(template)
    ctdisk.reserve(vmid)
    as_task(lambda: _create(vmid, archive, keys, given))


def _create(vmid: str, archive: str, keys: dict[str, str], given: dict[str, str]) -> None:
    conf = load(vmid)
    try:
        conf.current.keys = pctset.created_keys(vmid, keys)
        told = keys.get("description")
        conf.current.description = told + "\n" if told else ""
        print(f"extracting archive '{archive}'")
        ctdisk.unpack(vmid, archive, conf.current, given.get("ssh-public-keys"))
    except (OSError, subprocess.CalledProcessError) as error:
        ctdisk.remove(vmid)
        die(f"unable to create CT {vmid} - {error}")
    with locked(vmid):
        save(conf)
    if given.get("start") == "1":
        boot(vmid)


def destroy(vmid: str, words: list[str]) -> None:
    """`pct destroy`."""
    given = options("destroy", words, {"force", "purge", "destroy-unreferenced-disks"}, set())
    conf = load(vmid)
    if conf.current.keys.get("protection") == "1":
        die(f"can't remove CT {vmid} - protection mode enabled")
    if ha_managed(vmid) and given.get("purge") != "1":
        die(f"unable to remove CT {vmid} - used in HA resources and purge parameter not set.")
    if ct.running(vmid):
        if given.get("force") != "1":
            die(f"unable to destroy CT {vmid} - container is running")
        ct.kill(vmid)
    refuse_lock(conf)
    with locked(vmid):
        ctdisk.remove(vmid)


def main(words: list[str]) -> None:
    """One command; ends by SystemExit when something is wrong."""
    if os.getuid() != 0:
        die("please run as root")
    if not words:
        die("ERROR: no command specified\nUSAGE: pct <COMMAND> [ARGS] [OPTIONS]")
    command, rest = words[0], words[1:]
    if command == "list":
        show_list()
        return
    if command not in VERBS:
        die(f"ERROR: unknown command 'pct {command}'\nUSAGE: pct <COMMAND> [ARGS] [OPTIONS]")
    if not rest:
        die(f"400 not enough arguments\npct {command} <vmid> [OPTIONS]")
    vmid, rest = rest[0], rest[1:]
    if not re.fullmatch(r"[1-9]\d{2,8}", vmid):
        reject(command, {"vmid": "invalid format - value does not look like a valid VM ID\n"})
    if command == "status":
        load(vmid)
        print("status:", "running" if ct.running(vmid) else "stopped")
        if "--verbose" in rest or "-verbose" in rest:
            print(f"vmid: {vmid}")
    elif command == "pending":
        show_pending(vmid)
    elif command == "unlock":
        unlock(vmid)
    elif command == "listsnapshot":
        pctsnap.show(vmid)
    elif command in ("stop", "shutdown"):
        stop(vmid, command, rest)
    elif command in ("push", "pull"):
        copy(vmid, command, rest)
    elif command in ("snapshot", "delsnapshot", "rollback"):
        if pctsnap.work(vmid, command, rest):
            start(vmid, [])
    else:
        verbs = {
            "config": show_config,
            "create": create,
            "destroy": destroy,
            "exec": execute,
            "reboot": reboot,
            "set": pctset.set_options,
            "start": start,
        }
        verbs[command](vmid, rest)
