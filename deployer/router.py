"""Speaks with a running `smg` or `sglang-router` by its HTTP API: workers in, workers out.

Seen with sglang-router 0.3.2 and smg 1.13.0: POST /workers answers 202 with the worker's id before
the worker has been probed; a URL that is there already gets 202 (router) or 409 (smg). DELETE takes
a worker out at once; what runs on it ends. smg lists it as `draining` until then, the router does
not list it any more. GET /workers tells `is_healthy`.
"""

from __future__ import annotations

import json
import re
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from deployer.errors import StepFailed, Unreachable
from deployer.names import same_url
from deployer.remote.transport import Transport

EVERY_S = 0.25
ASK_S = 15.0
"""Of one request to the router."""


@dataclass(frozen=True)
class Reply:
    """The answer of the router. `body` is its JSON, None when it is none."""

    status: int
    body: Any
    text: str = ""


class Door(Protocol):
    """A place that reaches the router."""

    def ask(self, method: str, path: str, body: Any = None) -> Reply:
        """One request. Raises Unreachable when no answer comes."""


class HereDoor:
    """From the controller."""

    def __init__(self, url: str, key: str = "") -> None:
        self.url, self.key = url.rstrip("/"), key

    def ask(self, method: str, path: str, body: Any = None) -> Reply:
        """See Door."""
        request = urllib.request.Request(self.url + path, method=method)
        request.data = None if body is None else json.dumps(body).encode()
        request.add_header("Content-Type", "application/json")
        if self.key:
            request.add_header("Authorization", f"Bearer {self.key}")
        try:
            # A proxy of the environment is for the Internet, not for the router.
            opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
            with opener.open(request, timeout=ASK_S) as answer:
                return reply(answer.status, answer.read())
        except urllib.error.HTTPError as error:
            return reply(error.code, error.read())
        except (OSError, ValueError) as error:
            raise self._dark(error) from error

    def _dark(self, error: Exception) -> Unreachable:
        why = getattr(error, "reason", error)
        return Unreachable(f"the router does not answer: {why}", where=self.url, fix=REACH)


REACH = "is it running, and does cutover.router.via name a place that reaches it?"
_THERE = """
import json, sys, urllib.error, urllib.request
asked = json.load(sys.stdin)
request = urllib.request.Request(asked["url"], method=asked["method"])
request.data = None if asked["body"] is None else json.dumps(asked["body"]).encode()
request.add_header("Content-Type", "application/json")
if asked["key"]:
    request.add_header("Authorization", "Bearer " + asked["key"])
opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
try:
    with opener.open(request, timeout=asked["timeout_s"]) as answer:
        said = {"status": answer.status, "text": answer.read().decode("utf-8", "replace")}
except urllib.error.HTTPError as error:
    said = {"status": error.code, "text": error.read().decode("utf-8", "replace")}
except (OSError, ValueError) as error:
    said = {"status": 0, "text": str(getattr(error, "reason", error))}
print(json.dumps(said))
"""


class ThereDoor:
    """From a target, by its python3; the key travels by stdin."""

    def __init__(self, transport: Transport, url: str, key: str = "") -> None:
        self.transport, self.url, self.key = transport, url.rstrip("/"), key

    def ask(self, method: str, path: str, body: Any = None) -> Reply:
        """See Door."""
        asked = {"url": self.url + path, "method": method, "body": body}
        answer = self.transport.run(
            'exec python3 -I -c "$1"\n',
            args=(_THERE,),
            stdin=json.dumps({**asked, "key": self.key, "timeout_s": ASK_S}).encode(),
            timeout_s=ASK_S + 15.0,
        )
        where = f"{self.url} from {self.transport.name}"
        try:
            said = json.loads(answer.stdout)
            status, text = int(said["status"]), str(said["text"])
        except (ValueError, KeyError, TypeError):
            told = (answer.error_text.strip() or f"exit {answer.exit}").splitlines()[-1]
            raise StepFailed(
                f"the router could not be asked: {told}", where=where, fix="is python3 there?"
            ) from None
        if not status:
            raise Unreachable(f"the router does not answer: {text}", where=where, fix=REACH)
        return reply(status, text.encode())


def reply(status: int, raw: bytes) -> Reply:
    """The answer with its JSON, if it is any."""
    text = raw.decode("utf-8", "replace")
    try:
        return Reply(status, json.loads(text), text)
    except ValueError:
        return Reply(status, None, text)


@dataclass(frozen=True)
class Worker:
    """One worker as the router lists it. `load` is 0 where the router does not count it."""

    id: str
    url: str
    model: str = ""
    healthy: bool = False
    status: str = ""
    """smg: pending, ready, draining, ...; '' with sglang-router."""
    load: int = 0
    why: str = ""
    """What the router says of an addition that has not come about yet."""

    @property
    def ready(self) -> bool:
        """Does it get requests?"""
        return self.healthy and self.status in ("", "ready")

    @property
    def draining(self) -> bool:
        """It gets none any more, and some still run on it."""
        return self.status == "draining"


def parse_worker(row: Any) -> Worker | None:
    """A row of GET /workers or the answer of GET /workers/ID; None when it is no worker."""
    if not isinstance(row, dict) or not isinstance(row.get("url"), str):
        return None
    job, load = row.get("job_status"), row.get("load")
    job = job if isinstance(job, dict) else {}
    return Worker(
        str(row.get("id", "")),
        row["url"],
        str(row.get("model_id") or ""),
        row.get("is_healthy") is True,
        str(row.get("status") or ""),
        load if isinstance(load, int) else 0,
        str(job.get("message") or job.get("status") or ""),
    )


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
        """The listed worker of this URL."""
        return next((one for one in self.workers() if same_url(one.url, url)), None)

    def add(self, url: str, *, api_key: str = "") -> str:
        """Asks for the addition and returns the worker's id; one that is there is no error.

        Raises StepFailed.
        """
        body: dict[str, Any] = {"url": url.rstrip("/")}
        if api_key:
            body["api_key"] = api_key
        said = self.door.ask("POST", "/workers", body)
        if said.status == 409:
            found = re.search(r"with ID ([0-9a-f-]{36})", said.text)
            if found:
                return found[1]
            listed = self.find(url)
            if listed is not None:
                return listed.id
        if said.status not in (200, 201, 202) or not isinstance(said.body, dict):
            raise self._odd(f"POST /workers {url}", said)
        return str(said.body.get("worker_id") or said.body.get("id") or "")

    def await_ready(self, url: str, worker_id: str, limit_s: float, tick: Tick) -> Worker:
        """Waits until it gets requests. Raises StepFailed at the limit."""
        began, why = self.now(), ""
        while True:
            worker = self.find(url) or self._one(worker_id)
            if worker is not None and worker.ready:
                return worker
            why = (worker.why or worker.status) if worker is not None else "it is not listed"
            spent = self.now() - began
            if spent >= limit_s:
                raise StepFailed(
                    f"worker {url} did not become healthy in {limit_s:g} s: {why or 'unhealthy'}",
                    where=self.where,
                    fix="does the router reach that address? deployments have worker_url for it",
                )
            tick(f"the router takes {url} in", spent, limit_s)
            self.sleep(EVERY_S)

    def remove(self, url: str, worker_id: str = "") -> bool:
        """Takes a worker out; what runs on it ends. False when it was not there.

        `worker_id`: of an addition that may not be listed yet. Raises StepFailed.
        """
        listed = self.find(url)
        if listed is not None and listed.draining:
            return True
        target = listed.id if listed is not None else worker_id
        if not target:
            return False
        said = self.door.ask("DELETE", f"/workers/{urllib.parse.quote(target, '')}")
        if said.status == 404:
            return False
        if said.status not in (200, 202, 204):
            raise self._odd(f"DELETE /workers/{target}", said)
        return True

    def await_out(self, url: str, limit_s: float, tick: Tick, *, drained: bool) -> bool:
        """Waits until it gets no requests any more; with `drained` also until none runs on it.

        False at the limit. Only smg tells of running ones; with sglang-router ask the server.
        """
        began = self.now()
        while True:
            worker = self.find(url)
            if worker is None or (worker.draining and not drained):
                return True
            spent = self.now() - began
            if spent >= limit_s:
                return False
            left = f"{worker.load} requests run on {url}" if worker.draining else f"{url} leaves"
            tick(left, spent, limit_s)
            self.sleep(EVERY_S)

    def _one(self, worker_id: str) -> Worker | None:
        if not worker_id:
            return None
        said = self.door.ask("GET", f"/workers/{urllib.parse.quote(worker_id, '')}")
        return parse_worker(said.body) if said.status == 200 else None

    def _odd(self, what: str, said: Reply) -> StepFailed:
        fix = "is this an smg or sglang-router, and the API key right (cutover.router.api_key_env)?"
        evidence = tuple(said.text.splitlines()[:5])
        return StepFailed(
            f"{what}: status {said.status}", where=self.where, fix=fix, evidence=evidence
        )


def told(workers: Sequence[Worker]) -> str:
    """The URLs of a list, for people."""
    return ", ".join(one.url for one in workers) or "none"
