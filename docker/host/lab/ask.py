"""How a stand-in talks to the simulator."""

from __future__ import annotations

import json
import socket


def ask(**request: object) -> dict[str, object]:
    """One request, one answer."""
    with socket.socket(socket.AF_UNIX) as link:
        link.settimeout(20)
        link.connect("/run/lab/simulator.sock")
        with link.makefile("rw") as stream:
            stream.write(json.dumps(request) + "\n")
            stream.flush()
            answer = json.loads(stream.readline())
    return dict(answer)
