"""Rare words of the kernel, the installer and apt about NVIDIA drivers, as plain rows.

Each row: pattern, stable name, cause, action, and whether it holds until a reboot of {host} once
the kernel has said it. Texts are of the kernel's PCI code, of open-gpu-kernel-modules (NVRM), of
makeself and nvidia-installer, and of apt and dpkg.
"""

from __future__ import annotations

_REPEAT = "reboot {host}; if it comes back: power, riser or the GPU itself"

ROWS: tuple[tuple[str, str, str, str, bool], ...] = (
    # --- hardware and firmware of the machine
    (
        r"BAR\d is 0M @ 0x0|PCI I/O region assigned to your NVIDIA device is invalid",
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
        r"Timeout (?:after \d+s of )?waiting for RPC (?:response )?from GSP|Xid .*: (?:119|120),",
        "gsp-hangs",
        "the GPU's own processor (GSP) hangs",
        _REPEAT,
        True,
    ),
    (
        r"Xid .*: (?:48|63|64|94|95),|uncorrectable (?:ECC|memory) error",
        "memory-error",
        "the memory of a GPU has errors",
        "end what uses it and reset it, or reboot {host}; if it comes back, it goes to its vendor",
        True,
    ),
    (
        r"Xid .*: 74,",
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
    # --- the module
    (
        r"installed in this system is not supported by|NVIDIA legacy drivers",
        "driver-misfit",
        "this driver does not know one of the GPUs: it is too old or too new for it",
        "see which driver branch supports it (`lspci -nn -d 10de:` on {host})",
        True,
    ),
    (
        r"version magic '[^']*' should be|disagrees about version of symbol",
        "wrong-kernel",
        "the nvidia module was built for another kernel",
        "build it for the running kernel on {host}: `dkms autoinstall`",
        False,
    ),
    (
        r"Direct firmware load for nvidia/\S+ failed|Failed to load firmware .*gsp_",
        "no-firmware",
        "the firmware of the driver (gsp_*.bin) is not on the host",
        "install the firmware package of exactly this driver version on {host}",
        True,
    ),
    (
        r"probe (?:of \S+ failed|with driver nvidia failed) with error -(?:1|5|6|12|16|19)\b",
        "probe-failed",
        "the driver found a GPU and could not take it",
        "the NVRM lines before it in `dmesg` on {host} say why",
        True,
    ),
    (
        r"request_mem_region failed|Can't find an IRQ for your NVIDIA card",
        "no-resources",
        "another driver or the firmware holds what a GPU needs",
        "on {host}: look for a framebuffer driver (simpledrm, efifb) that has it: video=efifb:off",
        True,
    ),
    (
        r"system not yet initialized|CUDA_ERROR_SYSTEM_NOT_READY",
        "no-fabric",
        "the GPUs are joined by NVSwitch, and no fabric manager runs",
        "on {host}: systemctl enable --now nvidia-fabricmanager, of exactly the driver's version",
        False,
    ),
    # --- the installer
    (
        r"Error in (?:MD5 |SHA256 )?check ?sums|MD5 checksum .* (?:is different|mismatch)",
        "broken-file",
        "the installer file is broken",
        "fetch it again, and name its sha256 in the playbook",
        False,
    ),
    (
        r"Unpacking .* failed|Extraction failed|Cannot (?:change ownership|open): .*: Permission",
        "no-unpack",
        "the installer cannot unpack itself",
        "a folder with space and without noexec for it: driver.install with another tmpdir",
        False,
    ),
    (
        r"Unable to find (?:a suitable|the) (?:C compiler|development tool)|cc: command not found|"
        r"The compiler used to compile the kernel .* does not exactly match",
        "no-compiler",
        "there is no compiler, or another than the kernel's",
        "apt install build-essential on {host}",
        False,
    ),
    (
        r"appear to be running an X server",
        "x-server",
        "an X server runs on the machine",
        "stop its display manager, or install with --no-x-check",
        False,
    ),
    (
        r"Unable to load the (?:kernel module 'nvidia\w*\.ko'|'nvidia\w*' kernel module)",
        "not-loadable",
        "the module was built and cannot be loaded",
        "see the end of /var/log/nvidia-installer.log and `dmesg` on {host}",
        False,
    ),
    # --- apt and dpkg
    (
        r"dpkg was interrupted, you must manually run",
        "dpkg-cut-off",
        "an installation by dpkg was cut off",
        "run there: dpkg --configure -a",
        False,
    ),
    (
        r"have unmet dependencies|held broken packages",
        "unmet",
        "packages of the driver do not fit to what is installed",
        "all of its packages in one version (driver.packages), or `apt-mark unhold`",
        False,
    ),
    (
        r"Hash Sum mismatch|File has unexpected size",
        "apt-mirror",
        "a mirror of apt is just being changed, or a proxy serves old files",
        "run again later; rm -rf /var/lib/apt/lists/* there",
        False,
    ),
    (
        r"Temporary failure resolving|Could not resolve|Could not connect to|Failed to fetch http",
        "no-network",
        "apt does not reach its sources",
        "name server, route and proxy (Acquire::http::Proxy) of the machine",
        False,
    ),
    (
        r"is not valid yet \(invalid for another|Release file .* is expired",
        "clock",
        "the machine's clock is wrong, or a repository is abandoned",
        "set the clock (timedatectl), then run again",
        False,
    ),
    (
        r"NO_PUBKEY|is not signed\.|couldn't be verified because the public key",
        "apt-key",
        "apt does not know the key of a repository",
        "put the repository's key in place (/usr/share/keyrings), as its vendor says",
        False,
    ),
)
