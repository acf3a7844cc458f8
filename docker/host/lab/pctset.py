"""`pct set` of the lab: checks, what is applied at once, what becomes pending."""

from __future__ import annotations

import os
import re

import ct
import ctdisk
import ctformat
import ctschema
from ctconf import Conf, die, digest, load, locked, refuse_lock, save, warn
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
_AT_ONCE = {
    "delete": "you can't use '-{0}' and -delete {0}' at the same time",
    "revert": "you can't use '-{0}' and '-revert {0}' at the same time",
}


def set_options(vmid: str, words: list[str]) -> None:
    """Checks the arguments, then changes the file under its lock; ends as pct does."""
    given = options("set", words, {"force"}, {"*"})
    values = {name: _unicode(value) for name, value in given.items() if name not in ORDERS}
    for name in values:
        if not ctformat.known(name) or name in NEVER_SET:
            usage("set", name)
    check_parameters("set", values)
    if len(given.get("digest", "")) > 64:
        reject("set", {"digest": "value may only be 64 characters long"})
    deletes, reverts = (_listed("set", key, given.get(key, "")) for key in ("delete", "revert"))
    if not {*given} - {"digest"}:
        die("no options specified", 2)
    conf = load(vmid)
    for order, names in (("revert", reverts), ("delete", deletes)):
        for name in names:
            if not ctformat.known(name):
                reject("set", {order: f"unknown option '{name}'"}, code=255)
            if name in values:
                reject("set", {order: _AT_ONCE[order].format(name)}, code=255)
            if order == "delete" and name in reverts:
                text = f"you can't use '-delete {name}' and '-revert {name}' at the same time"
                reject("set", {order: text}, code=255)
    with locked(vmid):
        conf = load(vmid, told=False)
        refuse_lock(conf)
        if given.get("digest", "") not in ("", conf.current.keys.get("digest", digest(vmid))):
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
        # Integers go into the file as they were given; the next reader makes numbers of them.
        if ctformat.is_boolean(name):
            values[name] = ctformat.typed(name, values[name])[0]
        elif name in ("searchdomain", "nameserver"):
            values[name] = " ".join(re.split(r"[,;\s]+", values[name].strip()))
    if int(values.get("cpuunits", "0")) > 10000:
        values["cpuunits"] = "10000"  # cgroup v2 knows no more


def change(
    vmid: str, conf: Conf, values: dict[str, str], deletes: list[str], reverts: list[str]
) -> None:
    """Applies it to the data; a running guest gets what can be hot-plugged. Writes nothing."""
    alive = ct.running(vmid)
    current, pending = conf.current, conf.pending
    for name in reverts:
        pending.keys.pop(name, None)
        conf.set_deletes([key for key in conf.deletes if key != name])
    guarded = current.keys.get("protection", "0") != "0"
    touched = set(values)
    for name in deletes:
        if name == "description":
            current.description = pending.description = ""
            continue
        if not {name} & {*current.keys, *pending.keys}:
            warn(f"cannot delete '{name}' - not set in current configuration!")
            continue
        touched.add(name)
        if name in ("memory", "rootfs", "ostype"):
            die(f"unable to delete required option '{name}'")
        if name == "unprivileged":
            die("unable to delete read-only option: 'unprivileged'")
        if guarded and re.fullmatch(r"(mp|unused)\d+", name):
            die(f"can't remove CT {vmid} drive '{name}' - protection mode enabled")
        conf.set_deletes([*conf.deletes, name])
    for name in sorted(values):
        value = _checked(conf, name, values[name], guarded)
        if name == "description":
            current.description = value + "\n" if value else ""
            continue
        pending.keys[name] = value
        conf.set_deletes([key for key in conf.deletes if key != name])
    conf.clean_pending()
    hotplug(vmid, conf, touched) if alive else settle(conf, touched)


def _checked(conf: Conf, name: str, value: str, guarded: bool) -> str:
    """The value as it is written; ends as pct does when the host has not what it names."""
    if name == "unprivileged":
        die("unable to modify read-only option: 'unprivileged'")
    if re.fullmatch(r"mp\d+|rootfs", name):
        if guarded:
            die(f"can't update CT {conf.vmid} drive '{name}' - protection mode enabled")
        volume, written = ctformat.mount(name, value)
        ctdisk.check_volume(volume)
        if name == "rootfs":
            return value
        if new := re.fullmatch(r"([^:/]+):(\d+)", volume):
            taken = set().union(*(s.volumes() for s in (conf.current, *conf.snapshots.values())))
            made = ctdisk.new_volume(conf.vmid, new[1], taken)
            return ctformat.mount(name, f"{value.replace(volume, made, 1)},size={new[2]}G")[1]
        return written
    if name == "hookscript":
        ctdisk.check_script(value)
    elif name == "tags":
        return ";".join(sorted({tag.lower() for tag in ctschema.split(value)}))
    elif re.fullmatch(r"net\d+", name):
        return ctdisk.network(value)
    elif re.fullmatch(r"dev\d+", name):
        ct.device(value)
    return value


def settle(conf: Conf, touched: set[str]) -> None:
    """A stopped container: what was asked for becomes current at once."""
    current, pending = conf.current, conf.pending
    for name in [key for key in conf.deletes if key in touched]:
        keep_volume(conf, name, current.keys.pop(name))
        conf.set_deletes([key for key in conf.deletes if key != name])
    for name in [key for key in pending.keys if key in touched]:
        old = current.keys.get(name, "")
        current.keys[name] = pending.keys.pop(name)
        keep_volume(conf, name, old)


def keep_volume(conf: Conf, name: str, value: str) -> None:
    """The volume of a mount point that is gone becomes unused, once."""
    if not value or not re.fullmatch(r"mp\d+", name):
        return
    try:
        volume = ctformat.mount(name, value)[0]
    except ctschema.Refused:
        return
    if not volume.startswith("/"):
        conf.current.add_unused(volume)


def hotplug(vmid: str, conf: Conf, touched: set[str]) -> None:
    """A running container: some keys at once, new devices and mounts too, the rest waits."""
    current, pending = conf.current, conf.pending
    for name in [key for key in conf.deletes if key in touched]:
        if name not in HOT and not re.fullmatch(r"unused\d+|net\d", name):
            continue
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
    if text := ctformat.typed("features", keys.get("features", ""))[1]:
        die(text.removesuffix("\n"))
    for name in sorted(key for key in keys if re.fullmatch(r"dev\d+", key)):
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
