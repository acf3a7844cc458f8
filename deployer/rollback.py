"""`deploy rollback`: back to a launch that has passed, by the steps of `up`.

The wish is what that launch was made from (deployer.recipe), so the venv is found or built from its
lock, the weights are found or fetched at their commit, and the gates run. The driver is left as it
is. The state's record says where it goes and what served before; it is written before anything is
touched, so that after a kill the same command goes on. When it fails, what served before serves
again by the same steps, without the gates.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from deployer.deployment import Deployment
from deployer.engine import Engine, Outcome, Selection
from deployer.errors import (
    CommandOverdue,
    DeployError,
    Interrupted,
    LockHeld,
    LockUnknown,
    StepBlocked,
    Unreachable,
)
from deployer.kept import Kept
from deployer.model import Facts
from deployer.names import listed
from deployer.place import place_of, place_words, placed
from deployer.recipe import Recipe, as_made
from deployer.remote.lock_record import owner_here
from deployer.rollback_steps import (
    AdoptedAgain,
    AsRecorded,
    StopOther,
    job_of,
    rollback_steps,
    runs,
)
from deployer.state import DeploymentState, Launch, RolledBack
from deployer.steps.base import Step
from deployer.steps.rolled_back import wish_key
from deployer.steps.server_wanted import fingerprint
from deployer.up_options import MakeEngine


def made_of(kept: Kept, launch: Launch, here: str) -> tuple[Recipe, str]:
    """Recipe and lock of a launch. Raises DeployError."""
    if not launch.recipe:
        raise DeployError(
            f"what launch {launch.id} was made from is not known: an older version launched it",
            where=f"{here} rollback",
            fix="name another launch; what `up` finds serving is kept from now on",
        )
    return kept.load(launch.recipe)


def then(now: Deployment, recipe: Recipe, lock_text: str, launch: Launch) -> Deployment:
    """The deployment to bring up. Raises StepBlocked, DeployError."""
    if recipe.vmid != now.vmid:
        places = [
            f"container {one}" if one else "the host itself" for one in (recipe.vmid, now.vmid)
        ]
        raise StepBlocked(
            f"launch {launch.id} ran in {places[0]}, and {now.id} is {places[1]} now",
            where=f"{now.id} rollback",
            fix="name another launch, or set `container` in the inventory as it was",
        )
    was, place = place_of(launch), placed(now)
    if was != place:
        raise StepBlocked(
            f"launch {launch.id} was {place_words(was)}, and {now.id} is {place_words(place)} now",
            where=f"{now.id} rollback",
            fix="name another launch, or write `nodes` in the playbook as it was",
        )
    if len(now.gpus) < len(recipe.gpus):
        raise StepBlocked(
            f"launch {launch.id} ran on {len(recipe.gpus)} GPUs ({listed(recipe.gpus)}), and "
            f"{now.id} has {len(now.gpus)} now",
            where=f"{now.id} rollback",
            fix="name another launch, or give the deployment its GPUs in the inventory",
        )
    return as_made(now, recipe, lock_text, launch)


NOT_NOW = (Unreachable, LockHeld, LockUnknown, CommandOverdue, Interrupted)
"""After these nothing is brought back: the same command goes on, by what it then sees."""


@dataclass
class RollBack:
    """The aim of one rollback. `now`: the deployment as inventory and playbook say."""

    now: Deployment
    launch: Launch
    recipe: Recipe
    kept: Kept
    clock: Callable[[], float] = time.time

    def begin(self, want: Deployment, own: DeploymentState) -> None:
        """Pins the weights of that time."""
        record = own.rollback
        going = record is not None and not record.outcome
        self._pinned = record.manifest if record is not None and going else own.manifest
        own.manifest = self.recipe.manifest

    def seen(self, want: Deployment, own: DeploymentState, facts: Facts) -> None:
        """Records where it goes and what serves."""
        old, job = own.rollback, job_of(facts)
        going = old if old is not None and not old.outcome else None
        mark = fingerprint(want, own.manifest, want.variant_name)
        ours = set() if going is None else {mark, going.mark}
        left = job.identity.id if job is not None and job.fingerprint not in ours else ""
        if not left and going is not None:
            left = going.left
        self.goes(want, own, left)

    def goes(self, want: Deployment, own: DeploymentState, left: str) -> None:
        """Records where it goes, and that launch `left` serves."""
        mark = fingerprint(want, own.manifest, want.variant_name)
        before = self._pinned.commit if self._pinned is not None else ""
        own.rollback = RolledBack(
            to=self.launch.id,
            mark=mark,
            left=left,
            wish=wish_key(self.now),
            commits=list(dict.fromkeys([self.recipe.manifest.commit, before])),
            when=self.clock(),
            by=owner_here(),
            manifest=self._pinned,
        )

    def done(self, want: Deployment, own: DeploymentState) -> None:
        """It serves and has passed."""
        if own.rollback is not None:
            own.rollback.outcome = "done"
            own.rollback.manifest = None

    def failed(
        self, want: Deployment, own: DeploymentState, error: DeployError, engine: MakeEngine
    ) -> DeployError:
        """What served before serves again; the error tells it."""
        again = f"`deploy rollback {want.id} {self.launch.id}` goes on"
        record = own.rollback
        if record is None or isinstance(error, NOT_NOW):
            error.fix = f"{error.fix}; {again}" if error.fix else again
            return error
        former = next((one for one in own.launches if one.id == record.left), None)
        try:
            words = self._back(own, record, former, engine)
        except DeployError as second:
            before = f"what served before (launch {record.left})"
            before = before if record.left else "what had the port before"
            error.add(f"and {before} could not be brought back: {second.what}")
            error.fix = f"{error.fix}; {again}; `deploy up {want.id}` launches the playbook"
            return error
        error.add(words)
        return error

    def _back(
        self,
        own: DeploymentState,
        record: RolledBack,
        former: Launch | None,
        engine: MakeEngine,
    ) -> str:
        """Raises DeployError."""
        own.manifest = record.manifest
        if not record.left:
            step = AdoptedAgain()
            runner = engine(self.now, [step])
            seen = runner.apply(Outcome(), runner.look("at what had the port before"), Selection())
            words = step.words or step.holder or "nothing had served before"
            if not step.words and (left := job_of(seen)) is not None:
                words += (
                    f"; launch {left.identity.id} still runs, marked as failed; `deploy down "
                    f"{self.now.id}` stops it"
                )
        elif former is None:
            raise DeployError(f"launch {record.left} is not in the state file")
        else:
            want = self.now
            steps: list[Step] = [StopOther(former), AsRecorded(former)]
            if (made := self.kept.load_or_none(former.recipe)) is not None:
                recipe, lock_text = made
                want = then(self.now, recipe, lock_text, former)
                own.manifest = recipe.manifest
                steps = rollback_steps(former, asked=False)
            facts = self._bring_back(engine(want, steps), former)
            job = job_of(facts)
            new = job.identity.id if job is not None else ""
            words = (
                f"launch {former.id}, which served before, serves on"
                if new == former.id
                else f"what served before (launch {former.id}) serves again as launch {new}; its "
                "gates were not run again"
            )
        record.outcome = "failed"
        own.manifest = record.manifest
        return words

    def _bring_back(self, runner: Engine, former: Launch) -> Facts:
        """Raises DeployError, which says whether `former` serves all the same."""
        facts = runner.look("to bring back what served before")
        try:
            return runner.apply(Outcome(), facts, Selection())
        except Unreachable:
            raise
        except DeployError as error:
            if runs(runner.look("what serves after the failure"), former):
                error.add("it was not ended, and serves on")
            raise
