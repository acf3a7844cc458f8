"""The files that an inventory and a playbook name, as seen from their folder."""

from __future__ import annotations

import re
from pathlib import Path

from deployer.document import Document, read_text
from deployer.errors import DocumentError, UsageError
from deployer.inventory import Host, Ssh
from deployer.names import shown
from deployer.playbook import Playbook

MAX_LOCK_BYTES = 4 * 1024 * 1024
"""A full lock with the hashes of all wheels has some 500 kB."""
MAX_KEY_BYTES = 64 * 1024
_PUBLIC_KEY = re.compile(r"^(ssh|ecdsa|sk-ssh|sk-ecdsa)-[A-Za-z0-9@.-]+ [A-Za-z0-9+/=]{16,}( .*)?$")


def inventory_files(inventory_dir: Path) -> list[Path]:
    """The inventory's files by name. Raises UsageError when there is nothing to read."""
    make = "make one with `deploy init USER@HOST` or by `deploy help inventory`; or name it: -i DIR"
    if not inventory_dir.exists():
        raise UsageError("there is no such inventory folder", where=shown(inventory_dir), fix=make)
    if not inventory_dir.is_dir():
        raise UsageError(
            "the inventory must be a folder, this is a file",
            where=shown(inventory_dir),
            fix=f"-i {shown(inventory_dir.parent)}",
        )
    try:
        files = sorted(
            path
            for path in inventory_dir.iterdir()
            if path.suffix in (".yaml", ".yml") and not path.name.startswith(".")
        )
    except OSError as error:
        raise UsageError(
            f"the inventory folder cannot be read: {error.strerror}",
            where=shown(inventory_dir),
            fix="check its permissions",
        ) from error
    if not files:
        raise UsageError(
            "the inventory folder has no *.yaml file", where=shown(inventory_dir), fix=make
        )
    return files


def lock_of(document: Document, playbook: Playbook) -> str:
    """The text of the engine lock that the playbook names."""
    path = document.path.parent / Path(playbook.engine.lock).expanduser()
    if not path.exists():
        raise document.error(
            ("engine", "lock"),
            f"engine.lock: there is no file {shown(path)}",
            fix="correct the name, or make one: `deploy help lock` prints a sample",
        )
    text = read_text(path, MAX_LOCK_BYTES)
    if not any(line.strip() and not line.strip().startswith("#") for line in text.splitlines()):
        raise DocumentError(
            "the lock names no package", where=shown(path), fix="`deploy help lock` prints a sample"
        )
    return text


def guest_keys(document: Document, host_name: str, host: Host, vmid: int | None) -> str | None:
    """The public keys for a container that may be created; None when their file is missing."""
    container = host.containers.get(vmid or 0)
    if container is None or container.create is None:
        return ""
    named = container.create.ssh_public_key_file
    if named is None:
        return ""
    path = document.path.parent / expanded(named)
    if not path.exists():
        return None
    text = read_text(path, MAX_KEY_BYTES)
    lines = [line for line in text.splitlines() if line.strip() and line[0] != "#"]
    if not lines or not all(_PUBLIC_KEY.match(line) for line in lines):
        at = ("hosts", host_name, "containers", vmid or 0, "create")
        raise document.error(
            (*at, "ssh_public_key_file"),
            f"{shown(path)} does not hold public SSH keys, one a line",
            fix="name the .pub file, never the private key",
        )
    return "".join(f"{line}\n" for line in lines)


def with_absolute_paths(host: Host, folder: Path) -> Host:
    """`host` with its ssh files as absolute paths."""
    containers = {
        vmid: container.model_copy(update={"ssh": _absolute(container.ssh, folder)})
        if container.ssh
        else container
        for vmid, container in host.containers.items()
    }
    return host.model_copy(update={"ssh": _absolute(host.ssh, folder), "containers": containers})


def with_absolute_package(playbook: Playbook, folder: Path) -> Playbook:
    """`playbook` with its driver package of this machine as an absolute path."""
    package = playbook.driver.package
    if package is None or package.local is None:
        return playbook
    path = str(seen_from(folder, expanded(package.local)))
    driver = playbook.driver.model_copy(
        update={"package": package.model_copy(update={"local": path})}
    )
    return playbook.model_copy(update={"driver": driver})


def _absolute(ssh: Ssh, folder: Path) -> Ssh:
    files = {"identity_file": ssh.identity_file, "known_hosts": ssh.known_hosts}
    return ssh.model_copy(
        update={
            key: str(seen_from(folder, expanded(value)))
            for key, value in files.items()
            if value is not None
        }
    )


def seen_from(folder: Path, path: Path) -> Path:
    """`path` as seen from `folder`, which has no link in it: `..` at its head is gone."""
    while path.parts[:1] == ("..",):
        folder, path = folder.parent, Path(*path.parts[1:])
    return folder / path


def expanded(path: str) -> Path:
    """`path` with `~`; a user that is not known leaves it as it is."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        return Path(path)
