"""The container step: devN entries, restarts, and what the guest really sees."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hoststeps import SHELLS, Door, context, deployment, facts, output, run_script, tool, write
from test_step_driver import userspace
from test_step_gpus import NODES, char, on_nvidia, on_vfio

from deployer import gpu
from deployer.errors import ConnectionLost, Unreachable
from deployer.model import Facts, Plan, PlanState, Shell
from deployer.pct_config import parse_conf
from deployer.state import DeploymentState
from deployer.steps.container import ContainerStep
from deployer.steps.container_facts import ContainerFacts, CudaCheck, GuestNodes, probes
from deployer.steps.driver_facts import GuestDriver

BY_SHELL = pytest.mark.parametrize("shell", SHELLS, ids=lambda shell: shell[0])
BARE = "arch: amd64\nhostname: sglang\nrootfs: local:129/x.raw\n"
FULL = BARE + "".join(f"dev{n}: {node.path},mode=0666\n" for n, node in enumerate(NODES))
SNAPSHOT = "\n[before]\nmemory: 512\n"
PVE9, PVE8, PVE7 = (6, 1, 10), (5, 2, 0), (4, 4, 0)
LIBRARIES = GuestDriver(userspace())


ON_HOST = tuple((node, 0o666) for node in NODES)
RENDER = gpu.Node("/dev/dri/renderD128", "char", 226, 128)


def pct(
    conf: str | None, status: str = "running", version: tuple[int, ...] = PVE9, **more: Any
) -> ContainerFacts:
    more = {"devices": ON_HOST, "majors": frozenset({1, 195, 509}), **more}
    return ContainerFacts(status, f"status: {status}" if status else "", conf, version, **more)


def plan(*values: object, restart: str = "allowed", silent: str = "") -> Plan:
    seen = facts(on_nvidia(), LIBRARIES, *values, silent=silent)
    return ContainerStep().plan(deployment(restart=restart), seen, DeploymentState())


def titles(decided: Plan) -> list[str]:
    return [change.title for change in decided.changes]


def guest(nodes: Sequence[gpu.Node] = NODES) -> GuestNodes:
    return GuestNodes(tuple(nodes))


def test_nothing_to_do() -> None:
    decided = plan(pct(FULL), guest(), CudaCheck(0, 0))
    assert decided.state is PlanState.NOTHING
    assert decided.reason == (
        "container 129 runs and has /dev/nvidia0, /dev/nvidia1, /dev/nvidiactl, "
        "/dev/nvidia-uvm, /dev/nvidia-uvm-tools; CUDA starts in it"
    )


def test_no_container() -> None:
    want = deployment(vmid=None)
    assert ContainerStep().probes(want) == []
    decided = ContainerStep().plan(want, facts(), DeploymentState())
    assert decided.state is PlanState.NOTHING


def test_stopped_gets_its_devices_and_is_started() -> None:
    decided = plan(pct(BARE + SNAPSHOT, "stopped"), silent="connection refused")
    assert len(decided.changes) == 3
    action = decided.changes[1].action
    assert isinstance(action, Shell)
    digest = hashlib.sha1((BARE + SNAPSHOT).encode()).hexdigest()
    assert (
        "\nset -- pct set 129 --dev0 /dev/nvidia0,mode=0666 --dev1 /dev/nvidia1,mode=0666 "
        "--dev2 /dev/nvidiactl,mode=0666 --dev3 /dev/nvidia-uvm,mode=0666 "
        f"--dev4 /dev/nvidia-uvm-tools,mode=0666 --digest {digest}\n"
    ) in action.script
    assert action.describe().startswith("# --- a/etc/pve/lxc/129.conf\n# +++ b/etc")
    assert "\n# +dev3: /dev/nvidia-uvm,mode=0666\n" in action.script
    assert decided.changes[1].undo == "pct set 129 --delete dev0,dev1,dev2,dev3,dev4"
    assert decided.changes[2].title == "start container 129"


def test_free_indexes_are_used() -> None:
    conf = BARE + "dev1: /dev/dri/renderD128\n"
    seen = dataclasses.replace(pct(conf, "stopped"), devices=(*ON_HOST, (RENDER, 0o660)))
    action = plan(seen).changes[1].action
    assert isinstance(action, Shell)
    assert "--dev0 /dev/nvidia0" in action.script
    assert "--dev1" not in action.script
    assert "--dev2 /dev/nvidia1" in action.script


def test_stopped_with_its_devices_is_only_started() -> None:
    assert titles(plan(pct(FULL, "stopped"))) == ["start container 129"]


def test_devices_in_a_snapshot_do_not_count() -> None:
    conf = BARE + "\n[before]\n" + FULL.removeprefix(BARE)
    assert len(plan(pct(conf, "stopped")).changes) == 3


@pytest.mark.parametrize(("version", "restarted"), [(PVE9, False), (PVE8, True), ((), True)])
def test_a_new_device_shows_up_without_a_restart_only_on_new_versions(
    version: tuple[int, ...], restarted: bool
) -> None:
    decided = plan(pct(BARE, version=version), guest([]))
    assert ("restart container 129" in titles(decided)) is restarted


def test_configured_but_not_visible_needs_a_restart() -> None:
    assert titles(plan(pct(FULL), guest(NODES[:4]))) == ["restart container 129"]


@pytest.mark.parametrize(
    ("node", "words"),
    [
        (gpu.Node("/dev/nvidia-uvm", "file"), "is a regular file, not a device"),
        (gpu.Node("/dev/nvidia-uvm", "char", 510, 0), "device 510:0, on the host it is 509:0"),
    ],
)
def test_a_name_is_no_device(node: gpu.Node, words: str) -> None:
    nodes = [one for one in NODES if one.path != node.path]
    decided = plan(pct(FULL), guest([*nodes, node]))
    assert titles(decided) == ["restart container 129"]
    assert words in decided.reason


def test_restart_never() -> None:
    decided = plan(pct(FULL), guest([]), restart="never")
    assert decided.state is PlanState.BLOCKED
    assert "restart" in decided.fix


@pytest.mark.parametrize(
    ("seen", "reason", "fix"),
    [
        (pct(BARE + "lock: backup\n"), "locked (backup)", "pct unlock 129"),
        (pct(None, ""), "does not exist on kpro5", "pct create 129"),
        (pct(None), "cannot be read", "pve-cluster"),
        (pct(BARE, ""), "cannot tell the status", "pct status 129"),
        (ContainerFacts(timed_out=True), "no answer in time", "pve-cluster"),
    ],
)
def test_refusals(seen: object, reason: str, fix: str) -> None:
    decided = plan(seen, guest())
    assert decided.state is PlanState.BLOCKED
    assert reason in decided.reason
    assert fix in decided.fix


def test_waits_for_the_gpus() -> None:
    decided = plan(pct(BARE), guest(), on_vfio())
    assert decided.state is PlanState.UNKNOWN


def test_running_but_silent() -> None:
    decided = plan(pct(FULL), silent="connection refused")
    assert decided.state is PlanState.UNKNOWN
    assert "connection refused" in decided.reason


def test_libraries_and_cuda_are_looked_at_inside() -> None:
    assert "driver libraries" in plan(pct(FULL), guest(), GuestDriver()).reason
    broken = plan(pct(FULL), guest(), CudaCheck(0, 999))
    assert broken.state is PlanState.BLOCKED
    assert "cuInit answers 999" in broken.reason
    assert plan(pct(FULL), guest(), CudaCheck(None, None)).state is PlanState.NOTHING


def test_old_proxmox_gets_raw_lines_in_the_current_part() -> None:
    decided = plan(pct(BARE + SNAPSHOT, "stopped", PVE7))
    action = decided.changes[1].action
    assert isinstance(action, Shell)
    config = parse_conf(action.stdin.decode())
    assert len(config.current.raw) == 10
    assert config.snapshots["before"].raw == ()
    assert "\n# +lxc.cgroup2.devices.allow: c 509:0 rwm\n" in action.script
    unprivileged = plan(pct(BARE + "unprivileged: 1\n", "stopped", PVE7)).changes[1].action
    assert isinstance(unprivileged, Shell)
    raw = parse_conf(unprivileged.stdin.decode()).current.raw
    assert {key for key, _ in raw} == {"lxc.mount.entry"}
    assert len(raw) == 5


PCT = """state={state}
case "$1" in
status) echo "status: $(cat "$state")" ;;
start) echo running >"$state" ;;
shutdown) echo stopped >"$state"; echo "$@" >>{state}.calls ;;
exec) grep -q running "$state" ;;
esac
"""


@BY_SHELL
def test_restart_waits_for_the_guest(tmp_path: Path, shell: list[str]) -> None:
    state = tmp_path / "state"
    state.write_text("running\n")
    tool(tmp_path / "bin", "pct", PCT.format(state=state))
    action = plan(pct(FULL), guest([])).changes[-1].action
    assert isinstance(action, Shell)
    done = run_script(action.script, shell, tmp_path / "bin")
    assert done.returncode == 0, done.stderr.decode()
    assert state.read_text() == "running\n"
    calls = (tmp_path / "state.calls").read_text()
    assert calls == "shutdown 129 --timeout 60 --forceStop 1\n"


@BY_SHELL
def test_a_start_that_never_answers_ends(tmp_path: Path, shell: list[str]) -> None:
    state = tmp_path / "state"
    state.write_text("stopped\n")
    tool(tmp_path / "bin", "pct", PCT.format(state=state).replace("running >", "stopped >"))
    tool(tmp_path / "bin", "sleep", "exit 0\n")
    tool(tmp_path / "bin", "date", f"echo $(($(wc -c <{tmp_path}/n) * 60)); echo >>{tmp_path}/n\n")
    (tmp_path / "n").write_text("")
    action = plan(pct(FULL, "stopped")).changes[-1].action
    assert isinstance(action, Shell)
    done = run_script(action.script, shell, tmp_path / "bin")
    assert done.returncode == 1
    assert b"status: stopped" in done.stderr


def test_apply_goes_on_until_nothing_is_left() -> None:
    looks = [
        facts(on_nvidia(), LIBRARIES, pct(BARE), guest([])),
        facts(on_nvidia(), LIBRARIES, pct(FULL), guest(NODES[:4])),
        facts(on_nvidia(), LIBRARIES, pct(FULL), guest()),
    ]
    door = Door("kpro5/129")
    want = deployment()
    step = ContainerStep(clock=lambda: 0.0, pause=lambda seconds: None)
    before: Facts = facts(on_nvidia(), LIBRARIES, pct(BARE), guest([]))
    decided = step.plan(want, before, DeploymentState())
    step.apply(context(want, door, reprobe=lambda: looks.pop(0)), before, decided)
    assert looks == []
    assert any("\nset -- pct set 129" in script for script in door.scripts)
    assert sum("pct snapshot" in script for script in door.scripts) == 1
    assert any("pct shutdown" in script for script in door.scripts)


def test_apply_waits_for_the_guest_s_own_door() -> None:
    now = iter(range(1000))
    step = ContainerStep(clock=lambda: float(next(now)), pause=lambda seconds: None)
    door = Door("kpro5/129", [ConnectionLost("not yet"), ConnectionLost("not yet")])
    step._await_guest(context(deployment(), door))
    assert len(door.scripts) == 3
    dark = Door("kpro5/129", [Unreachable("dark")] * 200)
    with pytest.raises(Unreachable, match="dark"):
        step._await_guest(context(deployment(), dark))


@BY_SHELL
def test_look(tmp_path: Path, shell: list[str]) -> None:
    root, tools = tmp_path / "root", tmp_path / "bin"
    write(root / "etc/pve/lxc/129.conf", FULL + SNAPSHOT)
    tool(tools, "pct", 'echo "perl: warning: Setting locale failed." >&2\necho "status: running"\n')
    tool(tools, "dpkg-query", "echo 6.1.10\n")
    host, nodes, cuda = probes(129, str(root))
    seen = host.parse(output(run_script(host.script, shell, tools)))
    assert isinstance(seen, ContainerFacts)
    assert (seen.status, seen.version, seen.conf) == ("running", PVE9, FULL + SNAPSHOT)
    (root / "dev").mkdir()
    (root / "dev/nvidia1").touch()
    char(root / "dev/nvidia0", 195, 0)
    inside = nodes.parse(output(run_script(nodes.script, shell)))
    assert isinstance(inside, GuestNodes)
    assert inside.node("/dev/nvidia0").is_char
    assert inside.node("/dev/nvidia1").kind == "file"
    assert inside.node("/dev/nvidiactl").kind == "missing"
    checked = cuda.parse(output(run_script(cuda.script, shell)))
    assert checked == CudaCheck(None, None)


@BY_SHELL
def test_look_at_a_missing_container(tmp_path: Path, shell: list[str]) -> None:
    tools = tmp_path / "bin"
    text = "Configuration file 'nodes/kpro5/lxc/129.conf' does not exist"
    tool(tools, "pct", f'echo "{text}" >&2\nexit 2\n')
    tool(tools, "dpkg-query", "exit 1\n")
    one = probes(129, str(tmp_path))[0]
    seen = one.parse(output(run_script(one.script, shell, tools)))
    assert isinstance(seen, ContainerFacts)
    assert not seen.exists
    assert text in seen.status_text
