"""What storage tools, tar and LXC say below `pct start`, `create`, `stop` and `snapshot`.

Each row is (pattern, cause, action); {0}.. are the pattern's groups.
"""

from __future__ import annotations

ROWS: tuple[tuple[str, str, str], ...] = (
    # --- root file system and storage
    (
        r"wrong fs type, bad option, bad superblock on (\S+?),|can't read superblock on (\S+?)\.?$",
        "the file system of a volume is broken or of another kind",
        "pct fsck ID, with the container stopped",
    ),
    (
        r"command 'mount .*' failed: exit code 32",
        "a volume of the container cannot be mounted",
        "pct fsck ID; and see `dmesg`",
    ),
    (
        r"cannot find an unused loop device|failed to set ?up loop device",
        "the host has no loop device left",
        "see `losetup -a`",
    ),
    (
        r"can't activate LV '(\S+)'|no such logical volume (\S+)|[Ff]ailed to find logical volume",
        "a logical volume of the container is not there or cannot be activated",
        "see `lvs -a` on the host",
    ),
    (
        r"Check of pool (\S+) failed \(status:\d+\)\. Manual repair required",
        "the thin pool {0} is broken",
        "stop what uses it, and repair it: lvconvert --repair {0}",
    ),
    (
        r"[Ii]nsufficient free space|free space in thin pool \S+ reached threshold|out of space|"
        r"No space left on device|Disk quota exceeded",
        "there is no space left",
        "see `pvesm status`, `df -h` and `zfs list`; free some, or take another storage",
    ),
    (
        r"cannot open '([^']+)': dataset does not exist",
        "the ZFS dataset {0} is not there",
        "see `zfs list`; an imported pool is missing: zpool import",
    ),
    (
        r"cannot mount '([^']+)': directory is not empty",
        "ZFS cannot mount {0}: files lie in its place",
        "look at them, move them away, and run zfs mount -a",
    ),
    (
        r"zfs error: (.+)",
        "ZFS refuses: {0}",
        "see `zpool status`",
    ),
    (
        r"storage '([^']+)' is not (?:online|available|active)|storage '([^']+)' is disabled",
        "a storage that the container needs is not there now",
        "see `pvesm status`",
    ),
    (
        r"storage '([^']+)' (?:does not support (?:content-type|container directories)|"
        r"does not allow content type)",
        "storage {0} is not meant for containers",
        "give it the content `rootdir` (pvesm set {0} --content rootdir,images), or take another",
    ),
    (
        r"cfs-lock(?:ed)? '(storage-[^']+)'.*(?:got lock request timeout|timed out)",
        "another task holds {0} in the cluster",
        "run again when it has ended",
    ),
    (
        r"rbd: .*|rbd error: (.+)",
        "Ceph does not give the volume",
        "see `ceph -s`",
    ),
    (
        r"Failed to mount rootfs|Failed to (?:mount|pin|prepare) .*rootfs",
        "its root file system cannot be mounted",
        "see `pct mount ID` (and `pct unmount ID` afterwards)",
    ),
    # --- create
    (
        r"unable to create CT \d+ - command '(?:lxc-usernsexec .*)?tar .*' failed: "
        r"exit code (\d+)",
        "the template cannot be unpacked (tar ended with {0})",
        "the lines before say why: a broken download (fetch it again), or device files in it",
    ),
    (
        r"SSH public key validation error",
        "pct does not take the SSH key",
        "create.ssh_public_key_file must hold public keys, one a line",
    ),
    (
        r"unable to parse (?:directory volume name|volume ID|volume filename) '([^']+)'",
        "{0} is no volume of a storage",
        "write STORAGE:vztmpl/FILE",
    ),
    (
        r"you can't (?:start|take a snapshot|rollback|delete a snapshot).* template",
        "the container is a template",
        "name a container that is none",
    ),
    # --- stop, snapshot
    (
        r"command 'lxc-stop .*--kill.*' failed|did not stop after being killed",
        "the container cannot even be killed: a process in it is stuck in the kernel",
        "see `ps axo pid,stat,wchan:30,comm | grep ' D'`; a stuck GPU needs a host reboot",
    ),
    (
        r"is not most recent snapshot",
        "ZFS only rolls back to the newest snapshot",
        "delete the newer ones first, if that is meant",
    ),
    (
        r"snapshot '([^']+)' needed by replication job",
        "snapshot {0} is needed by a replication job",
        "run the replication first",
    ),
    (
        r"unable to freeze|got timeout.*freez|freezing .* failed",
        "the container cannot be frozen for the snapshot: a process in it hangs",
        "see `ps axo pid,stat,comm | grep ' D'`",
    ),
    (
        r"Failed to get (?:init pid|attach context)|Connection refused - Failed to get init pid",
        "the container ended meanwhile",
        "see why it stopped: journalctl -u pve-container@ID",
    ),
    (
        r"Cannot allocate memory|Out of memory",
        "the host has no memory left",
        "see `free -m` and `dmesg | grep -i oom`",
    ),
    (
        r"Too many open files|inotify_init",
        "the host has no file or inotify handles left",
        "raise fs.inotify.max_user_instances and fs.file-max with sysctl",
    ),
)

LAST: tuple[tuple[str, str, str], ...] = (
    (
        r"400 Parameter verification failed|400 unable to parse option|400 (?:not enough|too many)",
        "this version of pct refuses an option",
        "compare `pveversion`; report it with the lines shown",
    ),
    (
        r"startup for container '(\d+)' failed",
        "container {0} did not start",
        "the lines above say why; more: pct start {0} --debug 1",
    ),
    (
        r"Failed to run lxc\.hook\.pre-start|The container failed to start|"
        r"pve-container@\d+\.service failed",
        "the container did not start",
        "the lines above say why; more: pct start ID --debug 1",
    ),
    (
        r"container did not stop",
        "the container did not shut down in time",
        "look for what hangs in it: pct exec ID -- ps axo pid,stat,comm | grep ' D'",
    ),
    (
        r"unable to create CT (\d+) - (.+)",
        "container {0} cannot be created: {1}",
        "mend that, and run again",
    ),
)
"""What only says that it failed: asked when nothing else is known."""
