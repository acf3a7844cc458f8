"""Commands in, answers out: the loop of the agent.

Commands are JSON objects, one a line on stdin, or a JSON list as the first argument; every answer
is one JSON line: {"do": <command>, "ok": ..., ...}.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from deployer.agents.serve.chat import completion, models
from deployer.agents.serve.processes import identity
from deployer.agents.serve.web import SETTINGS, request, set_key_from_server

Record = dict[str, Any]
Actions = Mapping[str, Callable[[Record], Record]]
HEALTH_S = 25.0
"""Longer than the 20 s after which SGLang itself gives /health up."""


def say(answer: Record) -> None:
    """One JSON line, at once."""
    sys.stdout.write(json.dumps(answer, ensure_ascii=True) + "\n")
    sys.stdout.flush()


def light(command: Record) -> Record:
    """The quick proof that a launch which has passed its gates still serves."""
    seen = identity(command, SETTINGS["port"])
    set_key_from_server(seen)
    answer = {"alive": seen["alive"], "owned": seen["owned"], "owners": seen["owners"]}
    if not seen["owned"]:
        return answer
    answer["models"] = models()
    answer["completion"] = completion(
        {
            "model": command["model"],
            "prompt": "Say hello.",
            "max_tokens": 8,
            "temperature": 0,
            "timeout_s": command.get("timeout_s"),
        }
    )
    return answer


def ready(command: Record) -> Record:
    """Whether the server that owns the port is ours and serves the model.

    `health_s` is how long /health took: who asks again waits longer than that.
    """
    seen = identity(command, SETTINGS["port"])
    set_key_from_server(seen)
    answer = dict(seen)
    if seen["owned"]:
        answer["models"] = models()
        health = request("GET", "/health", None, HEALTH_S)
        answer["health"], answer["health_s"] = health["status"], health["seconds"]
    return answer


LIGHT: Actions = {"light": light}
BASIC: Actions = {
    **LIGHT,
    "identity": lambda command: identity(command, SETTINGS["port"]),
    "ready": ready,
    "health": lambda command: request("GET", "/health"),
    "models": lambda command: models(),
    "completion": completion,
}


def serve(actions: Actions) -> None:
    """Answers every command; a broken one is answered with its error."""
    if len(sys.argv) > 1:
        commands: Iterator[Record] = iter(json.loads(sys.argv[1]))
    else:
        commands = (json.loads(line) for line in sys.stdin if line.strip())
    command: Record
    for command in commands:
        try:
            answer = perform(command, actions)
        except (OSError, ValueError, KeyError, TypeError) as error:
            reason = f"{type(error).__name__}: {error}"
            say({"do": command.get("do"), "ok": False, "error": reason})
            continue
        if answer is not None:
            say(dict(answer, do=command.get("do"), ok=True))


def perform(command: Record, actions: Actions) -> Record | None:
    """The answer to one command; None for `set`."""
    for name in SETTINGS:
        if name in command:
            SETTINGS[name] = type(SETTINGS[name])(command[name])
    do = str(command.get("do"))
    if do == "set":
        return None
    if do not in actions:
        raise ValueError(f"unknown command: {do!r}")
    return actions[do](command)
