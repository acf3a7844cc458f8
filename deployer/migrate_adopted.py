"""What holds the destination's port and was not started by this tool: ended for the migration
(`stop.old_server: adopt`), and started again by `--abort` (deployer.steps.adopted).
"""

from __future__ import annotations

import time

from deployer.migrate_side import Side
from deployer.model import Facts
from deployer.steps import adopted
from deployer.steps.server_facts import PortOwner, ServerFact


def strangers(facts: Facts | None) -> tuple[PortOwner, ...]:
    """Who has the port there and is no launch of ours."""
    fact = facts.get(ServerFact) if facts is not None else None
    return tuple(owner for owner in fact.strangers if not owner.job) if fact is not None else ()


def told(owner: PortOwner) -> str:
    """What becomes of it, before it is asked for."""
    return (
        f"pid {owner.pid}, which this tool did not start, ends; --abort starts it again: "
        f"{owner.command[:200]}"
    )


def keep(side: Side, facts: Facts) -> str:
    """Writes down what may be stopped there; its command, '' when the port is free.

    Raises StepFailed when it cannot be written: then nothing may stop it.
    """
    found = strangers(facts)
    if not found:
        return ""
    owner, boot = found[0], facts.need(ServerFact).boot
    if adopted.keep(side.guest, side.want, owner, boot) is None:
        return ""
    side.note("prepare", f"{told(owner)} (kept in {adopted.folder(side.want)})")
    return owner.command[:500]


def put_back(side: Side) -> None:
    """Starts it again where nobody has the port; what comes of it is told, not raised."""
    fact = side.gather().get(ServerFact)
    if fact is None or not fact.asked:
        side.note("undo", "who has the port cannot be seen: nothing is started", "warning")
        return
    if fact.listening:
        who = "; ".join(f"pid {one.pid} ({one.command[:200]})" for one in fact.owners)
        side.note("undo", f"port {side.want.port} is held by {who or 'somebody'} again")
    else:
        again = adopted.start_again(side.guest, side.want)
        problem = again.problem or adopted.listens_again(
            side.guest,
            side.want,
            again,
            lambda what, done, total: side.progress("undo", what, done, total),
            time.monotonic,
            time.sleep,
        )
        if problem:
            text = (
                f"what had the port before could not be started again: {problem}; its words: "
                f"{adopted.folder(side.want)}"
            )
            side.note("undo", text, "warning")
            return
        side.note("undo", f"what had the port before serves again: {again.name}")
    adopted.forget(side.guest, side.want)
