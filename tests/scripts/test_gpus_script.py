"""The gpus step's script, by real shells, against a tree like a host's."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from deployer.steps.gpus_moves import Move, apply_script, to_nvidia
from tests.unit.hoststeps import SHELLS, A, B, Tree, run_script, tool, write
from tests.unit.test_step_gpus import char, look, overrides

BY_SHELL = pytest.mark.parametrize("shell", SHELLS[:2], ids=lambda shell: shell[0])
AUDIO = "0000:21:00.1"


def simulate(tree: Tree, folder: Path) -> None:
    """A kernel: unbind frees, drivers_probe follows driver_override, modprobe loads and binds."""

    def probe_one(address: str) -> None:
        wanted = tree.override(address)
        loaded = wanted != "nvidia" or (tree.root / "sys/module/nvidia").exists()
        if not tree.driver(address) and loaded:
            tree.bind(address, wanted)

    for driver in ("vfio-pci", "nvidia", "snd_hda_intel"):
        (tree.pci / "drivers" / driver).mkdir(exist_ok=True)
        tree.fifo(f"drivers/{driver}/unbind", tree.unbind)
    tree.fifo("drivers_probe", probe_one)
    tool(
        folder,
        "modprobe",
        f"""case $1 in
-r) rm -r {tree.root}/sys/module/$2 ;;
nvidia_uvm) mkdir -p {tree.root}/sys/module/nvidia_uvm ;;
nvidia)
  [ ! -e {tree.pci}/devices/{A}/driver ] || {{ echo "No such device" >&2; exit 1; }}
  mkdir -p {tree.root}/sys/module/nvidia
  printf '195 nvidia\\n509 nvidia-uvm\\n' >{tree.root}/proc/devices ;;
esac
""",
    )
    tool(folder, "nvidia-modprobe", "exit 0\n")


def run(
    tree: Tree, shell: list[str], *moves: Move, limit: float = 10, **more: object
) -> subprocess.CompletedProcess[bytes]:
    """The script; its tools lie beside the tree."""
    script = apply_script(moves, limit, str(tree.root), **more)  # type: ignore[arg-type]
    return run_script(script, shell, tree.root.parent / "bin")


@BY_SHELL
def test_script_rebinds_and_makes_nodes(tmp_path: Path, shell: list[str]) -> None:
    char(tmp_path / "can-make-nodes", 195, 0)
    tree = Tree(tmp_path / "host")
    simulate(tree, tmp_path / "bin")
    done = run(tree, shell, *to_nvidia([A, B]))
    assert done.returncode == 0, done.stderr.decode()
    assert [tree.driver(A), tree.driver(B)] == ["nvidia", "nvidia"]
    assert tree.driver(AUDIO) == "vfio-pci"
    assert look(tree, shell).ready
    assert list((tree.root / "run/deployer/gpus").iterdir()) == []
    again = run(tree, shell, *to_nvidia([A, B]))
    assert (again.returncode, again.stdout) == (0, b"")
    # And back, as an undo does: overrides as they were, modules and all.
    back = (Move(A, "vfio-pci", "nvidia", ""), Move(B, "vfio-pci", "nvidia", "vfio-pci"))
    done = run(tree, shell, *back, unload=("nvidia_uvm", "nvidia"))
    assert done.returncode == 0, done.stderr.decode()
    assert [tree.driver(A), tree.driver(B)] == ["vfio-pci", "vfio-pci"]
    assert [tree.override(A), tree.override(B)] == ["", "vfio-pci"]
    assert look(tree, shell).modules == ()


def daemon(tree: Tree, folder: Path, *pids: int) -> None:
    """nvidia-persistenced holds both GPUs; `systemctl stop` ends it, and all calls are noted."""
    for minor in (0, 1):
        char(tree.root / f"dev/nvidia{minor}", 195, minor)
    for number, pid in enumerate(pids):
        name = "nvidia-persiste" if pid == 9 else "python3"
        tree.process(pid, name, str(tree.root / f"dev/nvidia{number % 2}"), "/system.slice/x")
    tool(
        folder,
        "systemctl",
        f"""echo "$*" >>{folder}/calls
case $1 in stop) rm -r {tree.root}/proc/9 ;; esac
""",
    )


@BY_SHELL
def test_script_pauses_persistenced_for_the_way_to_vfio(tmp_path: Path, shell: list[str]) -> None:
    tree = Tree(tmp_path / "host", driver="nvidia")
    simulate(tree, tmp_path / "bin")
    daemon(tree, tmp_path / "bin", 9)
    tree.unbind(AUDIO)
    tree.bind(AUDIO, "snd_hda_intel")
    moves = (Move(A, "vfio-pci", "nvidia"), Move(AUDIO, "vfio-pci", "snd_hda_intel"))
    refused = run(tree, shell, *moves)
    assert refused.returncode == 76
    assert b"0000:21:00.0 is in use by pid 9 (nvidia-persiste)" in refused.stderr
    done = run(tree, shell, *moves, daemon=True)
    assert done.returncode == 0, done.stderr.decode()
    assert [tree.driver(one) for one in (A, AUDIO, B)] == ["vfio-pci", "vfio-pci", "nvidia"]
    assert (tmp_path / "bin/calls").read_text().splitlines() == [
        "is-active --quiet nvidia-persistenced.service",
        "stop nvidia-persistenced.service",
        "--no-block start nvidia-persistenced.service",
    ]


@BY_SHELL
def test_script_starts_persistenced_again_when_it_fails(tmp_path: Path, shell: list[str]) -> None:
    tree = Tree(tmp_path / "host", driver="nvidia")
    simulate(tree, tmp_path / "bin")
    daemon(tree, tmp_path / "bin", 9)
    tree.unbind(AUDIO)
    tree.bind(AUDIO, "xhci_hcd")
    moves = (Move(AUDIO, "vfio-pci", "snd_hda_intel"), Move(A, "vfio-pci", "nvidia"))
    done = run(tree, shell, *moves, daemon=True)
    assert done.returncode == 77
    assert b"0000:21:00.1 is bound to xhci_hcd, not to snd_hda_intel; it was not touched" in (
        done.stderr
    )
    assert [tree.driver(one) for one in (A, AUDIO)] == ["nvidia", "xhci_hcd"]
    assert (tmp_path / "bin/calls").read_text().endswith("start nvidia-persistenced.service\n")


@BY_SHELL
def test_script_comes_to_its_end_when_nobody_reads_it(tmp_path: Path, shell: list[str]) -> None:
    """The connection is cut: no GPU stays between two drivers, and the daemon starts again."""
    tree = Tree(tmp_path / "host", driver="nvidia")
    simulate(tree, tmp_path / "bin")
    daemon(tree, tmp_path / "bin", 9)
    script = apply_script([Move(A, "vfio-pci", "nvidia")], 10, str(tree.root), daemon=True)
    run_script(f"{{ {script}\n}} | :", shell, tmp_path / "bin")
    assert tree.driver(A) == "vfio-pci"
    assert (tmp_path / "bin/calls").read_text().endswith("start nvidia-persistenced.service\n")


@BY_SHELL
def test_script_stops_no_daemon_that_is_not_alone(tmp_path: Path, shell: list[str]) -> None:
    tree = Tree(tmp_path / "host", driver="nvidia")
    simulate(tree, tmp_path / "bin")
    daemon(tree, tmp_path / "bin", 9, 7, 8)
    done = run(tree, shell, Move(A, "vfio-pci", "nvidia"), daemon=True)
    assert done.returncode == 76
    assert b"in use by pid 8 (python3) 9 (nvidia-persiste)" in done.stderr
    assert not (tmp_path / "bin/calls").exists()
    assert tree.driver(A) == "nvidia"


def quick_clock(folder: Path) -> Path:
    """`date` advances a second at each call and `sleep` hardly waits."""
    tool(
        folder,
        "date",
        f"n=$(cat {folder}/n 2>/dev/null || echo 0)\necho $((n + 1)) | tee {folder}/n\n",
    )
    tool(folder, "sleep", "exit 0\n")
    return folder


@BY_SHELL
def test_script_gives_up_on_a_stuck_unbind_and_a_later_look_sees_it(
    tmp_path: Path, shell: list[str]
) -> None:
    tree = Tree(tmp_path / "host")
    boot = Path("/proc/sys/kernel/random/boot_id").read_text()
    write(tree.root / "proc/sys/kernel/random/boot_id", boot)
    # Nobody reads: the writer hangs, as in a kernel that waits for the GPU's user.
    os.mkfifo(tree.pci / "drivers/vfio-pci/unbind")
    quick_clock(tmp_path / "bin")
    done = run(tree, shell, *to_nvidia([A]), limit=60)
    assert done.returncode == 75
    assert b"only a reboot" in done.stderr
    mark = tree.root / "run/deployer/gpus" / A
    pid = int(mark.read_text().split()[1])
    try:
        (tree.root / f"proc/{pid}").symlink_to(f"/proc/{pid}")
        (seen,) = look(tree, shell).pending
        assert (seen.pid, seen.address) == (pid, A)
        assert seen.what == f"the unbind of {A} from vfio-pci"
        assert (overrides(tree, shell).of(A), overrides(tree, shell).of(B)) == (None, "")
        tree.unbind(A)
        again = run(tree, shell, *to_nvidia([A, B]))
        assert again.returncode == 75
        assert f"the unbind of {A} from vfio-pci by pid {pid} has not returned" in (
            again.stderr.decode()
        )
        assert tree.driver(B) == "vfio-pci"
    finally:
        os.kill(pid, signal.SIGKILL)
        # Lets the open of the FIFO end where the signal did not.
        os.close(os.open(tree.pci / "drivers/vfio-pci/unbind", os.O_RDONLY | os.O_NONBLOCK))
    (tree.root / f"proc/{pid}").unlink()
    assert look(tree, shell).pending == ()


@BY_SHELL
def test_script_does_not_believe_the_write(tmp_path: Path, shell: list[str]) -> None:
    tree = Tree(tmp_path / "host")
    tree.fifo("drivers/vfio-pci/unbind", lambda address: None)
    quick_clock(tmp_path / "bin")
    done = run(tree, shell, *to_nvidia([A]), limit=100)
    assert done.returncode == 75
    assert b"still bound" in done.stderr


@BY_SHELL
def test_script_tells_when_vfio_takes_the_device_back(tmp_path: Path, shell: list[str]) -> None:
    tree = Tree(tmp_path / "host")
    simulate(tree, tmp_path / "bin")
    tree.load()
    # Its ids or new_id match: the probe gives it back whatever was written.
    (tree.pci / "drivers_probe").unlink()
    tree.fifo("drivers_probe", lambda address: tree.bind(address, "vfio-pci"))
    done = run(tree, shell, *to_nvidia([A]), limit=1)
    assert done.returncode == 77
    assert b"is bound to 'vfio-pci' and not to nvidia after 1 s" in done.stderr


@BY_SHELL
def test_script_refuses_a_gpu_in_use(tmp_path: Path, shell: list[str]) -> None:
    tree = Tree(tmp_path / "host")
    tree.process(4242, "kvm", "/dev/vfio/14", "/")
    done = run(tree, shell, *to_nvidia([A]), limit=1)
    assert done.returncode == 76
    assert b"in use by pid 4242 (kvm)" in done.stderr
    assert tree.driver(A) == "vfio-pci"
