"""What `init` runs on a machine: real shells against trees that stand for one, tools missing."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from deployer.remote.sudo import SudoTransport, sudo_works
from deployer.remote.transport import Answer
from deployer.survey import ask
from deployer.survey_facts import guest_script, machine_probe, parse_guest, parse_machine
from tests.local_transport import SHELLS, LocalTransport, shell_path
from tests.unit.hoststeps import A, output, tool

Runs = Callable[..., subprocess.CompletedProcess[bytes]]

IDS = """\
10dc  Not this vendor
\t2230  Wrong
10de  NVIDIA Corporation
\t2230  GA102GL [RTX A6000]
\t\t10de 1459  A board
\t2231  GA102GL [RTX A5000]
10df  Emulex
\t2230  Wrong again
"""


def device(root: Path, address: str, vendor: str = "0x10de", virtual: bool = False) -> None:
    folder = root / "sys/bus/pci/devices" / address
    folder.mkdir(parents=True)
    (folder / "vendor").write_text(f"{vendor}\n")
    (folder / "device").write_text("0x2230\n")
    if virtual:
        (folder / "physfn").symlink_to("../0000:21:00.0")


def put(root: Path, name: str, text: str) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.fixture(params=SHELLS)
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Runs:
    """Runs a script with this shell; `tools` come first in PATH."""
    path = shell_path(request.param, tmp_path)

    def go(script: str, tools: Path | None = None) -> subprocess.CompletedProcess[bytes]:
        search = f"{tools}:{path}" if tools else path
        return subprocess.run(
            ["sh", "-c", script.replace("PATH=/usr/local", f"PATH={search}:/usr/local")],
            capture_output=True,
            stdin=subprocess.DEVNULL,
            timeout=30,
            env={"LC_ALL": "C", "PATH": search},
            check=False,
        )

    return go


def test_a_proxmox_host(run: Runs, tmp_path: Path) -> None:
    root = tmp_path / "root dir"
    device(root, A)
    device(root, "0000:21:00.4", virtual=True)
    device(root, "0000:03:00.0", "0x1a03")
    for name in ("129.conf", "100.conf", "x.conf", "99.conf", "101.conf.tmp"):
        put(root, f"etc/pve/lxc/{name}", "")
    put(root, "etc/os-release", 'NAME=x\nPRETTY_NAME="Debian GNU/Linux 12"\n')
    put(root, f"proc/driver/nvidia/gpus/{A}/information", "Model: \t\t NVIDIA RTX A6000\nIRQ: 1\n")
    put(root, "usr/share/misc/pci.ids", IDS)
    tools = tmp_path / "tools"
    tool(tools, "pct", "echo never; exit 1\n")
    tool(tools, "dpkg-query", "[ \"$2\" = -f ] && printf 'pve 8.2.4\\n'\n")
    done = run(machine_probe(str(root)).script, tools)
    seen = parse_machine(output(done))
    assert done.returncode == 0
    assert seen.name
    assert seen.os == "Debian GNU/Linux 12"
    assert (seen.pct, seen.pve, seen.mounted) == (True, "8.2.4", True)
    assert seen.containers == (100, 129)
    assert seen.virtual == ("0000:21:00.4",)
    assert seen.known == (("2230", "GA102GL [RTX A6000]"),)
    assert seen.gpu_name(A, "2230") == "RTX A6000"
    assert seen.models == ((A, "NVIDIA RTX A6000"),)


def test_a_machine_with_nothing(run: Runs, tmp_path: Path) -> None:
    done = run(machine_probe(str(tmp_path / "empty")).script)
    seen = parse_machine(output(done))
    assert done.returncode == 0
    assert (seen.containers, seen.known, seen.virtual, seen.models) == ((), (), (), ())
    assert not seen.mounted
    assert seen.uid is not None


def test_within_a_container(run: Runs, tmp_path: Path) -> None:
    root = tmp_path / "root"
    key = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIJPVdTGuKuBDoyr9LXjYlNCEkaTRhzzDlVrPXvZSxVkg root@x"
    put(root, "etc/ssh/ssh_host_ed25519_key.pub", key + "\n")
    put(root, "etc/ssh/ssh_host_bad_key.pub", "nonsense\n")
    put(root, "etc/ssh/sshd_config", "#Port 23\n  port 2222\nPort 24\nPermitRootLogin yes\n")
    put(root, "usr/lib/x86_64-linux-gnu/libcuda.so.580.126.09", "")
    put(
        root,
        "proc/driver/nvidia/version",
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.1  x\n",
    )
    tools = tmp_path / "tools"
    tool(tools, "ip", (
        "echo '2: eth0    inet 192.0.2.129/24 brd 192.0.2.255 scope global eth0'\n"
        "echo '2: eth0@if7    inet6 2001:db8::9/64 scope global'\n"
        "echo '3: odd    inet nonsense/24'\n"
    ))  # fmt: skip
    look = parse_guest(output(run(guest_script(str(root)), tools)), str(root))
    assert look.problem == ""
    assert look.addresses == (("eth0", "192.0.2.129"), ("eth0", "2001:db8::9"))
    assert look.port == 2222
    assert [one.type for one in look.keys] == ["ssh-ed25519"]
    assert look.driver.userspace.versions() == ("580.126.09",)
    assert look.driver.kernel_module == "580.1"
    assert look.nodes.nodes == ()


def test_what_pct_says_instead(run: Runs) -> None:
    look = parse_guest(output(run("echo 'container 129 is frozen' >&2; exit 255")))
    assert look.problem == "`pct exec` failed: container 129 is frozen"
    look = parse_guest(output(run("exit 3")))
    assert look.problem == "`pct exec` failed: exit 3"


class Sudo:
    """A transport on whose machine `sudo -n` does as told."""

    def __init__(self, inner: LocalTransport, says: str) -> None:
        self.inner, self.says, self.name = inner, says, inner.name
        self.scripts: list[str] = []

    def run(
        self,
        script: str,
        *,
        args: Sequence[str] = (),
        stdin: bytes = b"",
        timeout_s: float = 30.0,
        on_stdout: Callable[[bytes], None] | None = None,
    ) -> Answer:
        self.scripts.append(script)
        text = f'sudo() {{ [ "$1" = -n ] || exit 99; shift; {self.says}; }}\n'
        text += script.replace("exec sudo", "sudo")
        return self.inner.run(
            text, args=args, stdin=stdin, timeout_s=timeout_s, on_stdout=on_stdout
        )

    def close(self) -> None:
        self.inner.close()


@pytest.mark.parametrize("shell", SHELLS)
def test_probes_through_sudo(shell: str, tmp_path: Path) -> None:
    inner = LocalTransport(shell_path(shell, tmp_path))
    transport = Sudo(inner, 'SEEN=root; export SEEN; "$@"')
    through = SudoTransport(transport)
    answer = through.run('printf "%s|" "$SEEN" "$@"; exit 7', args=("a b", "$x'", ""))
    assert (answer.exit, answer.text) == (7, "root|a b|$x'||")
    assert "a b" not in "".join(transport.scripts)
    seen = ask(through, [machine_probe(str(tmp_path / "empty"))])
    assert (
        seen["survey.machine"]
        == ask(inner, [machine_probe(str(tmp_path / "empty"))])["survey.machine"]
    )
    with pytest.raises(ValueError, match="no input"):
        through.run("cat", stdin=b"x")


@pytest.mark.parametrize("says", ["echo 'a password is required' >&2; return 1", "echo 1000"])
def test_no_sudo(says: str, tmp_path: Path) -> None:
    assert not sudo_works(Sudo(LocalTransport(shell_path("dash", tmp_path)), says))


def test_sudo(tmp_path: Path) -> None:
    assert sudo_works(Sudo(LocalTransport(shell_path("dash", tmp_path)), "echo 0"))
