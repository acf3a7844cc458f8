"""`create:` of a container in the inventory: what it may say, and the keys that it names."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from deployer.catalog import Catalog
from deployer.errors import DocumentError
from deployer.inventory import Create, GuestNet
from deployer.steps.container_create import argv
from tests.unit.test_catalog import tree  # noqa: F401 - a fixture

KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIExample me@here\n"
CREATE = (
    "create: {template: 'local:vztmpl/debian-12.tar.zst', storage: local-zfs, disk_gib: 400, "
    "memory_mib: 65536, hostname: sglang, ssh_public_key_file: keys/id.pub}"
)


def load(tree: Path, create: str = CREATE) -> Catalog:  # noqa: F811
    """The catalog of `tree` whose container 129 has this `create:`."""
    path = tree / "inventory" / "a.yaml"
    text = path.read_text()
    old = 'gpus: ["0000:21:00.0"]}'
    assert old in text
    path.write_text(text.replace(old, f'gpus: ["0000:21:00.0"], {create}}}', 1))
    return Catalog.load(tree / "inventory")


def keys(tree: Path, text: str) -> None:  # noqa: F811
    """The file that CREATE names."""
    (tree / "inventory/keys").mkdir()
    (tree / "inventory/keys/id.pub").write_text(text)


def test_the_keys_are_read_beside_the_inventory(tree: Path) -> None:  # noqa: F811
    keys(tree, f"# mine\n\n{KEY}")
    catalog = load(tree)
    qwen, tiny = catalog.select(["kpro5/qwen", "kpro5/tiny"])
    assert qwen.guest_keys == KEY
    assert tiny.guest_keys == ""


def test_a_missing_key_file_matters_only_when_the_container_is_created(
    tree: Path,  # noqa: F811
) -> None:
    assert load(tree).select(["kpro5/qwen"])[0].guest_keys is None


@pytest.mark.parametrize("text", ["-----BEGIN OPENSSH PRIVATE KEY-----\nb3Blbn\n", "", "me@here\n"])
def test_a_private_key_is_refused(tree: Path, text: str) -> None:  # noqa: F811
    keys(tree, text)
    with pytest.raises(DocumentError, match="does not hold public SSH keys") as raised:
        load(tree).select(["kpro5/qwen"])
    assert "a.yaml:" in raised.value.where
    assert "BEGIN" not in str(raised.value)


@pytest.mark.parametrize(
    ("create", "reason"),
    [
        (CREATE.replace(", ssh_public_key_file: keys/id.pub", ""), "names no key for it"),
        (CREATE.replace("}", ", net: {gateway: 192.0.2.1}}"), "its address is dhcp"),
        (CREATE.replace("local:vztmpl/", "local:iso/"), "a template like"),
        (CREATE.replace("local-zfs", "'-x'"), "the name of a Proxmox storage"),
        (CREATE.replace("sglang,", "a_b,"), "a host name of letters"),
        (CREATE.replace("}", ", features: [nesting]}"), "a feature like nesting=1"),
        (CREATE.replace("}", ", net: {ip: 192.0.2.129}}"), "dhcp, or an IPv4 address"),
        (CREATE.replace("}", ", net: {bridge: 'vmbr0,tag=1'}}"), "a network bridge"),
        (CREATE.replace("400", "0"), "at least 1"),
        (CREATE.replace("disk_gib", "disk_gb"), "did you mean `disk_gib`"),
    ],
)
def test_what_does_not_fit_is_told(tree: Path, create: str, reason: str) -> None:  # noqa: F811
    with pytest.raises(DocumentError) as raised:
        load(tree, create)
    assert reason in str(raised.value) + raised.value.fix


def test_the_command() -> None:
    create = Create(
        template="local:vztmpl/debian-12.tar.zst",
        storage="local-zfs",
        disk_gib=400,
        memory_mib=65536,
        cores=16,
        hostname="sglang",
        net=GuestNet(ip="192.0.2.129/24", gateway="192.0.2.1", vlan=10),
        unprivileged=False,
        features=["nesting=1", "keyctl=1"],
        onboot=False,
    )
    assert argv(129, create, keys=True) == [
        *("pct", "create", "129", "local:vztmpl/debian-12.tar.zst"),
        *("--hostname", "sglang", "--rootfs", "local-zfs:400", "--cores", "16"),
        *("--memory", "65536", "--swap", "0"),
        *("--net0", "name=eth0,bridge=vmbr0,ip=192.0.2.129/24,gw=192.0.2.1,tag=10"),
        *("--unprivileged", "0", "--features", "nesting=1,keyctl=1", "--onboot", "0"),
        *("--description", "Created by deployer", "--ssh-public-keys", "keys"),
    ]


def test_least_of_a_creation() -> None:
    least = Create(template="a:vztmpl/b", storage="c", disk_gib=1, memory_mib=16, hostname="d")
    made = argv(100, least, keys=False)
    assert "--cores" not in made
    assert "--ssh-public-keys" not in made
    assert made[made.index("--unprivileged") + 1] == "1"
    with pytest.raises(ValidationError):
        Create(template="a:vztmpl/../b", storage="c", disk_gib=1, memory_mib=16, hostname="d")
