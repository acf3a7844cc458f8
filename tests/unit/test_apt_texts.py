"""What apt, dpkg and dkms of Debian 12 say, and what is made of it."""

from __future__ import annotations

import pytest

from deployer.apt_texts import explain

LISTS = """\
Reading package lists...
E: Could not get lock /var/lib/apt/lists/lock. It is held by process 846 (python3)
E: Unable to lock directory /var/lib/apt/lists/"""
FRONTEND = """\
Waiting for cache lock: Could not get lock /var/lib/dpkg/lock-frontend. It is held by process 859 (\
unattended-upgr)...
E: Unable to acquire the dpkg frontend lock (/var/lib/dpkg/lock-frontend), is another process using\
 it?"""
BROKEN = """\
E: dpkg was interrupted, you must manually run 'dpkg --configure -a' to correct the problem. """
HEADERS = """\
Error! Your kernel headers for kernel 6.8.12-4-pve cannot be found at /lib/modules/6.8.12-4-pve/\
build or /lib/modules/6.8.12-4-pve/source.
Please install the linux-headers-6.8.12-4-pve package or use the --kernelsourcedir option to tell \
DKMS where it's located.
dpkg: error processing package nvidia-kernel-dkms (--configure):
 installed nvidia-kernel-dkms package post-installation script subprocess returned error exit \
status 1
E: Sub-process /usr/bin/dpkg returned an error code (1)"""
NETWORK = """\
W: Failed to fetch http://no.such.host.invalid/repo/./InRelease  Could not resolve \
'no.such.host.invalid'
W: Some index files failed to download. They have been ignored, or old ones used instead.
E: Unable to locate package nvidia-driver"""
REFUSED = """\
Unable to locate package nvidia-driver
E: Failed to fetch https://enterprise.proxmox.com/debian/pve/dists/bookworm/InRelease  401  \
Unauthorized [IP: 192.0.2.1 443]"""
VERSION = "E: Version '580.999.01-1' for 'nvidia-driver' was not found"
CANDIDATE = "E: Package 'nvidia-driver' has no installation candidate"
UNKNOWN = "E: Unable to locate package nvidia-driver"
ARCHIVE = """\
E: Failed to fetch file:/srv/repo/./libcuda1_580.126.09-1_amd64.deb  File not found - \
/srv/repo/./libcuda1_580.126.09-1_amd64.deb (2: No such file or directory)
E: Unable to fetch some archives, maybe run apt-get update or try with --fix-missing?"""
UNMET = """\
The following packages have unmet dependencies:
 nvidia-driver : Depends: libcuda1 (= 580.126.09-1) but 575.57.08-1 is to be installed
E: Unable to correct problems, you have held broken packages."""
BUILD = """\
Error! Bad return status for module build on kernel: 6.14.0-2-pve (x86_64)
Consult /var/lib/dkms/nvidia/575.57.08/build/make.log for more information.
dpkg: error processing package nvidia-kernel-dkms (--configure):"""
FULL = """\
dpkg: error processing archive /var/cache/apt/archives/x.deb (--unpack):
 cannot copy extracted data: failed to write (No space left on device)"""
SCRIPT = "dpkg: error processing package nvidia-persistenced (--configure):"


@pytest.mark.parametrize(
    ("said", "cause", "fix"),
    [
        (LISTS, "python3 (pid 846) holds /var/lib/apt/lists/lock", "ps -fp 846"),
        (FRONTEND, "unattended-upgr (pid 859) holds /var/lib/dpkg/lock-frontend", "ps -fp 859"),
        (FRONTEND.splitlines()[1], "another program installs packages", "fuser -v"),
        (BROKEN, "an earlier installation was cut off", "dpkg --configure -a"),
        (HEADERS, "the headers of kernel 6.8.12-4-pve are missing", "proxmox-headers-6.8.12-4-pve"),
        (BUILD, "does not build for kernel 6.14.0-2-pve", "make.log"),
        (FULL, "the disk is full: No space left on device", "df -h"),
        (NETWORK, "no network to http://no.such.host.invalid/repo/./InRelease", "DNS"),
        (REFUSED, "the repository refuses: https://enterprise.proxmox.com", "pve-enterprise"),
        (VERSION, "no repository has nvidia-driver in version 580.999.01-1", "apt-cache policy"),
        (CANDIDATE, "no repository has package nvidia-driver", "non-free"),
        (UNKNOWN, "no repository has package nvidia-driver", "driver.packages"),
        (ARCHIVE, "libcuda1_580.126.09-1_amd64.deb cannot be fetched", "apt-get update"),
        (UNMET, "contradict each other: nvidia-driver : Depends: libcuda1", "name them all"),
        (UNMET.splitlines()[2], "that are installed contradict each other", "--fix-broken"),
        (SCRIPT, "the scripts of package nvidia-persistenced failed", "dpkg --configure -a"),
    ],
)
def test_a_text_has_its_cause_and_way_out(said: str, cause: str, fix: str) -> None:
    meaning = explain(said.splitlines())
    assert meaning is not None
    assert cause in meaning.cause
    assert fix in meaning.fix


def test_a_lock_that_was_waited_for_in_vain_is_no_cause_of_another_failure() -> None:
    waited = FRONTEND.splitlines()[0]
    meaning = explain([waited, *HEADERS.splitlines()])
    assert meaning is not None and "headers" in meaning.cause
    # Nor is a repository of no concern.
    meaning = explain([*UNMET.splitlines(), *REFUSED.splitlines()[1:]])
    assert meaning is not None and "contradict each other" in meaning.cause
    assert explain(["make: *** something else"]) is None
