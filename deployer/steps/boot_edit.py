"""Edits of a boot configuration that keeps GPUs from nvidia, and back. Pure: lines in, changes out.

Only whole lines and whole kernel arguments that boot_sources understands are edited, and an id is
left where another card of that id is to stay on vfio-pci: `ids=` cannot tell two equal cards apart,
the boot unit with driver_override can. udev rules and units of others are reported, never edited.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from deployer.model import Change, RunJob, Shell, Where, WriteFile
from deployer.shell import words
from deployer.steps.boot_facts import BootFacts, BootFile
from deployer.steps.boot_sources import BootSource, kept_by_ids, sources

MARK = "# deployer removed this: "
REFRESH = "boot-refresh"
"""Name of the job that makes initramfs and loader anew."""
_KERNEL_INSTALL = " (`kernel-install add KERNEL /boot/vmlinuz-KERNEL` for each kernel)"
REFRESH_TIMEOUT_S = 1800.0
REFRESH_STALL_S = 900.0
"""update-initramfs says nothing for minutes while it packs one image."""


@dataclass(frozen=True)
class Edits:
    """`changes` are in order; `left` says why a line that acts on the GPUs is not edited."""

    changes: tuple[Change, ...] = ()
    left: tuple[str, ...] = ()


@dataclass(frozen=True)
class Kept:
    """A file that was edited: what it held before, and the sha256 of what was written."""

    path: str
    was: bytes
    wrote: str


def edits(
    boot: BootFacts,
    found: Sequence[BootSource],
    functions: Mapping[str, str],
    keep: Mapping[str, str],
    waiting: Sequence[str] = (),
) -> Edits:
    """Changes that take the GPUs out of `found`, with the refresh of initramfs and loader.

    `functions`: address -> id of the GPUs for nvidia. `keep`: id -> address of another card that
    stays on vfio-pci. `waiting`: files edited by an earlier run whose refresh did not end well.
    """
    changes: list[Change] = []
    left: list[str] = []
    touched: list[str] = []
    for path in dict.fromkeys(one.path for one in found if one.effect in ("takes", "forbids")):
        file = boot.file(path)
        if file is None or not editable(path):
            if path != "/proc/cmdline":
                left.append(f"{path} is not edited: it is not a file of this kind")
            continue
        mine = [one for one in found if one.path == path and one.effect in ("takes", "forbids")]
        after, reasons = _edited(file, mine, functions, keep)
        left += reasons
        if after == file.content:
            continue
        why = "; ".join(f"{one.place}: {one.why}" for one in mine)
        changes += _writes(file, after, why)
        touched.append(path)
    refresh, lacking = _refresh(boot, [*touched, *interrupted(boot), *waiting])
    return Edits((*changes, *refresh), (*left, *lacking))


def put_back(
    boot: BootFacts,
    kept: Sequence[Kept],
    staying: Mapping[str, str],
    waiting: Sequence[str] = (),
) -> Edits:
    """Changes that give edited files their old content again, byte by byte.

    Not a file that somebody has changed since, and none that would forbid nvidia, or take a GPU
    from it that no boot unit brings back, while `staying` (address -> id) are to stay on it.
    """
    changes: list[Change] = []
    left: list[str] = []
    touched: list[str] = []
    copies: list[str] = []
    for one in kept:
        file = boot.file(one.path)
        if file is not None and file.content == one.was:
            continue
        copy = _copy_of(one.path, one.was)
        if file is None or hashlib.sha256(file.content).hexdigest() != one.wrote:
            was = f"; as it was: {copy}" if copy else ""
            left.append(f"{one.path} was changed by another since deployer edited it{was}")
            continue
        if hurt := _hurts(boot, replace(file, content=one.was), staying):
            left.append(f"{one.path} stays edited: {hurt}")
            continue
        reason = "deployer took the GPUs out of it; they go back to vfio-pci"
        write = WriteFile(Where.HOST, one.path, one.was, file.mode, before=file.content)
        changes.append(Change(f"put {one.path} back", reason, write, "edit it again"))
        touched.append(one.path)
        copies += [copy] if copy else []
    refresh, lacking = _refresh(boot, [*touched, *waiting])
    if copies:
        shell = Shell(Where.HOST, f"rm -f {words(copies)}\n")
        refresh.append(Change(f"remove {' and '.join(copies)}", "they have served", shell))
    return Edits((*changes, *refresh), (*left, *lacking))


def _hurts(boot: BootFacts, file: BootFile, staying: Mapping[str, str]) -> str:
    """What this file would do to GPUs that stay on nvidia, '' when nothing."""
    if not staying:
        return ""
    guarded = bool(boot.enabled)
    for source in sources(replace(boot, files=(file,), cmdline=""), staying):
        if source.effect == "forbids" or (source.effect == "takes" and not guarded):
            return f"{source.text} ({source.why}), and {', '.join(staying)} stays on nvidia"
    return ""


def _refresh(boot: BootFacts, paths: Iterable[str]) -> tuple[list[Change], list[str]]:
    """(the job that makes these files count at the next boot, what is lacking for it)."""
    touched = list(dict.fromkeys(paths))
    if not touched:
        return [], []
    commands, lacking = refresh_commands(boot, touched)
    if not commands:
        return [], lacking
    script = "set -e\n" + "".join(f"{words(command)}\n" for command in commands)
    job = RunJob(Where.HOST, REFRESH, script, timeout_s=REFRESH_TIMEOUT_S, stall_s=REFRESH_STALL_S)
    names = " and ".join(command[0] for command in commands)
    reason = f"what the next boot reads is made from {' and '.join(touched)}"
    return [Change(f"run {names}", reason, job, "the same, with the files put back")], lacking


def interrupted(boot: BootFacts) -> list[str]:
    """Files with an edit of ours that are newer than the initramfs made from them."""
    made = min((time for _, time in boot.initrds), default=None)
    if made is None:
        return []
    return [
        file.path
        for file in boot.files
        if MARK.encode() in file.content and _in_initramfs(file.path) and file.mtime > made
    ]


def refresh_commands(
    boot: BootFacts, touched: Iterable[str]
) -> tuple[list[tuple[str, ...]], list[str]]:
    """(commands, what is lacking) that make these files count at the next boot."""
    paths = list(touched)
    wanted: list[tuple[str, ...]] = []
    if any(_in_initramfs(path) for path in paths):
        wanted.append(("update-initramfs", "-u", "-k", "all"))
    if any(path.startswith("/etc/default/grub") for path in paths):
        wanted.append(("update-grub",))
    if "esp" in boot.tools or "/etc/kernel/cmdline" in paths:
        wanted.append(("proxmox-boot-tool", "refresh"))
    commands = [command for command in wanted if command[0] in boot.tools]
    lacking = [
        f"{command[0]} is not installed: the edit counts only when it, or its like, has run"
        + (_KERNEL_INSTALL if command[0] == "proxmox-boot-tool" else "")
        for command in wanted
        if command[0] not in boot.tools
    ]
    return commands, lacking


def _in_initramfs(path: str) -> bool:
    return path.startswith(("/etc/modprobe.d/", "/etc/initramfs-tools/", "/etc/modules"))


def editable(path: str) -> bool:
    """Whether a file of this kind is ever edited; the copies beside them are not."""
    if ".deployer-" in path:
        return False
    return path.startswith(
        ("/etc/modprobe.d/", "/etc/modules", "/etc/initramfs-tools/modules", "/etc/driverctl.d/")
    ) or path.startswith(("/etc/default/grub", "/etc/kernel/cmdline"))


def _writes(file: BootFile, after: bytes, why: str) -> list[Change]:
    """The backup (a name that the file's readers do not read), then the file."""
    changes = []
    if backup := _copy_of(file.path, file.content):
        write = WriteFile(Where.HOST, backup, file.content, file.mode)
        changes.append(
            Change(f"keep {file.path} as {backup}", "to go back to", write, f"rm {backup}")
        )
    write = WriteFile(Where.HOST, file.path, after, file.mode, before=file.content)
    changes.append(Change(f"edit {file.path}", why, write, "write back what it held"))
    return changes


def _copy_of(path: str, content: bytes) -> str:
    """Where the file's old content is kept; '' where each file of the folder is read."""
    if path.startswith("/etc/driverctl.d/"):
        return ""
    return f"{path}.deployer-{hashlib.sha256(content).hexdigest()[:8]}"


def _edited(
    file: BootFile,
    found: Sequence[BootSource],
    functions: Mapping[str, str],
    keep: Mapping[str, str],
) -> tuple[bytes, list[str]]:
    """The new content, and why lines stay."""
    lines = file.content.decode("utf-8", "surrogateescape").splitlines(keepends=True)
    left = []
    by_line: dict[int, list[BootSource]] = {}
    for one in found:
        by_line.setdefault(one.line, []).append(one)
    for number, several in by_line.items():
        raw = lines[number - 1]
        text = raw.rstrip("\r\n")
        new = text
        if several[0].span > 1:
            left.append(f"{several[0].place} goes over {several[0].span} lines: edit it by hand")
            continue
        for one in several:
            ids = kept_by_ids(one, functions)
            held = {name: keep[name] for name in ids if name in keep}
            left += [
                f"{one.place} keeps {name}: {other} has the same id and stays on vfio-pci, so the "
                "boot unit moves ours"
                for name, other in held.items()
            ]
            new = _new_line(file.path, new, one, ids - set(held))
        if new != text:
            end = raw[len(text) :] or "\n"
            lines[number - 1] = _with_old(file.path, text, new, end)
    return "".join(lines).encode("utf-8", "surrogateescape"), left


def _with_old(path: str, old: str, new: str, end: str) -> str:
    """Files with comments keep the old line as one."""
    if path == "/etc/kernel/cmdline" or path.startswith("/etc/driverctl.d/"):
        return new + end
    return f"{MARK}{old}{end}" + (new + end if new else "")


def _new_line(path: str, text: str, source: BootSource, ids: set[str]) -> str:
    if path.startswith("/etc/driverctl.d/"):
        return "nvidia"
    if path == "/etc/kernel/cmdline" or path.startswith("/etc/default/grub"):
        return _without_argument(text, source.text, ids)
    if not re.search(r"\bids=", text):
        return ""
    if not ids:
        return text
    new = _without_ids(text, ids)
    # `options vfio-pci` with nothing behind it says nothing.
    return "" if re.fullmatch(r"\s*options\s+vfio[-_]pci\s*", new) else new


def _without_ids(text: str, ids: set[str]) -> str:
    def replace(found: re.Match[str]) -> str:
        kept = _rest(found.group(2), ids)
        return f"{found.group(1)}ids={kept}" if kept else ""

    return re.sub(r"(^|\s+)ids=\"?([^\s\"]+)\"?", replace, text)


def _rest(listed: str, drop: set[str]) -> str:
    return ",".join(
        one for one in listed.split(",") if ":".join(one.split(":")[:2]).lower() not in drop
    )


def _without_argument(text: str, token: str, ids: set[str]) -> str:
    """A kernel command line with `token` shortened or taken out."""
    name, _, listed = token.partition("=")
    kept = _rest(listed, ids) if name.endswith("ids") else _rest(listed, {"nvidia"})
    pattern = rf"(?<![^\s\"'=]){re.escape(token)}(?![^\s\"'])"
    if kept:
        return re.sub(pattern, lambda _: f"{name}={kept}", text)
    found = re.search(pattern, text)
    if found is None:
        return text
    before, after = text[: found.start()], text[found.end() :]
    # One of the two blanks around it goes too.
    return before.rstrip(" ") + after if before.endswith(" ") else before + after.lstrip(" ")
