"""GPUs back to vfio-pci, and the host as it was after a failure: decisions, data in and out."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable
from dataclasses import replace

import pytest

from deployer import gpu, proxmox
from deployer.deployment import Deployment
from deployer.errors import StepFailed
from deployer.events import ChangeDone, ChangeStarted, Event
from deployer.model import Change, Facts, Plan, PlanState, Procedure, Shell, Where, WriteFile
from deployer.remote.transport import Answer
from deployer.state import DeploymentState
from deployer.steps.boot_facts import BootFacts, BootFile
from deployer.steps.gpus import GpusStep
from deployer.steps.gpus_binding import Binding, UnbindStuck
from deployer.steps.gpus_facts import GpuFacts, Holder, Overrides, PciFunction, Pending
from deployer.steps.gpus_moves import Move
from deployer.steps.gpus_retire import apply_retire, retire_plan
from deployer.steps.gpus_state import (
    differences,
    edited,
    is_refresh,
    moves_back,
    note_refresh,
    proof,
    refreshed,
    remember,
    to_refresh,
)
from tests.unit.hoststeps import A, B, Door, context, deployment, facts
from tests.unit.test_step_gpus import DRIVER, function, on_nvidia, on_vfio

AUDIO = "0000:21:00.1"
DAEMON = Holder(9, "nvidia-persiste", unit="nvidia-persistenced.service")
OVERRIDES = Overrides(((A, "vfio-pci"), (B, "")))


def retire(seen: GpuFacts, *others: object, **gpus: object) -> Plan:
    return retire_plan(deployment(gpus=gpus), facts(seen, *others), DeploymentState())


def with_audio(driver: str) -> GpuFacts:
    """Both on nvidia, the first one's audio function on `driver`."""
    one, two = on_nvidia().functions
    audio = replace(one.members[0], driver=driver)
    return on_nvidia(functions=(replace(one, members=(audio,)), two))


def moves(plan: Plan) -> tuple[Move, ...]:
    (binding,) = (
        change.action.data for change in plan.changes if isinstance(change.action, Procedure)
    )
    assert isinstance(binding, Binding)
    return binding.moves


def test_retire_moves_every_function_of_the_slots() -> None:
    decided = retire(with_audio("snd_hda_intel"))
    assert moves(decided) == (
        Move(A, "vfio-pci", "nvidia"),
        Move(AUDIO, "vfio-pci", "snd_hda_intel"),
        Move(B, "vfio-pci", "nvidia"),
    )
    action = decided.changes[0].action
    assert "echo 0000:21:00.1 > /sys/bus/pci/drivers/snd_hda_intel/unbind" in action.describe()
    assert "modprobe vfio-pci" in action.describe()


def test_retire_has_nothing_to_do_on_vfio() -> None:
    decided = retire(on_vfio())
    assert decided.state is PlanState.NOTHING
    assert decided.reason == "all functions of 0000:21:00 and 0000:41:00 are on vfio-pci"


def test_retire_takes_the_boot_unit_away() -> None:
    boot = BootFacts(enabled=("deployer-gpus-qwen.service",))
    (change,) = retire(on_vfio(), boot).changes
    assert isinstance(change.action, Shell)
    assert change.title == "remove deployer-gpus-qwen.service"


@pytest.mark.parametrize(
    ("changes", "words", "fix"),
    [
        ({"holders": ((A, Holder(7, "python3", container=129)),)}, "pid 7 (python3)", "stop pid 7"),
        (
            {"holders": ((B, DAEMON), (B, Holder(8, "dcgm", unit="nvidia-dcgm.service")))},
            "of nvidia-dcgm.service",
            "`systemctl stop nvidia-dcgm.service`",
        ),
        ({"pending": (Pending(5, "sh", "D", A, "the unbind"),)}, "only a host reboot", "reboot"),
        ({"hidden_users": 15}, "in use 15 times", "reboot"),
        ({"scanned": False}, "nobody knows who holds", "network file system"),
        (
            {"claims": (proxmox.Claim(101, ("0000:41:00",), False, running=True),)},
            "belongs to running VM 101",
            "qm shutdown 101",
        ),
        ({"functions": (function(A, "nouveau"),)}, "bound to nouveau", "by hand"),
    ],
)
def test_retire_refuses(changes: dict[str, object], words: str, fix: str) -> None:
    decided = retire(on_nvidia(**changes))
    assert decided.state is PlanState.BLOCKED
    assert words in decided.reason
    assert fix in decided.fix


def test_retire_stops_persistenced_only_when_it_is_alone_and_allowed() -> None:
    seen = on_nvidia(holders=((A, DAEMON), (B, DAEMON)))
    decided = retire(seen)
    assert decided.state is PlanState.CHANGES
    assert "systemctl stop nvidia-persistenced" in decided.changes[0].action.describe()
    refused = retire(seen, persistenced="never")
    assert refused.state is PlanState.BLOCKED
    assert "gpus.persistenced: allowed" in refused.fix
    # Of this name, and no service: nobody could start it again.
    stray = replace(DAEMON, unit="")
    assert retire(on_nvidia(holders=((A, stray),))).state is PlanState.BLOCKED


def test_a_disk_controller_in_the_group_is_told_and_left_alone() -> None:
    one, two = on_nvidia().functions
    disk = PciFunction("0000:22:00.0", True, "0x144d", "0xa80a", "0x010802", "nvme")
    decided = retire(on_nvidia(functions=(replace(one, members=(*one.members, disk)), two)))
    assert "0000:22:00.0 (144d:a80a, nvme) shares IOMMU group 14" in decided.notes[0]
    assert "0000:22:00.0" not in [move.address for move in moves(decided)]


def test_retire_is_proven_by_looking_again() -> None:
    want = deployment()
    seen = facts(on_nvidia(), OVERRIDES)
    decided = retire_plan(want, seen, DeploymentState())
    door = Door()
    made = context(want, door, lambda: facts(on_nvidia(), OVERRIDES))
    with pytest.raises(StepFailed, match="still not as wanted"):
        apply_retire(made, seen, decided)
    made = context(want, door, lambda: facts(on_vfio()))
    apply_retire(made, seen, decided)
    assert f"{A},vfio-pci,nvidia" in door.scripts[-1]
    before = made.state.extra["gpus"]["before"]
    assert before["functions"][A] == {"driver": "nvidia", "override": "vfio-pci"}
    assert before["functions"][AUDIO] == {"driver": "vfio-pci", "override": None}
    assert proof(made.state, on_vfio()) == "effective now, not proven across a reboot"


V = "/etc/modprobe.d/v.conf"
WAS, WROTE = b"options vfio-pci ids=10de:2230\n", b"# taken out\n"
COPY = f"{V}.deployer-{hashlib.sha256(WAS).hexdigest()[:8]}"
TOOLS = ("update-initramfs",)


def edited_state(path: str = V, **more: object) -> DeploymentState:
    """As `up` with `persist: change` leaves it."""
    entry = {
        "was": base64.b64encode(WAS).decode(),
        "wrote": hashlib.sha256(WROTE).hexdigest(),
    }
    return DeploymentState(extra={"gpus": {"edited": {path: entry}, **more}})


def at_boot(
    content: bytes, state: DeploymentState, seen: GpuFacts | None = None, **more: object
) -> Plan:
    """What retiring does with a boot file of this content; the GPUs are on vfio-pci."""
    boot = BootFacts(files=(BootFile(V, content),), tools=TOOLS, **more)  # type: ignore[arg-type]
    want = deployment(gpus={"persist": "change"})
    return retire_plan(want, facts(seen or on_vfio(), boot), state)


def test_retire_puts_back_what_up_edited() -> None:
    back, refresh, copy = at_boot(WROTE, edited_state()).changes
    assert isinstance(back.action, WriteFile) and isinstance(copy.action, Shell)
    assert (back.action.path, back.action.content, back.action.before) == (V, WAS, WROTE)
    assert refresh.title == "run update-initramfs"
    assert copy.action.script == f"rm -f {COPY}\n"
    after = at_boot(WAS, edited_state())
    assert (after.state, after.notes) == (PlanState.NOTHING, ())
    # Cut off between the file and what is made from it.
    (again,) = at_boot(WAS, edited_state(refresh=[V])).changes
    assert again.title == "run update-initramfs"


def test_retire_puts_back_what_names_no_gpu() -> None:
    """`blacklist nvidia` is of no GPU's address; with none left on nvidia it hurts nobody."""
    was = b"blacklist nvidia\n"
    entry = {"was": base64.b64encode(was).decode(), "wrote": hashlib.sha256(WROTE).hexdigest()}
    state = DeploymentState(extra={"gpus": {"edited": {V: entry}}})
    assert at_boot(WROTE, state).changes[0].title == f"put {V} back"
    other = on_vfio(displays=(function("0000:61:00.0", "nvidia", 2),))
    assert at_boot(WROTE, state, other).state is PlanState.NOTHING


def test_retire_leaves_a_file_that_somebody_changed_since() -> None:
    decided = at_boot(b"options vfio-pci ids=10de:2230 disable_vga=1\n", edited_state())
    assert decided.state is PlanState.NOTHING
    assert decided.notes == (
        f"at boot: {V} was changed by another since deployer edited it; as it was: {COPY}",
    )


def test_retire_takes_no_gpu_from_another_deployment() -> None:
    other = function("0000:61:00.0", "nvidia", 2)
    seen = on_vfio(displays=(*on_vfio().functions, other))
    stays = at_boot(WROTE, edited_state(), seen)
    assert stays.state is PlanState.NOTHING
    assert stays.notes[0].startswith(f"at boot: {V} stays edited: options vfio-pci ids=10de:2230")
    assert "0000:61:00.0 stays on nvidia" in stays.notes[0]
    # With a boot unit of its own it comes back whatever the file says.
    guarded = at_boot(WROTE, edited_state(), seen, enabled=("deployer-gpus-other.service",))
    assert guarded.changes[0].title == f"put {V} back"
    own = at_boot(WROTE, edited_state(), seen, enabled=("deployer-gpus-qwen.service",))
    assert [change.title for change in own.changes] == ["remove deployer-gpus-qwen.service"]


def test_retire_edits_nothing_that_the_playbook_does_not_allow() -> None:
    boot = BootFacts(files=(BootFile(V, WROTE),), tools=TOOLS)
    seen = facts(on_vfio(), boot)
    decided = retire_plan(deployment(gpus={"persist": "unit"}), seen, edited_state())
    assert decided.state is PlanState.NOTHING
    assert decided.notes[0] == f"at boot: put {V} back: not done, since gpus.persist is unit"
    assert f"nothing gives {A} and {B} to vfio-pci at boot" in decided.notes[1]
    assert "options vfio-pci ids=10de:2230" in decided.notes[1]


def test_what_an_edit_replaces_is_the_file_of_before_the_first() -> None:
    """A second edit of ours goes back to the first content; another's change in between counts."""
    want = deployment(gpus={"persist": "change"})
    state = DeploymentState()
    one, other = WAS + b"blacklist nvidia\n", b"blacklist nvidia\n"
    for content, was in ((one, one), (other, other)):
        boot = BootFacts(files=(BootFile(V, content),), tools=TOOLS)
        seen = facts(on_nvidia(), OVERRIDES, boot, DRIVER)
        decided = GpusStep().plan(want, seen, state)
        made = replace(context(want, Door()), state=state)
        remember(made, seen, decided)
        (kept,) = edited(state)
        assert (kept.path, kept.was) == (V, was)
    written = next(
        change.action.content
        for change in decided.changes
        if isinstance(change.action, WriteFile) and change.action.path == V
    )
    assert hashlib.sha256(written).hexdigest() == kept.wrote
    ours = BootFacts(files=(BootFile(V, written),), tools=TOOLS)
    again = WriteFile(Where.HOST, V, b"# more\n", 0o644, before=written)
    plan = Plan.change("more", Change("edit", "more", again))
    remember(made, facts(on_nvidia(), OVERRIDES, ours, DRIVER), plan)
    assert edited(state)[0].was == other


def test_a_refresh_that_failed_is_gone_on_with() -> None:
    """Nothing on the host tells whether a loader's own copy was made anew."""
    want = deployment(gpus={"persist": "change"})
    grub = "/etc/default/grub"
    line = b'GRUB_CMDLINE_LINUX="vfio-pci.ids=10de:2230"\n'
    boot = BootFacts(files=(BootFile(grub, line),), tools=("update-grub",))
    seen = facts(on_nvidia(), OVERRIDES, boot, DRIVER)
    door = Door()
    made = context(want, door)
    decided = GpusStep().plan(want, seen, made.state)
    files = [change for change in decided.changes if not is_refresh(change)]
    (refresh,) = (change for change in decided.changes if is_refresh(change))
    for change in files:
        note_refresh(made, decided, change)
    assert to_refresh(made.state) == (grub,)
    done = BootFacts(
        files=tuple(
            BootFile(change.action.path, change.action.content)
            for change in files
            if isinstance(change.action, WriteFile)
        ),
        tools=("update-grub",),
        enabled=("deployer-gpus-qwen.service",),
    )
    again = GpusStep().plan(want, facts(on_nvidia(), OVERRIDES, done, DRIVER), made.state)
    assert [change.title for change in again.changes] == ["run update-grub"]
    refreshed(made, refresh)
    last = GpusStep().plan(want, facts(on_nvidia(), OVERRIDES, done, DRIVER), made.state)
    assert last.state is PlanState.NOTHING


def test_each_change_of_a_retirement_is_told() -> None:
    """As those of `up` are: with its start, its end and its seconds."""
    want = deployment(gpus={"persist": "unit"})
    boot = BootFacts(enabled=("deployer-gpus-qwen.service",))
    seen = facts(on_nvidia(), OVERRIDES, boot)
    told: list[Event] = []
    made = context(want, Door(), lambda: facts(on_vfio()))
    made.bus.subscribe(told.append)
    apply_retire(made, seen, retire_plan(want, seen, made.state))
    titles = [f"bind {A} and {B} to vfio-pci", "remove deployer-gpus-qwen.service"]
    assert [one.title for one in told if isinstance(one, ChangeStarted)] == titles
    assert [one.title for one in told if isinstance(one, ChangeDone)] == titles


def looks(*seen: Facts) -> Callable[[], Facts]:
    """A look gives the next of these."""
    left = list(seen)
    return lambda: left.pop(0)


def undone(
    want: Deployment, before: Facts, error: StepFailed, *seen: Facts, answers: object = None
) -> tuple[str, list[str]]:
    """The error's text after the undo, and the scripts that ran."""
    step = GpusStep()
    plan = step.plan(want, before, context(want, Door()).state)
    door = Door(answers=list(answers) if isinstance(answers, list) else None)
    step.undo(context(want, door, looks(*seen)), before, plan, error)
    return error.what, door.scripts


BEFORE = facts(on_vfio(), OVERRIDES, BootFacts(), DRIVER)


def half_way() -> Facts:
    functions = (function(A, "nvidia", 0), function(B, "vfio-pci"))
    nodes = (gpu.Node("/dev/nvidia0", "char", 195, 0),)
    return facts(
        on_vfio(functions=functions, modules=("nvidia",), nodes=nodes),
        Overrides(((A, "nvidia"), (B, ""))),
        BootFacts(),
    )


def test_undo_puts_back_drivers_overrides_modules_and_nodes() -> None:
    want = deployment(gpus={"persist": "report"})
    told, scripts = undone(want, BEFORE, StepFailed("it failed"), half_way(), BEFORE)
    assert told == "it failed; kpro5 is as it was before"
    assert f"set -- 20 -p -u nvidia {A},vfio-pci,nvidia,vfio-pci\n" in scripts[0]
    assert scripts[1] == "rm -f /dev/nvidia0\n"


def test_undo_tells_what_differs_and_why() -> None:
    want = deployment(gpus={"persist": "report"})
    held = [Answer(76, b"", f"{A} is in use by pid 7 (x)\n".encode())]
    told, _ = undone(want, BEFORE, StepFailed("it failed"), half_way(), half_way(), answers=held)
    assert told == (
        f"it failed; kpro5 is not as it was before: {A} was on vfio-pci and is on nvidia; "
        f"driver_override of {A} was 'vfio-pci' and is 'nvidia'; "
        "module nvidia is there and was not; node /dev/nvidia0 is there and was not "
        f"({A} is in use by pid 7 (x))"
    )


def test_behind_a_stuck_unbind_nothing_is_tried() -> None:
    want = deployment(gpus={"persist": "report"})
    gone = facts(
        on_vfio(functions=(function(A, ""), function(B, "vfio-pci"))),
        Overrides(problem="a write to a driver file by pid 5 has not returned"),
        BootFacts(),
    )
    told, scripts = undone(want, BEFORE, UnbindStuck("it is stuck"), gone)
    assert scripts == []
    assert f"{A} was on vfio-pci and is on no driver" in told
    assert f"driver_override of {A} was 'vfio-pci' and cannot be read: a write to a driver" in told
    assert "cleared by a host reboot only, so nothing else was tried" in told


def test_undo_with_nothing_changed_runs_nothing() -> None:
    want = deployment(gpus={"persist": "report"})
    told, scripts = undone(want, BEFORE, StepFailed("it failed"), BEFORE)
    assert (told, scripts) == ("it failed; kpro5 is as it was before", [])


def test_undo_writes_back_files_and_renews_what_is_made_from_them() -> None:
    want = deployment(gpus={"persist": "change"})
    path = "/etc/modprobe.d/v.conf"
    old = BootFacts(
        files=(BootFile(path, b"options vfio-pci ids=10de:2230\n"),), tools=("update-initramfs",)
    )
    before = facts(on_nvidia(), OVERRIDES, old, DRIVER)
    unit = "deployer-gpus-qwen.service"
    new = BootFacts(
        files=(BootFile(path, b"#\n"), BootFile(f"/etc/systemd/system/{unit}", b"x")),
        enabled=(unit,),
    )
    changed = facts(on_nvidia(), OVERRIDES, new)
    answers: list[Answer | Exception] = []
    failed = [*answers, Answer(0, b"", b""), Answer(0, b"", b""), Answer(1, b"", b"no job here")]
    told, scripts = undone(want, before, StepFailed("it failed"), changed, changed, answers=failed)
    assert f"{path} is not what it was" in told
    # The files are back, and what is made from them is not: that is no host as before.
    failed = [*answers, Answer(0, b"", b""), Answer(0, b"", b""), Answer(1, b"", b"no job here")]
    half, _ = undone(want, before, StepFailed("it failed"), changed, before, answers=failed)
    assert half.startswith("it failed; on kpro5 all links and files are as before, but ")
    assert "no job here" in half or "boot-refresh" in half, half
    assert f"boot link {unit} is there and was not" in told
    removed = next(script for script in scripts if script.startswith("rm -f"))
    assert f"/etc/systemd/system/{unit}" in removed
    assert f"multi-user.target.wants/{unit}" in removed
    assert "/usr/local/sbin/deployer-gpus" in removed
    assert f"{path}.deployer-" in removed


def test_differences_link_by_link() -> None:
    assert differences(BEFORE, BEFORE) == []
    swapped = replace(on_vfio().functions[0], driver="nvidia")
    now = facts(on_vfio(functions=(swapped, on_vfio().functions[1])), OVERRIDES, BootFacts())
    assert differences(BEFORE, now) == [f"{A} was on vfio-pci and is on nvidia"]
    assert differences(BEFORE, facts(GpuFacts(timed_out=True))) == [
        "the PCI devices gave no answer, so nothing can be compared"
    ]


def test_what_was_not_known_is_not_guessed() -> None:
    before = facts(on_vfio(), Overrides(problem="too slow"), BootFacts())
    after = half_way()
    assert moves_back(before, after) == (Move(A, "vfio-pci", "nvidia", None),)
