"""HTTP to the server on this machine. Every exchange has a deadline of its own.

The API key comes in by stdin ({"do": "set", "api_key": ...}) or is read from the environment of the
server's own process; it is never printed. Names of environment proxies are ignored.
"""

# ruff: noqa: PTH123

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

Record = dict[str, Any]
Reader = Callable[[http.client.HTTPResponse], Record]

KEY_VARIABLE = b"DEPLOYER_API_KEY="
BODY_LIMIT = 16_000_000
SETTINGS: Record = {"api_key": "", "host": "127.0.0.1", "port": 0, "timeout_s": 30.0}


def set_key_from_server(seen: Record) -> None:
    """Takes the API key from the environment of the process that owns the port, when it is ours."""
    if SETTINGS["api_key"] or not seen["owned"]:
        return
    for one in seen["owners"]:
        try:
            with open(f"/proc/{one['pid']}/environ", "rb") as file:
                entries = file.read().split(b"\0")
        except OSError:
            continue
        for entry in entries:
            if entry.startswith(KEY_VARIABLE):
                SETTINGS["api_key"] = entry[len(KEY_VARIABLE) :].decode("utf-8", "replace")
                return


class Deadline(Exception):
    """The request ran over its time."""


def request(
    method: str,
    path: str,
    body: Record | None = None,
    timeout_s: float | None = None,
    read: Reader | None = None,
) -> Record:
    """{status, seconds, body, text} or {status: 0, error}; with `read`, what that returns.

    The deadline covers the whole exchange.
    """
    limit = float(timeout_s or SETTINGS["timeout_s"])
    began = time.monotonic()
    connection = http.client.HTTPConnection(SETTINGS["host"], SETTINGS["port"], timeout=limit)
    expired = threading.Event()

    def cut() -> None:
        expired.set()
        sock = connection.sock
        if sock is not None:
            try:
                sock.shutdown(socket.SHUT_RDWR)
            except OSError:
                return

    timer = threading.Timer(limit, cut)
    timer.daemon = True
    timer.start()
    try:
        headers = {"Content-Type": "application/json", "Connection": "close"}
        if SETTINGS["api_key"]:
            headers["Authorization"] = "Bearer " + SETTINGS["api_key"]
        payload = None if body is None else json.dumps(body).encode()
        connection.request(method, path, payload, headers)
        response = connection.getresponse()
        if read is not None and response.status == 200:
            found = read(response)
            if expired.is_set():
                raise Deadline()
            seconds = round(time.monotonic() - began, 4)
            return {"status": response.status, "seconds": seconds, "body": None, **found}
        data = response.read(BODY_LIMIT)
        if expired.is_set():
            raise Deadline()
        text = data.decode("utf-8", "replace")
        try:
            parsed = json.loads(text) if text else None
        except ValueError:
            parsed = None
        return {
            "status": response.status,
            "seconds": round(time.monotonic() - began, 4),
            "body": parsed,
            "text": "" if parsed is not None else text[:2000],
        }
    except (Deadline, OSError, ValueError, http.client.HTTPException) as error:
        late = expired.is_set() or isinstance(error, (Deadline, socket.timeout))
        reason = f"no answer within {limit:g} s" if late else f"{type(error).__name__}: {error}"
        return {
            "status": 0,
            "seconds": round(time.monotonic() - began, 4),
            "error": reason,
            "timed_out": late,
        }
    finally:
        timer.cancel()
        connection.close()
