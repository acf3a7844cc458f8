"""Waits until the server has no request left, before it is told to stop."""

from __future__ import annotations

import time
from collections.abc import Callable

from deployer.errors import REFUSALS, StepFailed, Unreachable
from deployer.model import Facts
from deployer.remote.jobs import JobIdentity
from deployer.steps.base import StepContext
from deployer.steps.server_agent import ask
from deployer.steps.server_facts import ServerFact

EVERY_S = 2.0
IDLE_LOOKS = 2
"""So many looks in a row must see nothing: a gauge may lag behind."""


def empty(context: StepContext, facts: Facts) -> str:
    """Waits for the requests of our launch before something else than the stop step ends it.

    At most the playbook's stop.drain_s; '' when nothing of ours runs.
    """
    server, limit_s = facts.get(ServerFact), context.want.playbook.stop.drain_s
    job = server.job if server is not None else None
    if job is None or not job.alive or limit_s <= 0:
        return ""
    jobs = context.jobs(context.want.guest)

    def alive() -> bool:
        return jobs.poll(job.identity).alive

    return drain(context, job.identity, limit_s, alive, time.monotonic, time.sleep)


def drain(
    context: StepContext,
    job: JobIdentity,
    limit_s: float,
    alive: Callable[[], bool],
    now: Callable[[], float],
    sleep: Callable[[float], None],
) -> str:
    """Waits at most `limit_s`; what came of it, in words. The key is in the server's environment.

    It ends early when the server is gone or cannot tell: SGLang itself then ends what it has.
    """
    ends, idle, left = now() + limit_s, 0, 0
    command = {
        **{"do": "requests", "pid": job.pid, "start": job.start, "boot": job.boot},
        "session": job.session,
    }
    while True:
        if not alive():
            return "it ended by itself while it drained"
        try:
            answer = ask(context.on(context.want.guest), context.want, [command], timeout_s=60)[0]
        except REFUSALS:
            raise
        except (StepFailed, Unreachable) as error:
            return f"how many requests run could not be asked ({error.what}); TERM lets them end"
        if not answer.get("known"):
            return f"the server does not tell how many requests run ({answer.get('source')})"
        left = int(answer["requests"])
        idle = idle + 1 if left == 0 else 0
        if idle >= IDLE_LOOKS:
            return "drained: no request runs or waits"
        if now() >= ends:
            return f"{left} requests still ran after {limit_s:g} s of draining"
        context.progress(
            "draining", max(0.0, limit_s - (ends - now())), limit_s, "s", f"requests: {left}"
        )
        sleep(EVERY_S)
