"""Which launch can be gone back to, and which one is meant. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from deployer.deployment import Deployment
from deployer.errors import UsageError
from deployer.names import listed
from deployer.place import place_of, place_words, placed
from deployer.state import DeploymentState, Launch
from deployer.steps.rolled_back import time_text

Place = tuple[Deployment, DeploymentState]
"""A deployment, or one node of it, and its state."""


def part_of(own: DeploymentState, launch_id: str) -> Launch | None:
    """A node's record of a launch: all nodes share its id."""
    return next((one for one in own.launches if one.id == launch_id), None)


def unfit(places: Sequence[Place], launch_id: str) -> str:
    """Why this launch cannot be made again in all of these places; '' when it can."""
    for now, own in places:
        part = part_of(own, launch_id)
        if part is None:
            return f"{now.id} has no record of its part in it"
        was, place = place_of(part), placed(now)
        if was != place:
            return f"{now.id} was {place_words(was)} then, and is {place_words(place)} now"
    return ""


def passed(launch: Launch, known_good: str) -> bool:
    """Has it passed its gates, whatever became of it later?"""
    if launch.id == known_good or launch.verdict == "good":
        return True
    return launch.verdict == "stopped" and launch.verified > 0


def present(own: DeploymentState) -> Launch | None:
    """The newest launch: what serves, or what served last."""
    return own.launches[-1] if own.launches else None


Able = Callable[[Launch], bool]


def any_launch(launch: Launch) -> bool:
    """All can."""
    return True


def choices(own: DeploymentState, able: Able = any_launch) -> list[Launch]:
    """What can be gone back to: of each wish that has passed, its newest launch; newest first.

    `able`: whether a launch can be made again in this place.
    """
    now, found = present(own), []
    good = {one.fingerprint for one in own.launches if passed(one, own.known_good)}
    # What was brought back after a failure has not passed itself; its wish has.
    serves = now is not None and (
        passed(now, own.known_good) or (now.verdict == "ready" and now.fingerprint in good)
    )
    seen = {now.fingerprint} if now is not None and serves else set()
    for launch in reversed(own.launches):
        fits = passed(launch, own.known_good) and able(launch)
        if launch.fingerprint not in seen and fits:
            seen.add(launch.fingerprint)
            found.append(launch)
    return found


@dataclass(frozen=True)
class Chosen:
    """`launch` None: nothing to go back to, because `why`; `done`: it was gone back already."""

    launch: Launch | None
    why: str
    done: bool = False


def choose(own: DeploymentState, word: str, here: str, able: Able = any_launch) -> Chosen:
    """The launch that `word` names (its id, or the beginning of it), else the default.

    `here`: HOST/NAME, for messages. Raises UsageError for a word that names none.
    """
    if word:
        found = [one for one in own.launches if one.id.startswith(word)]
        exact = [one for one in found if one.id == word]
        if len(exact or found) != 1:
            meant = found or choices(own, able)
            known = f"name one of: {listed([one.id for one in meant])}; " if meant else ""
            raise UsageError(
                f"{len(found) or 'no'} launches of {here} begin with {word}",
                where="rollback",
                fix=f"{known}`deploy history {here}` lists all",
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
            f"rolled back to launch {record.to} already, at {time_text(record.when)}; name a "
            "launch to go elsewhere",
            done=True,
        )
    found, all_ = choices(own, able), choices(own)
    if not found and all_:
        return Chosen(None, "no other launch that has passed its gates can be made again")
    if not found:
        return Chosen(
            None, "no other launch has passed its gates, by the records of this machine (.deploy/)"
        )
    why = "the last launch with another wish that passed its gates"
    if found[0].id == own.known_good:
        why = "the last known-good launch"
    newer = all_[: next(i for i, one in enumerate(all_) if one.fingerprint == found[0].fingerprint)]
    if newer:
        why += f" and can be made again; {listed([one.id for one in newer])} cannot"
    return Chosen(found[0], why)
