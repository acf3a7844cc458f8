"""`pct exec` through a host's transport: a shim for pct, and the refusals of the real one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from deployer import errors
from deployer.remote.pct import ContainerMissing, ContainerStopped, PctTransport
from deployer.remote.transport import Answer
from tests.local_transport import LocalTransport, ScriptedTransport

SHIM = """#!/bin/sh
[ "$1 $2 $3" = "exec 129 --" ] || exit 255
shift 3
exec env -i PATH=/sbin:/bin:/usr/sbin:/usr/bin "$@"
"""


@pytest.fixture
def guest(tmp_path: Path) -> Iterator[PctTransport]:
    shim = tmp_path / "pct"
    shim.write_text(SHIM)
    shim.chmod(0o755)
    host = LocalTransport(f"{tmp_path}:/usr/bin:/bin", "kpro5", env={"LEAK": "1"})
    yield PctTransport(host, 129, "kpro5/129")


def test_script_arguments_stdin_and_status(guest: PctTransport) -> None:
    answer = guest.run('cat; printf "%s|" "$@"; echo e >&2; exit 9', args=("'", "ä\n"), stdin=b"\0")
    assert answer == Answer(9, b"\0" + "'|ä\n|".encode(), b"e\n")


def test_environment_is_full_and_nothing_leaks(guest: PctTransport) -> None:
    answer = guest.run('echo "$HOME $LC_ALL ${LEAK-none} $PATH"')
    assert answer.text.startswith("/root C none /usr/local/sbin:/usr/local/bin:")


def test_stdin_is_empty_unless_given(guest: PctTransport) -> None:
    assert guest.run("cat").stdout == b""


def test_a_signal_of_the_script(guest: PctTransport) -> None:
    assert guest.run("kill -9 $$").exit == 137


def test_output_is_handed_on_without_the_frame(guest: PctTransport) -> None:
    seen: list[bytes] = []
    guest.run("echo out", on_stdout=seen.append)
    assert b"".join(seen) == b"out\n"


def test_without_input_pct_gets_dev_null() -> None:
    host = ScriptedTransport(Answer(1, b"", b""), Answer(1, b"", b""), name="kpro5")
    guest = PctTransport(host, 129, "kpro5/129")
    for stdin in (b"", b"x"):
        with pytest.raises(errors.ConnectionLost):
            guest.run("true", stdin=stdin, timeout_s=7)
    assert host.calls[0].script.endswith("</dev/null")
    assert not host.calls[1].script.endswith("</dev/null")
    assert host.calls[1].stdin == b"x"
    assert host.calls[0].args[:3] == ("129", "/bin/sh", "-c")
    assert all(word.isascii() for word in host.calls[0].args)
    assert host.calls[0].timeout_s == 7


REFUSALS = [
    (255, "container '129' not running!\n", ContainerStopped, "129 on kpro5 is not running"),
    (
        2,
        "perl: warning: Setting locale failed.\n"
        "Configuration file 'nodes/kpro5/lxc/129.conf' does not exist\n",
        ContainerMissing,
        "kpro5 has no container 129",
    ),
    (127, "sh: 1: exec: pct: not found\n", errors.Unreachable, "kpro5 has no `pct`"),
    (255, "please run as root\n", errors.Unreachable, "needs root"),
    (
        1,
        "lxc-attach: 129: ../src/lxc/attach.c: 1: Failed to get init pid\n",
        errors.ConnectionLost,
        "never began (status 1)",
    ),
    (0, "", errors.ConnectionLost, "never began (status 0)"),
]


@pytest.mark.parametrize(("status", "stderr", "kind", "text"), REFUSALS)
def test_refusals_of_pct_are_typed(
    status: int, stderr: str, kind: type[errors.DeployError], text: str
) -> None:
    host = ScriptedTransport(Answer(status, b"", stderr.encode()), name="kpro5")
    with pytest.raises(errors.Unreachable) as caught:
        PctTransport(host, 129, "kpro5/129").run("true")
    assert type(caught.value) is kind
    assert text in str(caught.value)
    assert caught.value.where == "kpro5/129"
    assert caught.value.fix
    assert caught.value.exit_code == 3


def test_a_script_that_speaks_like_pct_is_not_believed(guest: PctTransport) -> None:
    answer = guest.run("echo \"container '129' not running!\" >&2; exit 255")
    assert answer.exit == 255


def test_a_lost_host_shows_what_the_guest_said() -> None:
    host = ScriptedTransport(errors.DeadlineExceeded("late", where="kpro5", evidence=("@:begin;",)))
    with pytest.raises(errors.DeadlineExceeded) as caught:
        PctTransport(host, 129, "kpro5/129").run("true")
    assert caught.value.evidence == ()
