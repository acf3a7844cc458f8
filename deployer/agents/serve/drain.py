"""How many requests the server has: a look before it is stopped."""

from __future__ import annotations

import re
from typing import Any

from deployer.agents.serve.processes import identity
from deployer.agents.serve.web import SETTINGS, request, set_key_from_server

Record = dict[str, Any]

SOURCES = ("/get_load", "/v1/loads")
"""Answered by the scheduler itself; which of them exists depends on the version."""
COUNT = re.compile(r"^(?:num|total)_(?:running_|waiting_|queue_|total_)?reqs$")
METRIC = re.compile(
    r"^sglang[:_]num_(?:running|queue)_reqs(?:\{[^}]*\})?\s+([0-9.eE+-]+)\s*$", re.MULTILINE
)
LOOK_S = 10.0


def counts(body: Any, found: dict[str, float]) -> dict[str, float]:
    """Sums every count of requests in the JSON, by its name."""
    if isinstance(body, dict):
        for name, value in body.items():
            if COUNT.match(str(name)) and isinstance(value, (int, float)):
                found[name] = found.get(name, 0.0) + value
            else:
                counts(value, found)
    elif isinstance(body, list):
        for one in body:
            counts(one, found)
    return found


def requests(command: Record) -> Record:
    """{known, requests, source}: running and waiting; `known` False when nothing tells it.

    /metrics comes last: its gauges are only written while tokens are made.
    """
    set_key_from_server(identity(command, SETTINGS["port"]))
    tried = []
    for path in SOURCES:
        answer = request("GET", path, None, LOOK_S)
        found = counts(answer.get("body"), {}) if answer["status"] == 200 else {}
        if found:
            return {"known": True, "requests": int(max(found.values())), "source": path}
        tried.append(f"{path}: {answer.get('error') or answer['status']}")
    answer = request("GET", "/metrics", None, LOOK_S)
    if answer["status"] == 200:
        values = [float(value) for value in METRIC.findall(answer.get("text") or "")]
        if values:
            return {"known": True, "requests": int(sum(values)), "source": "/metrics"}
    tried.append(f"/metrics: {answer.get('error') or answer['status']}")
    return {"known": False, "requests": 0, "source": "; ".join(tried)}
