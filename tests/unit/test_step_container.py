"""The container step: devN entries, restarts, and what the guest really sees."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from deployer import gpu
from deployer.errors import AuthenticationRefused, ConnectionLost, Unreachable
from deployer.model import Facts, Plan, PlanState, Shell, Where
from deployer.pct_config import parse_conf
from deployer.state import DeploymentState
from deployer.steps import cuda_proof
from deployer.steps.container import ContainerStep
from deployer.steps.container_facts import ContainerFacts, GuestNodes, probes
from deployer.steps.cuda_proof import CudaProof
from deployer.steps.driver_facts import GuestDriver, HostDriver, Userspace
from tests.unit.hoststeps import (
    SHELLS,
    Door,
    context,
    deployment,
    facts,
    output,
    run_script,
    tool,
    write,
)
from tests.unit.test_step_driver import userspace
from tests.unit.test_step_gpus import NODES, char, on_nvidia, on_vfio

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
    decided = plan(pct(FULL), guest(), CudaProof(0))
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
    broken = plan(pct(FULL), guest(), CudaProof(999))
    assert broken.state is PlanState.BLOCKED
    assert "cuInit answers 999" in broken.reason
    assert plan(pct(FULL), guest(), CudaProof(skipped="x")).state is PlanState.NOTHING


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
    refused = Door("kpro5/129", [AuthenticationRefused("no such key")])
    with pytest.raises(AuthenticationRefused):
        step._await_guest(context(deployment(), refused))
    assert len(refused.scripts) == 1, "each login that is refused counts there"


@BY_SHELL
def test_look(tmp_path: Path, shell: list[str]) -> None:
    root, tools = tmp_path / "root", tmp_path / "bin"
    write(root / "etc/pve/lxc/129.conf", FULL + SNAPSHOT)
    tool(tools, "pct", 'echo "perl: warning: Setting locale failed." >&2\necho "status: running"\n')
    tool(tools, "dpkg-query", "echo 6.1.10\n")
    host, nodes = probes(129, str(root))
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


EPERM, EACCES, ENXIO = (
    "Operation not permitted",
    "Permission denied",
    "No such device or address",
)


def refused(path: str, said: str) -> CudaProof:
    return CudaProof(999, refused=((path, said),))


@pytest.mark.parametrize(
    ("conf", "check", "reason", "fix"),
    [
        (
            FULL.replace("uvm,mode=0666", "uvm,deny-write=1"),
            refused("/dev/nvidia-uvm", EPERM),
            "dev3 says deny-write",
            "pct set 129 --dev3 /dev/nvidia-uvm,mode=0666; pct reboot 129",
        ),
        (
            FULL.replace("nvidia0,mode=0666", "nvidia0"),
            refused("/dev/nvidia0", EACCES),
            "mode and owner of the node, in a privileged container",
            "pct set 129 --dev0 /dev/nvidia0,mode=0666",
        ),
        (
            FULL + "unprivileged: 1\n",
            refused("/dev/nvidiactl", EACCES),
            "in an unprivileged container",
            "--dev2 /dev/nvidiactl,mode=0666",
        ),
        (FULL, refused("/dev/nvidia0", ENXIO), "the driver behind it is gone", "deploy doctor"),
        (FULL, refused("/dev/nvidia0", "No such device"), "is gone", "nvidia again"),
        (FULL, refused("/dev/nvidia0", "Input/output error"), "Input/output error", "dmesg"),
    ],
)
def test_errors_of_opening_are_told_apart(
    conf: str, check: CudaProof, reason: str, fix: str
) -> None:
    decided = plan(pct(conf), guest(), check)
    assert decided.state is PlanState.BLOCKED
    assert reason in decided.reason
    assert fix in decided.fix


def test_rules_that_are_older_than_the_configuration_need_a_restart() -> None:
    decided = plan(pct(FULL), guest(), refused("/dev/nvidia-uvm", EPERM))
    assert titles(decided) == ["restart container 129"]
    never = plan(pct(FULL), guest(), refused("/dev/nvidia-uvm", EPERM), restart="never")
    assert never.state is PlanState.BLOCKED


RAW = BARE + "".join(
    f"lxc.mount.entry: {node.path} {node.path[1:]} none bind,optional,create=file\n"
    for node in NODES
)


def test_raw_lines_count_as_configured() -> None:
    conf = RAW + "lxc.cgroup2.devices.allow: c 195:* rwm\nlxc.cgroup2.devices.allow: c 509:* rwm\n"
    assert plan(pct(conf), guest(), CudaProof(0)).state is PlanState.NOTHING


def test_a_shut_rule_is_mended_only_in_privileged_containers() -> None:
    conf = RAW + "lxc.cgroup2.devices.allow: c 195:* rwm\nlxc.cgroup2.devices.allow: c 508:* rwm\n"
    decided = plan(pct(conf), guest())
    assert [title.split(" ")[0] for title in titles(decided)] == ["take", "correct", "restart"]
    assert "shut out" in decided.reason
    assert plan(pct(conf + "unprivileged: 1\n"), guest()).state is PlanState.NOTHING
    never = plan(pct(conf), guest(), restart="never")
    assert never.state is PlanState.BLOCKED


def test_what_the_inventory_does_not_name_is_left_alone_and_said() -> None:
    conf = FULL + (
        "dev9: /dev/nvidia7\nlxc.mount.entry: /dev/nvidia8 dev/nvidia8 none bind 0 0\n"
        "lxc.cgroup2.devices.allow: c 508:* rwm\nnot a line\n"
        "[pve:pending]\ncores: 2\ndelete: swap\n"
    )
    decided = plan(pct(conf), guest(), CudaProof(0))
    assert decided.state is PlanState.NOTHING
    assert "left alone: /dev/nvidia8 (raw), dev9 /dev/nvidia7" in decided.reason
    assert "stale rules: c 508:* rwm" in decided.reason
    assert "pending until its next start: -swap, cores" in decided.reason
    assert "1 lines that pct cannot read" in decided.reason


def test_odd_bytes_of_the_file_can_be_told() -> None:
    stopped = pct(FULL + "dev7: /dev/gr\udcff\x1b[2J\n", "stopped")
    locked = pct(BARE + "lock: gr\udcff\n")
    odd = pct(FULL + "lxc.mount.entry: /dev/nvidia7\udcff x none bind\n")
    for decided in (plan(stopped), plan(locked), plan(odd, guest())):
        told = decided.reason + decided.fix
        assert told.encode().decode() == told
        assert told.isprintable()
        assert "\ufffd" in told


def test_a_device_that_is_only_pending_needs_the_restart() -> None:
    pending = "".join(f"dev{n}: {node.path},mode=0666\n" for n, node in enumerate(NODES))
    decided = plan(pct(BARE + "\n[pve:pending]\n" + pending), guest([]))
    assert titles(decided) == ["restart container 129"]
    assert "with the restart also comes what is pending: dev0, dev1" in decided.reason


def test_a_snapshot_of_ours_that_was_cut_off_is_dropped_and_taken_again() -> None:
    first = next(t for t in titles(plan(pct(BARE, "stopped"))) if t.startswith("take snapshot"))
    name = first.split()[2]
    whole = BARE + f"\n[{name}]\nmemory: 512\nsnaptime: 5\n"
    assert not any(t.startswith("take") for t in titles(plan(pct(whole, "stopped"))))
    decided = plan(pct(whole + "snapstate: prepare\n", "stopped"))
    assert titles(decided)[0] == f"take snapshot {name} of container 129 and drop {name}"
    action = decided.changes[0].action
    assert isinstance(action, Shell)
    assert f"BROKEN={name}\n" in action.script


def test_rules_of_cgroup_v1_are_told() -> None:
    conf = FULL + "lxc.cgroup.devices.allow: c 195:* rwm\n"
    decided = plan(pct(conf), guest(), CudaProof(0))
    assert "rules of cgroup v1, without effect on this host: c 195:* rwm" in decided.reason
    own = plan(pct(conf + "unprivileged: 1\n"), guest(), CudaProof(0))
    assert "cgroup v1" not in own.reason


def test_an_entry_that_pct_cannot_parse_keeps_it_from_starting() -> None:
    decided = plan(pct(FULL + "dev7: /dev/nvidia0,mode=666\n", "stopped"), guest([]))
    assert decided.state is PlanState.BLOCKED
    assert "cannot start: dev7 (mode: value does not match the regex pattern)" in decided.reason
    assert "pct set 129 --delete dev7" in decided.fix


@pytest.mark.parametrize("status", ["stopped", "running"])
def test_an_entry_whose_node_is_gone_keeps_it_from_starting(status: str) -> None:
    seen = pct(FULL + "dev7: /dev/nvidia9\n", status)
    decided = plan(seen, guest([]))
    assert decided.state is PlanState.BLOCKED
    assert "cannot start: dev7 (the host has no device /dev/nvidia9)" in decided.reason
    assert "pct set 129 --delete dev7" in decided.fix


@pytest.mark.parametrize(
    ("conf", "more", "reason", "fix"),
    [
        (BARE, {"quorate": False}, "no quorum", "pvecm"),
        (BARE + "template: 1\n", {}, "is a template", "none"),
        (BARE + "lock: backup\n", {"tasks": ("vzdump",)}, "task vzdump works on it", "has ended"),
        (BARE + "lock: create\n", {}, "was not ours", "pct destroy 129"),
        (BARE + "lock: migrate\n", {}, "vzmigrate was cut off", "pct unlock 129"),
        (BARE + "lock: mytool\n", {}, "another tool was cut off", "pct unlock 129"),
        (None, {"elsewhere": ("VM 129 on kpro6",)}, "there is VM 129 on kpro6", "correct"),
        (None, {"status_text": "sh: pct: not found"}, "it is no Proxmox host", "kind: plain"),
        (None, {"status_text": "please run as root"}, "needs root", "user: root"),
        (BARE, {"status": "", "status_text": "please run as root"}, "needs root", "user: root"),
        (
            None,
            {"status_text": "ipcc_send_rec[1] failed: Connection refused"},
            "is not mounted",
            "pve-cluster",
        ),
    ],
)
def test_more_refusals(conf: str | None, more: dict[str, Any], reason: str, fix: str) -> None:
    seen = pct(conf, "" if conf is None else "stopped")
    decided = plan(dataclasses.replace(seen, **more))
    assert decided.state is PlanState.BLOCKED
    assert reason in decided.reason
    assert fix in decided.fix


def test_without_quorum_a_container_that_needs_nothing_is_fine() -> None:
    assert plan(pct(FULL, quorate=False), guest(), CudaProof(0)).state is PlanState.NOTHING


def test_the_ha_manager_is_asked() -> None:
    decided = plan(pct(FULL, ha="started"), guest([]))
    assert titles(decided) == ["restart container 129 through the HA manager"]
    broken = plan(pct(FULL, "stopped", ha="error"))
    assert broken.state is PlanState.BLOCKED
    assert "ha-manager set ct:129 --state started" in broken.fix


def test_a_snapshot_only_where_wanted_and_once() -> None:
    want = deployment()
    host = want.host
    silent = host.containers[129].model_copy(update={"snapshot": "never"})
    host = host.model_copy(update={"containers": {129: silent}})
    seen = facts(on_nvidia(), LIBRARIES, pct(BARE, "stopped"))
    decided = ContainerStep().plan(dataclasses.replace(want, host=host), seen, DeploymentState())
    assert titles(decided)[-1] == "start container 129"
    assert len(decided.changes) == 2
    first = plan(pct(BARE, "stopped"))
    name = first.changes[0].title.split(" ")[2]
    taken = BARE + f"parent: {name}\n\n[{name}]\nmemory: 1\nsnaptime: 5\n"
    assert len(plan(pct(taken, "stopped")).changes) == 2


@pytest.mark.parametrize(
    ("state", "told"),
    [
        ("migrate", "the HA manager migrates container 129"),
        ("fence", "waits for the fencing of the node of container 129"),
        ("recovery", "looks for a node for container 129"),
        ("request_stop", "the HA manager stops container 129"),
    ],
)
def test_while_the_ha_manager_works_on_it_nothing_is_done(state: str, told: str) -> None:
    seen = pct(BARE, ha="started", ha_status=f"service ct:129 (kpro5, {state})")
    decided = plan(seen, guest([]))
    assert decided.state is PlanState.BLOCKED
    assert told in decided.reason


@pytest.mark.parametrize("status", ["stopped", "running"])
def test_what_the_ha_manager_has_in_error_is_neither_started_nor_restarted(status: str) -> None:
    text = FULL if status == "stopped" else "\n[pve:pending]\n".join((BARE, FULL[len(BARE) :]))
    seen = pct(text, status, ha="started", ha_status="service ct:129 (kpro5, error)")
    decided = plan(seen, guest([]))
    assert decided.state is PlanState.BLOCKED
    assert "the HA manager has it in error" in decided.reason
    assert "--state disabled" in decided.fix


def test_a_frozen_container_is_not_touched() -> None:
    decided = plan(pct(BARE, frozen=True), guest([]))
    assert decided.state is PlanState.BLOCKED
    assert "is frozen" in decided.reason
    locked = plan(pct(BARE + "lock: backup\n", frozen=True, tasks=("vzdump",)))
    assert "task vzdump works on it" in locked.reason


def test_a_file_that_etc_pve_cannot_hold_is_refused() -> None:
    decided = plan(pct(BARE + "#" + "x" * 1024 * 1024 + "\n", "stopped", PVE7))
    assert decided.state is PlanState.BLOCKED
    assert "takes 1 MiB" in decided.reason


@BY_SHELL
def test_look_at_the_cluster(tmp_path: Path, shell: list[str]) -> None:
    root, tools = tmp_path / "root", tmp_path / "bin"
    conf = "#gr\udcff\nlock: backup\ndev0: gid=4,path=/dev/here\r\ndev1: /dev/gone\n"
    conf += "[s1]\ndev2: /dev/x\n"
    (root / "etc/pve/lxc").mkdir(parents=True)
    (root / "etc/pve/lxc/129.conf").write_bytes(conf.encode("utf-8", "surrogateescape"))
    write(root / "etc/pve/.members", '{"cluster": { "name": "a", "quorate": 0 }}\n')
    write(root / "etc/pve/ha/resources.cfg", "vm: 129\n\tstate started\n\nct: 129\n\tstate error\n")
    write(root / "etc/pve/nodes/kpro6/lxc/129.conf", "")
    write(
        root / "proc/devices", "Character devices:\n  1 mem\n509 nvidia-uvm\n\nBlock:\n  7 loop\n"
    )
    upid = "task UPID:kpro5:0001:0002:0003:vzdump:129:root@pam:"
    (root / "proc/77").mkdir()
    (root / "proc/77/cmdline").write_bytes(upid.encode() + b"\0")
    (root / "proc/78").mkdir()
    (root / "proc/78/cmdline").write_bytes(upid.replace(":129:", ":1290:").encode())
    write(root / "sys/fs/cgroup/lxc/129/cgroup.freeze", "1\n")
    (root / "dev").mkdir()
    char(root / "dev/here", 10, 3)
    tool(tools, "pct", "echo status: stopped\n")
    tool(tools, "dpkg-query", "echo 6.1.10\n")
    tool(tools, "ha-manager", "echo 'service ct:129 (kpro5, error)'\n")
    one = probes(129, str(root))[0]
    seen = one.parse(output(run_script(one.script, shell, tools)))
    assert isinstance(seen, ContainerFacts)
    assert seen.conf == conf
    assert (seen.quorate, seen.ha) == (False, "error")
    assert seen.ha_status == "service ct:129 (kpro5, error)"
    assert (seen.ha_state, seen.frozen) == ("error", True)
    assert seen.elsewhere == ("container 129 on kpro6",)
    assert seen.tasks == ("vzdump",)
    assert seen.majors == {1, 509}
    assert seen.on_host("/dev/here")
    assert not seen.on_host("/dev/gone")
    assert not seen.on_host("/dev/x")


@BY_SHELL
@pytest.mark.parametrize(
    "conf", ["", "memory: 512", "memory: 512\r\n\r\n", "a\n=== conf\n=== whole\n"]
)
def test_the_file_comes_as_it_is(tmp_path: Path, shell: list[str], conf: str) -> None:
    (tmp_path / "etc/pve/lxc").mkdir(parents=True)
    (tmp_path / "etc/pve/lxc/129.conf").write_bytes(conf.encode())
    tool(tmp_path / "bin", "pct", "echo status: stopped\n")
    one = probes(129, str(tmp_path))[0]
    seen = one.parse(output(run_script(one.script, shell, tmp_path / "bin")))
    assert isinstance(seen, ContainerFacts)
    assert seen.conf == conf


@BY_SHELL
def test_why_a_node_cannot_be_opened(tmp_path: Path, shell: list[str]) -> None:
    (tmp_path / "dev").mkdir()
    char(tmp_path / "dev/nvidiactl", 195, 255)
    char(tmp_path / "dev/nvidia0", 195, 0)
    one = cuda_proof.probe(Where.GUEST, "", str(tmp_path))
    write(tmp_path / "proc/devices", "195 nvidia\n")
    seen = one.parse(output(run_script(one.script, shell)))
    assert isinstance(seen, CudaProof) and seen.refused == (), "no module: nothing is opened"
    write(tmp_path / "proc/driver/nvidia/version", "x\n")
    seen = one.parse(output(run_script(one.script, shell)))
    assert isinstance(seen, CudaProof)
    # No such driver here: ENXIO; where the machine's own rules shut it out: EPERM.
    assert {path for path, _ in seen.refused} == {"/dev/nvidia0", "/dev/nvidiactl"}
    assert {said for _, said in seen.refused} <= {EPERM, ENXIO, "No such device"}


@pytest.mark.parametrize(
    ("proof", "library", "state", "words"),
    [
        (CudaProof(0, devices=2), "580.126.09", PlanState.NOTHING, "CUDA starts on it"),
        (CudaProof(999), "580.126.09", PlanState.BLOCKED, "cuInit answers 999"),
        (CudaProof(803), "580.95.05", PlanState.NOTHING, "in no container"),
        (CudaProof(skipped="no Python"), "580.126.09", PlanState.NOTHING, "in no container"),
    ],
)
def test_cuda_on_a_plain_host(proof: CudaProof, library: str, state: PlanState, words: str) -> None:
    """It is judged once the steps before have done their part, and never before."""
    names = ("libcuda.so", "libnvidia-ml.so")
    seen = HostDriver(userspace=Userspace(tuple((name, library) for name in names), smi=True))
    want = deployment(vmid=None)
    decided = ContainerStep().plan(want, facts(on_nvidia(), seen, proof), DeploymentState())
    assert decided.state is state
    assert words in decided.reason
