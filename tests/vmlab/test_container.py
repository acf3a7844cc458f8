"""The container on a real kernel: real nodes, real device rules, and CUDA's own word."""

from __future__ import annotations

from tests.vmlab.world import CONF, FIRST, OTHER_VERSION, VERSION, World

SNAPSHOT = """
[before]
arch: amd64
hostname: sglang
rootfs: local-zfs:subvol-129-disk-0
snaptime: 1700000000
"""
DEVICES = ("/dev/nvidia0", "/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools")


def right_nodes(world: World) -> dict[str, str]:
    """What the container of deployment `one` must have."""
    uvm = world.uvm_major()
    return {
        "/dev/nvidia0": "char 195:0",
        "/dev/nvidiactl": "char 195:255",
        "/dev/nvidia-uvm": f"char {uvm}:0",
        "/dev/nvidia-uvm-tools": f"char {uvm}:1",
    }


def test_devices_come_before_the_snapshots_and_a_changed_uvm_major_is_mended(world: World) -> None:
    """Lines below a snapshot's head would have no effect; nvidia-smi is fine with a stale node."""
    world.give(FIRST)
    world.machine.sh('printf "$1" >>"$2"', SNAPSHOT, CONF).ok()

    done = world.up("one", "container")

    assert done.exit == 0, done
    current, _, snapshot = world.machine.sh('cat "$1"', CONF).ok().partition("[before]")
    assert all(f": {path}" in current for path in DEVICES)
    assert "nvidia" not in snapshot and "snaptime: 1700000000" in snapshot
    assert world.nodes_inside() == right_nodes(world)
    assert world.cuda_inside() == 0
    denied = world.inside("mknod /tmp/second c 195 1 && : <>/tmp/second")
    assert denied.exit != 0  # the rules are per minor: the other GPU stays out of reach

    before = world.uvm_major()
    world.machine.sh("rmmod nvidia_uvm && modprobe nvidia_uvm major=240").ok()
    assert world.inside("nvidia-smi -L").exit == 0
    assert world.cuda_inside() == 999

    mended = world.up("one", "gpus")
    assert mended.exit == 0, mended
    done = world.up("one", "container")

    assert done.exit == 0, done
    assert before != world.uvm_major() == 240
    assert world.nodes_inside() == right_nodes(world)
    assert world.cuda_inside() == 0


def test_an_empty_file_in_place_of_a_node_is_found_and_replaced(world: World) -> None:
    """What `optional,create=file` leaves of a missing node opens without an error."""
    world.give(FIRST)
    world.machine.sh("rm -f /dev/nvidia-uvm*").ok()
    world.container_with(
        "lxc.cgroup2.devices.allow: c 195:* rwm",
        *(
            f"lxc.mount.entry: {path} {path[1:]} none bind,optional,create=file 0 0"
            for path in DEVICES[:3]
        ),
    )
    assert world.nodes_inside()["/dev/nvidia-uvm"] == "regular empty file"
    assert world.inside(": </dev/nvidia-uvm").exit == 0
    world.machine.sh("nvidia-modprobe -u -c 0").ok()

    done = world.up("one", "container", "--jsonl")

    assert done.exit == 0, done
    assert "/dev/nvidia-uvm" in done.out and "not a device" in done.out, done
    assert world.nodes_inside() == right_nodes(world)
    assert world.cuda_inside() == 0


def test_a_container_that_cannot_start_says_which_node_is_missing(world: World) -> None:
    """devN with a missing node stops the start; nothing goes on as if it had one."""
    world.give(FIRST)
    world.machine.sh('echo "dev9: /dev/nvidia7" >>"$1"', CONF).ok()

    failed = world.up("one", "container")

    assert failed.exit == 1, failed
    assert "/dev/nvidia7" in failed.err
    assert world.machine.sh("pct status 129").out == "status: stopped\n"


def test_a_start_that_fails_leaves_host_and_container_as_they_were(world: World) -> None:
    """Byte by byte, and no snapshot of ours stays behind."""
    world.give(FIRST)
    world.machine.sh('echo "lxc.hook.pre-start: /bin/false" >>"$1"', CONF).ok()
    before = world.listing()

    failed = world.up("one", "container")

    assert failed.exit == 1, failed
    assert "startup for container '129' failed" in failed.err, failed
    assert "container 129 is as before again" in failed.err, failed
    assert world.listing() == before
    assert world.machine.sh("pct status 129").out == "status: stopped\n"


def test_libraries_of_another_version_are_found_and_replaced(world: World) -> None:
    """The guest's must be the loaded module's to the last figure."""
    world.give(FIRST)
    world.container_with(*(f"dev{n}: {path},mode=0666" for n, path in enumerate(DEVICES)))
    world.install_inside(OTHER_VERSION)
    smi = world.inside("nvidia-smi -L")
    assert smi.exit == 18 and "Driver/library version mismatch" in smi.out

    done = world.up("one", "driver", "--jsonl")

    assert done.exit == 0, done
    assert f"{OTHER_VERSION}, not {VERSION}" in done.out, done
    assert "install driver libraries" in done.out, done
    assert world.inside("nvidia-smi -L").exit == 0
    assert world.cuda_inside() == 0
    folder = "/usr/lib/x86_64-linux-gnu"
    links = f"readlink {folder}/libcuda.so.1 {folder}/libnvidia-ml.so.1"
    names = [f"libcuda.so.{VERSION}", f"libnvidia-ml.so.{VERSION}"]
    assert world.inside(links).ok().split() == names
    # The stand-in refuses to ask, and to build a module where no kernel source is.
    log = world.inside("cat /var/log/nvidia-installer.log").ok()
    assert f"(version: {VERSION}) is now complete" in log, log
