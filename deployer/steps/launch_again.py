"""What served before serves again, when what was to replace it has failed."""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

from deployer.errors import REFUSALS, StepFailed, Unreachable
from deployer.place import place_of, place_words, placed
from deployer.remote.jobs import JobIdentity
from deployer.state import DeploymentState, Launch
from deployer.steps import adopted
from deployer.steps.base import Step, StepContext
from deployer.steps.launch_restore import (
    as_launched,
    by_itself,
    command_of,
    last_good,
    note_of,
    other_weights,
    restored_words,
)
from deployer.steps.launch_start import SeenBefore, start_command
from deployer.steps.launch_told import redacted

# Its rules are loaded where a launch is followed, see the launch step.
if TYPE_CHECKING:
    from deployer.steps.launch_wait import LaunchFailed


class LaunchAgain(Step):
    """The last known-good launch, or a server of somebody else that was stopped for the wish."""

    now: Callable[[], float]
    sleep: Callable[[float], None]
    seen: SeenBefore

    @abstractmethod
    def follow(self, context: StepContext, job: JobIdentity, launch: Launch, key: str) -> None:
        """Until the launch is ready. Raises LaunchFailed."""

    @abstractmethod
    def give_up(
        self, context: StepContext, job: JobIdentity, launch: Launch, error: LaunchFailed
    ) -> None:
        """Ends all of a launch that has failed. Raises StepFailed."""

    def former(self, state: DeploymentState, failed: Collection[str]) -> Launch | None:
        """What is started again after a failure; None: nothing."""
        return last_good(state, failed)

    def restore(self, context: StepContext, key: str, failed: Collection[str]) -> str:
        """Starts the last known-good launch again; says in words what came of it, '' if none.

        `failed`: fingerprints of what has failed in this run; the same would fail the same way.
        """
        from deployer.steps.launch_wait import LaunchFailed

        good = self.former(context.state, failed)
        if good is None:
            return self.adopted_again(context)
        was, place = place_of(good), placed(context.want)
        if was != place:
            # A part of it alone would wait for the others, and a whole of it is not this one.
            return self._or_adopted(
                context,
                f"the last known-good launch {good.id} was {place_words(was)}, and was not started "
                f"again as {place_words(place)}",
            )
        then = copy.copy(context)
        then.want = as_launched(context.want, good)
        either = f"the last known-good launch {good.id} did not start again either"
        again = f"; `deploy rollback {context.want.id} {good.id}` brings its build and weights too"
        brings = again if good.recipe else ""
        seen = SeenBefore(self.seen.weights, good.venv, good.recipe, self.seen.launch)
        try:
            mark, argv = good.fingerprint, command_of(good)
            note = note_of(good, by_itself(context.state, good))
            job, launch = start_command(then, argv, mark, note, key, seen)
            try:
                self.follow(then, job, launch, key)
            except LaunchFailed as error:
                self.give_up(then, job, launch, error)
                return self._or_adopted(context, f"{either} ({error.failure.cls}){brings}")
        except REFUSALS:
            raise
        except StepFailed as error:
            # The first failure is the one to tell; this one is told with it.
            return self._or_adopted(context, f"{either} ({redacted(error.what, key)}){brings}")
        except Unreachable as error:
            return f"{either} ({redacted(error.what, key)}){brings}"
        text = restored_words(context.want, then.want, good, launch)
        text += other_weights(context.want, context.state, good)
        context.note(text, "warning")
        return text

    def adopted_again(self, context: StepContext) -> str:
        """What was stopped for this wish and was not ours serves again; '': there is none."""
        if adopted.for_abort_only(context.state):
            return ""
        try:
            text, serves = adopted.back_again(
                context.on(context.want.guest),
                context.want,
                lambda what, done, total: context.progress(what, done, total, "s"),
                self.now,
                self.sleep,
            )
        except REFUSALS:
            raise
        except Unreachable as error:
            return f"whether anything else had the port before could not be seen: {error.what}"
        if text:
            context.note(text, "info" if serves else "warning")
        return text

    def _or_adopted(self, context: StepContext, told: str) -> str:
        other = self.adopted_again(context)
        return f"{told}; {other}" if other else told
