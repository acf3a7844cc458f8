"""`pct set` of the lab: checks, what is applied at once, what becomes pending."""

from __future__ import annotations

import os
import re

import ct
import ctconf
import ctdisk
import ctformat
from ctconf import Conf, die, load, locked, refuse_lock, save, warn
from pctargs import options, reject, usage

FAST = {
    "description",
    "onboot",
    "startup",
    "protection",
    "hostname",
    "hookscript",
    "cores",
    "tags",
    "lock",
}
HOT = FAST | {"cpulimit", "cpuunits", "memory", "swap"}
ORDERS = {"delete", "revert", "digest", "force"}
NEVER_SET = {"parent", "snaptime"}


def set_options(vmid: str, words: list[str]) -> None:
    """Checks the arguments, then changes the file under its lock; ends as pct does."""
    given = options("set", words, {"force"}, {"*"})
    values = {name: _unicode(value) for name, value in given.items() if name not in ORDERS}
    for name in values:
        if not ctformat.known(name) or name in NEVER_SET or name.startswith("unused"):
            usage("set", name)
    check_parameters("set", values)
    deletes, reverts = (_listed("set", key, given.get(key, "")) for key in ("delete", "revert"))
    if not given:
        die("no options specified", 2)
    for name in deletes:
        if name in values:
            text = f"you can't use '-{name}' and -delete {name}' at the same time"
            reject("set", {"delete": text}, code=255)
    check_devices(values)
    with locked(vmid):
        conf = load(vmid)
        for name in (*deletes, *reverts):
            if not ctformat.known(name):
                reject("set", {"delete": f"unknown option '{name}'"}, code=255)
        refuse_lock(conf)
        if given.get("digest", "") not in ("", ctconf.digest(vmid)):
            die("detected modified configuration - file changed by other user? Try again.")
        change(vmid, conf, values, deletes, reverts)
        save(conf, told=True)
    check_generated(conf)


def _unicode(value: str) -> str:
    """An argument in a UTF-8 locale: what is left of latin-1 is written as such."""
    return os.fsencode(value).decode("utf-8", "replace")


def _listed(command: str, key: str, text: str) -> list[str]:
    names = [name for name in re.split(r"[,;\s]+", text) if name]
    for name in names:
        if not re.fullmatch(r"[a-z][a-z0-9_-]+", name, re.IGNORECASE):
            reject(command, {key: f"invalid format - invalid configuration ID '{name}'\n"})
    return names


def check_parameters(command: str, values: dict[str, str]) -> None:
    """The schema's word on each value; normalises booleans and integers in place."""
    errors = {}
    for name, value in values.items():
        if not ctformat.known(name):
            usage(command, name)
        # An empty property string has no sub-key that could be wrong.
        if text := ctformat.parameter_error(name, value):
            errors[name] = text
    if errors:
        reject(command, errors)
    for name in values:
        if name in ctformat.BOOLEANS or name in ctformat.INTEGERS:
            values[name] = ctformat.typed(name, values[name])[0]
        elif name in ("searchdomain", "nameserver"):
            values[name] = " ".join(re.split(r"[,;\s]+", values[name].strip()))
    if int(values.get("cpuunits", "0")) > 10000:
        values["cpuunits"] = "10000"  # cgroup v2 knows no more


def check_devices(values: dict[str, str]) -> None:
    """devN values must name device nodes that are there."""
    for name, value in sorted(values.items()):
        if re.fullmatch(r"dev\d+", name):
            ct.device(value)


def change(
    vmid: str, conf: Conf, values: dict[str, str], deletes: list[str], reverts: list[str]
) -> None:
    """Applies it to the data; a running guest gets what can be hot-plugged. Writes nothing."""
    alive = ct.running(vmid)
    current, pending = conf.current, conf.pending
    for name in reverts:
        pending.keys.pop(name, None)
        conf.set_deletes([key for key in conf.deletes if key != name])
    guarded = current.keys.get("protection") == "1"
    for name in deletes:
        if name in ("rootfs", "ostype", "arch"):
            die(f"unable to delete required option '{name}'")
        if name == "unprivileged":
            die("unable to delete read-only option: 'unprivileged'")
        if guarded and re.fullmatch(r"(mp|unused)\d+", name):
            die(f"can't remove CT {vmid} drive '{name}' - protection mode enabled")
    for name, value in values.items():
        if name == "unprivileged":
            die("unable to modify read-only option: 'unprivileged'")
        if re.fullmatch(r"mp\d+|rootfs", name):
            if guarded:
                die(f"can't update CT {vmid} drive '{name}' - protection mode enabled")
            ctdisk.check_volume(value.split(",")[0])
        if name == "hookscript":
            ctdisk.check_script(value)
        if re.fullmatch(r"net\d+", name):
            values[name] = ctdisk.network(value)
    for name in deletes:
        if name == "description":
            current.description = pending.description = ""
        elif name not in current.keys and name not in pending.keys:
            warn(f"cannot delete '{name}' - not set in current configuration!")
        else:
            conf.set_deletes([*{*conf.deletes, name}])
    for name, value in values.items():
        if name == "description":
            current.description = value + "\n" if value else ""
            continue
        pending.keys[name] = value
        conf.set_deletes([key for key in conf.deletes if key != name])
    conf.clean_pending()
    touched = {*values, *deletes}
    hotplug(vmid, conf, touched) if alive else settle(conf, touched)
    for section in (conf.current, conf.pending):
        section.settle_env()


def settle(conf: Conf, touched: set[str]) -> None:
    """A stopped container: what was asked for becomes current at once."""
    current, pending = conf.current, conf.pending
    for name in [key for key in conf.deletes if key in touched]:
        value = current.keys.pop(name)
        if re.fullmatch(r"mp\d+", name) and not value.startswith("/"):
            free = next(n for n in range(256) if f"unused{n}" not in current.keys)
            current.keys[f"unused{free}"] = value.split(",")[0]
        conf.set_deletes([key for key in conf.deletes if key != name])
    for name in [key for key in pending.keys if key in touched]:
        current.keys[name] = pending.keys.pop(name)


def hotplug(vmid: str, conf: Conf, touched: set[str]) -> None:
    """A running container: some keys at once, new devices and mounts too, the rest waits."""
    current, pending = conf.current, conf.pending
    for name in [key for key in conf.deletes if key in touched and key in HOT]:
        current.keys.pop(name)
        conf.set_deletes([key for key in conf.deletes if key != name])
    errors = {}
    for name in sorted(key for key in pending.keys if key in touched):
        value = pending.keys[name]
        is_new = name not in current.keys
        if is_new and re.fullmatch(r"mp\d+", name):
            source = value.split(",")[0]
            if source.startswith("/") and not os.path.isdir(source):
                errors[name] = f"unable to hotplug {name}: directory '{source}' does not exist\n"
                continue
        elif is_new and re.fullmatch(r"dev\d+", name):
            ct.plug(f"/proc/{ct.init_pid(vmid)}/root", value)
        elif name not in HOT and not name.startswith("net"):
            continue
        current.keys[name] = pending.keys.pop(name)
    if errors:
        reject("set", errors, code=1)


def check_generated(conf: Conf) -> None:
    """What making the LXC configuration finds: the file has been written by then."""
    keys = conf.current.keys
    if keys.get("template") == "1":
        return
    if "arch" not in keys:
        die("missing 'arch' - internal error at /usr/share/perl5/PVE/LXC.pm line 729.")
    for name in ("features", *sorted(key for key in keys if re.fullmatch(r"dev\d+", key))):
        if name in keys and ctformat.known(name) and ctformat.format_error(name, keys[name]):
            die(ctformat.typed(name, keys[name])[1].rstrip("\n"))
    for name in sorted(key for key in keys if re.fullmatch(r"dev\d+", key)):
        if ctformat.known(name):
            ct.device(keys[name])
    if "rootfs" not in keys:
        die("missing 'rootfs' configuration")
    for name in sorted(key for key in keys if re.fullmatch(r"net\d+", key)):
        ctdisk.check_bridge(keys[name])


def created_keys(vmid: str, given: dict[str, str]) -> dict[str, str]:
    """The keys of a container that `pct create` has made."""
    keys = {
        "arch": "amd64",
        "ostype": "debian",
        "hostname": f"CT{vmid}",
        "memory": "512",
        "swap": "512",
    }
    keys.update({name: value for name, value in given.items() if name != "description"})
    if keys.get("unprivileged", "1") == "0":
        keys.pop("unprivileged", None)
    else:
        keys["unprivileged"] = "1"
    for name in [key for key in keys if re.fullmatch(r"net\d+", key)]:
        keys[name] = ctdisk.network(keys[name], vmid)
    keys["rootfs"] = ctdisk.allocated(vmid, keys.get("rootfs", "local:4"))
    return keys
