"""The machine goes down in the middle of `up`; what was changed lasts across reboots. Runs last."""

from __future__ import annotations

import subprocess

from tests.vmlab.world import CONF, FIRST, SECOND, World


def test_cut_off_in_the_middle_the_same_command_finishes_and_it_lasts(world: World) -> None:
    """Power off while the GPUs move; again; then one more boot, whose units and guests start."""
    # What the tests before have put back must be on the disk: a cut loses what is not.
    world.machine.sh("sync").ok()
    world.playbook(gpus={"persist": "change"})
    process = subprocess.Popen(
        world.argv("up", "kpro5/one", "--only", "gpus", "--yes"),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    said = ""
    while "bind " not in said:
        line = process.stdout.readline()
        assert line, said
        said += line
    boots = [world.boot_id()]
    world.machine.power_off()
    # Before the host is up again: `up` may reach it anew, and go on.
    rest, _ = process.communicate(timeout=120)
    world.machine.start()
    boots.append(world.boot_id())
    assert process.returncode in (1, 3), said + rest
    assert "Traceback" not in said + rest
    # By what `up` had made last before the cut: nothing yet, or its unit, which ran at this boot.
    assert world.driver(FIRST) in ("vfio-pci", "nvidia")
    assert world.driver(SECOND) == "vfio-pci"

    done = world.up("one", "gpus")
    assert done.exit == 0, done
    done = world.up("one", "container")
    assert done.exit == 0, done
    world.machine.sh("sed -i 's/^onboot: 0/onboot: 1/' \"$1\"; sync", CONF).ok()
    world.machine.cut()
    boots.append(world.boot_id())

    assert len(set(boots)) == 3
    assert world.driver(FIRST) == "nvidia"
    assert world.driver(SECOND) == "vfio-pci"
    assert world.machine.sh("pct status 129").ok() == "status: running\n"
    assert world.nodes_inside()["/dev/nvidia-uvm"] == f"char {world.uvm_major()}:0"
    assert world.cuda_inside() == 0
    seen = world.deploy("plan", "kpro5/one")
    assert "= gpus" in seen.said and "= container" in seen.said, seen
    assert "proven across a reboot" in seen.said, seen
