"""The steps with the real update-initramfs, update-grub, kernel-install, apt, dpkg and dkms.

What is simulated: grub-probe (there is no disk), the GPUs, and what the packages hold.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest

from deployer.deployment import Deployment
from deployer.errors import DeployError, StepFailed
from deployer.model import Facts, Plan, PlanState, Where
from deployer.state import DeploymentState
from deployer.steps import boot_facts, driver_probes
from deployer.steps.base import Step, StepContext
from deployer.steps.boot_edit import MARK
from deployer.steps.driver import DriverStep
from deployer.steps.gpus import GpusStep
from deployer.steps.gpus_retire import apply_retire, retire_plan
from tests.container.realhost import RealHost, started
from tests.unit.hoststeps import context, deployment
from tests.unit.test_step_gpus import DRIVER, on_nvidia, on_vfio

pytestmark = [pytest.mark.container, pytest.mark.long]
KERNEL = "6.8.12-1-pve"
VFIO = "vfio-pci.ids=10de:2230"
WANTED, OLD = "580.126.09", "575.57.08"


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealHost]:
    with started(tmp_path_factory.mktemp("real") / "context") as one:
        yield one


def working(host: RealHost, want: Deployment, state: DeploymentState, look: object) -> StepContext:
    made = context(want, None, reprobe=look)  # type: ignore[arg-type]
    both = {Where.HOST: host, Where.GUEST: host}
    return dataclasses.replace(made, transports=both, state=state, step="step")


def acted(step: Step, made: StepContext, facts: Facts) -> Plan:
    """As the engine does it, with the undo; the plan of afterwards."""
    plan = step.plan(made.want, facts, made.state)
    assert plan.state is PlanState.CHANGES, plan
    try:
        step.apply(made, facts, plan)
    except DeployError as error:
        step.undo(made, facts, plan, error)
        raise
    return step.plan(made.want, made.reprobe(), made.state)


class Boot:
    """The gpus step with `persist: change`; the GPUs are on nvidia, then on vfio-pci."""

    def __init__(self, host: RealHost) -> None:
        self.host = host
        self.want = deployment(gpus={"persist": "change"})
        self.state = DeploymentState()
        self.gpus = on_nvidia()
        self.made = working(host, self.want, self.state, self.look)

    def look(self) -> Facts:
        seen = self.host.look([boot_facts.probe()])
        return Facts({**seen.values, type(self.gpus): self.gpus, type(DRIVER): DRIVER})

    def initramfs(self) -> str:
        """What modprobe reads in the image, comments left out."""
        script = (
            "rm -rf /tmp/image; unmkinitramfs /boot/initrd.img-$1 /tmp/image;"
            "cd /tmp/image && cat etc/modprobe.d/vfio.conf etc/modprobe.d/blacklist.conf;"
            "ls etc/modprobe.d"
        )
        return self.host.sh(script, KERNEL)

    def grub(self) -> str:
        """The command lines of the kernel in grub.cfg."""
        return self.host.sh("grep -h '^[[:space:]]*linux' /boot/grub/grub.cfg")


ETC = ("/etc", "/usr/local/sbin", "/boot/grub")


def test_gpus_leave_the_boot_configuration_and_come_back(machine: RealHost) -> None:
    boot = Boot(machine)
    before = machine.files(*ETC)
    assert "options vfio-pci ids=10de:2230" in boot.initramfs()
    assert VFIO in boot.grub()

    after = acted(GpusStep(), boot.made, boot.look())

    assert after.state is PlanState.NOTHING, after
    inside = boot.initramfs()
    assert "\noptions vfio-pci ids=10de:1aef disable_vga=1" in inside
    assert "\noptions vfio-pci ids=10de:2230" not in inside
    assert f"{MARK}blacklist nvidia" in inside and "\nblacklist nvidia" not in inside
    # The copies beside them are read by none of the tools.
    assert "deployer" not in machine.sh("ls /tmp/image/etc/modprobe.d")
    assert "10de:2230" not in boot.grub() and "vfio-pci.ids=10de:1aef iommu=pt" in boot.grub()

    boot.gpus = on_vfio()
    plan = retire_plan(boot.want, boot.look(), boot.state)
    apply_retire(boot.made, boot.look(), plan)

    assert machine.files(*ETC) == before
    assert "\noptions vfio-pci ids=10de:2230,10de:1aef disable_vga=1" in boot.initramfs()
    assert VFIO in boot.grub()


ONCE = "#!/bin/sh\n[ -e /tmp/failed ] || { : >/tmp/failed; exit 7; }\n"


def test_a_loader_that_fails_is_undone_with_what_is_made_from_it(machine: RealHost) -> None:
    boot = Boot(machine)
    machine.sh('printf %s "$1" >/etc/grub.d/99_once && chmod 755 /etc/grub.d/99_once', ONCE)
    machine.sh(": >/tmp/failed; update-grub && rm /tmp/failed")
    before = machine.files(*ETC)

    with pytest.raises(StepFailed) as failed:
        acted(GpusStep(), boot.made, boot.look())

    assert "run update-initramfs and update-grub: job boot-refresh" in failed.value.what
    assert failed.value.what.endswith("kpro5 is as it was before"), failed.value.what
    # grub-mkconfig leaves what it had begun beside the file that the loader reads.
    assert [one for one in machine.files(*ETC) if "grub.cfg.new" not in one] == before
    assert "\noptions vfio-pci ids=10de:2230,10de:1aef disable_vga=1" in boot.initramfs()
    assert VFIO in boot.grub()

    # A tool that stays broken: that is no host as before, and it is said.
    machine.sh("rm /tmp/failed; printf '#!/bin/sh\\nexit 7\\n' >/etc/grub.d/99_once")
    with pytest.raises(StepFailed) as failed:
        acted(GpusStep(), boot.made, boot.look())
    assert "all links and files are as before, but" in failed.value.what, failed.value.what
    assert "boot-refresh" in failed.value.what.rpartition("but")[2]
    machine.sh("rm /etc/grub.d/99_once")
    # The next run begins with what is still to be made.
    again = acted(GpusStep(), boot.made, boot.look())
    assert again.state is PlanState.NOTHING, again


RULE = '# one\n\nKERNEL=="0000:21:00.0", RUN+="/bin/true"\n'
UNIT = "[Service]\nExecStart=\nExecStart=/sbin/bind vfio-pci\n"


def test_each_line_that_acts_on_a_gpu_is_named_where_it_is(machine: RealHost) -> None:
    machine.sh("mkdir -p /etc/udev/rules.d /etc/systemd/system/x.service.d")
    for path, text in (
        ("/etc/udev/rules.d/70-gpu.rules", RULE),
        ("/etc/systemd/system/x.service.d/a.conf", UNIT),
    ):
        machine.sh('printf %s "$1" >"$2"', text, path)
    boot = Boot(machine)
    plan = GpusStep().plan(boot.want, boot.look(), boot.state)
    found = [note for note in plan.notes if note.startswith("at boot: /etc/")]
    assert any("/etc/udev/rules.d/70-gpu.rules:3: KERNEL" in note for note in found), found
    assert any("/x.service.d/a.conf:3: ExecStart=/sbin/bind" in note for note in found), found
    for note in found:
        path, _, rest = note.removeprefix("at boot: ").partition(":")
        number, _, text = rest.partition(": ")
        line = machine.sh('sed -n "$2p" "$1"', path, number).strip()
        assert line.endswith(text.rpartition(" (")[0]) or text.split(" (")[0] in line, note


def test_kernel_install_reads_the_command_line_that_is_edited(machine: RealHost) -> None:
    """systemd-boot without proxmox-boot-tool; `lacking` names this command."""
    machine.sh("mkdir -p /boot/$(cat /etc/machine-id || systemd-machine-id-setup --print)")
    machine.sh(f"kernel-install add {KERNEL} /boot/vmlinuz-{KERNEL}")
    entries = machine.sh("cat /boot/loader/entries/*.conf")
    assert f"options    root=ZFS=rpool/ROOT/pve-1 {VFIO} quiet" in entries, entries


PACKAGES = [f"{name}={WANTED}-1" for name in ("nvidia-driver", "nvidia-kernel-dkms", "nvidia-libs")]


class Driver:
    """The driver step with `driver.packages`, on the host itself."""

    def __init__(self, host: RealHost, packages: list[str] = PACKAGES) -> None:
        self.host = host
        section = {
            "version": WANTED,
            "install": "host-and-guest",
            "packages": packages,
            "package": None,
        }
        self.want = deployment(vmid=None, driver=section)
        self.made = working(host, self.want, DeploymentState(), self.look)

    def look(self) -> Facts:
        return self.host.look(driver_probes.host_probes())

    def up(self) -> Plan:
        return acted(DriverStep(), self.made, self.look())

    def fails(self) -> StepFailed:
        with pytest.raises(StepFailed) as failed:
            self.up()
        return failed.value


@pytest.fixture(scope="module")
def packages(machine: RealHost) -> RealHost:
    """With a repository, and a kernel with headers."""
    machine.sh(f"sh /lab/packages.sh {OLD} {WANTED}")
    return machine


def test_without_headers_nothing_is_tried(packages: RealHost) -> None:
    packages.sh("mv /lib/modules/$(uname -r)/build /lib/modules/$(uname -r)/gone")
    one = Driver(packages)
    plan = DriverStep().plan(one.want, one.look(), one.made.state)
    packages.sh("mv /lib/modules/$(uname -r)/gone /lib/modules/$(uname -r)/build")
    assert plan.state is PlanState.BLOCKED
    assert "the headers of the running kernel" in plan.reason
    assert "apt-get install linux-headers-" in plan.fix


def test_a_repository_that_does_not_answer_is_named(packages: RealHost) -> None:
    packages.sh("mv /etc/apt/sources.list /root/; rm -rf /var/lib/apt/lists/*")
    packages.sh("echo 'deb [trusted=yes] http://no.such.invalid/ ./' >/etc/apt/sources.list")
    error = Driver(packages).fails()
    packages.sh("mv /root/sources.list /etc/apt/sources.list")
    assert "no network to http://no.such.invalid/" in error.what, (error.what, error.evidence)
    assert "DNS" in error.fix


def test_a_version_that_nobody_has(packages: RealHost) -> None:
    error = Driver(packages, [f"nvidia-driver={WANTED}-9"]).fails()
    assert f"no repository has nvidia-driver in version {WANTED}-9" in error.what, error.evidence
    assert "apt-cache policy nvidia-driver" in error.fix


def test_packages_of_two_versions(packages: RealHost) -> None:
    mixed = [PACKAGES[0], f"nvidia-libs={OLD}-1"]
    error = Driver(packages, mixed).fails()
    assert "the packages contradict each other: nvidia-driver : Depends: nvidia-libs" in error.what


def test_an_interrupted_dpkg(packages: RealHost) -> None:
    packages.sh("printf 'Package: x\\n' >/var/lib/dpkg/updates/0001")
    error = Driver(packages).fails()
    packages.sh("rm /var/lib/dpkg/updates/0001")
    assert "an earlier installation was cut off" in error.what, error.evidence
    assert "on kpro5: dpkg --configure -a" in error.fix


def test_headers_that_are_not_whole(packages: RealHost) -> None:
    """dkms refuses, and dpkg is left half configured; the next run finishes."""
    packages.sh("rmdir /lib/modules/$(uname -r)/build/include")
    error = Driver(packages).fails()
    packages.sh("mkdir /lib/modules/$(uname -r)/build/include")
    assert "dkms cannot build the module: the headers of kernel" in error.what, error.evidence
    assert "then dpkg --configure -a" in error.fix


def test_another_apt_is_waited_for_and_then_it_works(packages: RealHost) -> None:
    """The lock of the lists, for which apt-get itself does not wait, and dpkg's."""
    for lock in ("/var/lib/apt/lists/lock", "/var/lib/dpkg/lock-frontend"):
        packages.sh('setsid python3 /lab/hold.py "$1" 8 >/dev/null 2>&1 </dev/null &', lock)
    packages.sh("until [ $(pgrep -fc hold.py) -ge 2 ]; do sleep 0.1; done")
    after = Driver(packages).up()
    assert after.state is PlanState.NOTHING, after
    assert packages.sh("modinfo -k $(uname -r) -F version nvidia").strip() == WANTED
    held = packages.sh("apt-mark showhold").split()
    assert held == ["nvidia-driver", "nvidia-kernel-dkms", "nvidia-libs"]
    assert f"nvidia/{WANTED}" in packages.sh("dkms status")
    # Held, and still replaced when the playbook names another.
    assert DriverStep().plan(*_asked(packages)).state is PlanState.NOTHING


def _asked(host: RealHost) -> tuple[Deployment, Facts, DeploymentState]:
    one = Driver(host)
    return one.want, one.look(), one.made.state


def test_a_lock_that_stays_is_told_with_its_holder(
    packages: RealHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    from deployer.steps import driver_install

    monkeypatch.setattr(driver_install, "LOCK_WAIT_S", 3)
    packages.sh("apt-get remove -y --allow-change-held-packages nvidia-driver nvidia-kernel-dkms")
    pid = packages.sh(
        "setsid python3 /lab/hold.py /var/lib/dpkg/lock-frontend 600 >/tmp/held 2>&1 </dev/null &"
        "echo $!; until grep -q held /tmp/held; do sleep 0.1; done"
    ).strip()
    error = Driver(packages).fails()
    packages.sh('kill "$1"', pid)
    assert "another program installs packages: python3" in error.what, error.evidence
    assert "/var/lib/dpkg/lock-frontend" in error.what
