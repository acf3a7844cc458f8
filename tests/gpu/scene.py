"""What a scene records, and what all scenes do: wait, ask the server by hand."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from project import Ran

FLOOR_MIB = 600
"""What stop.gpu_floor_mib of the playbooks allows."""


@dataclass
class Scene:
    """One scene's record. `checks`: what was expected, what was seen, whether it agrees."""

    name: str
    checks: list[dict[str, Any]] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)
    runs: list[dict[str, Any]] = field(default_factory=list)
    skipped: str = ""
    """Why nothing of it was done; then it counts neither way."""

    def check(self, what: str, ok: bool, seen: object) -> bool:
        """Notes one expectation."""
        self.checks.append({"what": what, "ok": bool(ok), "seen": seen})
        return bool(ok)

    def ran(self, ran: Ran, **more: Any) -> Ran:
        """Notes one command."""
        self.runs.append({**ran.record(), **more})
        return ran

    @property
    def ok(self) -> bool:
        """Everything was as expected, and something was."""
        return bool(self.checks) and all(one["ok"] for one in self.checks)


def ask(port: int, model: str, prompt: str, tokens: int, key: str | None) -> dict[str, Any]:
    """One completion by our own hand: {status, content, reasoning, seconds} or {error}."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": tokens,
        "temperature": 0,
    }
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    if key is not None:
        request.add_header("Authorization", f"Bearer {key}")
    began = time.monotonic()
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            message = json.load(answer)["choices"][0]["message"]
            said = {
                "status": 200,
                "content": message.get("content"),
                "reasoning": message.get("reasoning_content"),
            }
    except urllib.error.HTTPError as error:
        said = {"status": error.code}
    except (OSError, ValueError, KeyError) as error:
        said = {"status": 0, "error": f"{type(error).__name__}: {error}"}
    return {**said, "seconds": round(time.monotonic() - began, 2)}


def wait_for(what: Callable[[], Any], limit_s: float, every_s: float = 0.1) -> Any:
    """The first true value of `what()`, or its last after `limit_s`."""
    ends = time.monotonic() + limit_s
    while not (seen := what()) and time.monotonic() < ends:
        time.sleep(every_s)
    return seen
