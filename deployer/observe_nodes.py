"""What the nodes of one server say together: one may look well while another is gone. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from deployer.names import listed


def join(documents: Sequence[dict[str, Any]]) -> None:
    """Writes `node.problem` of each deployment that is one of several nodes; '' when they are one.

    Of nodes that were not looked at nothing is said.
    """
    servers: dict[str, list[dict[str, Any]]] = {}
    for one in documents:
        if one["node"] is not None:
            servers.setdefault(one["node"]["answers"], []).append(one)
    for nodes in servers.values():
        problem = _problem(nodes)
        for one in nodes:
            one["node"]["problem"] = problem


def _problem(nodes: Sequence[dict[str, Any]]) -> str:
    seen = [one for one in nodes if one["state"] != "unknown"]
    alive = {one["id"]: one["launch"] for one in seen if one["pid"] is not None}
    gone = [one for one in seen if one["pid"] is None]
    ended = [one["id"] for one in gone if one["launch"] in alive.values()]
    if ended:
        return f"{listed(ended)} has ended, and {listed(alive)} is one server with it"
    if len(set(alive.values())) > 1 or (alive and gone):
        parts = [f"launch {launch} on {one}" for one, launch in alive.items()]
        parts += [f"none on {one['id']}" for one in gone]
        return f"they are not one launch: {', '.join(parts)}"
    return ""
