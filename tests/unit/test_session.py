"""The look of a session: what is acted upon was seen under the host lock, guest included."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import serverworld as world

from deployer import session as module
from deployer.errors import AuthenticationRefused, LockHeld, Unreachable
from deployer.model import Probe, Where
from deployer.remote.transport import Transport
from deployer.session import HostSession
from deployer.steps.verify import VerifyStep

WANT = world.deployment()


class Lock:
    """The double of HostLock; `held` refuses."""

    def __init__(self, seen: list[str], held: bool = False) -> None:
        self.seen, self.held = seen, held

    def acquire_and_gather(self, transport: Any, probes: Sequence[Probe]) -> Mapping[type, object]:
        self.seen.append("lock")
        if self.held:
            raise LockHeld("another run")
        return {}

    def release(self, transport: Any) -> None:
        self.seen.append("release")


def made(
    monkeypatch: pytest.MonkeyPatch, guest: Exception | None = None
) -> tuple[HostSession, list[str]]:
    seen: list[str] = []
    host, inside = world.FakeTransport(), world.FakeTransport(name="kpro5/129")

    def gather(transport: Transport, probes: Sequence[Probe]) -> Mapping[type, object]:
        seen.append(transport.name)
        if transport is inside and guest is not None:
            raise guest
        return {}

    monkeypatch.setattr(module, "open_host", lambda *words: host)
    monkeypatch.setattr(module, "open_guest", lambda *words: inside)
    monkeypatch.setattr(module, "gather", gather)
    return HostSession("kpro5", WANT.host, Path(), lambda text: None), seen


def test_the_guest_is_asked_after_the_lock_was_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    session, seen = made(monkeypatch)
    session._lock = Lock(seen)  # type: ignore[assignment]
    session.look(WANT, [VerifyStep()])
    assert seen == ["lock", "kpro5/129"]
    session.close(lambda text: None)
    assert seen[-1] == "release"


def test_nothing_is_asked_of_the_guest_while_another_has_the_lock(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    session, seen = made(monkeypatch)
    session._lock = Lock(seen, held=True)  # type: ignore[assignment]
    with pytest.raises(LockHeld):
        session.look(WANT, [VerifyStep()])
    assert seen == ["lock"]


def test_a_guest_that_is_down_is_silent_and_one_that_refuses_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    session, _ = made(monkeypatch, Unreachable("it is stopped"))
    assert session.look(WANT, [VerifyStep()]).silent == {Where.GUEST: "it is stopped"}
    session, _ = made(monkeypatch, AuthenticationRefused("no key"))
    with pytest.raises(AuthenticationRefused):
        session.look(WANT, [VerifyStep()])
