"""Speaks with a running `smg` or `sglang-router` by its HTTP API: workers in, workers out.

Seen with sglang-router 0.2.0 to 0.3.2 and smg 1.1.0 to 1.13.0, on a CPU:
- POST /workers answers 202 with the worker's id before the worker has been probed. A probe that
  fails may end the addition for good after seconds (0.2, 0.3, smg 1.1) or be repeated for minutes.
  A URL that is there already gets 202, from smg 1.8 on 409.
- DELETE takes a worker out of the choice at once; what runs on it goes on. smg lists it as
  `draining` for a fixed time (5 s), whatever still runs; the others drop it from the list. So the
  router never tells that a server is empty: that is asked of the server.
- DELETE may be accepted and come to nothing (0.3.0, at times).
- A URL that drains cannot be added before it is gone (409).
- With --dp-aware a URL is listed once for each rank, as URL@RANK. Older ones drop the ranks only by
  the id of the URL itself, which POST tells.
- A URL with and one without a slash at its end are two workers.
- A worker whose model cannot be asked (another API key) is listed healthy, its model `unknown`.
"""

from __future__ import annotations

import re
import time
import urllib.parse
from collections.abc import Callable
from typing import Any

from deployer.errors import DeployError, StepFailed, Unreachable
from deployer.router_door import REACH, Door, Reply
from deployer.router_worker import NEUTRAL, Worker, at, parse_worker

EVERY_S = 0.25
AGAIN_S = 2.0
"""Between two requests to take the same worker in, or out."""
DARK_S = 15.0
"""How long a router that answered may be dark: it may be started again."""
GATEWAY = (502, 503, 504)
"""What a proxy in front of it says while it does not run."""
_ID = re.compile(r"with ID ([0-9a-f-]{36})")


Tick = Callable[[str, float, float], None]
"""Told what is waited for, seconds so far, and the limit; may raise to end the wait."""


class Router:
    """One router behind a door. `now` and `sleep` are the controller's, in seconds."""

    def __init__(
        self,
        door: Door,
        where: str,
        *,
        now: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.door, self.where, self.now, self.sleep = door, where, now, sleep

    def workers(self) -> list[Worker]:
        """What it lists. Raises StepFailed for an answer that is no list."""
        said = self.door.ask("GET", "/workers")
        rows = said.body.get("workers") if isinstance(said.body, dict) else None
        if said.status != 200 or not isinstance(rows, list):
            raise self._odd("GET /workers", said)
        return [worker for row in rows if (worker := parse_worker(row)) is not None]

    def find(self, url: str) -> Worker | None:
        """The worker of this URL, see `at`."""
        return at(self.workers(), url)

    def add(self, url: str, *, api_key: str = "", like: Worker | None = None) -> str:
        """Asks for the addition and returns the worker's id; one that is there is no error.

        '' when the router does not tell it. `like`: the worker whose names, priority and cost it
        shall have. Raises StepFailed, Unreachable.
        """
        body: dict[str, Any] = {"url": posted(url)}
        if api_key:
            body["api_key"] = api_key
        if like is not None:
            body |= _like(like)
        said = self.door.ask("POST", "/workers", body)
        if said.status == 409:
            found = _ID.search(said.text)
            if found:
                return found[1]
            listed = self.find(url)
            # It may have left in the meantime.
            return listed.id if listed is not None else ""
        if said.status not in (200, 201, 202) or not isinstance(said.body, dict):
            raise self._odd(f"POST /workers {url}", said)
        return str(said.body.get("worker_id") or said.body.get("id") or "")

    def take_in(
        self,
        url: str,
        limit_s: float,
        tick: Tick,
        *,
        api_key: str = "",
        like: Worker | None = None,
        noted: Callable[[str], None] = lambda worker_id: None,
    ) -> Worker:
        """Adds it and waits until it gets requests; again when the router has dropped it.

        `noted` is told the id of each addition. Raises StepFailed at the limit.
        """
        asked, worker_id = -AGAIN_S, ""

        def look(spent: float) -> tuple[Worker | None, str]:
            nonlocal asked, worker_id
            worker = self.find(url)
            if worker is not None and worker.ready:
                return worker, ""
            if worker is None or worker.draining:
                coming = self._one(worker_id)
                lost = coming is None or coming.failed or coming.draining
                # smg 1.8 takes the URL of draining ranks, and drops the new ones with the old.
                lost = lost and not (worker is not None and worker.ranked)
                if lost and spent - asked >= AGAIN_S:
                    worker_id, asked = self.add(url, api_key=api_key, like=like), spent
                    noted(worker_id)
                    worker = self.find(url)
                    if worker is not None and worker.ready:
                        return worker, ""
                worker = coming or worker
            if worker is None:
                return None, "it is not listed"
            return None, worker.why or worker.status or "unhealthy"

        return self._until(look, f"the router takes {url} in", limit_s, tick, url)

    def _until(
        self,
        look: Callable[[float], tuple[Worker | None, str]],
        what: str,
        limit_s: float,
        tick: Tick,
        url: str,
    ) -> Worker:
        """Looks until there is a worker. A router that is started again meanwhile is waited for.

        Raises StepFailed at the limit, Unreachable when it is dark for DARK_S, or at first.
        """
        began, seen = self.now(), -DARK_S
        while True:
            spent = self.now() - began
            try:
                worker, why = look(spent)
                seen = spent
            except Unreachable as error:
                if spent - seen >= DARK_S:
                    raise
                worker, why = None, error.what
            if worker is not None:
                return worker
            if spent >= limit_s:
                raise StepFailed(
                    f"worker {url} did not become healthy in {limit_s:g} s: {why}",
                    where=self.where,
                    fix="does the router reach that address? deployments have worker_url for it",
                )
            tick(what, spent, limit_s)
            self.sleep(EVERY_S)

    def remove(self, url: str, worker_id: str = "") -> bool:
        """Takes a worker out, each time that it is listed. False when it was not there.

        `worker_id`: of an addition that may not be listed yet. Raises StepFailed.
        """
        rows = [one for one in self.workers() if one.is_at(url)]
        live = [one.id for one in rows if not one.draining]
        if rows and not live:
            return True
        found = [self._delete(one) for one in live or [worker_id] if one]
        return any(found)

    def take_out(self, url: str, limit_s: float, tick: Tick, worker_id: str = "") -> bool:
        """The same, and waits until it gets no requests any more; what it has runs on.

        Raises StepFailed at the limit.
        """
        if not self.remove(url, worker_id):
            return False
        began, asked, base = self.now(), 0.0, ""
        while (worker := self.find(url)) is not None and not worker.draining:
            spent = self.now() - began
            if spent >= limit_s:
                raise StepFailed(
                    f"the router still lists {url} {limit_s:g} s after it was taken out",
                    where=self.where,
                    fix="does its service discovery put it back? take it out there; then run the "
                    "same command again",
                )
            if spent - asked >= AGAIN_S:
                asked = spent
                if worker.ranked and not base:
                    # Its id is known once it was asked for, and that must be over before it goes.
                    base = self.add(url)
                else:
                    self.remove(url)
                    if base:
                        self._delete(base)
            tick(f"{url} leaves", spent, limit_s)
            self.sleep(EVERY_S)
        return True

    def _delete(self, worker_id: str) -> bool:
        """False when there is no such worker, or no such id at this router."""
        said = self.door.ask("DELETE", f"/workers/{urllib.parse.quote(worker_id, '')}")
        if said.status in (400, 404):
            return False
        if said.status not in (200, 202, 204):
            raise self._odd(f"DELETE /workers/{worker_id}", said)
        return True

    def _one(self, worker_id: str) -> Worker | None:
        if not worker_id:
            return None
        said = self.door.ask("GET", f"/workers/{urllib.parse.quote(worker_id, '')}")
        return parse_worker(said.body) if said.status == 200 else None

    def _odd(self, what: str, said: Reply) -> DeployError:
        if said.status in GATEWAY:
            return Unreachable(f"{what}: status {said.status}", where=self.where, fix=REACH)
        fix = "is this an smg or sglang-router, and the API key right (router.api_key_env)?"
        if said.status == 404:
            fix = "is this an smg or sglang-router? Before 0.2 that has no such API: use a hook"
        evidence = tuple(line[:300] for line in said.text.splitlines()[:5])
        return StepFailed(
            f"{what}: status {said.status}", where=self.where, fix=fix, evidence=evidence
        )


def posted(url: str) -> str:
    """The URL as routers take it: a scheme in lower case, no slash at the end."""
    scheme, found, rest = url.partition("://")
    return (f"{scheme.lower()}://{rest}" if found else f"http://{url}").rstrip("/")


def _like(worker: Worker) -> dict[str, Any]:
    """What a worker in its place is to be told of: only what a router does not find by itself."""
    body: dict[str, Any] = {}
    if worker.models:
        # sglang-router knows the first form, smg the second.
        body["model_id"] = worker.models[0]
        body["models"] = [{"id": name} for name in worker.models]
    if (worker.priority, worker.cost) != NEUTRAL:
        body |= {"priority": worker.priority, "cost": worker.cost}
    return body
