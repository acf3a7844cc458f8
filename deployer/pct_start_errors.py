"""What keeps a container from starting: texts, meanings, actions.

The texts come from programs below pct: lxc-start and its hooks, AppArmor. Each row is (pattern,
cause, action); {0}.. are the pattern's groups. Those of lxc are of LXC 4 to 6: its line numbers and
function names change, and are in no pattern.
"""

from __future__ import annotations

ROWS: tuple[tuple[str, str, str], ...] = (
    # --- devices and mounts
    (
        r'(?:No such file or directory|Permission denied) - Failed to mount "(/dev/[^"]+)"',
        "the host node {0}, which a raw lxc.mount.entry line brings in, is not there",
        "load the driver (nvidia-modprobe -u -c 0), or write `optional` in that line",
    ),
    (
        r'([A-Z][\w ]+) - Failed to mount "([^"]+)" on(?:to)? "([^"]+)"',
        "{1} cannot be mounted into the container: {0}",
        "look at that path on the host, and at mp and lxc.mount.entry in its configuration",
    ),
    (
        r"directory '(/\S+)' does not exist",
        "the host folder {0} of a bind mount is not there",
        "make it, mount what belongs there, or take the mp entry out",
    ),
    (
        r"Operation not permitted - Failed to (?:create|mknod)|"
        r"Cannot mknod: Operation not permitted",
        "an unprivileged container must not make device nodes",
        "bring devices in by devN entries; templates must hold none",
    ),
    (
        r"unable to hotplug (dev\d+): (.+)",
        "{0} cannot be brought into the running container: {1}",
        "the entry was not written; set it when the container is stopped, or restart it",
    ),
    (
        r"unable to hotplug (\w+): (.+)",
        "{0} cannot be changed while the container runs: {1}",
        "stop the container, and run again",
    ),
    (
        r"nvidia-container-cli: (?:initialization error: )?(.+)",
        "the hook of the NVIDIA container toolkit fails: {0}",
        "take the lxc.hook.mount line out: devN entries need no hook; or mend the host's driver",
    ),
    # --- cgroups
    (
        r"Failed to setup limits for the \"devices\" controller|"
        r"Failed to setup legacy device cgroup controller limits|"
        r'Failed to set "devices\.(?:allow|deny)"',
        "its configuration has rules of cgroup v1 (lxc.cgroup.devices...), which this host has not",
        "write lxc.cgroup2.devices... in place of them",
    ),
    (
        r'Failed to set "?((?:devices|memory|cpu|pids|io)\.[\w.]+)"? to "?([^"\n]+?)"?$',
        "the cgroup setting {0} = {1} is refused",
        "correct that lxc.cgroup2 line, or memory and cores of the container",
    ),
    (
        r"(?:Failed to load|Failed to attach|Failed to create) (?:bpf|eBPF)|bpf_program_",
        "the kernel does not take the device rules (a BPF program)",
        "look at `dmesg`; a lxc.cgroup2.devices line may have a wrong form",
    ),
    (
        r"Failed to create (?:monitor|container|payload) cgroup|"
        r"Failed creating (?:monitor|payload|container) cgroups?",
        "its cgroup cannot be made: what is left of its last run holds it",
        "see /sys/fs/cgroup/lxc/; `systemctl reset-failed pve-container@*`, else a host reboot",
    ),
    (
        r"No such file or directory - Failed to open .*cgroup|cgroup_init.*[Ff]ailed|"
        r"Failed to initialize cgroup driver",
        "the host's cgroup tree is not as LXC needs it",
        "see `mount | grep cgroup`, and no systemd.unified_cgroup_hierarchy=0 on the kernel line",
    ),
    (
        r"old systemd \(< v232\) detected",
        "the system in the container is too old for cgroup v2",
        "use a newer template",
    ),
    # --- AppArmor, seccomp, capabilities
    (
        r"apparmor_parser not available|Cannot use generated profile",
        "AppArmor's parser is missing on the host",
        "apt install apparmor",
    ),
    (
        r"Failed to run apparmor_parser on|Failed to load generated AppArmor profile",
        "AppArmor does not take the profile that was made for the container",
        "see `dmesg | grep apparmor`: an lxc.apparmor.raw line may be wrong",
    ),
    (
        r"Failed to change (?:AppArmor|apparmor) (?:profile|label)|"
        r"failed to change apparmor profile",
        "the AppArmor profile of the container is not loaded",
        "systemctl restart apparmor on the host; and see `aa-status`",
    ),
    (
        r"Incomplete AppArmor support|set\n?.*lxc\.(?:aa_|apparmor\.)allow_incomplete",
        "this kernel's AppArmor lacks what LXC needs",
        "boot the Proxmox kernel (`uname -r` ends with -pve)",
    ),
    (
        r"Failed to initialize LSM",
        "AppArmor of the host does not work",
        "see `systemctl status apparmor` and `dmesg | grep apparmor`",
    ),
    (
        r"(?:[Ff]ailed to (?:load|parse|setup)|Error loading) (?:the )?seccomp",
        "its seccomp profile cannot be loaded",
        "see lxc.seccomp.profile and `features` in its configuration",
    ),
    (
        r"You may need to enable nesting",
        "systemd in the container needs nesting for its services",
        "pct set ID --features nesting=1, then restart it",
    ),
    # --- ids
    (
        r"newuidmap failed to write mapping|newgidmap failed to write mapping|"
        r"[ug]id range \[\d+-\d+\) -> \[\d+-\d+\) not allowed",
        "the host does not allow the id mapping of the container",
        "the lxc.idmap ranges must stand in /etc/subuid and /etc/subgid of the host",
    ),
    (
        r"Failed to set ?up id mapping|Invalid argument - Failed to write (?:uid|gid) map",
        "the lxc.idmap lines of the container do not fit together",
        "they must not overlap, and cover 0 to 65535",
    ),
    (
        r"Value too large for defined data type",
        "a file of the container has an owner outside its id mapping",
        "chown it on the host to ids from 100000 on",
    ),
    # --- network
    (
        r'Failed to create veth pair "([^"]+)"',
        "the network interface {0} cannot be made: one of that name is left over",
        "ip link delete {0}, on the host",
    ),
    (
        r"can't add (\S+) to bridge|unable to add (?:vlan|interface) \S+|"
        r"no physical interface on bridge",
        "its network interface cannot be attached to the bridge",
        "see `ip link`, and bridge and VLAN tag of net0",
    ),
    (
        r"MTU size '(\d+)' is bigger than bridge MTU '(\d+)'",
        "the MTU {0} is over that of the bridge ({1})",
        "correct mtu in net0",
    ),
    (
        r"Failed to create network device|Failed to create (?:the )?(?:configured )?network",
        "its network cannot be set up",
        "the lines before say why; see bridge and name of net0",
    ),
    # --- the system inside
    (
        r"(No such file or directory|Permission denied|Exec format error) - "
        r'Failed to exec "([^"]+)"',
        "the container's init {1} cannot be started: {0}",
        "its root file system is empty, of another architecture, or its volume is not mounted",
    ),
    (
        r"unsupported (\w+) (?:version|release) '([^']+)'",
        "this pve-container does not know {0} {1}",
        "upgrade Proxmox (apt full-upgrade), or take an older template",
    ),
    (
        r"unable to detect OS distribution|unknown ID '[^']*' in /etc/os-release",
        "pct does not know the system in the container",
        "pct set ID --ostype unmanaged",
    ),
    (
        r"unable to open file '(/etc/pve/[^']+)' - (.+)",
        "{0} cannot be written: {1}; most likely the cluster has no quorum",
        "bring the other nodes back (`pvecm status`)",
    ),
    (
        r"unable to open file '([^']+)' - Permission denied",
        "{0} in the container belongs to other ids than those it runs with",
        "it was made privileged and is unprivileged now, or the other way: back it up, restore it",
    ),
    (
        r"Transport endpoint is not connected",
        "/etc/pve is not mounted any more: pmxcfs has died",
        "systemctl restart pve-cluster",
    ),
    (
        r"hookscript error for (\d+) on ([\w-]+): (.+)",
        "the hook script of container {0} fails at {1}: {2}",
        "mend it, or take it out: pct set {0} --delete hookscript",
    ),
    (
        r"script '(\S+)' (?:does not exist|is not executable)",
        "the hook script {0} is not there or cannot be run",
        "pct set ID --delete hookscript, or put it back",
    ),
    (
        r"Failed to run lxc\.hook\.(pre-mount|mount|autodev|start)",
        "a hook of the container fails ({0})",
        "see the lxc.hook lines of its configuration, and run pct start ID --debug 1",
    ),
    # --- its configuration
    (
        r'[Uu]nknown (?:configuration )?key "?lxc\.[\w.-]+|'
        r'Unsupported (?:config )?key "?lxc\.[\w.-]+',
        "its configuration has an lxc key that this LXC does not know",
        "take that line out of /etc/pve/lxc/ID.conf",
    ),
    (
        r"Failed to (?:parse config|load config|load rcfile)",
        "LXC cannot read the configuration that pct made of /etc/pve/lxc/ID.conf",
        "correct its lxc lines",
    ),
    (
        r"missing '(arch|ostype)' - internal error",
        "the configuration has no {0}",
        "it is not whole: restore it from a backup, or pct set ID --{0}",
    ),
    (
        r"^format error$",
        "a value of the configuration has a form that pct cannot read",
        "the lines after it name the part; correct the entry",
    ),
)
