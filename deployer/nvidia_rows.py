"""What makeself, nvidia-installer, dkms, apt and dpkg say when a driver does not install.

Each row: pattern, stable name, cause, action, and whether it holds until a reboot. The first that
is found counts: a cause stands before what it brings about.
"""

from __future__ import annotations

ROWS: tuple[tuple[str, str, str, str, bool], ...] = (
    # --- what a build needs
    (
        r"[Kk]ernel headers for kernel \S+ cannot be found|--kernelsourcedir|"
        r"Unable to (?:find|determine) the kernel (?:source|header)|"
        r"install the linux-headers-\S+ package",
        "no-headers",
        "the headers of the kernel are missing",
        "install proxmox-headers-KERNEL (Debian: linux-headers-KERNEL) on {host}",
        False,
    ),
    (
        r"(?:Module build|autoinstall) for kernel:? \S+ was skipped",
        "build-skipped",
        "dkms built nothing: the headers of the kernel are missing, though it ended well",
        "install proxmox-headers-KERNEL (Debian: linux-headers-KERNEL) on {host}",
        False,
    ),
    (
        r"BUILD_EXCLUSIVE directive which does not match",
        "kernel-excluded",
        "this driver is not made for this kernel, so dkms builds nothing",
        "a driver that knows the kernel, or an older kernel on {host}",
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
        r"No space left on device",
        "disk-full",
        "the disk is full",
        "free space where the installer works (/tmp, /usr, /var)",
        False,
    ),
    (
        r"Bad return status for module build|The kernel module failed to build|"
        r"Failed to run `\S*dkms (?:build|install)|dkms autoinstall on \S+ failed|"
        r'performing the step: "(?:Building|Checking)',
        "build-failed",
        "the module does not compile for this kernel: mostly the driver is too old for it",
        "a newer driver, or an older kernel on {host}; make.log below /var/lib/dkms says more",
        False,
    ),
    # --- the installer
    (
        r"must be run as root",
        "permission",
        "the installer needs root",
        "give `user: root` in the inventory's `ssh`",
        False,
    ),
    (
        r"Error in (?:MD5 |SHA256 )?check ?sums?\b|MD5 checksum .* (?:is different|mismatch)|"
        r"[Uu]nexpected end of (?:input|file)",
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
        r"installed previously using a different installer|alternate (?:method of|driver) "
        r"install",
        "other-install",
        "the driver is there already, installed in another way (by packages)",
        "remove those packages first, or install by `driver.packages` too",
        False,
    ),
    (
        r"kernel module '[^']*' appears to already be loaded",
        "already-loaded",
        "the installer found an nvidia module loaded",
        "in a container: only --no-kernel-modules; on {host}: unload the old module first",
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
    # --- the container toolkit
    (
        r"/dev/nvidia-uvm: no such file or directory",
        "no-uvm",
        "the host has no /dev/nvidia-uvm: nothing has loaded nvidia_uvm since its boot",
        "nvidia-modprobe -u -c 0 on {host}; the step gpus makes a boot unit of it",
        False,
    ),
    (
        r"system not yet initialized|CUDA_ERROR_SYSTEM_NOT_READY",
        "no-fabric",
        "the GPUs are joined by NVSwitch, and no fabric manager runs",
        "on {host}: systemctl enable --now nvidia-fabricmanager, of exactly the driver's version",
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
    (
        r"Another instance of the (?:NVIDIA )?[Ii]nstaller|Could not get lock /var/lib/dpkg/lock",
        "busy",
        "another installation is at work",
        "wait for it to end",
        False,
    ),
    (
        r"has no installation candidate|Version '[^']*' for '[^']*' was not found|"
        r"Unable to locate package",
        "no-package",
        "apt does not know a package in that version",
        "correct driver.packages, or add the repository to {host}'s apt sources",
        False,
    ),
)
