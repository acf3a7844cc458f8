"""What the texts of apt, dpkg and dkms mean when packages do not install, and what to do.

Texts of apt 2.6, dpkg 1.21 and dkms 3.0 (Debian 12). Those of the locks, an interrupted dpkg, no
network, unknown and mixed versions and missing headers come from runs of the real tools
(tests/container/test_real_tools.py); the others are written after their sources' formats.
All of apt's failures end with status 100, so only the text tells them apart.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Meaning:
    """One cause in plain words, and the next action on the machine."""

    cause: str
    fix: str


# In this order: a cause stands before what it brings about.
_TABLE: tuple[tuple[str, str, str], ...] = (
    (
        r"Could not get lock (\S+?)\.? It is held by process (\d+) \(([^)]*)\)[\s\S]*"
        r"(?:Unable to (?:acquire|lock)|is another process using it)",
        "another program installs packages: {2} (pid {1}) holds {0}",
        "run again when it has ended: `ps -fp {1}`",
    ),
    (
        r"(?:Unable to acquire the dpkg frontend lock|Unable to lock directory \S+)",
        "another program installs packages",
        "run again when it has ended: `fuser -v /var/lib/dpkg/lock-frontend`",
    ),
    (
        r"dpkg was interrupted, you must manually run",
        "an earlier installation was cut off, and dpkg refuses more until it is finished",
        "dpkg --configure -a",
    ),
    (
        r"Your kernel headers for kernel (\S+) cannot be found",
        "dkms cannot build the module: the headers of kernel {0} are missing",
        "install them (proxmox-headers-{0} or linux-headers-{0}), then dpkg --configure -a",
    ),
    (
        r"Bad return status for module build on kernel:? (\S+)",
        "the module does not build for kernel {0}",
        "see make.log below /var/lib/dkms/nvidia; another driver version, or boot an older kernel",
    ),
    (
        r"(No space left on device|You don't have enough free space in \S+)",
        "the disk is full: {0}",
        "free space (`df -h`), then dpkg --configure -a",
    ),
    (
        r"The following packages have unmet dependencies:\n\s*([^\n]+)",
        "the packages contradict each other: {0}",
        "all packages of one driver must be of one version: name them all in driver.packages",
    ),
    (
        r"(?:you have held broken packages|Try 'apt --fix-broken install')",
        "the packages that are installed contradict each other",
        "apt-get --fix-broken install",
    ),
    (
        r"dpkg: error processing package (\S+)",
        "the scripts of package {0} failed",
        "the lines above say why; then dpkg --configure -a",
    ),
    # A repository may fail beside any of the causes above.
    (
        r"Failed to fetch (\S+)\s+(Could not resolve '[^']*'|[^\n]*(?:Connection|connect|timed out)"
        r"[^\n]*)",
        "no network to {0} ({1})",
        "look at its DNS, route and proxy (`apt-config dump Acquire::http::Proxy`)",
    ),
    (
        r"Failed to fetch (\S+)\s+(40[13]\s+[^\n\[]*)",
        "the repository refuses: {0} ({1})",
        "without a subscription: take pve-enterprise out of /etc/apt/sources.list.d",
    ),
    (
        r"(?:Version '([^']+)' for '([^']+)' was not found)",
        "no repository has {1} in version {0}",
        "see `apt-cache policy {1}`, and correct driver.packages or the repositories",
    ),
    (
        r"(?:Unable to locate package (\S+)|Package '?(\S+?)'? has no installation candidate)",
        "no repository has package {0}",
        "see /etc/apt/sources.list.d (`non-free`, or NVIDIA's repository), and driver.packages",
    ),
    (
        r"Failed to fetch (\S+)",
        "{0} cannot be fetched",
        "apt-get update, and see whether its repository still has that file",
    ),
)


def explain(lines: Iterable[str]) -> Meaning | None:
    """The meaning of what apt said, the first cause of the table; None when no text is known."""
    text = "\n".join(lines)
    for pattern, cause, fix in _TABLE:
        if found := re.search(pattern, text):
            words = [word.strip() for word in found.groups() if word is not None]
            return Meaning(cause.format(*words), fix.format(*words))
    return None
