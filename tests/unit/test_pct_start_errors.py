"""What a failed start or creation prints, as lxc, its hooks and the storage tools put it."""

from __future__ import annotations

import re

import pytest

from deployer import pct_start_errors, pct_storage_errors
from deployer.pct_errors import explain

HOOK = """run_buffer: 571 Script exited with status 2
lxc_init: 845 Failed to run lxc.hook.pre-start for container "129"
__lxc_start: 2034 Failed to initialize container "129"
startup for container '129' failed"""
SPAWN = """sync_wait: 34 An error occurred in another process (expected sequence number 4)
__lxc_start: 2114 Failed to spawn container "129"
startup for container '129' failed"""
ROOT = "/usr/lib/x86_64-linux-gnu/lxc/rootfs"

ROWS = [
    (
        'mount_entry: 2474 No such file or directory - Failed to mount "/dev/nvidia-uvm" on '
        f'"{ROOT}/dev/nvidia-uvm"\nlxc_setup: 3911 Failed to setup mount entries\n{SPAWN}',
        "the host node /dev/nvidia-uvm",
    ),
    (
        "lxc-start: 129: ../src/lxc/conf.c: mount_entry: 2474 No such file or directory - Failed "
        f'to mount "/srv/models" on "{ROOT}/srv/models"\n{SPAWN}',
        "/srv/models cannot be mounted into the container: No such file or directory",
    ),
    (
        f'safe_mount: 1337 Permission denied - Failed to mount "overlay" onto "/mnt"\n{SPAWN}',
        "overlay cannot be mounted into the container: Permission denied",
    ),
    (f"directory '/mnt/nas' does not exist\n{HOOK}", "the host folder /mnt/nas of a bind mount"),
    (
        "tar: ./dev/x: Cannot mknod: Operation not permitted\ntar: Exiting with failure status due "
        "to previous errors\nunable to create CT 101 - command 'lxc-usernsexec -m u:0:100000:65536 "
        "-m g:0:100000:65536 -- tar xpf - -z --totals' failed: exit code 2",
        "must not make device nodes",
    ),
    (
        "unable to hotplug dev0: failed to change apparmor profile",
        "dev0 cannot be brought into the running container: failed to change apparmor profile",
    ),
    ("unable to hotplug mp0: directory busy", "mp0 cannot be changed while the container runs"),
    (
        "nvidia-container-cli: initialization error: nvml error: driver not loaded\n"
        f"run_buffer: 322 Script exited with status 1\n{SPAWN}",
        "the NVIDIA container toolkit fails: nvml error: driver not loaded",
    ),
    (
        "cg_legacy_set_data: 2675 No such file or directory - Failed to setup limits for the "
        '"devices" controller. The controller seems to be unused by "cgfsng" cgroup driver or not '
        "enabled on the cgroup hierarchy\ncgfsng_setup_limits_legacy: 2742 No such file or "
        'directory - Failed to set "devices.deny" to "a"\nlxc_spawn: 1890 Failed to setup legacy '
        "device cgroup controller limits\nstartup for container '129' failed",
        "rules of cgroup v1",
    ),
    (
        'cgfsng_setup_limits: 3303 Invalid argument - Failed to set "memory.max" to "5x"\n' + SPAWN,
        "the cgroup setting memory.max = 5x is refused",
    ),
    (
        "cgfsng_devices_activate: 3418 Operation not permitted - Failed to attach bpf program\n"
        f"{SPAWN}",
        "the kernel does not take the device rules",
    ),
    (
        "cgfsng_payload_create: 1367 No such file or directory - Failed to create container "
        "cgroup\n"
        f"{SPAWN}",
        "its cgroup cannot be made",
    ),
    (
        "cgroup_init: 33 Bad file descriptor - Failed to initialize cgroup driver\n"
        "lxc_init: 865 Failed to initialize cgroup driver\nstartup for container '129' failed",
        "cgroup tree is not as LXC needs it",
    ),
    (
        "WARN: old systemd (< v232) detected, container won't run in a pure cgroupv2 environment! "
        "Please see documentation -> container -> cgroup version.",
        "too old for cgroup v2",
    ),
    (
        "apparmor_prepare: 1088 Cannot use generated profile: apparmor_parser not available\n"
        "lxc_init: 879 Failed to initialize LSM\nstartup for container '129' failed",
        "AppArmor's parser is missing",
    ),
    (
        "run_apparmor_parser: 915 Failed to run apparmor_parser on "
        '"/var/lib/lxc/100/apparmor/lxc-100_<-var-lib-lxc>": apparmor_parser: Unable to replace '
        '"lxc-100_</var/lib/lxc>".  Profile does not conform to protocol\n'
        "apparmor_prepare: 1085 Failed to load generated AppArmor profile\n"
        "lxc_init: 879 Failed to initialize LSM\nstartup for container '100' failed",
        "AppArmor does not take the profile",
    ),
    (
        "apparmor_process_label_set_at: 1183 No such file or directory - Failed to change AppArmor "
        f'profile to "lxc-container-default-cgns"\n{SPAWN}',
        "the AppArmor profile of the container is not loaded",
    ),
    (
        "apparmor_prepare: 1051 Incomplete AppArmor support in your kernel\n"
        "apparmor_prepare: 1054 If you really want to start this container, set\n"
        f"lxc.apparmor.allow_incomplete = 1\n{SPAWN}",
        "this kernel's AppArmor lacks",
    ),
    ("lxc_init: 879 Failed to initialize LSM", "AppArmor of the host does not work"),
    (
        "seccomp.c: lxc_read_seccomp_config: 1231 Error loading seccomp policy\n" + SPAWN,
        "seccomp profile cannot be loaded",
    ),
    ("WARN: Systemd 252 detected. You may need to enable nesting.", "needs nesting"),
    (
        'lxc_map_ids: 3668 newuidmap failed to write mapping "newuidmap: uid range [0-65536) -> '
        '[1000-66536) not allowed": newuidmap 4711 0 1000 65536\n'
        f"lxc_spawn: 1791 Failed to set up id mapping.\n{SPAWN}",
        "does not allow the id mapping",
    ),
    (f"lxc_spawn: 1791 Failed to set up id mapping.\n{SPAWN}", "do not fit together"),
    (
        "chown: changing ownership of '/x': Value too large for defined data type",
        "an owner outside its id mapping",
    ),
    (
        'netdev_configure_server_veth: 736 File exists - Failed to create veth pair "veth129i0" '
        'and "vethjp3sLk"\nlxc_create_network_priv: 3466 Failed to create network device\n'
        f"{SPAWN}",
        "the network interface veth129i0 cannot be made",
    ),
    (
        "can't add veth129i0 to bridge vmbr0: Operation not supported\n" + SPAWN,
        "cannot be attached to the bridge",
    ),
    (
        "net0: MTU size '9000' is bigger than bridge MTU '1500'",
        "the MTU 9000 is over that of the bridge (1500)",
    ),
    (
        "lxc_create_network_priv: 3466 No such device - Failed to create network device\n" + SPAWN,
        "its network cannot be set up",
    ),
    (
        "mount: /var/lib/lxc/.pve-staged-mounts/rootfs: wrong fs type, bad option, bad superblock "
        "on /dev/mapper/pve-vm--129--disk--0, missing codepage or helper program, or other error.\n"
        "command 'mount /dev/dm-3 /var/lib/lxc/.pve-staged-mounts/rootfs' failed: exit code 32\n"
        f"{HOOK}",
        "the file system of a volume is broken",
    ),
    (
        "mount: /mnt: mount(2) system call failed: Structure needs cleaning.\n"
        f"command 'mount /dev/dm-3 /var/lib/lxc/rootfs' failed: exit code 32\n{HOOK}",
        "a volume of the container cannot be mounted",
    ),
    (f"losetup: cannot find an unused loop device\n{HOOK}", "no loop device left"),
    (
        "can't activate LV '/dev/pve/vm-129-disk-0':   Failed to find logical volume "
        f'"pve/vm-129-disk-0"\n{HOOK}',
        "a logical volume of the container",
    ),
    (
        "can't activate pve/data: Check of pool pve/data failed (status:1). Manual repair "
        "required!\n"
        f"{HOOK}",
        "the thin pool pve/data is broken",
    ),
    (
        "lvcreate 'pve/vm-129-disk-0' error:   Volume group \"pve\" has insufficient free space "
        "(4095 extents): 65536 required.\nunable to create CT 129 - lvcreate failed",
        "there is no space left",
    ),
    (
        f"cannot open 'rpool/data/subvol-129-disk-0': dataset does not exist\n{HOOK}",
        "the ZFS dataset rpool/data/subvol-129-disk-0 is not there",
    ),
    (
        "zfs error: cannot mount '/rpool/data/subvol-129-disk-0': directory is not empty\n" + HOOK,
        "ZFS cannot mount /rpool/data/subvol-129-disk-0",
    ),
    ("zfs error: cannot create snapshot 'a@b': dataset is busy", "ZFS refuses: cannot create"),
    (f"storage 'nas' is not online\n{HOOK}", "a storage that the container needs"),
    ("storage 'nas' is not available on node 'kpro5'", "a storage that the container needs"),
    (
        "storage 'local' does not support container directories",
        "storage local is not meant for containers",
    ),
    (
        "unable to create CT 129 - error during cfs-locked 'storage-nas' operation: got lock "
        "request timeout",
        "another task holds storage-nas",
    ),
    ("rbd: sysfs write failed\n" + HOOK, "Ceph does not give the volume"),
    (
        'lxc_mount_rootfs: 1442 No such file or directory - Failed to mount rootfs "x" onto "y"\n'
        + SPAWN,
        "its root file system cannot be mounted",
    ),
    (f"lxc_setup_rootfs: 1500 Failed to mount rootfs\n{SPAWN}", "its root file system"),
    (
        'start: 2164 No such file or directory - Failed to exec "/sbin/init"\n' + SPAWN,
        "the container's init /sbin/init cannot be started: No such file or directory",
    ),
    (f"unsupported debian version '14.0'\n{HOOK}", "does not know debian 14.0"),
    (f"unsupported fedora release 'Fedora release 44'\n{HOOK}", "does not know fedora"),
    (f"unable to detect OS distribution\n{HOOK}", "does not know the system"),
    (
        "unable to open file '/etc/pve/nodes/kpro5/lxc/129.conf.tmp.4711' - Permission denied",
        "most likely the cluster has no quorum",
    ),
    (
        f"unable to open file '/etc/hostname.tmp.4711' - Permission denied\n{HOOK}",
        "belongs to other ids",
    ),
    (
        "cat: /etc/pve/lxc/129.conf: Transport endpoint is not connected",
        "pmxcfs has died",
    ),
    (
        "hookscript error for 129 on pre-start: command '/x 129 pre-start' failed: exit code 1",
        "the hook script of container 129 fails at pre-start",
    ),
    (f"script 'local:snippets/x.sh' does not exist\n{HOOK}", "the hook script local:snippets/x.sh"),
    (
        f'lxc_setup: 4000 Failed to run lxc.hook.mount for container "129"\n{SPAWN}',
        "a hook of the container fails (mount)",
    ),
    (
        'parse_line: 3071 Unknown key "lxc.cgroup.devices.allow"\n'
        "lxc_file_for_each_line: 120 Failed to parse config\nlxc_start.c: main: 230 Failed to load "
        "config for 129",
        "its configuration has an lxc key",
    ),
    ("lxc-start: 129: lxccontainer.c: Failed to load config", "LXC cannot read the configuration"),
    (
        "missing 'arch' - internal error at /usr/share/perl5/PVE/LXC.pm line 729.",
        "the configuration has no arch",
    ),
    ("format error\nmode: value does not match the regex pattern", "a form that pct cannot read"),
    (
        "tar: Unexpected EOF in archive\nunable to create CT 129 - command 'lxc-usernsexec -m "
        "u:0:100000:65536 -- tar xpf - --zstd -C /var/lib/lxc/129/rootfs' failed: exit code 2",
        "the template cannot be unpacked (tar ended with 2)",
    ),
    (
        "400 Parameter verification failed\nssh-public-keys: SSH public key validation error",
        "does not take the SSH key",
    ),
    ("400 Parameter verification failed\nfeatures: x", "refuses an option"),
    ("unable to parse volume ID 'debian.tar'", "debian.tar is no volume"),
    ("you can't start a CT if it's a template", "the container is a template"),
    (
        "command 'lxc-stop -n 129 --kill' failed: exit code 1",
        "cannot even be killed",
    ),
    (
        "can't rollback, 'deployer-00000001' is not most recent snapshot",
        "only rolls back to the newest",
    ),
    (
        "snapshot 's1' needed by replication job '129-0' - run replication first",
        "snapshot s1 is needed",
    ),
    ("unable to freeze CT 129", "cannot be frozen"),
    (
        "lxc-attach: 129: ../src/lxc/attach.c: get_attach_context: 406 Connection refused - Failed "
        "to get init pid",
        "the container ended meanwhile",
    ),
    (f"lxc_spawn: 1800 Cannot allocate memory - Failed to clone\n{SPAWN}", "no memory left"),
    (f"mainloop: 30 Too many open files - Failed to create epoll\n{SPAWN}", "inotify handles"),
    (HOOK, "container 129 did not start"),
    ('Failed to run lxc.hook.pre-start for container "129"', "the container did not start"),
    ("container did not stop", "did not shut down in time"),
    ("unable to create CT 129 - something new", "cannot be created: something new"),
]


@pytest.mark.parametrize(("text", "cause"), ROWS, ids=range(len(ROWS)))
def test_a_text_is_understood(text: str, cause: str) -> None:
    told = explain(text.splitlines())
    assert told is not None
    assert cause in told.cause
    assert told.fix
    assert "{" not in told.cause + told.fix


def test_every_row_of_the_table_has_a_text() -> None:
    texts = [text for text, _ in ROWS]
    table = (*pct_start_errors.ROWS, *pct_storage_errors.ROWS, *pct_storage_errors.LAST)
    unused = [
        pattern
        for pattern, _, _ in table
        if not any(re.search(pattern, text, re.MULTILINE) for text in texts)
    ]
    assert unused == []
    assert len(table) > 60


def test_what_is_not_known_is_not_guessed() -> None:
    assert explain(["lxc-start: 129: something quite new"]) is None
