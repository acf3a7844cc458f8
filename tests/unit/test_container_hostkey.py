"""The host key of a container that the tool made: read on its host, never from who answers."""

from __future__ import annotations

import base64
import dataclasses
from pathlib import Path

import pytest

from deployer.cli.trust import _compare
from deployer.errors import HostKeyChanged, HostKeyUnknown, UsageError
from deployer.model import Where
from deployer.remote.hostkeys import HostKey, parse_public
from deployer.remote.transport import Answer
from deployer.remote.trust import Offered, seen_by_host
from deployer.steps.base import StepContext
from deployer.steps.container import ContainerStep
from deployer.steps.container_hostkey import record_host_key
from tests.unit.hoststeps import Door, context, deployment

BLOB = b"\x00\x00\x00\x0bssh-ed25519\x00\x00\x00\x20" + b"k" * 32
LINE = f"ssh-ed25519 {base64.b64encode(BLOB).decode()} root@sglang\n"


def world(tmp_path: Path, answer: Answer) -> tuple[StepContext, Door, Path]:
    """A context whose host gives `answer`, and the known_hosts file of its container."""
    known = tmp_path / "known_hosts"
    want = deployment()
    container = want.host.containers[129]
    assert container.ssh is not None
    ssh = container.ssh.model_copy(update={"known_hosts": str(known)})
    container = container.model_copy(update={"ssh": ssh})
    host = want.host.model_copy(update={"containers": {129: container}})
    door = Door("kpro5", [answer])
    made = context(dataclasses.replace(want, host=host), door)
    return made, door, known


def test_it_is_recorded(tmp_path: Path) -> None:
    made, door, known = world(tmp_path, Answer(0, LINE.encode(), b""))
    assert record_host_key(made)
    assert known.read_text() == f"192.0.2.129 {LINE.rsplit(' ', 1)[0]}\n"
    assert "pct exec" in door.scripts[0]


@pytest.mark.parametrize(
    "answer",
    [
        Answer(3, b"", b""),  # the mark of this tool does not stand in its configuration
        Answer(255, b"", b"container '129' not running!\n"),
        Answer(0, b"", b""),
        Answer(0, b"ssh-ed25519 AAAA\n", b""),
        Answer(0, LINE.replace("ssh-ed25519", "ssh-rsa").encode(), b""),
        Answer(0, b"ssh-ed25519 ***\n", b""),
    ],
)
def test_what_is_no_key_of_ours_is_not(tmp_path: Path, answer: Answer) -> None:
    made, _, known = world(tmp_path, answer)
    assert not record_host_key(made)
    assert not known.exists()


def test_another_key_is_never_replaced(tmp_path: Path) -> None:
    made, _, known = world(tmp_path, Answer(0, LINE.encode(), b""))
    other = base64.b64encode(BLOB.replace(b"k", b"x")).decode()
    known.write_text(f"192.0.2.129 ssh-ed25519 {other}\n")
    with pytest.raises(HostKeyChanged):
        record_host_key(made)


def test_parse_public() -> None:
    key = parse_public(LINE)
    assert key is not None
    assert (key.type, key.blob) == ("ssh-ed25519", BLOB)


def test_the_wait_for_a_new_container_records_its_key_once(tmp_path: Path) -> None:
    made, host, known = world(tmp_path, Answer(0, LINE.encode(), b""))
    guest = Door("kpro5/129", [HostKeyUnknown("unknown"), Answer(0, b"", b"")])
    both = dataclasses.replace(made, transports={Where.HOST: host, Where.GUEST: guest})
    ContainerStep(pause=lambda seconds: None)._await_guest(both)
    assert known.exists()
    stranger = Door("kpro5/129", [HostKeyUnknown("unknown")])
    silent = Door("kpro5", [Answer(3, b"", b"")])
    refused = dataclasses.replace(made, transports={Where.HOST: silent, Where.GUEST: stranger})
    with pytest.raises(HostKeyUnknown):
        ContainerStep(pause=lambda seconds: None)._await_guest(refused)


OFFERED = Offered(
    "kpro5/129", "192.0.2.129:22", "192.0.2.129", HostKey("ssh-ed25519", BLOB), Path(), False
)


def test_trust_compares_with_what_the_host_reads(capsys: pytest.CaptureFixture[str]) -> None:
    door = Door("kpro5", [Answer(0, f"{LINE}not a key\n".encode(), b"")])
    keys = seen_by_host(door, 129)
    assert [key.type for key in keys] == ["ssh-ed25519"]
    _compare(OFFERED, keys)
    assert "its host reads the same key" in capsys.readouterr().err
    _compare(OFFERED, ())
    assert capsys.readouterr().err == ""
    stranger = dataclasses.replace(OFFERED, key=HostKey("ssh-ed25519", BLOB.replace(b"k", b"x")))
    with pytest.raises(UsageError, match="another machine answers there"):
        _compare(stranger, keys)
