"""A survey as a commented inventory file. Pure.

Every word that came from the machine is made harmless: values are quoted, comments hold one line of
printable text. What is written loads again as `InventoryFile`.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from deployer.findings import Finding, Level
from deployer.inventory import Ssh
from deployer.remote.sshtry import Door
from deployer.steps.gpus_facts import PciFunction
from deployer.survey import Guest, Survey, guest_ssh
from deployer.survey_guest import gpus_of

WIDTH = 98
PLAYBOOK = "qwen3.6-27b"
"""The name of the sample playbook."""
_PLAIN = re.compile(r"[A-Za-z/][A-Za-z0-9 ._/()\[\]+~@-]*|~/[\w./+-]+|\.\./[\w./+-]+", re.ASCII)
_IPV4 = re.compile(r"[0-9]{1,3}(\.[0-9]{1,3}){3}")
_WORDS = frozenset(["true", "false", "yes", "no", "on", "off", "null", "y", "n"])
_MARKS = {
    Level.BLOCKED: "blocked",
    Level.WARNING: "warning",
    Level.PENDING: "pending",
    Level.UNKNOWN: "unknown",
}


@dataclass(frozen=True)
class Target:
    """What the user typed: the host's name in the inventory, and how it was reached."""

    name: str
    ssh: Ssh
    command: str
    """`deploy init root@192.0.2.5`, for the first line."""
    playbooks: tuple[str, ...] = ()
    """Those that are there already."""


def plain(text: str) -> str:
    """One line of printable text, whatever a machine says."""
    return "".join(char if char.isprintable() else "\ufffd" for char in text).strip()


def scalar(text: str) -> str:
    """`text` as a YAML value that is read as text again."""
    text = plain(text)
    harmless = _PLAIN.fullmatch(text) or _IPV4.fullmatch(text)
    if harmless and text.lower() not in _WORDS:
        return text
    quoted = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{quoted}"'


def comment(text: str, indent: str = "", first: str = "", hanging: str = "") -> list[str]:
    """`text` as comment lines."""
    lines = textwrap.wrap(
        plain(text),
        WIDTH - len(indent) - 2,
        initial_indent=first,
        subsequent_indent=hanging,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return [f"{indent}# {line}".rstrip() for line in lines or [""]]


def _noted(line: str, note: str) -> list[str]:
    """`line` with a comment beside it, or above it where that would be too long."""
    if not note:
        return [line]
    column = max(len(line) + 1, 34)
    if column + 2 + len(plain(note)) <= WIDTH:
        return [f"{line:<{column}}# {plain(note)}"]
    return [*comment(note, re.match(" *", line).group()), line]  # type: ignore[union-attr]


def render(target: Target, seen: Survey, found: Sequence[Finding]) -> str:
    """The whole file. Raises ValueError without a GPU: an inventory cannot hold such a host."""
    if not seen.gpus.functions:
        raise ValueError("a host without a GPU is no host of an inventory")
    lines = [*_head(target, seen, found), "", "hosts:", f"  {target.name}:"]
    kind = "a Linux machine; models run on the host itself" if seen.kind == "plain" else ""
    lines += _noted(f"    kind: {seen.kind}", kind)
    lines += ["    ssh:", *ssh_lines(target.ssh, "      ")]
    lines += ["    gpus:"]
    for one in seen.gpus.functions:
        lines += _gpu(seen, one)
    lines += _containers(target, seen)
    lines += _deployments(target, seen)
    return "\n".join(lines) + "\n"


def _head(target: Target, seen: Survey, found: Sequence[Finding]) -> list[str]:
    machine = seen.machine
    lines = comment(f"{target.name} as `{target.command}` found it. Nothing was changed there.")
    system = [f"Proxmox VE {machine.pve}".strip()] if machine.is_proxmox else []
    system += [machine.os] if machine.os else []
    system += [f"kernel {seen.driver.kernel}"] if seen.driver.kernel else []
    system += [f"it calls itself {machine.name}"] if machine.name != target.name else []
    lines += comment("`deploy help inventory` explains every key.")
    lines += comment(", ".join(system) + ".") if system else []
    lines += ["#", *comment(f"Driver: {driver_text(seen)}.")]
    told = [one for one in found if one.level in _MARKS]
    if not told:
        return [*lines, "# Nothing that was seen stands in the way."]
    lines += ["#", "# What stands in the way, worst first:"]
    for one in told:
        mark = f"  {_MARKS[one.level]}  "
        lines += comment(f"{one.where}: {one.what}", first=mark, hanging=" " * len(mark))
        arrow = " " * len(mark) + "-> "
        lines += comment(one.fix, first=arrow, hanging=" " * len(arrow)) if one.fix else []
    return lines


def driver_text(seen: Survey) -> str:
    """Versions on the host: `module 580.126.09 (open) loaded, libraries 580.126.09`."""
    driver = seen.driver
    if driver.loaded:
        flavour = f" ({driver.flavour})" if driver.flavour else ""
        text = f"module {driver.loaded}{flavour} loaded"
    elif driver.on_disk:
        text = f"module {driver.on_disk} on disk for kernel {driver.kernel}, not loaded"
    else:
        text = f"no nvidia module for kernel {driver.kernel or 'unknown'}"
    versions = driver.userspace.versions()
    return f"{text}, libraries {' and '.join(versions) or 'none'}"


def ssh_lines(ssh: Ssh, indent: str) -> list[str]:
    """The keys of an `ssh` entry that are set."""
    keys = ("address", "port", "user", "identity_file", "known_hosts", "gateway")
    lines = []
    for key in keys:
        value = getattr(ssh, key)
        if value is not None and (key == "address" or key in ssh.model_fields_set):
            text = str(value) if isinstance(value, int) else scalar(value)
            lines.append(f"{indent}{key}: {text}")
    return lines


def _gpu(seen: Survey, one: PciFunction) -> list[str]:
    note = f"on {one.driver or 'no driver'}"
    if one.group:
        note += f", IOMMU group {one.group}"
    lines = _noted(f'      - address: "{one.address}"', note)
    if name := plain(seen.gpu_name(one))[:200]:
        lines.append(f"        name: {scalar(name)}")
    lines.append(f'        id: "{one.id}"')
    return lines


def _containers(target: Target, seen: Survey) -> list[str]:
    if seen.kind == "plain":
        return []
    listed = [guest for guest in seen.guests if not guest.template and guest.seen.exists]
    left = [guest for guest in seen.guests if guest not in listed]
    lines = []
    for guest in left:
        why = "a template" if guest.template else "its configuration cannot be read"
        lines += comment(f"container {guest.vmid} ({guest.hostname}) left out: {why}", "    ")
    if not listed:
        why = "none was seen; `up` creates one that has `create:`, see `deploy help inventory`"
        return [*lines, *comment(f"containers: {why}", "    ")]
    lines.append("    containers:")
    for guest in listed:
        lines += _container(target, seen, guest)
    return lines


def _container(target: Target, seen: Survey, guest: Guest) -> list[str]:
    lines = _noted(f"      {guest.vmid}:", guest_text(guest))
    if guest.by_ssh and guest.tried is not None:
        ssh = guest_ssh(guest, guest.tried.place, target.ssh)
        lines += [*_noted("        ssh:", "its sshd takes our key"), *ssh_lines(ssh, " " * 10)]
    else:
        lines += comment(f"no ssh: {_no_ssh(guest)}; it is reached through `pct exec`", " " * 8)
    own = gpus_of(guest.seen, seen.gpus.functions)
    if own and len(own) < len(seen.gpus.functions):
        text = ", ".join(f'"{address}"' for address in own)
        lines += _noted(f"        gpus: [{text}]", "as its configuration names devices")
    lines += _noted("        restart: allowed", "when a device change needs it; or `never`")
    return lines


def _no_ssh(guest: Guest) -> str:
    tried = guest.tried
    if guest.look is None:
        runs = "it does not run" if guest.seen.status == "stopped" else "its status is not known"
        return f"{runs}, so its sshd was not asked"
    if guest.look.problem:
        return guest.look.problem
    if not guest.look.keys:
        return "it has no sshd with host keys"
    if tried is None:
        return "no address of it is known"
    if tried.door is Door.LOCKED:
        return f"its sshd answers, but {tried.text}"
    return tried.text


def guest_text(guest: Guest) -> str:
    """`sglang, running, unprivileged, 192.0.2.129, driver libraries 580.126.09`."""
    config = guest.seen.config()
    words = [plain(guest.hostname)] if plain(guest.hostname) else []
    words.append(guest.seen.status or "status unknown")
    words.append("unprivileged" if config.unprivileged else "privileged")
    words += list(guest.addresses[:2])
    if guest.look is not None and not guest.look.problem:
        versions = guest.look.driver.userspace.versions()
        words.append(
            f"driver libraries {' and '.join(versions)}" if versions else "no driver libraries"
        )
    if config.has_pending:
        words.append("changes pending")
    return ", ".join(words)


def _deployments(target: Target, seen: Survey) -> list[str]:
    guests = seen.guests if seen.kind == "proxmox" else ()
    guest = likeliest(guests, seen.gpus.functions)
    playbook = target.playbooks[0] if target.playbooks else PLAYBOOK
    word = re.match("[a-z]+", playbook.lower())
    name = word.group()[:20] if word else "model"
    there = (
        f"playbooks/{playbook}.yaml"
        if target.playbooks
        else f"playbooks/{playbook}.yaml must exist: `deploy help playbook`"
    )
    lines = comment("What runs here. Take the `# ` away, correct it, then:", "    ")
    if any(one.by_ssh for one in guests):
        lines.append(f"    #   deploy trust {target.name}")
    lines.append(f"    #   deploy plan {target.name}")
    lines.append("    # deployments:")
    lines.append(f"    #   {name}:")
    if guest is not None:
        lines.append(f"    #     container: {guest.vmid}")
    return [*lines, *_noted(f"    #     playbook: {scalar(playbook)}", there)]


def likeliest(guests: Iterable[Guest], functions: Sequence[PciFunction]) -> Guest | None:
    """The container that a model would run in: with GPUs, running, the first; None without any."""
    usable = [one for one in guests if not one.template and one.seen.exists]
    usable.sort(key=lambda one: (not gpus_of(one.seen, functions), one.seen.status != "running"))
    return usable[0] if usable else None
