"""What the kernel says about NVIDIA's module and GPUs: its log, and the errors of modprobe.

Each row: pattern, stable name, cause, action, and whether it holds until a reboot of {host} once
the kernel has said it. The first that is found counts: special ones stand before general ones.
Messages of several lines are known by one line of theirs, since the log is read line by line.
Texts: the kernel's PCI code and module loader, open-gpu-kernel-modules (NVRM), kmod; Xid numbers
as NVIDIA's catalog groups them. Those of a program's own faults (13, 31, 43, 45) are left out: they
say nothing about the machine.
"""

from __future__ import annotations

_OWN_KEY = (
    "enrol the signing key on {host} (`mokutil --import`, then at the console during the reboot), "
    "or turn Secure Boot off in the firmware"
)
_REPEAT = "reboot {host}; if it comes back: power, riser or the GPU itself"
_RESET = "end what uses it and reset it (`nvidia-smi -r -i BUS_ID`), or reboot {host}"
_INSERT = r"could not insert (?:module )?\S*nvidia\S*: "

ROWS: tuple[tuple[str, str, str, str, bool], ...] = (
    # --- hardware and firmware of the machine
    (
        r"Xid .*: 79,|fallen off the bus",
        "gpu-lost",
        "a GPU is lost (fallen off the bus)",
        _REPEAT,
        True,
    ),
    (
        r"BAR\d is 0M @ 0x0|PCI I/O region assigned to your NVIDIA device is invalid|"
        r"64-bit BAR mapped above 4GB",
        "no-bar",
        "the firmware of the machine gave a GPU no address space",
        "turn on Above 4G Decoding in the firmware of {host}, or boot it with pci=realloc",
        True,
    ),
    (
        r"(?:change|transition) power state from D3(?:cold)? to D0",
        "d3cold",
        "a GPU does not come back from its power saving state",
        "switch {host} off and on: a reboot may not do",
        True,
    ),
    (
        r"not ready \d+ms after (?:FLR|bus reset|resume); giving up",
        "reset-failed",
        "a GPU did not come back from its reset",
        "switch {host} off and on",
        True,
    ),
    (
        r"does not have the necessary power cables connected|Xid .*: 54,",
        "power-cable",
        "a power cable of a GPU is not attached",
        "attach the GPU's power cable on {host}",
        True,
    ),
    (
        r"Timeout (?:after \d+s of )?waiting for RPC (?:response )?from (?:GPU\d+ )?GSP|"
        r"Xid .*: (?:119|120),",
        "gsp-hangs",
        "the GPU's own processor (GSP) hangs",
        _REPEAT,
        True,
    ),
    (
        r"Xid .*: 63,",
        "memory-repair",
        "a bad row of a GPU's memory is set aside at its next reset",
        _RESET,
        True,
    ),
    (
        r"Xid .*: (?:48|64|94|95|140),|uncorrectable (?:ECC|memory) error",
        "memory-error",
        "the memory of a GPU has errors",
        f"{_RESET}; if it comes back, it goes to its vendor",
        True,
    ),
    (
        r"GPU recovery action changed from .* to 0x[1-9a-f]\S* \(Node Reboot",
        "node-reboot",
        "the driver says that a GPU needs a reboot of its machine",
        "reboot {host}",
        True,
    ),
    (
        r"GPU recovery action changed from .* to 0x[1-9a-f]\S* |Xid .*: (?:61|62|109),",
        "reset",
        "a GPU needs a reset",
        _RESET,
        True,
    ),
    (
        r"Xid .*: (?:74|14[4-9]|150),",
        "nvlink",
        "an NVLink between GPUs has errors",
        "see `nvidia-smi nvlink -e` on {host}; look at the bridge",
        False,
    ),
    (
        r"AER: .*(?:Uncorrect|Fatal)|PCIe Bus Error: severity=Uncorrect",
        "pcie",
        "the PCIe link of a device has errors that cannot be corrected",
        "look at `dmesg` on {host} for the address; slot, riser and cable",
        False,
    ),
    (
        r"with non-zero usage count",
        "stuck-removal",
        "a GPU is stuck in removal: it was unbound while in use",
        "only a reboot of {host} clears it",
        True,
    ),
    # --- the driver and the GPU do not fit
    (
        r"requires use of the NVIDIA open kernel modules",
        "needs-open",
        "a GPU needs the open kernel module, the proprietary one is loaded",
        "install the driver on {host} with --kernel-module-type=open",
        True,
    ),
    (
        r"not supported by open(?: nvidia\.ko|$|\n)|does not include the required GPU|"
        r"Open nvidia\.ko is only ready for use",
        "needs-proprietary",
        "a GPU needs the proprietary kernel module, the open one is loaded",
        "install the driver on {host} with --kernel-module-type=proprietary",
        True,
    ),
    (
        r"installed in this system(?: is|,)? ?(?:\n\s*)?(?:is )?not supported by|"
        r"supported through the NVIDIA",
        "driver-misfit",
        "this driver does not know one of the GPUs: it is too old or too new for it",
        "see which driver branch supports it (`lspci -nn -d 10de:` on {host})",
        True,
    ),
    (
        r"Direct firmware load for nvidia/\S+ failed|Failed to load firmware .*gsp_|"
        r"No firmware image found",
        "no-firmware",
        "the firmware of the driver (gsp_*.bin) is not on the host",
        "install the firmware package of exactly this driver version on {host}",
        True,
    ),
    # --- another driver has it
    (
        r"is already bound to (?:NovaCore|nova)",
        "nova",
        "nova has the GPU (a blacklist of nouveau does not stop it)",
        "on {host}: blacklist nova_core and nova_drm in /etc/modprobe.d, update-initramfs -u, "
        "reboot",
        True,
    ),
    (
        r"is already bound to nouveau|Nouveau kernel driver is (?:currently in use|.*incompatible)",
        "nouveau",
        "nouveau has the GPU",
        "on {host}: blacklist nouveau in /etc/modprobe.d, update-initramfs -u, reboot",
        True,
    ),
    (
        r"is already bound to |No NVIDIA devices probed|No NVIDIA (?:GPU|graphics adapter) found|"
        r"probe routine was not called for \d+ device|" + _INSERT + "No such device",
        "other-driver",
        "another driver has the GPUs, so the nvidia module finds none",
        "free a GPU first: the step gpus does for vfio-pci; nouveau and nova: blacklist and reboot",
        False,
    ),
    (
        r"request_mem_region failed|Can't find an IRQ for your NVIDIA card|"
        r"BAR \d+: can't reserve",
        "no-resources",
        "another driver or the firmware holds what a GPU needs",
        "on {host}: look for a framebuffer driver (simpledrm, efifb) that has it: video=efifb:off",
        True,
    ),
    (
        r"group \d+ is not viable|within the iommu_group are bound to their vfio",
        "group-not-viable",
        "another function of the GPU's IOMMU group is on a driver of the host, so no VM can have "
        "the group",
        "bind every function of the group to vfio-pci: `migrate --retire` does so for a GPU's own",
        False,
    ),
    (
        r"RmInitAdapter(?: failed|: Cannot initialize)|rm_init_adapter failed|"
        r"failed to wait for GFW.?BOOT|unexpected WPR2 already up|Failed to copy vbios|"
        r"None of the NVIDIA devices were initialized",
        "init-failed",
        "the driver could not start a GPU",
        "reboot {host}; if it comes back: another driver version, power or the GPU itself",
        True,
    ),
    (
        r"probe (?:of \S+ failed|with driver nvidia failed) with error -(?:1|5|6|12|16|19)\b",
        "probe-failed",
        "the driver found a GPU and could not take it",
        "the NVRM lines before it in `dmesg` on {host} say why",
        True,
    ),
    # --- loading the module
    (
        r"Key was rejected by service|Required key not available|unsigned module loading is "
        r"restricted|Loading of (?:unsigned module|module with unavailable key) is rejected",
        "key-rejected",
        "Secure Boot rejects the module: it is not signed with an enrolled key",
        _OWN_KEY,
        False,
    ),
    (
        r"Module nvidia\S* not found",
        "no-module",
        "there is no nvidia module for the running kernel",
        "install the driver on {host} with dkms and the headers of its kernel",
        False,
    ),
    (
        r"version magic '[^']*' should be|disagrees about version of symbol|"
        + _INSERT
        + r"(?:Exec format error|Invalid argument|Unknown symbol|Invalid module format)",
        "wrong-kernel",
        "the nvidia module was built for another kernel",
        "build it for the running kernel on {host}: `dkms autoinstall`",
        False,
    ),
    (
        _INSERT + "Operation not permitted",
        "no-permission",
        "modules may not be loaded here: this is a container, or root without CAP_SYS_MODULE",
        "load it on {host} itself",
        False,
    ),
    (
        _INSERT + "Cannot allocate memory",
        "no-memory",
        "the kernel has no memory for the module",
        "free memory on {host} (huge pages, VMs), then again",
        False,
    ),
    (
        r"Module nvidia\S* is in use",
        "in-use",
        "the nvidia module is in use",
        "stop what has /dev/nvidia* open: containers, nvidia-persistenced, exporters",
        False,
    ),
)
