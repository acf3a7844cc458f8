"""The container step's scripts on a host with the lab's `pct`: what is changed, and taken back."""

from __future__ import annotations

import dataclasses
import fcntl
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from deployer import pct_config
from deployer.errors import DeployError, RemoteCommandFailed
from deployer.inventory import Create
from deployer.model import Facts, Plan, PlanState, ProbeOutput, Shell, Where
from deployer.pct_edit import ALLOW, Edit
from deployer.remote.transport import Answer
from deployer.state import DeploymentState
from deployer.steps import container_changes as changes
from deployer.steps import container_create
from deployer.steps.container import ContainerStep
from deployer.steps.container_facts import ContainerFacts, GuestNodes, probes
from deployer.steps.cuda_proof import CudaProof
from tests.local_transport import LocalTransport, shell_path
from tests.unit.hoststeps import SHELLS, Door, context, deployment, facts, run_script, tool
from tests.unit.test_step_container import BARE, FULL, LIBRARIES
from tests.unit.test_step_gpus import NODES, on_nvidia

TOOL = Path(__file__).with_name("pct_tool.py")
BY_SHELL = pytest.mark.parametrize("shell", SHELLS, ids=lambda shell: shell[0])
WHOLE = BARE + "memory: 512\nostype: debian\n"
CREATE = Create(
    template="local:vztmpl/debian.tar.gz",
    storage="local",
    disk_gib=8,
    memory_mib=1024,
    hostname="sglang",
)


class HostHere(LocalTransport):
    """A host below a folder: absolute paths of scripts are moved there."""

    def __init__(self, root: Path) -> None:
        super().__init__(f"{root}/bin:{shell_path('dash', root)}", "kpro5")
        self.root = root

    def moved(self, text: str) -> str:
        """`text` with the host's paths below the folder."""
        text = text.replace("/run/lock/lxc", f"{self.root}/locks")
        for path in ("/etc/pve", "/var/lib/deployer", "/sys/class/net"):
            text = text.replace(path, f"{self.root}{path}")
        return text

    def run(self, script: str, *, args: Sequence[str] = (), **more: Any) -> Answer:
        return super().run(self.moved(script), args=[self.moved(one) for one in args], **more)


class World:
    """A host with container 129, and the step that works on it."""

    def __init__(self, root: Path, conf: str | None, status: str, version: str = "6.1.10") -> None:
        self.root = root
        self.conf = root / "etc/pve/lxc/129.conf"
        self.conf.parent.mkdir(parents=True)
        (root / "running").mkdir()
        if conf is not None:
            self.conf.write_bytes(pct_config.encode(conf))
        if status == "running":
            (root / "running/129").touch()
        lines = [f"{node.path} {node.major} {node.minor}\n" for node in NODES]
        (root / "devices").write_text("".join(lines))
        # What is asked all the time needs no Python.
        tool(
            root / "bin",
            "pct",
            f"""if [ "$*" = "status 129" ] && [ -e {self.conf} ]; then
  status=stopped; [ ! -e {root}/running/129 ] || status=running
  echo "status: $status"; exit 0
fi
exec {sys.executable} -I -S {TOOL} {root} "$@"
""",
        )
        tool(root / "bin", "dpkg-query", f"echo {version}\n")
        self.host = HostHere(root)
        self.guest = Door("kpro5/129")
        self.want = deployment()
        self.blind = False
        """The guest sees no device, whatever its configuration names."""
        self.step = ContainerStep(pause=lambda seconds: None)

    def look(self) -> Facts:
        """The host as its probe sees it; a guest that has what its configuration names."""
        create = self.want.container.create if self.want.container else None
        probe = probes(129, create=create)[0]
        answer = self.host.run(probe.script)
        seen = probe.parse(ProbeOutput(answer.exit, answer.stdout, answer.stderr))
        assert isinstance(seen, ContainerFacts)
        paths = {entry.path for entry in seen.config().current.devices().values()}
        paths |= set(pct_config.mounted_devices(seen.config().current))
        seen = dataclasses.replace(seen, devices=tuple((node, 0o666) for node in NODES))
        host = (on_nvidia(), LIBRARIES, seen)
        if seen.status != "running":
            return facts(*host, silent="connection refused")
        inside = tuple(node for node in NODES if node.path in paths and not self.blind)
        return facts(*host, GuestNodes(inside), CudaProof(0))

    def plan(self, seen: Facts) -> Plan:
        """The step's decision."""
        return self.step.plan(self.want, seen, DeploymentState())

    def context(self) -> Any:
        """For apply and undo."""
        made = context(self.want, self.guest, reprobe=self.look)
        return dataclasses.replace(
            made, transports={Where.HOST: self.host, Where.GUEST: self.guest}
        )

    def applied(self) -> tuple[Facts, Plan, Any]:
        """Applied and not undone: what was seen before, the plan, and the context."""
        seen = self.look()
        decided = self.plan(seen)
        working = self.context()
        self.step.apply(working, seen, decided)
        return seen, decided, working

    def apply(self) -> Plan:
        """As the engine does it, with undo; the plan afterwards."""
        seen = self.look()
        decided = self.plan(seen)
        assert decided.state is PlanState.CHANGES, decided
        working = self.context()
        try:
            self.step.apply(working, seen, decided)
        except DeployError as error:
            self.step.undo(working, seen, decided, error)
            raise
        return self.plan(self.look())

    @property
    def running(self) -> bool:
        """Whether the container runs."""
        return (self.root / "running/129").exists()

    def calls(self, verb: str) -> list[str]:
        """The calls of pct with this verb."""
        lines = (self.root / "calls").read_text().splitlines()
        return [line for line in lines if line.split()[0] == verb]


def test_a_stopped_container_gets_its_devices(tmp_path: Path) -> None:
    world = World(tmp_path, WHOLE, "stopped")
    after = world.apply()
    assert after.state is PlanState.NOTHING, after
    config = pct_config.parse_conf(world.conf.read_text())
    assert [entry.path for entry in config.current.devices().values()] == [n.path for n in NODES]
    assert len(config.snapshots) == 1
    copies = list((tmp_path / "var/lib/deployer/lxc/129").glob("*.conf"))
    assert WHOLE in [copy.read_text() for copy in copies]
    assert oct(copies[0].stat().st_mode & 0o777) == "0o600"


def test_hot_plug_needs_no_restart(tmp_path: Path) -> None:
    world = World(tmp_path, WHOLE, "running")
    assert world.apply().state is PlanState.NOTHING
    assert world.calls("shutdown") == []


def test_an_old_proxmox_gets_raw_lines_and_a_restart(tmp_path: Path) -> None:
    text = WHOLE + "#note\xff\n\n[old]\nmemory: 1\n"
    world = World(tmp_path, text, "running", "4.4.0")
    assert world.apply().state is PlanState.NOTHING
    assert len(world.calls("shutdown")) == 1
    config = pct_config.parse_conf(pct_config.decode(world.conf.read_bytes()))
    assert len(config.current.raw) == 10
    assert config.snapshots["old"].keys == {"memory": "1"}


def test_a_stale_major_is_found_and_mended(tmp_path: Path) -> None:
    mounts = "".join(
        f"lxc.mount.entry: {n.path} {n.path[1:]} none bind,optional,create=file\n" for n in NODES
    )
    rules = f"{ALLOW}: c 195:* rwm\n{ALLOW}: c 508:* rwm\n"
    world = World(tmp_path, WHOLE + rules + mounts, "running")
    title = world.plan(world.look()).changes[1].title
    assert title.startswith(f"correct {ALLOW}: c 508:* rwm to {ALLOW}: c 509:* rwm in")
    assert world.apply().state is PlanState.NOTHING
    assert f"{ALLOW}: c 509:* rwm\n" in world.conf.read_text()
    before_the_snapshot = world.conf.read_text().partition("\n[")[0]
    assert "508" not in before_the_snapshot


def test_no_snapshot_is_said_and_goes_on(tmp_path: Path) -> None:
    world = World(tmp_path, WHOLE + "mp0: /srv,mp=/srv\n", "stopped")
    notes: list[str] = []
    seen = world.look()
    working = world.context()
    working.bus.emit = lambda event: notes.append(getattr(event, "text", ""))
    world.step.apply(working, seen, world.plan(seen))
    assert any("snapshot feature is not available" in note for note in notes)
    assert world.plan(world.look()).state is PlanState.NOTHING


def test_only_our_snapshots_are_dropped(tmp_path: Path) -> None:
    ours = (
        "".join(f"\n[deployer-{n:08x}]\nmemory: 1\nsnaptime: {n}\n" for n in range(1, 4))
        + "\n[before]\nmemory: 1\nsnaptime: 0\n\n[deployer-mine]\nmemory: 1\nsnaptime: 0\n"
    )
    world = World(tmp_path, WHOLE + ours, "stopped")
    world.apply()
    left = set(pct_config.parse_conf(world.conf.read_text()).snapshots)
    assert {"before", "deployer-mine", "deployer-00000003"} < left
    assert len(left) == 4


def test_a_snapshot_that_was_cut_off_is_taken_again(tmp_path: Path) -> None:
    world = World(tmp_path, WHOLE, "stopped")
    name = world.plan(world.look()).changes[0].title.split()[2]
    world.conf.write_text(WHOLE + f"\n[{name}]\nmemory: 1\nsnapstate: prepare\nsnaptime: 1\n")
    assert world.apply().state is PlanState.NOTHING
    taken = pct_config.parse_conf(world.conf.read_text()).snapshots[name].keys
    assert "snapstate" not in taken
    assert taken["memory"] == "512"


def test_a_failed_start_leaves_everything_as_before(tmp_path: Path) -> None:
    text = "#note\n" + WHOLE.replace("arch", "cores: 2\narch") + "lxc.cap.drop = x\n"
    world = World(tmp_path, text, "running", "5.2.0")
    (tmp_path / "broken").write_text("lxc-start: 129: cgroups: failed\n")

    def healed(*_: Any) -> Facts:
        (tmp_path / "broken").unlink(missing_ok=True)
        return World.look(world)

    seen = world.look()
    decided = world.plan(seen)
    working = world.context()
    with pytest.raises(RemoteCommandFailed) as raised:
        world.step.apply(working, seen, decided)
    assert not world.running
    assert "container 129 did not start" in raised.value.what
    working.reprobe = healed
    world.step.undo(working, seen, decided, raised.value)
    assert "container 129 is as before again" in raised.value.what
    assert world.conf.read_bytes() == text.encode()
    assert world.running


def test_what_cannot_be_put_back_is_told(tmp_path: Path) -> None:
    world = World(tmp_path, WHOLE, "running", "5.2.0")
    (tmp_path / "broken").write_text("lxc-start: 129: cgroups: failed\n")
    with pytest.raises(RemoteCommandFailed) as raised:
        world.apply()
    assert "it is started again failed" in raised.value.what
    assert "it is stopped and was running" in raised.value.what
    assert world.conf.read_text() == WHOLE


def test_hot_plugged_devices_stay_until_the_next_start_and_that_is_told(tmp_path: Path) -> None:
    world = World(tmp_path, WHOLE, "running")
    seen, decided, working = world.applied()
    error = DeployError("something else")
    world.blind = True
    world.step.undo(working, seen, decided, error)
    assert "dev0 goes at its next start" in error.what
    assert "is new" not in error.what


def test_what_is_right_stays_and_is_told(tmp_path: Path) -> None:
    world = World(tmp_path, WHOLE, "running")
    seen, decided, working = world.applied()
    after = world.conf.read_text()
    error = DeployError("CUDA does not start in container 129")
    world.step.undo(working, seen, decided, error)
    assert "is right and stays, since the failure lies elsewhere" in error.what
    assert "dev0 is new (/dev/nvidia0,mode=0666)" in error.what
    assert "snapshot deployer-" in error.what
    assert world.conf.read_text() == after


def test_a_container_that_was_stopped_is_stopped_again(tmp_path: Path) -> None:
    world = World(tmp_path, WHOLE, "stopped")
    seen, decided, working = world.applied()
    error = DeployError("the guest sees none of them")
    world.blind = True
    world.step.undo(working, seen, decided, error)
    assert "is as before again" in error.what
    assert not world.running
    assert world.conf.read_text() == WHOLE


@BY_SHELL
def test_an_edit_of_another_is_not_overwritten(tmp_path: Path, shell: list[str]) -> None:
    world = World(tmp_path, WHOLE, "stopped")
    script, content = edit(world, WHOLE)
    world.conf.write_text(WHOLE + "cores: 1\n")
    refused = run(world, script, shell, content)
    assert refused.returncode == 1
    assert b"changed by another" in refused.stderr
    world.conf.write_text(WHOLE)
    assert run(world, script, shell, content).returncode == 0
    assert world.conf.read_text() == WHOLE + "lxc.cap.drop: x\n"
    assert [path.name for path in world.conf.parent.iterdir()] == ["129.conf"]


@BY_SHELL
def test_an_edit_that_cannot_be_written_leaves_nothing(tmp_path: Path, shell: list[str]) -> None:
    world = World(tmp_path, WHOLE, "stopped")
    script, content = edit(world, WHOLE)
    cut = run(world, script, shell, content[:-5])
    assert cut.returncode == 1
    assert b"came over broken" in cut.stderr
    assert [path.name for path in world.conf.parent.iterdir()] == ["129.conf"]
    (world.conf.parent / "129.conf.deployer.tmp").mkdir()
    refused = run(world, script, shell, content)
    assert refused.returncode == 1
    assert b"is read-only (pvecm status)" in refused.stderr
    assert world.conf.read_text() == WHOLE


def test_an_edit_waits_for_pct_s_lock(tmp_path: Path) -> None:
    world = World(tmp_path, WHOLE, "stopped")
    script, content = edit(world, WHOLE)
    (tmp_path / "locks").mkdir()
    with (tmp_path / "locks/pve-config-129.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        refused = run(world, script.replace("flock -w 10", "flock -w 0.1"), SHELLS[0], content)
    assert refused.returncode == 1
    assert b"locked by another task" in refused.stderr
    assert world.conf.read_text() == WHOLE


def edit(world: World, text: str) -> tuple[str, bytes]:
    """The script of an edit, and its input."""
    action = changes.edit_lines(129, text, Edit(("lxc.cap.drop: x",)), "for a test").action
    assert isinstance(action, Shell)
    return world.host.moved(action.script), action.stdin


def run(world: World, script: str, shell: list[str], content: bytes) -> Any:
    """By this shell."""
    import subprocess

    return subprocess.run(
        [*shell, "-c", script], input=content, capture_output=True, check=False, timeout=30
    )


@BY_SHELL
def test_pct_that_fails_after_it_wrote(tmp_path: Path, shell: list[str]) -> None:
    text = WHOLE + "dev9: /dev/nosuch\n"
    world = World(tmp_path, text, "stopped")
    action = changes.set_devices(129, text, {0: "/dev/nvidia0"}, "").action
    assert isinstance(action, Shell)
    done = run_script(world.host.moved(action.script), shell, tmp_path / "bin")
    assert done.returncode == 0, done.stderr
    assert b"after it had written" in done.stdout
    again = run_script(world.host.moved(action.script), shell, tmp_path / "bin")
    assert b"detected modified configuration" in again.stderr
    missing = changes.set_devices(129, None, {3: "/dev/nosuch"}, "").action
    assert isinstance(missing, Shell)
    failed = run_script(world.host.moved(missing.script), shell, tmp_path / "bin")
    assert failed.returncode == 1
    assert b"Device /dev/nosuch does not exist" in failed.stderr


@BY_SHELL
def test_a_line_in_a_snapshot_is_no_success(tmp_path: Path, shell: list[str]) -> None:
    entry = "dev0: /dev/nvidia0,mode=0666\n"
    world = World(tmp_path, f"{WHOLE}lock: backup\n\n[s1]\n{entry}", "stopped")
    action = changes.set_devices(129, None, {0: "/dev/nvidia0"}, "").action
    assert isinstance(action, Shell)
    refused = run_script(world.host.moved(action.script), shell, tmp_path / "bin")
    assert refused.returncode == 1
    assert b"is not in " in refused.stderr
    # What only waits for the next start is written; whether it is in force is seen elsewhere.
    world.conf.write_text(f"{WHOLE}lock: backup\n\n[pve:pending]\n{entry}\n[s1]\ncores: 1\n")
    waits = run_script(world.host.moved(action.script), shell, tmp_path / "bin")
    assert waits.returncode == 0


def test_an_ha_container_is_asked_for_and_polled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(tmp_path, FULL + "memory: 512\n", "stopped")
    (tmp_path / "etc/pve/ha").mkdir()
    (tmp_path / "etc/pve/ha/resources.cfg").write_text("ct: 129\n\tstate stopped\n\nct: 130\n")
    seen = world.look()
    asked = seen.need(ContainerFacts)
    assert asked.ha == "stopped"
    decided = world.plan(seen)
    assert decided.changes[0].title == "start container 129 through the HA manager"
    # The manager's own work: it starts the container after the request.
    tool(tmp_path / "bin", "sleep", f"touch {tmp_path}/running/129\n")
    action = decided.changes[0].action
    assert isinstance(action, Shell)
    answer = world.host.run(action.script)
    assert answer.exit == 0, answer.stderr
    assert "Requesting HA start for CT 129" in answer.text


def test_ignored_by_the_ha_manager_is_not_managed(tmp_path: Path) -> None:
    world = World(tmp_path, FULL, "stopped")
    (tmp_path / "etc/pve/ha").mkdir()
    (tmp_path / "etc/pve/ha/resources.cfg").write_text("ct: 129\n\tstate ignored\n")
    assert world.look().need(ContainerFacts).ha == ""


class Creating(World):
    """A host without container 129 and an inventory that wants it."""

    def __init__(
        self,
        root: Path,
        patch: pytest.MonkeyPatch,
        keys: str | None = "ssh-ed25519 AAAA me\n",
    ) -> None:
        super().__init__(root, None, "stopped")
        # A job's script travels in its own packet.
        patch.setattr(container_create, "_CREATE", self.host.moved(container_create._CREATE))
        patch.setattr(
            container_create, "STATE_FOLDER", self.host.moved(container_create.STATE_FOLDER)
        )
        host = self.want.host
        container = host.containers[129].model_copy(update={"create": CREATE})
        host = host.model_copy(update={"containers": {129: container}})
        self.want = dataclasses.replace(self.want, host=host, guest_keys=keys)
        import subprocess

        cache = root / "vz/template/cache"
        cache.mkdir(parents=True)
        (root / "tree/etc").mkdir(parents=True)
        subprocess.run(
            ["tar", "-czf", cache / "debian.tar.gz", "-C", root / "tree", "."], check=True
        )
        tool(
            root / "bin",
            "pvesm",
            f"""case $1 in
path) echo {cache}/${{2#*vztmpl/}} ;;
status) printf 'Name Type Status Total\\nlocal dir active 1\\nold dir inactive 1\\n' ;;
esac
""",
        )


def test_a_container_is_created_started_and_gets_its_devices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = Creating(tmp_path, monkeypatch)
    shown = [change.title for change in world.plan(world.look()).changes]
    assert shown[0] == "create container 129 from local:vztmpl/debian.tar.gz"
    assert shown[1].startswith("add /dev/nvidia0")
    assert shown[2] == "start container 129"
    after = world.apply()
    assert after.state is PlanState.NOTHING, after
    config = pct_config.parse_conf(world.conf.read_text())
    assert config.unprivileged
    assert config.current.description == "Created by deployer\n"
    assert config.current.keys["rootfs"] == "local:129/vm-129-disk-0.raw,size=8G"
    assert (tmp_path / "lxc/129/rootfs/root/.ssh/authorized_keys").read_text() == (
        "ssh-ed25519 AAAA me\n"
    )
    assert not (tmp_path / "var/lib/deployer/lxc/129/creating").exists()


def cut_off(world: World, conf: str, *, ours: bool = True) -> None:
    """What a killed creation leaves."""
    world.conf.write_text(conf)
    note = world.root / "var/lib/deployer/lxc/129/creating"
    note.parent.mkdir(parents=True)
    if ours:
        note.touch()


@pytest.mark.parametrize(
    "conf", ["lock: create\n", "#Created by deployer\narch: amd64\nlock: create\n"]
)
def test_a_creation_that_was_cut_off_begins_again(
    tmp_path: Path, conf: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = Creating(tmp_path, monkeypatch)
    cut_off(world, conf)
    assert "was cut off" in world.plan(world.look()).reason
    assert world.apply().state is PlanState.NOTHING
    assert len(world.calls("destroy")) == 1
    assert pct_config.parse_conf(world.conf.read_text()).lock == ""


@pytest.mark.parametrize(
    ("conf", "ours"),
    [("lock: create\n", False), ("hostname: another\nlock: create\n", True)],
)
def test_a_creation_of_another_is_left_alone(
    tmp_path: Path, conf: str, ours: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = Creating(tmp_path, monkeypatch)
    cut_off(world, conf, ours=ours)
    decided = world.plan(world.look())
    assert decided.state is PlanState.BLOCKED
    assert "not ours" in decided.reason


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("etc/pve/nodes/kpro6/lxc/129.conf", "container 129 on kpro6"),
        ("etc/pve/nodes/kpro6/qemu-server/129.conf", "VM 129 on kpro6"),
        ("etc/pve/qemu-server/129.conf", "VM 129 on "),
    ],
)
def test_an_id_that_another_guest_has_is_refused(
    tmp_path: Path, path: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = Creating(tmp_path, monkeypatch)
    (tmp_path / path).parent.mkdir(parents=True)
    (tmp_path / path).touch()
    decided = world.plan(world.look())
    assert decided.state is PlanState.BLOCKED
    assert said in decided.reason


def test_what_a_creation_needs_is_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = Creating(tmp_path, monkeypatch)
    tool(
        tmp_path / "bin", "pvesm", "[ $1 = path ] && { echo no such volume >&2; exit 2; }; exit 0\n"
    )
    decided = world.plan(world.look())
    assert "has no template local:vztmpl/debian.tar.gz" in decided.reason
    assert decided.fix == "fetch it there: pveam download local debian.tar.gz"
    keyless = Creating(tmp_path / "other", monkeypatch, keys=None)
    assert "is not on this machine" in keyless.plan(keyless.look()).reason
