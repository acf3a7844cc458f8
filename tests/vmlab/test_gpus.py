"""GPUs between vfio-pci and nvidia on a real kernel: what moves, what is refused, what hangs."""

from __future__ import annotations

import time

import pytest

from deployer.errors import StepBlocked
from tests.vmlab.machine import eventually
from tests.vmlab.world import FIRST, SECOND, UNBIND_LIMIT_S, World

ANSWER_S = 90
"""A command that ends within it has not hung; a look takes 3 s on a quiet machine."""


def test_one_of_two_equal_gpus_moves_and_the_other_is_untouched(world: World) -> None:
    """Both have the id 10de:2230, and vfio-pci has all: the module alone could not be loaded."""
    audio = f"{FIRST[:-1]}1"
    assert {world.driver(one) for one in (FIRST, SECOND, audio)} == {"vfio-pci"}
    refused = world.machine.sh("modprobe nvidia")
    assert refused.exit != 0 and "No such device" in refused.err  # the trap is there

    done = world.up("one", "gpus")

    assert done.exit == 0, done
    assert world.driver(FIRST) == "nvidia"
    assert [world.driver(SECOND), world.driver(audio)] == ["vfio-pci", "vfio-pci"]
    listed = world.machine.sh("nvidia-smi --query-gpu=pci.bus_id --format=csv,noheader").ok()
    assert listed.split() == [f"0000{FIRST}"]
    nodes = world.machine.sh("stat -c %t:%T /dev/nvidia0 /dev/nvidiactl /dev/nvidia-uvm").ok()
    assert nodes.split() == ["c3:0", "c3:ff", f"{world.uvm_major():x}:0"]


def test_and_back_to_vfio_but_not_while_a_container_has_it_open(world: World) -> None:
    """The container has a node of its own, so `fuser` on the host's would show nobody."""
    world.give(FIRST, SECOND)
    world.container_with("dev0: /dev/nvidia0,mode=0666", "dev1: /dev/nvidiactl,mode=0666")
    world.hold_in_container("/dev/nvidia0")
    assert world.machine.sh("fuser /dev/nvidia0").out.strip() == ""
    began = time.monotonic()

    with pytest.raises(StepBlocked) as refused:
        world.back_to_vfio("one")

    assert "container 129" in str(refused.value)
    assert time.monotonic() - began < ANSWER_S
    assert world.driver(FIRST) == "nvidia"
    assert "non-zero usage count" not in world.machine.sh("dmesg").out

    world.machine.sh("pct stop 129").ok()
    world.back_to_vfio("one")

    assert world.driver(FIRST) == "vfio-pci"
    assert world.driver(SECOND) == "nvidia"
    assert world.machine.sh("nvidia-smi -L | wc -l").ok().strip() == "1"


def test_a_gpu_that_a_vm_holds_is_refused_at_once(world: World) -> None:
    """An unbind would block and no signal would end it; so none is begun."""
    pid = world.vm(FIRST)

    refused = world.up("one", "gpus", limit_s=ANSWER_S)

    assert refused.exit == 1, refused
    assert f"pid {pid}" in refused.err and "VM 101" in refused.err, refused
    assert "qm shutdown 101" in refused.err
    assert world.driver(FIRST) == "vfio-pci"
    assert "blocked until" not in world.machine.sh("dmesg | tail -n 20").out


def test_an_unbind_that_blocks_ends_in_a_verdict_and_later_commands_answer(world: World) -> None:
    """The holder's file sits in a socket's queue: no look could have found it."""
    holder = world.vm(FIRST, "hidden")
    began = time.monotonic()

    stuck = world.up("one", "gpus", limit_s=2 * ANSWER_S)

    assert stuck.exit == 1, stuck
    assert f"the unbind of {FIRST} from vfio-pci has not returned after {UNBIND_LIMIT_S} s" in (
        stuck.err
    ), stuck
    assert "reboot kpro5" in stuck.err
    assert time.monotonic() - began > UNBIND_LIMIT_S
    assert "blocked until released" in world.machine.sh("dmesg").out
    # Reading driver_override of the GPU would now hang for good; no later look may do that.
    again = world.deploy("plan", "kpro5/one", limit_s=ANSWER_S)
    assert "reboot" in again.said, again
    other = world.deploy("plan", "kpro5/two", limit_s=ANSWER_S)
    assert f"bind {SECOND} to nvidia" in other.said, other

    world.machine.sh('kill "$1"', str(holder)).ok()
    eventually(lambda: world.writers() == [], "the unbind has ended", 20)


def test_a_gpu_that_went_back_to_vfio_is_noticed(world: World) -> None:
    """As `qm start` of a VM leaves it: the ids match, so an unbound device goes to vfio-pci."""
    world.give(FIRST)
    world.machine.sh(
        'echo >"/sys/bus/pci/devices/$1/driver_override"; cd /sys/bus/pci;'
        'echo "$1" >drivers/nvidia/unbind; echo "$1" >drivers_probe',
        FIRST,
    ).ok()
    assert world.driver(FIRST) == "vfio-pci"

    seen = world.deploy("plan", "kpro5/one", limit_s=ANSWER_S)

    assert f"{FIRST} is on vfio-pci" in seen.said, seen
    assert "/etc/modprobe.d/vfio.conf:2" in seen.said, seen  # it would at the next boot, too


UNITS = "/etc/systemd/system/multi-user.target.wants"


def test_a_step_that_fails_at_its_last_change_leaves_the_host_as_it_was(world: World) -> None:
    """Link by link and file by file; tests/scripts/test_undo_gpus.py fails at each change."""
    world.playbook(gpus={"persist": "unit"})
    world.machine.sh('mkdir -p "$1" && mount -t tmpfs -o ro none "$1"', UNITS).ok()
    before = world.listing()

    failed = world.up("one", "gpus")

    assert failed.exit == 1, failed
    assert "enable deployer-gpus-one.service" in failed.err, failed
    assert "kpro5 is as it was before" in failed.err, failed
    assert world.listing() == before
