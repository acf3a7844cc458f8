"""What lines of a boot configuration do to GPUs, and how they are edited: text in, text out."""

from __future__ import annotations

from pathlib import Path

import pytest

from deployer.model import RunJob, WriteFile
from deployer.steps.boot_edit import MARK, edits, interrupted
from deployer.steps.boot_facts import BootFacts, BootFile, probe
from deployer.steps.boot_sources import sources, stale_initrds
from tests.unit.hoststeps import BOOT_ID, SHELLS, A, Tree, output, run_script, tool, write

A6000 = {A: "10de:2230"}
TOOLS = ("update-initramfs", "update-grub", "proxmox-boot-tool")
BY_SHELL = pytest.mark.parametrize("shell", SHELLS[:2], ids=lambda shell: shell[0])


def boot(path: str, text: str, **more: object) -> BootFacts:
    file = BootFile(path, text.encode(), 100)
    return BootFacts(files=(file,), tools=TOOLS, **more)  # type: ignore[arg-type]


V = "/etc/modprobe.d/v.conf"
GRUB = "/etc/default/grub"


@pytest.mark.parametrize(
    ("path", "text", "effect"),
    [
        (V, "options vfio-pci ids=10de:2230,10de:1aef", "takes"),
        (V, "options vfio_pci ids=10de:2230:1459:1", "takes"),
        (V, "options vfio-pci disable_vga=1 ids=10DE:2230", "takes"),
        (V, "options vfio-pci ids=8086:1234", ""),
        (V, "# options vfio-pci ids=10de:2230", ""),
        (V, "blacklist nvidia", "takes"),
        (V, "blacklist nvidiafb", ""),
        (V, "blacklist nouveau", ""),
        (V, "install nvidia /bin/false", "forbids"),
        (V, "install nvidia /usr/bin/true", "forbids"),
        (V, "install vfio-pci /sbin/vfio-bind.sh", "claims"),
        (V, "softdep nvidia pre: vfio-pci", "tells"),
        (V, "softdep nouveau pre: vfio vfio_pci", "tells"),
        (V, "softdep nvidia post: nvidia-uvm", ""),
        ("/etc/modules", "vfio_pci", "tells"),
        ("/etc/modules", "vfio-pci ids=10de:2230", "takes"),
        ("/etc/modules-load.d/vfio.conf", "vfio-pci", "tells"),
        ("/etc/modules-load.d/nvidia.conf", "nvidia", ""),
        ("/etc/initramfs-tools/modules", "vfio_pci ids=10de:2230", "takes"),
        (
            "/etc/initramfs-tools/scripts/init-top/vfio",
            'echo vfio-pci > "$D/driver_override"',
            "claims",
        ),
        (f"/etc/driverctl.d/{A}", "vfio-pci", "takes"),
        (f"/etc/driverctl.d/{A}", "nvidia", ""),
        ("/etc/driverctl.d/0000:41:00.0", "vfio-pci", ""),
        (
            "/etc/udev/rules.d/9.rules",
            f'KERNEL=="{A}", ATTR{{driver_override}}="vfio-pci"',
            "claims",
        ),
        (
            "/etc/udev/rules.d/9.rules",
            'ATTR{vendor}=="0x10de", ATTR{device}=="0x2230", RUN+="/sbin/modprobe vfio-pci"',
            "claims",
        ),
        ("/etc/udev/rules.d/9.rules", 'KERNEL=="nvidia*", MODE="0666"', ""),
        ("/etc/systemd/system/vfio.service", "ExecStart=/usr/local/sbin/vfio-pci-bind", "claims"),
        ("/etc/systemd/system/nvidia.service", "ExecStart=/usr/bin/nvidia-modprobe -u", ""),
        ("/etc/systemd/system/deployer-gpus-qwen.service", f"ExecStart=x {A},nvidia,vfio-pci", ""),
        ("/etc/rc.local", f"echo {A} > /sys/bus/pci/drivers/vfio-pci/bind", "claims"),
        (GRUB, 'GRUB_CMDLINE_LINUX_DEFAULT="quiet vfio-pci.ids=10de:2230"', "takes"),
        (GRUB, "GRUB_CMDLINE_LINUX=vfio_pci.ids=10de:2230", "takes"),
        (GRUB, "GRUB_CMDLINE_LINUX='modprobe.blacklist=nouveau,nvidia'", "takes"),
        (GRUB, 'GRUB_CMDLINE_LINUX="modprobe.blacklist=nouveau"', ""),
        (GRUB, 'GRUB_CMDLINE_LINUX="module_blacklist=nvidia"', "forbids"),
        (GRUB, 'GRUB_CMDLINE_LINUX="rd.driver.pre=vfio-pci"', "tells"),
        (GRUB, 'GRUB_TIMEOUT="5"', ""),
        ("/etc/default/grub.d/gpu.cfg", 'GRUB_CMDLINE_LINUX="vfio-pci.ids=10de:2230"', "takes"),
        # Not what this system was started with.
        ("/etc/kernel/cmdline", "root=ZFS=x vfio-pci.ids=10de:2230", "tells"),
    ],
)
def test_a_line_and_its_effect(path: str, text: str, effect: str) -> None:
    found = sources(boot(path, f"\n{text}\n"), A6000)
    assert [(one.effect, one.place) for one in found] == ([(effect, f"{path}:2")] if effect else [])


def test_the_loader_decides_which_command_line_counts() -> None:
    files = (
        BootFile("/etc/kernel/cmdline", b"vfio-pci.ids=10de:2230\n"),
        BootFile(GRUB, b'GRUB_CMDLINE_LINUX="vfio-pci.ids=10de:2230"\n'),
    )
    for systemd_boot, used in ((True, "/etc/kernel/cmdline"), (False, GRUB)):
        found = sources(BootFacts(files=files, systemd_boot=systemd_boot), A6000)
        assert [one.path for one in found if one.effect == "takes"] == [used]
        (unused,) = (one for one in found if one.effect == "tells")
        assert "not used: this system was" in unused.why


def test_vfio_that_is_built_in_does_not_read_modprobe_d() -> None:
    (one,) = sources(boot(V, "options vfio-pci ids=10de:2230\n", vfio_built_in=True), A6000)
    assert one.effect == "tells"
    assert "built into the kernel" in one.why


def test_the_running_kernel_s_command_line() -> None:
    found = sources(
        BootFacts(cmdline="quiet module_blacklist=nvidia vfio-pci.ids=10de:2230"), A6000
    )
    assert [(one.place, one.effect) for one in found] == [
        ("/proc/cmdline:1", "forbids"),
        ("/proc/cmdline:1", "takes"),
    ]


def test_an_initramfs_that_is_older_than_its_files() -> None:
    seen = boot(V, "options vfio-pci ids=10de:2230\n", initrds=(("6.8", 99), ("6.14", 101)))
    assert stale_initrds(seen, sources(seen, A6000)) == ("6.8",)


def after(path: str, text: str, keep: dict[str, str] | None = None, **more: object) -> str:
    """The text that the edit writes; unchanged when there is none."""
    seen = boot(path, text, **more)
    made = edits(seen, sources(seen, A6000), A6000, keep or {})
    for change in made.changes:
        action = change.action
        if isinstance(action, WriteFile) and action.path == path:
            assert action.before == text.encode()
            return action.content.decode()
    return text


@pytest.mark.parametrize(
    ("path", "text", "new"),
    [
        (V, "options vfio-pci ids=10de:2230\n", f"{MARK}options vfio-pci ids=10de:2230\n"),
        (
            V,
            "a\noptions vfio-pci ids=10de:2230,10de:1aef disable_vga=1\nb\n",
            f"a\n{MARK}options vfio-pci ids=10de:2230,10de:1aef disable_vga=1\n"
            "options vfio-pci ids=10de:1aef disable_vga=1\nb\n",
        ),
        (
            V,
            "options vfio-pci ids=10de:2230 disable_vga=1",
            f"{MARK}options vfio-pci ids=10de:2230 disable_vga=1\noptions vfio-pci disable_vga=1\n",
        ),
        (
            V,
            "blacklist nvidia\nblacklist nouveau\n",
            f"{MARK}blacklist nvidia\nblacklist nouveau\n",
        ),
        (V, "install nvidia /bin/false\n", f"{MARK}install nvidia /bin/false\n"),
        (V, "softdep nvidia pre: vfio-pci\n", "softdep nvidia pre: vfio-pci\n"),
        ("/etc/modules", "vfio-pci ids=10de:2230\n", f"{MARK}vfio-pci ids=10de:2230\nvfio-pci\n"),
        (f"/etc/driverctl.d/{A}", "vfio-pci\n", "nvidia\n"),
        (
            GRUB,
            'GRUB_CMDLINE_LINUX_DEFAULT="quiet vfio-pci.ids=10de:2230,10de:1aef iommu=pt"\n',
            f'{MARK}GRUB_CMDLINE_LINUX_DEFAULT="quiet vfio-pci.ids=10de:2230,10de:1aef iommu=pt"\n'
            'GRUB_CMDLINE_LINUX_DEFAULT="quiet vfio-pci.ids=10de:1aef iommu=pt"\n',
        ),
        (
            GRUB,
            'GRUB_CMDLINE_LINUX="vfio-pci.ids=10de:2230 module_blacklist=nvidia,x"\n',
            f'{MARK}GRUB_CMDLINE_LINUX="vfio-pci.ids=10de:2230 module_blacklist=nvidia,x"\n'
            'GRUB_CMDLINE_LINUX="module_blacklist=x"\n',
        ),
        (
            GRUB,
            'GRUB_CMDLINE_LINUX="vfio-pci.ids=10de:2230"\n',
            f'{MARK}GRUB_CMDLINE_LINUX="vfio-pci.ids=10de:2230"\nGRUB_CMDLINE_LINUX=""\n',
        ),
    ],
)
def test_an_edit_takes_out_our_gpu_and_no_more(path: str, text: str, new: str) -> None:
    assert after(path, text) == new


def test_a_kernel_command_line_stays_one_line() -> None:
    text = "root=ZFS=rpool/ROOT vfio-pci.ids=10de:2230 quiet"
    new = after("/etc/kernel/cmdline", text, systemd_boot=True)
    assert new == "root=ZFS=rpool/ROOT quiet\n"


def test_a_line_that_goes_on_behind_a_backslash_is_seen_and_left() -> None:
    text = (
        "# x \\\nblacklist nouveau\noptions vfio-pci \\\n  disable_vga=1 ids=10de:2230\nsoftdep x\n"
    )
    seen = boot(V, text)
    (one,) = found = sources(seen, A6000)
    assert (one.place, one.effect, one.span) == (f"{V}:3", "takes", 2)
    made = edits(seen, found, A6000, {})
    assert made.changes == ()
    assert made.left == (f"{V}:3 goes over 2 lines: edit it by hand",)
    assert sources(boot(V, "# x \\\nblacklist nvidia\n"), A6000) == ()
    grub = boot(GRUB, '# x \\\nGRUB_CMDLINE_LINUX="quiet \\\nvfio-pci.ids=10de:2230"\n')
    assert [(one.line, one.effect) for one in sources(grub, A6000)] == [(2, "takes")]
    assert sources(boot(V, "options vfio-pci ids=10de:2230 \\\n"), A6000)[0].span == 1


def test_an_id_that_another_card_needs_stays_and_the_unit_does_it() -> None:
    text = "options vfio-pci ids=10de:2230\n"
    seen = boot(V, text)
    keep = {"10de:2230": "0000:41:00.0"}
    made = edits(seen, sources(seen, A6000), A6000, keep)
    assert made.changes == ()
    assert made.left == (
        f"{V}:1 keeps 10de:2230: 0000:41:00.0 has the same id and stays on vfio-pci, so the boot "
        "unit moves ours",
    )


def test_an_edit_is_kept_beside_and_what_is_made_from_it_is_made_again() -> None:
    seen = boot(V, "options vfio-pci ids=10de:2230\n")
    backup, write_, refresh = edits(seen, sources(seen, A6000), A6000, {}).changes
    assert isinstance(backup.action, WriteFile) and isinstance(write_.action, WriteFile)
    assert backup.action.path.startswith(f"{V}.deployer-")
    assert backup.action.content == write_.action.before
    assert "-options vfio-pci ids=10de:2230" in write_.action.describe()
    assert isinstance(refresh.action, RunJob)
    assert refresh.action.script == "set -e\nupdate-initramfs -u -k all\n"


@pytest.mark.parametrize(
    ("path", "text", "more", "commands"),
    [
        (GRUB, 'GRUB_CMDLINE_LINUX="vfio-pci.ids=10de:2230"\n', {}, ["update-grub"]),
        (
            "/etc/kernel/cmdline",
            "vfio-pci.ids=10de:2230\n",
            {"systemd_boot": True},
            ["proxmox-boot-tool refresh"],
        ),
        (
            V,
            "blacklist nvidia\n",
            {"tools": (*TOOLS, "esp")},
            ["update-initramfs -u -k all", "proxmox-boot-tool refresh"],
        ),
        (f"/etc/driverctl.d/{A}", "vfio-pci\n", {}, []),
    ],
)
def test_each_file_has_its_tool(
    path: str, text: str, more: dict[str, object], commands: list[str]
) -> None:
    file = BootFile(path, text.encode())
    seen = BootFacts(**{"files": (file,), "tools": TOOLS, **more})  # type: ignore[arg-type]
    made = edits(seen, sources(seen, A6000), A6000, {})
    ran = [one.action.script for one in made.changes if isinstance(one.action, RunJob)]
    assert ran == (["set -e\n" + "".join(f"{line}\n" for line in commands)] if commands else [])


def test_a_tool_that_is_missing_is_told() -> None:
    seen = BootFacts(files=(BootFile(V, b"blacklist nvidia\n"),))
    made = edits(seen, sources(seen, A6000), A6000, {})
    assert [type(one.action) for one in made.changes] == [WriteFile, WriteFile]
    assert "update-initramfs is not installed" in made.left[0]


def test_an_edit_whose_refresh_did_not_run_is_gone_on_with() -> None:
    text = f"{MARK}options vfio-pci ids=10de:2230\n"
    assert interrupted(boot(V, text, initrds=(("6.8", 99),))) == [V]
    assert interrupted(boot(V, text, initrds=(("6.8", 101),))) == []
    assert interrupted(boot(V, "# by hand\n", initrds=(("6.8", 99),))) == []
    seen = boot(V, text, initrds=(("6.8", 99),))
    (refresh,) = edits(seen, (), A6000, {}).changes
    assert refresh.title == "run update-initramfs"


@BY_SHELL
def test_look_at_the_boot_configuration(tmp_path: Path, shell: list[str]) -> None:
    root = tmp_path / "host"
    Tree(root)
    etc = root / "etc"
    write(etc / "modprobe.d/vfio.conf", "# ids=\noptions vfio-pci ids=10de:2230\n")
    write(etc / "modprobe.d/alsa.conf", "options snd x=1\n")
    write(etc / "driverctl.d" / A, "vfio-pci\n")
    write(etc / "udev/rules.d/70-x.rules", f'\nKERNEL=="{A}", RUN+="/usr/local/bin/x"\n')
    write(etc / "default/grub", "GRUB_TIMEOUT=5\n")
    write(etc / "kernel/cmdline", "root=x")
    write(etc / "kernel/proxmox-boot-uuids", "ABCD-1234\n")
    write(etc / "systemd/system/other.service", "[Service]\nExecStart=/bin/true\n")
    write(etc / "modprobe.d/long nvidia.conf", "# nvidia\n" + "#" * 70000)
    unit = etc / "systemd/system/multi-user.target.wants/deployer-gpus-qwen.service"
    unit.parent.mkdir()
    unit.symlink_to("/nowhere")
    write(root / "boot/initrd.img-6.8.12-1-pve", "x")
    tool(tmp_path / "bin", "update-grub", "exit 0\n")
    one = probe(str(root))
    seen = one.parse(output(run_script(one.script, shell, tmp_path / "bin")))
    assert isinstance(seen, BootFacts)
    assert sorted(file.path for file in seen.files) == [
        "/etc/default/grub",
        f"/etc/driverctl.d/{A}",
        "/etc/kernel/cmdline",
        "/etc/modprobe.d/vfio.conf",
        "/etc/udev/rules.d/70-x.rules",
    ]
    kernel_line = seen.file("/etc/kernel/cmdline")
    assert kernel_line is not None and kernel_line.content == b"root=x"
    assert seen.large == ("/etc/modprobe.d/long nvidia.conf",)
    assert seen.boot_id == BOOT_ID
    assert [kernel for kernel, _ in seen.initrds] == ["6.8.12-1-pve"]
    assert {"update-grub", "esp"} <= set(seen.tools)
    assert seen.has_unit("deployer-gpus-qwen.service") and not seen.systemd_boot
    assert [str(source) for source in sources(seen, A6000)] == [
        f"/etc/driverctl.d/{A}:1: vfio-pci (driverctl binds it to vfio-pci at boot)",
        "/etc/modprobe.d/vfio.conf:2: options vfio-pci ids=10de:2230 "
        "(vfio-pci takes every GPU of this id)",
        "/proc/cmdline:1: vfio-pci.ids=10de:2230 "
        "(vfio-pci takes every GPU of this id; of the running kernel)",
        f'/etc/udev/rules.d/70-x.rules:2: KERNEL=="{A}", RUN+="/usr/local/bin/x" '
        "(a udev rule acts on it when it appears)",
    ]
