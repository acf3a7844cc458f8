"""A plain client of the lab's hub, for its unit tests."""

from __future__ import annotations

import http.client
import json
import ssl
import sys
from pathlib import Path
from urllib.parse import urlsplit

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "docker" / "hub"))
from hub import Hub

SHARD = "model-00002-of-00003.safetensors"
PATIENCE_S, SILENCE_S = 10.0, 0.2
Answer = tuple[int, dict[str, str], bytes]


def connect(
    url: str, timeout: float = PATIENCE_S, context: ssl.SSLContext | None = None
) -> http.client.HTTPConnection:
    """A connection to the url's origin."""
    at = urlsplit(url)
    if at.scheme == "https":
        return http.client.HTTPSConnection(
            at.hostname or "", at.port, timeout=timeout, context=context
        )
    return http.client.HTTPConnection(at.hostname or "", at.port, timeout=timeout)


def ask(
    url: str,
    method: str = "GET",
    body: object = None,
    timeout: float = PATIENCE_S,
    context: ssl.SSLContext | None = None,
    headers: dict[str, str] | None = None,
    **fields: str,
) -> Answer:
    """One request: status, header (names in small letters), body."""
    at = urlsplit(url)
    conn = connect(url, timeout, context)
    try:
        text = None if body is None else json.dumps(body)
        conn.request(
            method, at.path + (f"?{at.query}" if at.query else ""), text, fields | (headers or {})
        )
        got = conn.getresponse()
        return got.status, {k.lower(): v for k, v in got.getheaders()}, got.read()
    finally:
        conn.close()


def resolve(hub: Hub, name: str = SHARD, **fields: str) -> Answer:
    """The hub's word on where a file is."""
    return ask(f"{hub.url}/{hub.repo.name}/resolve/main/{name}", "HEAD", headers=fields)


def cdn_url(hub: Hub, name: str = SHARD) -> str:
    """A signed url of a shard."""
    return resolve(hub, name)[1]["location"]


def content(hub: Hub, name: str = SHARD) -> bytes:
    """The right bytes of a file."""
    return hub.repo.blobs[name].path.read_bytes()


def partial(url: str, wanted: int = 0, **fields: str) -> tuple[bytes, str]:
    """What comes until the connection ends or is silent, and the name of that end.

    Silence counts only once `wanted` bytes are there: a slow machine is no fault of the hub.
    """
    at, data = urlsplit(url), b""
    conn = connect(url, PATIENCE_S if wanted else SILENCE_S)
    try:
        conn.request("GET", at.path + (f"?{at.query}" if at.query else ""), None, fields)
        got = conn.getresponse()
        while block := got.read1(1 << 16):
            data += block
            if len(data) >= wanted and conn.sock is not None:
                conn.sock.settimeout(SILENCE_S)
        return data, "short" if got.length else "whole"
    except (OSError, http.client.HTTPException) as error:
        return data, type(error).__name__
    finally:
        conn.close()
