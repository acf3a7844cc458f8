"""`deploy init USER@HOST`: look at a machine that no inventory names, and write its file."""

from __future__ import annotations

import difflib
import os
import re
import tempfile
import unicodedata
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from deployer import crosscheck, names
from deployer.catalog import Catalog
from deployer.cli.deadline import deadline
from deployer.cli.direct import Way, direct, retold, ssh_of, written
from deployer.cli.options import Options, common
from deployer.cli.output import print_json
from deployer.cli.plain import printable
from deployer.document import parse, read_text
from deployer.errors import Unreachable, UsageError
from deployer.findings import Finding, Level
from deployer.inventory import InventoryFile
from deployer.names import shown
from deployer.survey import Survey, survey
from deployer.survey_findings import findings
from deployer.survey_yaml import Target, driver_text, guest_text, render
from deployer.validation import validate


@click.command("init")
@click.argument("word", metavar="[USER@]HOST")
@direct
@click.option("--name", metavar="NAME", help="Its name in the inventory (default: its own).")
@click.option("--print", "printed", is_flag=True, help="Print the file; write nothing.")
@common
def command(options: Options, word: str, name: str | None, printed: bool, way: Way) -> int:
    """Look at a machine and write a commented inventory file; change nothing there.

    Writes NAME.yaml in the inventory folder: its GPUs by PCI address, its containers and how each
    is reached, the driver, and what stands in the way. A file that is there already is never
    changed: the difference is shown, and the exit code is 2. With `--json` it is written only with
    `--yes`. Exit code 1 when there is no GPU of NVIDIA.
    """
    options.no_events("init")
    if printed and options.as_json:
        raise UsageError("--print and --json exclude each other", fix="--json has the file in it")
    if name is not None and not re.fullmatch(names.HOST_NAME, name):
        raise UsageError(
            f"--name {name!r}: expected {names.PLAIN_WORDS[names.HOST_NAME]}", fix="--name kpro5"
        )
    ssh = ssh_of(word, way)
    try:
        with deadline(options.timeout):
            seen = survey(word, ssh, Path.cwd())
    except Unreachable as error:
        raise retold(error, word, way) from error
    label = name or host_name(seen.machine.name, ssh.address)
    found = findings(label, seen)
    if not seen.gpus.functions:
        return _no_gpu(options, label, seen, found)
    target = Target(
        label, written(ssh, options.inventory), way.command("init", word), _playbooks(options)
    )
    text = render(target, seen, found)
    check(label, text)
    if printed:
        click.echo(text, nl=False)
        return 0
    path = options.inventory / f"{label}.yaml"
    _refuse_twin(options, label, path)
    new = _is_new(path, text, options)
    writes = new and (options.yes or not options.as_json)
    if writes:
        create(path, text)
    if options.as_json:
        print_json({**document(label, seen, found), "path": str(path), "written": writes,
                    "yaml": text})  # fmt: skip
        return 0
    _told(target, seen, found, path, new)
    return 0


def host_name(told: str, address: str) -> str:
    """A name for the inventory from what the machine calls itself, else from its address."""
    for text in (told.split(".")[0], address.strip("[]")):
        ascii_ = unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode().lower()
        name = re.sub(r"[^a-z0-9]+", "-", ascii_).strip("-")[:63].strip("-")
        if name and name != "localhost":
            return name
    return "host"


def check(label: str, text: str) -> None:
    """What was written must load. Raises DocumentError: a defect of ours."""
    made = parse(Path(f"{label}.yaml"), text)
    for name, host in validate(made, InventoryFile).hosts.items():
        crosscheck.check_host(made, name, host)


def create(path: Path, text: str) -> None:
    """Writes a file that is not there yet, whole or not at all. Raises UsageError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fchmod(handle, 0o644)
                os.fsync(handle)
            # A link is never made over another file, which may have come in the meantime.
            os.link(temporary, path)
        finally:
            Path(temporary).unlink()
    except OSError as error:
        raise UsageError(
            f"cannot be written: {error.strerror}", where=shown(path), fix="or use --print"
        ) from error


def _playbooks(options: Options) -> tuple[str, ...]:
    folder = options.inventory.resolve().parent / "playbooks"
    stems = sorted(path.stem for path in folder.glob("*.yaml"))
    return tuple(stem for stem in stems if re.fullmatch(names.PLAYBOOK_NAME, stem))


def _refuse_twin(options: Options, label: str, path: Path) -> None:
    """Another file of the folder may not name the host already."""
    folder = options.inventory
    if not folder.exists() or not any(folder.glob("*.y*ml")):
        return
    documents = Catalog.load(folder).documents
    if label in documents and documents[label].path.resolve() != path.resolve():
        raise UsageError(
            f"host `{label}` is described already",
            where=documents[label].where(("hosts", label), key=True),
            fix="give this one another name with --name, or use --print",
        )


def _is_new(path: Path, text: str, options: Options) -> bool:
    """Whether there is no such file; False when it says just this. Raises UsageError otherwise."""
    if not path.exists() and not path.is_symlink():
        return True
    old = read_text(path)
    if old == text:
        return False
    if not options.as_json:
        lines = (old.splitlines(), text.splitlines())
        for line in difflib.unified_diff(*lines, shown(path), "as found now", lineterm=""):
            click.echo(printable(line))
    raise UsageError(
        "the file is there and differs from what was found now; it was left as it is",
        where=shown(path),
        fix="take over what is right by hand (--print shows all), or use another --name",
    )


def _no_gpu(options: Options, label: str, seen: Survey, found: Sequence[Finding]) -> int:
    """Nothing to write: an inventory lists hosts with GPUs."""
    others = [one for one in seen.gpus.displays if not one.is_nvidia_gpu]
    shown_ = ", ".join(f"{one.address} ({one.id})" for one in others)
    more = f"; other display devices: {shown_}" if others else ""
    error = UsageError(
        f"no GPU of NVIDIA was found{more}; nothing was written",
        where=label,
        fix="look at `lspci -Dnn | grep -i nvidia` there: is the card in, and seen by the BIOS?",
    )
    error.exit_code = 1
    if options.as_json:
        print_json({**document(label, seen, found), "path": None, "written": False, "yaml": None})
        return 1
    _findings(found)
    raise error


def document(label: str, seen: Survey, found: Sequence[Finding]) -> dict[str, Any]:
    """The JSON form of what was seen."""
    return {
        "name": label,
        "kind": seen.kind,
        "machine": {
            "hostname": seen.machine.name,
            "os": seen.machine.os,
            "kernel": seen.driver.kernel,
            "proxmox": seen.machine.pve,
            "user": seen.user,
            "looked_as": seen.eyes,
        },
        "driver": {
            "loaded": seen.driver.loaded,
            "flavour": seen.driver.flavour,
            "on_disk": seen.driver.on_disk,
            "libraries": list(seen.driver.userspace.versions()),
        },
        "gpus": [
            {
                "address": one.address,
                "id": one.id,
                "name": seen.gpu_name(one),
                "driver": one.driver,
                "iommu_group": one.group,
            }
            for one in seen.gpus.functions
        ],
        "containers": [
            {
                "vmid": guest.vmid,
                "hostname": guest.hostname,
                "status": guest.seen.status,
                "template": guest.template,
                "addresses": list(guest.addresses),
                "sshd": guest.tried.door.value if guest.tried else None,
                "reached_by": "ssh" if guest.by_ssh else "pct exec",
                "libraries": list(guest.look.driver.userspace.versions()) if guest.look else None,
            }
            for guest in seen.guests
        ],
        "findings": [one.to_dict() for one in found],
    }


def _findings(found: Sequence[Finding]) -> None:
    for one in found:
        if one.level is Level.FINE:
            continue
        click.echo(f"  {one.level.name.lower():<8} {printable(one.where)}: {printable(one.what)}")
        if one.fix:
            click.echo(f"  {'':<8} -> {printable(one.fix)}")


def _told(target: Target, seen: Survey, found: Sequence[Finding], path: Path, new: bool) -> None:
    """What a person reads; the next command last."""
    label = target.name
    click.echo(f"{label}: {seen.kind}, {printable(driver_text(seen))}")
    for one in seen.gpus.functions:
        click.echo(f"  {one.address} {printable(seen.gpu_name(one)) or one.id} on "
                   f"{one.driver or 'no driver'}")  # fmt: skip
    for guest in seen.guests:
        way = "its own ssh" if guest.by_ssh else "pct exec"
        text = "a template" if guest.template else f"{guest_text(guest)}; by {way}"
        click.echo(f"  container {guest.vmid}: {printable(text)}")
    _findings(found)
    click.echo(f"{'wrote' if new else 'is as found:'} {shown(path)}")
    trust = any(guest.by_ssh for guest in seen.guests)
    where = f" -i {shown(path.parent)}" if path.parent != Path("inventory") else ""
    click.echo("  -> take the marks off `deployments:` there, then: "
               + (f"deploy{where} trust {label}; " if trust else "")
               + f"deploy{where} plan {label}")  # fmt: skip
