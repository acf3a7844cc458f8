"""`deploy rollback`: back to a launch that has passed, by the steps of `up`.

The wish is what that launch was made from (deployer.recipe), so the venv is found or built from its
lock, the weights are found or fetched at their commit, and the gates run. The driver is left as it
is. The state's record says where it goes and what served before; it is written before anything is
touched, so that after a kill the same command goes on. When it fails, what served before serves
again by the same steps, without the gates.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass

from deployer.deployment import Deployment
from deployer.engine import Outcome, Selection
from deployer.errors import DeployError, StepBlocked, StepFailed, Unreachable, UsageError
from deployer.kept import Kept
from deployer.model import Change, Facts, Plan, Procedure
from deployer.names import listed
from deployer.recipe import Recipe, as_made
from deployer.remote.jobs import JobIdentity
from deployer.state import DeploymentState, Launch, RolledBack
from deployer.steps.base import Step, StepContext
from deployer.steps.container import ContainerStep
from deployer.steps.driver import DriverStep
from deployer.steps.gpus import GpusStep
from deployer.steps.launch import LaunchStep, api_key
from deployer.steps.launch_restore import note_of
from deployer.steps.rolled_back import wish_key
from deployer.steps.server_facts import ServerFact, ServerJob
from deployer.steps.server_wanted import LaunchNote, Rung, fingerprint
from deployer.steps.shards import ShardsStep
from deployer.steps.stop import StopStep
from deployer.steps.venv import VenvStep
from deployer.steps.verify import VerifyStep
from deployer.up import MakeEngine


def passed(launch: Launch, known_good: str) -> bool:
    """Has it passed its gates, whatever became of it later?"""
    if launch.id == known_good or launch.verdict == "good":
        return True
    return launch.verdict == "stopped" and launch.verified > 0


def present(own: DeploymentState) -> Launch | None:
    """The newest launch: what serves, or what served last."""
    return own.launches[-1] if own.launches else None


def choices(own: DeploymentState) -> list[Launch]:
    """What can be gone back to: of each wish that has passed, its newest launch; newest first."""
    now = present(own)
    seen = {now.fingerprint} if now is not None and passed(now, own.known_good) else set()
    found = []
    for launch in reversed(own.launches):
        if launch.fingerprint not in seen and passed(launch, own.known_good):
            seen.add(launch.fingerprint)
            found.append(launch)
    return found


@dataclass(frozen=True)
class Chosen:
    """`launch` None: nothing to go back to, because `why`."""

    launch: Launch | None
    why: str


def choose(own: DeploymentState, word: str, here: str) -> Chosen:
    """The launch that `word` names (its id, or the beginning of it), else the default.

    `here`: HOST/NAME, for messages. Raises UsageError for a word that names none.
    """
    if word:
        found = [one for one in own.launches if one.id.startswith(word)]
        exact = [one for one in found if one.id == word]
        if len(exact or found) != 1:
            known = listed([one.id for one in choices(own)])
            raise UsageError(
                f"{len(found) or 'no'} launches of {here} begin with {word}",
                where="rollback",
                fix=f"name one of: {known} (`deploy history {here}` lists all)",
            )
        return Chosen((exact or found)[0], "asked for")
    record, now = own.rollback, present(own)
    if record is not None and not record.outcome:
        going = next((one for one in own.launches if one.id == record.to), None)
        if going is not None:
            return Chosen(going, "a rollback to it was interrupted, and goes on")
    done = record is not None and record.outcome == "done"
    if record is not None and done and now is not None and now.fingerprint == record.mark:
        return Chosen(
            None,
            f"rolled back to launch {record.to} already, at {when(record.when)}; name a launch to "
            "go elsewhere",
        )
    found = choices(own)
    if not found:
        return Chosen(None, "no other launch has passed its gates here")
    if found[0].id == own.known_good:
        return Chosen(found[0], "the last known-good launch")
    return Chosen(found[0], "the last launch with another wish that passed its gates")


def when(seconds: float) -> str:
    """Unix seconds as a user reads them."""
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds))


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
    return as_made(now, recipe, lock_text, launch)


class DriverAsItIs(DriverStep):
    """A rollback changes no driver."""

    def plan(self, want: Deployment, facts: Facts, state: DeploymentState) -> Plan:
        """Nothing."""
        return Plan.nothing("left as it is; `deploy up` sees to it")


class LaunchAgain(LaunchStep):
    """Launches what `launch` was; the note and the recipe are those of that time."""

    def __init__(self, launch: Launch) -> None:
        super().__init__()
        self.launch = launch

    def see(self, facts: Facts) -> None:
        """The recipe is kept already."""
        super().see(facts)
        self.seen = dataclasses.replace(self.seen, recipe=self.launch.recipe)

    def start_rung(
        self, context: StepContext, rung: Rung, note: LaunchNote, key: str
    ) -> tuple[JobIdentity, Launch]:
        """What had failed before it then is told of it again."""
        return super().start_rung(context, rung, note_of(self.launch), key)

    def former(self, state: DeploymentState, failed: Collection[str]) -> Launch | None:
        """Nothing by this step: the rollback brings back what served before."""
        return None


def rollback_steps(launch: Launch, *, gates: bool = True) -> list[Step]:
    """The steps of `up` that bring `launch` back."""
    steps: list[Step] = [
        DriverAsItIs(),
        GpusStep(),
        ContainerStep(),
        VenvStep(),
        ShardsStep(),
        StopStep(retry=True),
        LaunchAgain(launch),
    ]
    return [*steps, VerifyStep()] if gates else steps


class StopOther(StopStep):
    """Ends whatever launch of ours runs but `launch`."""

    def __init__(self, launch: Launch) -> None:
        super().__init__(retry=True)
        self.launch = launch

    def plan(self, want: Deployment, facts: Facts, state: DeploymentState) -> Plan:
        """As of `down`."""
        if _runs(facts, self.launch):
            return Plan.nothing(f"launch {self.launch.id} runs")
        return self.down_plan(want, facts)


class AsRecorded(LaunchAgain):
    """Starts a launch by its recorded command: what it was made from is not known."""

    def plan(self, want: Deployment, facts: Facts, state: DeploymentState) -> Plan:
        """Nothing when it runs."""
        if _runs(facts, self.launch):
            return Plan.nothing(f"what launch {self.launch.id} was runs")
        words = "its recorded command, environment and build"
        change = Change(
            f"start what launch {self.launch.id} was", "it served", Procedure(want.guest, words)
        )
        return Plan.change("it served before", change)

    def former(self, state: DeploymentState, failed: Collection[str]) -> Launch | None:
        """The launch."""
        return self.launch

    def apply(self, context: StepContext, facts: Facts, plan: Plan) -> None:
        """Starts and follows it. Raises StepFailed."""
        words = self.restore(context, api_key(context), ())
        if context.state.launches[-1].verdict != "ready":
            raise StepFailed(words, where=f"{context.want.id} rollback", fix="read `deploy logs`")


def _job(facts: Facts) -> ServerJob | None:
    server = facts.get(ServerFact)
    return server.job if server is not None and server.job and server.job.alive else None


def _runs(facts: Facts, launch: Launch) -> bool:
    job = _job(facts)
    return job is not None and job.fingerprint == launch.fingerprint


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
        old, job = own.rollback, _job(facts)
        going = old if old is not None and not old.outcome else None
        mark = fingerprint(want, own.manifest, want.variant_name)
        ours = {mark} if going is None else {mark, going.mark}
        left = job.identity.id if job is not None and job.fingerprint not in ours else ""
        if not left and going is not None:
            left = going.left
        before = self._pinned.commit if self._pinned is not None else ""
        own.rollback = RolledBack(
            to=self.launch.id,
            mark=mark,
            left=left,
            wish=wish_key(self.now),
            commits=list(dict.fromkeys([self.recipe.manifest.commit, before])),
            when=self.clock(),
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
        if record is None or isinstance(error, Unreachable):
            error.fix = f"{error.fix}; {again}" if error.fix else again
            return error
        former = next((one for one in own.launches if one.id == record.left), None)
        try:
            words = self._back(own, record, former, engine)
        except DeployError as second:
            error.add(
                f"and what served before (launch {record.left}) could not be brought back: "
                f"{second.what}"
            )
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
            words = "nothing had served before"
        elif former is None:
            raise DeployError(f"launch {record.left} is not in the state file")
        else:
            want = self.now
            steps: list[Step] = [StopOther(former), AsRecorded(former)]
            if self.kept.has(former.recipe):
                recipe, lock_text = self.kept.load(former.recipe)
                want = then(self.now, recipe, lock_text, former)
                own.manifest = recipe.manifest
                steps = rollback_steps(former, gates=False)
            runner = engine(want, steps)
            facts = runner.look("to bring back what served before")
            facts = runner.apply(Outcome(), facts, Selection())
            job = _job(facts)
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
