"""Targets whose logins are odd: each is served or told, and none delays the others."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from fleetlab import Fleet, fleet, why_not
from test_many import SCRIPT, ends, up

pytestmark = [pytest.mark.skipif(bool(why_not()), reason=why_not()), pytest.mark.long]

FINE = ("banner", "noisy", "one-session", "plain", "slow")
BANNER_S = 6
SHELL = "`ssh HOST true` must end at once with status 0"
SAID = {
    "endless": (r"no complete answer within 30 s", SHELL),
    "expired": (r"ended with status 1\n  \| WARNING: Your password has expired", SHELL),
    "false": (r"the remote shell ended with status 1", SHELL),
    "forced": (r"ended with status 0\n  \| Hi there, this key may only push", SHELL),
    "half": (rf"the key exchange never ends within {BANNER_S} s", "is it sshd that listens there"),
    "hangs": (r"no complete answer within 30 s", SHELL),
    "nologin": (r"\n  \| This account is currently not available", SHELL),
    "no-session": (r"sshd opens no session", "look at MaxSessions"),
    "sftp-only": (r"\n  \| This service allows sftp connections only", SHELL),
}
"""Host -> what is said of it, and what to do."""


@contextmanager
def half_an_sshd() -> Iterator[int]:
    """Its port: it says who it is, and nothing more."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        kept = []

        def serve() -> None:
            while True:
                try:
                    client, _ = server.accept()
                except OSError:
                    return
                client.sendall(b"SSH-2.0-OpenSSH_9.2\r\n")
                kept.append(client)

        threading.Thread(target=serve, daemon=True).start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)
        for client in kept:
            client.close()


def changed(path: str, line: str) -> dict[str, str]:
    """The machine's file with another line for root."""
    rows = Path(path).read_text().splitlines()
    return {path: "".join(f"{line if row.startswith('root:') else row}\n" for row in rows)}


def shell(path: str) -> dict[str, str]:
    """/etc/passwd with this login shell for root."""
    return changed("/etc/passwd", f"root:x:0:0:root:/root:{path}")


def profile(folder: Path, text: str) -> list[str]:
    """The line of sshd_config that makes bash run `text` before each command."""
    folder.mkdir()
    (folder / ".bashrc").write_text(text)
    return [f"SetEnv HOME={folder}"]


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """All of them."""
    with fleet(tmp_path_factory.mktemp("odd")) as made, half_an_sshd() as half:
        folder = made.folder
        (folder / "banner").write_text("All activity is logged.\n" * 8000)
        made.start(["plain"])
        made.start(["banner"], lines=[f"Banner {folder / 'banner'}"])
        noise = "head -c 5000000 /dev/zero | tr '\\0' x\necho\n"
        made.start(["noisy"], lines=profile(folder / "noise", noise))
        made.start(["endless"], lines=profile(folder / "endless", "yes welcome\n"))
        made.start(["one-session"], lines=["MaxSessions 1"])
        made.start(["no-session"], lines=["MaxSessions 0"])
        made.start(["slow"], lines=['ForceCommand sleep 3; exec sh -c "$SSH_ORIGINAL_COMMAND"'])
        made.start(["hangs"], lines=["ForceCommand sleep 1000"])
        made.start(["forced"], lines=["ForceCommand echo Hi there, this key may only push"])
        made.start(["sftp-only"], lines=["ForceCommand internal-sftp"])
        made.start(["false"], over=shell("/bin/false"))
        made.start(["nologin"], over=shell("/usr/sbin/nologin"))
        expired = changed("/etc/shadow", "root:*:0:0:99999:7:::")
        made.start(["expired"], over=expired, lines=["UsePAM yes"])
        made.place("half", half, connect_timeout_s=BANNER_S)
        made.write()
        yield made


def test_each_is_served_or_told_and_none_delays_another(odd: Fleet) -> None:
    done = up(odd, "one", "--all", "--yes", "--no-canary", timeout_s=120)
    assert done.exit == 3, done.err
    assert f"{len(FINE)} of {len(FINE) + len(SAID)} deployments done" in done.err
    assert [n for n in FINE if (odd.targets[n].own / "mark").read_text() == "one"] == list(FINE)
    errors = dict(re.findall(r"^deploy: ([\w-]+): (.*(?:\n  .*)+)", done.err, re.M))
    assert set(errors) == set(SAID), done.err
    for name, (what, fix) in SAID.items():
        assert re.search(what, errors[name]), errors[name]
        assert f"\n  -> {fix}" in errors[name], errors[name]
    ended = ends(odd)
    last = max(ended["hangs"]["time"], ended["endless"]["time"])
    assert all(ended[name]["time"] < last for name in FINE), "nobody waited for them"


def test_a_host_that_goes_away_in_the_middle_is_told_and_done_by_the_next_run(odd: Fleet) -> None:
    argv = [sys.executable, str(SCRIPT), str(odd.inventory), "two", "--hold", "--yes"]
    process = subprocess.Popen(
        [*argv, "--no-canary", "plain", "slow"],
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    ends_at = time.monotonic() + 60
    while odd.targets["plain"].lock_is_free or odd.targets["slow"].lock_is_free:
        assert time.monotonic() < ends_at, "the locks are never taken"
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.05)
    odd.cut("plain")
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130, said
    assert "the host lock could not be released: plain: " in said
    assert odd.targets["slow"].lock_is_free and not odd.targets["plain"].lock_is_free
    away = up(odd, "two", "--yes", "--no-canary", "plain", "one-session")
    assert away.exit == 3 and "refuses the connection" in away.err, away.err
    assert (odd.targets["one-session"].own / "mark").read_text() == "two"
    odd.boot("plain")
    again = up(odd, "two", "--yes", "plain")
    assert again.exit == 0, again.err
    assert "took over the lock of a dead run" in " ".join(again.err.split())
    assert (odd.targets["plain"].own / "mark").read_text() == "two"


def test_two_names_of_one_machine_do_not_meet(odd: Fleet) -> None:
    port, mark = odd.targets["plain"].port, odd.targets["plain"].own / "mark"
    try:
        odd.place("twin", port)
        odd.write()
        done = up(odd, "three", "--yes", "one-session")
        assert done.exit == 2, done.err
        assert "hosts.twin is reached at the address of hosts.plain, and both claim GPU" in done.err
        odd.place("twin", port, address="localhost")
        odd.write()
        done = up(odd, "three", "--yes", "plain", "twin")
        assert done.exit == 2, done.err
        assert re.search("(plain|twin) and (plain|twin) are one machine, and both claim", done.err)
        assert "1 of 2 deployments done, 1 failed" in done.err
        assert mark.read_text() == "three"
        # With nothing in common one may follow the other, and is told to if they meet.
        odd.write(gpus={"twin": "0000:41:00.0"})
        done = up(odd, "four", "--yes", "plain", "twin")
        assert done.exit == 0, done.err
        assert re.search("warning: (plain|twin) is the same machine as (plain|twin); ", done.err)
        assert "waits for the canary plain/m" in done.err
        argv = ("--hold", "--yes", "--no-canary", "--timeout", "5", "plain", "twin")
        done = up(odd, "five", *argv)
        assert done.exit == 1, done.err
        same = "it is the same machine as (plain|twin), which this run is at work on"
        assert re.search(f"^deploy: (plain|twin): {same}\\n  -> ", done.err, re.M), done.err
        assert mark.read_text() == "four" and odd.targets["plain"].lock_is_free
    finally:
        odd.forget("twin")
        odd.write()


def test_a_canary_that_hangs_ends_with_the_commands_time(odd: Fleet) -> None:
    argv = ("--hold", "--yes", "--timeout", "15", "plain", "banner", "one-session")
    began = time.monotonic()
    done = up(odd, "five", *argv)
    assert done.exit == 1 and time.monotonic() - began < 30, done.err
    assert "waits for the canary plain/m" in done.err
    assert "plain/m, banner/m, one-session/m: the command ran over its --timeout of 15 s" in (
        done.err
    ), done.err
    assert all(odd.targets[name].lock_is_free for name in ("plain", "banner", "one-session"))
