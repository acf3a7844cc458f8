"""A gpus step that fails at any of its effects leaves the host as it was, link by link.

Every program of the step that changes something is counted; one of them fails, before its effect or
after it. What is told must then be what a listing of the host says.
"""

from __future__ import annotations

import dataclasses
import re
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from deployer.errors import DeployError
from deployer.model import Facts, PlanState, ProbeOutput, Where
from deployer.remote.transport import Answer
from deployer.state import DeploymentState
from deployer.steps import boot_facts, gpus_facts
from deployer.steps.gpus import GpusStep
from deployer.steps.gpus_state import edited, to_refresh
from tests.local_transport import LocalTransport
from tests.scripts.test_gpus_script import simulate
from tests.unit.hoststeps import A, B, Tree, context, deployment, facts, tool, write
from tests.unit.test_step_gpus import DRIVER, char

VFIO = "options vfio-pci ids=10de:2230,10de:1aef\n"
PLACES = ("/etc/", "/usr/local/sbin", "/dev/nvidia", "/var/lib/deployer")

# Counts a call of PROGRAM whose words match PATTERN; the call that ROOT/fault names fails.
COUNTED = r"""
case "$*" in {pattern}) ;; *) exec {program} "$@" ;; esac
n=$(($(cat {root}/count) + 1))
echo "$n" >{root}/count
read -r at when <{root}/fault
if [ "$n $when" = "$at before" ]; then echo "effect $n: Input/output error" >&2; exit 5; fi
{program} "$@"
code=$?
if [ "$n $when" = "$at after" ]; then echo "effect $n: Input/output error" >&2; exit 5; fi
exit "$code"
"""


class Here(LocalTransport):
    """A host below a folder: its paths in scripts are moved there."""

    def __init__(self, root: Path, path: str) -> None:
        super().__init__(path, "kpro5")
        self.root = root

    def moved(self, text: str) -> str:
        """`text` with the host's paths below the folder."""
        text = text.replace("DEPLOYER_ROOT=''", f"DEPLOYER_ROOT={self.root}")
        for place in PLACES:
            text = re.sub(rf"(?<![\w/}}\"]){re.escape(place)}", f"{self.root}{place}", text)
        return text

    def run(self, script: str, *, args: Sequence[str] = (), **more: Any) -> Answer:
        return super().run(self.moved(script), args=[self.moved(one) for one in args], **more)


class Host:
    """A host with both GPUs on vfio-pci, told so to modprobe, and the step that takes them."""

    def __init__(self, root: Path) -> None:
        self.root = root / "host"
        self.root.parent.mkdir(parents=True)
        self.tree = Tree(self.root)
        plain, counted = root / "plain", root / "bin"
        simulate(self.tree, plain)
        write(self.root / "etc/modprobe.d/vfio.conf", VFIO)
        (self.root / "boot").mkdir()
        tool(
            plain,
            "update-initramfs",
            f"cat {self.root}/etc/modprobe.d/*.conf >{self.root}/boot/initrd.img-6.8\n",
        )
        (self.root / "boot/initrd.img-6.8").write_text(VFIO)
        for program, pattern, real in (
            ("sh", "'-c mark='*", "/bin/sh"),
            ("modprobe", "*", plain / "modprobe"),
            ("nvidia-modprobe", "*", plain / "nvidia-modprobe"),
            ("mknod", "*", "/bin/mknod"),
            ("mv", f"*{self.root}/etc/*|*{self.root}/usr/*", "/bin/mv"),
            ("ln", "*", "/bin/ln"),
            ("update-initramfs", "*", plain / "update-initramfs"),
        ):
            text = COUNTED.format(pattern=pattern, program=real, root=root)
            tool(counted, program, text)
        self.count, self.fault = root / "count", root / "fault"
        self.count.write_text("0\n")
        self.fault.write_text("0 never\n")
        self.here = Here(self.root, f"{counted}:/usr/sbin:/usr/bin:/sbin:/bin")
        self.want = deployment(gpus={"persist": "change", "unbind_timeout_s": 5})
        self.state = DeploymentState()
        self.step = GpusStep()

    def look(self) -> Facts:
        """As the step's probes see it."""
        place = str(self.root)
        found = []
        for probe in (*gpus_facts.probes(self.want.gpus, place), boot_facts.probe(place)):
            answer = self.here.run(probe.script)
            found.append(probe.parse(ProbeOutput(answer.exit, answer.stdout, answer.stderr)))
        return facts(*found, DRIVER)

    def up(self) -> None:
        """As the engine does it, with the undo."""
        seen = self.look()
        plan = self.step.plan(self.want, seen, self.state)
        assert plan.state is PlanState.CHANGES, plan
        working = dataclasses.replace(
            context(self.want, None, reprobe=self.look),  # type: ignore[arg-type]
            transports={Where.HOST: self.here, Where.GUEST: self.here},
            state=self.state,
            step="gpus",
        )
        try:
            self.step.apply(working, seen, plan)
        except DeployError as error:
            self.step.undo(working, seen, plan, error)
            raise
        after = self.step.plan(self.want, self.look(), self.state)
        assert after.state is PlanState.NOTHING, after

    def listing(self) -> list[str]:
        """Drivers, overrides, modules, nodes, links and files, a line each."""
        return sorted(self._listed())

    def _listed(self) -> Iterator[str]:
        for address in sorted(path.name for path in (self.tree.pci / "devices").iterdir()):
            override = self.tree.override(address).replace("(null)", "")
            yield f"{address} {self.tree.driver(address)} {override}"
        modules = self.root / "sys/module"
        yield f"modules {sorted(path.name for path in modules.glob('*'))}"
        for folder in ("dev", "etc", "usr", "boot", "run/deployer"):
            for path in (self.root / folder).rglob("*"):
                mode = path.lstat()
                name = path.relative_to(self.root)
                if path.is_symlink():
                    yield f"{name} -> {path.readlink()}"
                elif stat.S_ISCHR(mode.st_mode):
                    yield f"{name} {mode.st_rdev:x}"
                elif path.is_file():
                    yield f"{name} {mode.st_mode:o} {path.read_text()}"


@pytest.mark.parametrize("when", ["before", pytest.param("after", marks=pytest.mark.long)])
def test_at_every_effect_the_host_is_as_before_or_the_difference_is_told(
    tmp_path: Path, when: str
) -> None:
    char(tmp_path / "can-make-nodes", 195, 0)
    told: dict[int, str] = {}
    for effect in range(1, 100):
        host = Host(tmp_path / str(effect))
        before = host.listing()
        host.fault.write_text(f"{effect} {when}\n")
        try:
            host.up()
        except DeployError as error:
            told[effect] = error.what
            assert "kpro5 is as it was before" in error.what, (effect, error, error.evidence)
            assert host.listing() == before, (effect, error)
            assert to_refresh(host.state) == ()
            continue
        assert [host.tree.driver(one) for one in (A, B)] == ["nvidia", "nvidia"]
        assert "vfio-pci ids=10de:1aef" in (host.root / "boot/initrd.img-6.8").read_text()
        assert [one.was for one in edited(host.state)] == [VFIO.encode()]
        if int(host.count.read_text()) < effect:
            break
    # Two overrides, unbinds and probes, two modules, nodes, six files and links, the refresh.
    assert len(told) >= 15, told
