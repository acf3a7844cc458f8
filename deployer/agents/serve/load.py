"""Many requests, several at a time."""

from __future__ import annotations

import threading
import time
from typing import Any

from deployer.agents.serve.chat import completion

Record = dict[str, Any]


def many(command: Record) -> Record:
    """Each of `requests` as a completion, `parallel` at a time; stops when `deadline_s` is over.

    `results` are in the order of the requests, each with its `number`; those that never began or
    never ended are missing.
    """
    requests = command["requests"]
    ends = time.monotonic() + float(command.get("deadline_s") or 600)
    results: list[Record] = []
    lock, todo = threading.Lock(), iter(range(len(requests)))

    def work() -> None:
        while time.monotonic() < ends:
            with lock:
                number = next(todo, None)
            if number is None:
                return
            answer = dict(completion(requests[number]), number=number)
            with lock:
                results.append(answer)

    began = time.monotonic()
    count = min(int(command["parallel"]), len(requests))
    threads = [threading.Thread(target=work, daemon=True) for _ in range(count)]
    for thread in threads:
        thread.start()
    longest = max((float(one.get("timeout_s") or 30) for one in requests), default=30.0)
    for thread in threads:
        thread.join(max(0.0, ends - time.monotonic()) + longest + 5)
    with lock:
        done = sorted(results, key=lambda one: one["number"])
    return {"results": done, "seconds": round(time.monotonic() - began, 3), "asked": len(requests)}
