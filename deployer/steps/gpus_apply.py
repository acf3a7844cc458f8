"""Runs a plan of GPUs, to nvidia or back: what is now is saved first, bindings go by the script."""

from __future__ import annotations

from deployer.model import Facts, Plan
from deployer.steps.apply import run_changes
from deployer.steps.base import StepContext
from deployer.steps.gpus_binding import Binding, run_binding
from deployer.steps.gpus_state import note_refresh, refreshed, remember


def run_plan(context: StepContext, facts: Facts, plan: Plan) -> None:
    """Each change in order, with its events; the first that fails ends it.

    Raises what run_binding and run_changes raise.
    """
    remember(context, facts, plan)
    for change in plan.changes:
        data = getattr(change.action, "data", None)
        if isinstance(data, Binding):
            run_binding(context, change, data)
            continue
        note_refresh(context, plan, change)
        run_changes(context, Plan.change(plan.reason, change))
        refreshed(context, change)
