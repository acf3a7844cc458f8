"""`deploy init` on the lab's host, and the sshd of a container as it is tried from here."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from lab import INVENTORY, ROOT, Lab, Result
from sshd import WHY_NOT, free_port, make_key, start_sshd

from deployer.catalog import Catalog
from deployer.inventory import Ssh
from deployer.remote.hostkeys import HostKey, parse_public
from deployer.remote.sshtry import Door, try_login

pytestmark = pytest.mark.container

# All that a look could change by accident: modules, nodes, bindings, what Proxmox and /etc hold.
# A login alone makes sshd write motd.dynamic.
SEEN = r"""
cat /proc/modules 2>/dev/null | sort
ls /sys/module
ls -lR --time-style=+ /dev
ls -l --time-style=+ /sys/bus/pci/devices/*/ | grep -- '->'
find /etc /var/lib/deployer /run /usr/local -type f ! -name motd.dynamic 2>/dev/null | sort |
  xargs stat -c '%n %Y %s %a'
"""


def test_init_of_the_lab(lab: Lab, tmp_path: Path) -> None:
    lab.reset("kpro5")
    host, folder = lab.hosts["kpro5"], tmp_path / "inventory"
    (tmp_path / "playbooks").symlink_to(ROOT / "docker" / "playbooks")
    known = tmp_path / "known hosts"
    way = ["--port", "22105", "--known-hosts", str(known)]
    way += ["-I", str(ROOT / "docker/.build/id_ed25519")]

    def deploy(*words: str) -> Result:
        return lab.deploy("-i", str(folder), *words)

    unknown = deploy("init", "root@127.0.0.1", *way)
    assert unknown.exit == 3
    assert "SHA256:" in unknown.err
    shown = re.search(r"run `deploy (trust root@127.0.0.1 --port 22105 .*)`", unknown.err)
    assert shown
    assert not folder.exists()
    deploy("trust", "root@127.0.0.1", *way, "--yes").ok()
    before = host.sh(SEEN).ok().out
    told = deploy("init", "root@127.0.0.1", *way).ok()
    assert host.sh(SEEN).ok().out == before
    assert "0000:21:00.0 RTX A6000 on vfio-pci" in told.out

    path = folder / "kpro5.yaml"
    found, wanted = (Catalog.load(one).hosts["kpro5"] for one in (folder, INVENTORY))
    assert (found.kind, found.ssh.port, found.ssh.user) == ("proxmox", 22105, "root")
    assert [(one.address, one.name) for one in found.gpus] == [
        (one.address, one.name) for one in wanted.gpus
    ]
    assert list(found.containers) == list(wanted.containers) == [129]
    assert found.containers[129].ssh is not None
    assert found.deployments == {}
    assert deploy("init", "root@127.0.0.1", *way).ok().out.count("is as found") == 1

    head, _, tail = path.read_text().partition("    # deployments:")
    path.write_text(head + re.sub("(?m)^    # ", "    ", "    # deployments:" + tail))
    deploy("trust", "kpro5", "--yes").ok()
    plan = deploy("plan", "kpro5").ok()
    assert "0000:21:00.0" in plan.err + plan.out


def keys(*pairs: Path) -> tuple[HostKey, ...]:
    found = [parse_public(path.with_name(f"{path.name}.pub").read_text()) for path in pairs]
    return tuple(key for key in found if key is not None)


@pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT or "-")
def test_how_an_sshd_answers(tmp_path: Path) -> None:
    server = start_sshd(tmp_path / "server")
    other = make_key(tmp_path / "other")
    try:

        def tried(key: Path, expected: tuple[HostKey, ...], port: int = server.port) -> Door:
            ssh = Ssh(
                address="127.0.0.1",
                port=port,
                user=server.user,
                identity_file=str(key),
                known_hosts=str(tmp_path / "none"),
                connect_timeout_s=5,
            )
            return try_login("x", ssh, tmp_path, expected).door

        right = keys(other, server.host_key)
        assert tried(server.user_key, right) is Door.OPEN
        assert tried(other, right) is Door.LOCKED
        assert tried(server.user_key, keys(other)) is Door.STRANGER
        assert tried(server.user_key, right, free_port()) is Door.CLOSED
        assert not (tmp_path / "none").exists()
    finally:
        server.stop()
