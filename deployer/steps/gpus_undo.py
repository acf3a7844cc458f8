"""After a failed gpus step: the host as it was before, or the exact difference and why."""

from __future__ import annotations

from collections.abc import Sequence

from deployer.errors import DeployError, StepFailed
from deployer.model import Change, Facts, Plan, Shell, Where, WriteFile
from deployer.remote.files import write_atomic
from deployer.shell import words
from deployer.steps.apply import run_change
from deployer.steps.base import StepContext
from deployer.steps.boot_facts import BootFacts
from deployer.steps.gpus_binding import Binding, UnbindStuck, run_binding
from deployer.steps.gpus_facts import GpuFacts, Overrides
from deployer.steps.gpus_moves import UNIT_FOLDER, unit_name
from deployer.steps.gpus_state import (
    differences,
    forget_refresh,
    is_refresh,
    moves_back,
    new_nodes,
    refreshed,
    to_unload,
)


def undo(context: StepContext, facts: Facts, plan: Plan, error: DeployError) -> None:
    """Puts back drivers, overrides, modules, nodes and files; adds the outcome to `error`.

    Behind a stuck unbind nothing else is tried: only the difference is told.
    """
    host = context.want.host_name
    why: list[str] = []
    try:
        now = context.reprobe()
        if not isinstance(error, UnbindStuck) and differences(facts, now):
            context.note(f"{error.what}: the host is put back as it was")
            why = _put_back(context, facts, now, plan)
            now = context.reprobe()
        left = differences(facts, now)
    except DeployError as failure:
        error.add(f"and then {host} could not be put back: {failure.what}")
        return
    if isinstance(error, UnbindStuck):
        why = ["a stuck unbind is cleared by a host reboot only, so nothing else was tried"]
    if not left and not why:
        forget_refresh(context)
        error.add(f"{host} is as it was before")
        return
    if not left:
        error.add(f"on {host} all links and files are as before, but {'; '.join(why)}")
        return
    reason = f" ({'; '.join(why)})" if why else ""
    error.add(f"{host} is not as it was before: {'; '.join(left)}{reason}")


def _put_back(context: StepContext, facts: Facts, now: Facts, plan: Plan) -> list[str]:
    """Each part whatever becomes of the others; returns what failed."""
    failed = []
    for part in (_files, _drivers):
        try:
            failed += part(context, facts, now, plan)
        except StepFailed as failure:
            failed.append(failure.what)
    return failed


def _drivers(context: StepContext, facts: Facts, now: Facts, plan: Plan) -> list[str]:
    moves, unload = moves_back(facts, now), to_unload(facts, now)
    if moves or unload:
        gpus = context.want.playbook.gpus
        binding = Binding(
            moves,
            gpus.unbind_timeout_s,
            daemon=gpus.persistenced == "allowed",
            unload=unload,
        )
        title = "put the drivers back"
        run_binding(context, Change(title, plan.reason, binding.action(moves)), binding)
    nodes = new_nodes(facts, now)
    if nodes:
        script = f"rm -f {words(nodes)}\n"
        run_change(context, Change("remove nodes", plan.reason, Shell(Where.HOST, script)))
    unknown = [
        one.address
        for one in moves
        if one.override is None and facts.need(GpuFacts).scanned and one.target
    ]
    problem = (facts.get(Overrides) or Overrides(problem="not asked")).problem
    return [
        f"driver_override of {address} was not known before ({problem or 'not read'}) and is now "
        "its driver's name"
        for address in unknown
    ]


def _files(context: StepContext, facts: Facts, now: Facts, plan: Plan) -> list[str]:
    """Files of the plan as they were, the boot link too; then what is made from them, again."""
    old, new = facts.get(BootFacts), now.get(BootFacts)
    if old is None:
        return ["the boot configuration was not known before"]
    host = context.on(Where.HOST)
    gone: list[str] = []
    restored: list[str] = []
    for change in plan.changes:
        action = change.action
        if not isinstance(action, WriteFile):
            continue
        was = old.file(action.path)
        if was is None:
            gone.append(action.path)
        elif new is None or (new.file(action.path) or was).content != was.content:
            write_atomic(host, action.path, was.content, was.mode)
            restored.append(action.path)
    unit = unit_name(context.want.name)
    if unit not in old.enabled and new is not None and unit in new.enabled:
        gone.append(f"{UNIT_FOLDER}/multi-user.target.wants/{unit}")
    if gone:
        reload = "if [ -d /run/systemd/system ]; then systemctl daemon-reload; fi\n"
        script = f"rm -f {words(gone)}\n{reload}"
        run_change(context, Change("remove files", plan.reason, Shell(Where.HOST, script)))
    return _renewed(context, restored, plan)


def _renewed(context: StepContext, restored: Sequence[str], plan: Plan) -> list[str]:
    """The refresh of the plan once more, when a file that it reads was put back."""
    edited = [path for path in restored if not path.startswith(UNIT_FOLDER)]
    for change in plan.changes:
        if edited and is_refresh(change):
            run_change(context, change)
            refreshed(context, change)
    return []
