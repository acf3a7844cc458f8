"""The gpus step's script, by real shells, against a tree like a host's."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from deployer.steps.gpus_moves import apply_script, to_nvidia
from tests.unit.hoststeps import SHELLS, A, B, Tree, run_script, tool
from tests.unit.test_step_gpus import char, look

BY_SHELL = pytest.mark.parametrize("shell", SHELLS, ids=lambda shell: shell[0])


def simulate(tree: Tree, folder: Path) -> None:
    """A kernel: unbind frees, drivers_probe follows driver_override, modprobe loads and binds."""

    def probe_one(address: str) -> None:
        if not tree.driver(address) and (tree.root / "sys/module/nvidia").exists():
            tree.bind(address, tree.override(address))

    tree.fifo("drivers/vfio-pci/unbind", tree.unbind)
    tree.fifo("drivers_probe", probe_one)
    tool(
        folder,
        "modprobe",
        f"""case $1 in
nvidia_uvm) mkdir -p {tree.root}/sys/module/nvidia_uvm ;;
nvidia)
  [ ! -e {tree.pci}/devices/{A}/driver ] || {{ echo "No such device" >&2; exit 1; }}
  mkdir -p {tree.root}/sys/module/nvidia
  printf '195 nvidia\\n509 nvidia-uvm\\n' >{tree.root}/proc/devices ;;
esac
""",
    )
    tool(folder, "nvidia-modprobe", "exit 0\n")


@BY_SHELL
def test_script_rebinds_and_makes_nodes(tmp_path: Path, shell: list[str]) -> None:
    char(tmp_path / "can-make-nodes", 195, 0)
    tree = Tree(tmp_path / "host")
    simulate(tree, tmp_path / "bin")
    script = apply_script(to_nvidia([A, B]), 10, str(tree.root))
    done = run_script(script, shell, tmp_path / "bin")
    assert done.returncode == 0, done.stderr.decode()
    assert [tree.driver(A), tree.driver(B)] == ["nvidia", "nvidia"]
    assert tree.driver("0000:21:00.1") == "vfio-pci"
    assert look(tree, shell).ready
    again = run_script(script, shell, tmp_path / "bin")
    assert (again.returncode, again.stdout) == (0, b"")


def quick_clock(folder: Path) -> Path:
    """`date` advances a second at each call and `sleep` does not wait."""
    tool(
        folder,
        "date",
        f"n=$(cat {folder}/n 2>/dev/null || echo 0)\necho $((n + 1)) | tee {folder}/n\n",
    )
    tool(folder, "sleep", "exit 0\n")
    return folder


@BY_SHELL
def test_script_gives_up_on_a_stuck_unbind(tmp_path: Path, shell: list[str]) -> None:
    tree = Tree(tmp_path)
    # Nobody reads: the writer hangs, as in a kernel that waits for the GPU's user.
    os.mkfifo(tree.pci / "drivers/vfio-pci/unbind")
    clock = quick_clock(tmp_path / "bin")
    done = run_script(apply_script(to_nvidia([A]), 20, str(tree.root)), shell, clock)
    assert done.returncode == 75
    assert b"only a reboot" in done.stderr
    # Lets the writer end.
    os.close(os.open(tree.pci / "drivers/vfio-pci/unbind", os.O_RDONLY | os.O_NONBLOCK))


@BY_SHELL
def test_script_does_not_believe_the_write(tmp_path: Path, shell: list[str]) -> None:
    tree = Tree(tmp_path)
    tree.fifo("drivers/vfio-pci/unbind", lambda address: None)
    clock = quick_clock(tmp_path / "bin")
    done = run_script(apply_script(to_nvidia([A]), 100, str(tree.root)), shell, clock)
    assert done.returncode == 75
    assert b"still bound" in done.stderr


@BY_SHELL
def test_script_refuses_a_gpu_in_use(tmp_path: Path, shell: list[str]) -> None:
    tree = Tree(tmp_path)
    tree.process(4242, "kvm", "/dev/vfio/14", "/")
    done = run_script(apply_script(to_nvidia([A]), 1, str(tree.root)), shell)
    assert done.returncode == 76
    assert b"in use by pid 4242" in done.stderr
    assert tree.driver(A) == "vfio-pci"
