"""How a router is reached: one HTTP request, from this machine or from a target.

What answers may be something else: a proxy's page, a redirect, another protocol, a body without an
end. A redirect is not followed: it would carry the key to another address.
"""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any, Protocol

from deployer.errors import StepBlocked, StepFailed, Unreachable
from deployer.inventory import RouterCutover
from deployer.names import is_loopback
from deployer.remote.transport import Transport

ASK_S = 15.0
"""Of one request to the router."""
MOST = 8 * 1024 * 1024
"""Bytes of an answer; a list of a thousand workers has one."""
REACH = "is it running, and does router.url (seen from router.via) name it?"


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


class _Stay(urllib.request.HTTPRedirectHandler):
    """A redirect is an answer like others."""

    def redirect_request(self, *words: Any) -> None:
        """None: it is not followed."""
        return


class HereDoor:
    """From the controller."""

    def __init__(self, url: str, key: str = "") -> None:
        self.url, self.key = url.rstrip("/"), key

    def ask(self, method: str, path: str, body: Any = None) -> Reply:
        """See Door."""
        # A proxy of the environment is for the Internet, not for the router.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), _Stay)
        try:
            request = urllib.request.Request(self.url + path, method=method)
            request.data = None if body is None else json.dumps(body).encode()
            request.add_header("Content-Type", "application/json")
            if self.key:
                request.add_header("Authorization", f"Bearer {self.key}")
            try:
                with opener.open(request, timeout=ASK_S) as answer:
                    return reply(answer.status, _read(answer))
            except urllib.error.HTTPError as error:
                with error:
                    return reply(error.code, _read(error))
        except (OSError, ValueError, http.client.HTTPException) as error:
            why = str(getattr(error, "reason", error)) or type(error).__name__
            raise Unreachable(
                f"the router does not answer: {why}", where=self.url, fix=REACH
            ) from error


def _read(answer: IO[bytes]) -> bytes:
    """Its body. Raises ValueError for one that is no router's."""
    raw = answer.read(MOST + 1)
    if len(raw) > MOST:
        raise ValueError(f"an answer of more than {MOST} bytes")
    return raw


_THERE = """
import http.client, json, sys, urllib.error, urllib.request
class Stay(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *words):
        return None
asked = json.load(sys.stdin)
def read(answer):
    raw = answer.read(asked["most"] + 1)
    if len(raw) > asked["most"]:
        raise ValueError("an answer of more than %d bytes" % asked["most"])
    return raw.decode("utf-8", "replace")
try:
    request = urllib.request.Request(asked["url"], method=asked["method"])
    request.data = None if asked["body"] is None else json.dumps(asked["body"]).encode()
    request.add_header("Content-Type", "application/json")
    if asked["key"]:
        request.add_header("Authorization", "Bearer " + asked["key"])
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), Stay)
    try:
        with opener.open(request, timeout=asked["timeout_s"]) as answer:
            said = {"status": answer.status, "text": read(answer)}
    except urllib.error.HTTPError as error:
        said = {"status": error.code, "text": read(error)}
except (OSError, ValueError, http.client.HTTPException) as error:
    said = {"status": 0, "text": str(getattr(error, "reason", error)) or type(error).__name__}
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
            stdin=json.dumps({**asked, "key": self.key, "timeout_s": ASK_S, "most": MOST}).encode(),
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


class EitherDoor:
    """Several places that reach the same router: the next one is asked when one is dark."""

    def __init__(self, doors: Sequence[Door]) -> None:
        self.doors = doors

    def ask(self, method: str, path: str, body: Any = None) -> Reply:
        """See Door. Raises what the first place raised. All requests may be made twice."""
        first: Unreachable | None = None
        for door in self.doors:
            try:
                return door.ask(method, path, body)
            except Unreachable as error:
                first = first or error
        if first is None:
            raise TypeError("no place to ask from")
        raise first


def reply(status: int, raw: bytes) -> Reply:
    """The answer with its JSON, if it is any."""
    text = raw.decode("utf-8", "replace")
    try:
        return Reply(status, json.loads(text), text)
    except (ValueError, RecursionError):
        return Reply(status, None, text)


def key_for(rules: RouterCutover, environ: Mapping[str, str]) -> str:
    """The router's API key, '' when it needs none.

    Raises StepBlocked when the variable is unset, or holds what no header can carry.
    """
    return secret(environ, rules.api_key_env, "router.api_key_env")


def secret(environ: Mapping[str, str], name: str | None, where: str) -> str:
    """The value of a variable that is to travel in a header. Raises StepBlocked; never shows it."""
    if not name:
        return ""
    value = environ.get(name, "")
    if not value:
        raise StepBlocked(f"{name} ({where}) is not set", fix="export it")
    if not (value.isascii() and value.isprintable()):
        raise StepBlocked(
            f"{name} ({where}) holds line breaks or letters that no HTTP header carries",
            fix="export it without them",
        )
    return value


def doors(
    rules: RouterCutover,
    key: str,
    hosts: Sequence[Transport],
    here: Callable[[str, str], Door] = HereDoor,
) -> Door:
    """Where the inventory says that it is reached from; of `hosts` the first has the first word.

    A loopback address is another router on each host: there only the first one is asked.
    """
    if rules.via == "controller":
        return here(rules.url, key)
    seen = hosts[:1] if is_loopback(rules.url) else hosts
    places = [ThereDoor(host, rules.url, key) for host in seen]
    return places[0] if len(places) == 1 else EitherDoor(places)
