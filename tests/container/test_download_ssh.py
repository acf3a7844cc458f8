"""The download's stream over a real sshd: sessions die, the network freezes, `pct` lies between."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))
import sshd as servers
from shardbench import Bench, Hub, agent_pid, attached, jobs_of, running, until
from test_transport_contract import PCT, WithPct, ssh_entry

from deployer.events import Progress
from deployer.remote.connect import open_host
from deployer.remote.pct import PctTransport
from deployer.steps import shards_follow

pytestmark = [
    pytest.mark.container,
    pytest.mark.skipif(bool(servers.WHY_NOT), reason=servers.WHY_NOT or "-"),
]


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    with Hub(tmp_path / "hub", shards=3, mb=2) as hub:
        yield hub


@pytest.fixture
def server(tmp_path: Path) -> Iterator[servers.Sshd]:
    server = servers.start_sshd(tmp_path / "sshd", bashrc="#")
    yield server
    server.stop()


@pytest.fixture
def bench(hub: Hub, tmp_path: Path, server: servers.Sshd) -> Iterator[Bench]:
    """A bench whose guest is this machine by SSH."""
    bench = Bench(hub, tmp_path)
    transport = open_host("box", ssh_entry(server), tmp_path)
    bench.transport = transport
    yield bench
    transport.close()


def resumed_nowhere(bench: Bench) -> None:
    """One job from the first byte to the last, followed by its stream."""
    assert bench.right()
    assert len(jobs_of(bench)) == 1
    told = [note for note in bench.notes()[1:] if "the target is lost" not in note]
    assert told == [], told


def test_sessions_that_die_are_opened_again_and_leave_nothing(
    bench: Bench, hub: Hub, server: servers.Sshd
) -> None:
    hub.shared.set["bps"] = 400_000.0
    with running(bench):
        agent = agent_pid(bench)
        for _ in range(3):
            until(lambda: attached(bench), "a stream")
            streams = attached(bench)
            for pid in servers.children(server.process.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            until(lambda gone=streams: not set(gone) & set(attached(bench)), "its end", 5)
            assert Path(f"/proc/{agent}").exists()
        hub.shared.set["bps"] = 0.0
    resumed_nowhere(bench)
    until(lambda: not attached(bench), "the end of every stream", 5)


def test_a_network_that_freezes_is_noticed_and_joined_again(
    bench: Bench, hub: Hub, server: servers.Sshd, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(shards_follow, "ATTACH_S", 3)
    monkeypatch.setattr(shards_follow, "SLACK_S", 2.0)
    hub.shared.set["bps"] = 120_000.0
    with servers.frozen_proxy(server.port) as (port, proxy):
        known = server.known_hosts
        known.write_text(known.read_text().replace(f":{server.port}", f":{port}"))
        bench.transport = open_host(
            "box", ssh_entry(server, port=port, connect_timeout_s=2.0), tmp_path
        )
        with running(bench):
            until(lambda: len(progress(bench)) > 1, "figures")
            proxy.send_signal(signal.SIGSTOP)
            seen = len(progress(bench))
            time.sleep(8)
            assert len(progress(bench)) <= seen + 1
            proxy.send_signal(signal.SIGCONT)
            until(lambda: len(progress(bench)) > seen + 2, "figures again")
            hub.shared.set["bps"] = 0.0
        resumed_nowhere(bench)
        bench.transport.close()


def test_a_stream_comes_through_pct_as_it_is_written(
    bench: Bench, hub: Hub, tmp_path: Path
) -> None:
    folder = tmp_path / "pct"
    folder.mkdir()
    (folder / "pct").write_text(PCT)
    (folder / "pct").chmod(0o755)
    bench.transport = PctTransport(WithPct(bench.transport, folder), 129, "box/129")
    hub.shared.set["bps"] = 400_000.0
    with running(bench):
        until(lambda: len(progress(bench)) >= 4, "figures while it runs")
        hub.shared.set["bps"] = 0.0
    resumed_nowhere(bench)


def progress(bench: Bench) -> list[Progress]:
    return [event for event in bench.events if isinstance(event, Progress)]
