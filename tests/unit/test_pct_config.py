"""What a container configuration means: sections, pending values, devices, odd bytes.

The recorded cases of the real pct run in test_pct_cases.py.
"""

from __future__ import annotations

import pytest

from deployer.pct_config import (
    decode,
    encode,
    free_indexes,
    is_header,
    mounted_devices,
    parse_conf,
    parse_device,
    typed,
)

BASE = "arch: amd64\nhostname: ct101\nmemory: 512\n"


def test_settings_after_a_snapshot_belong_to_it() -> None:
    config = parse_conf(BASE + "[before]\nmemory: 1\ndev0: /dev/nvidia0\n")
    assert config.current.devices() == {}
    assert config.snapshots["before"].devices()[0].path == "/dev/nvidia0"


def test_lock_and_pending() -> None:
    config = parse_conf(
        BASE + "lock: backup\ndev0: /dev/a\n\n[pve:pending]\ndelete: dev0\ndev1: /dev/b\n"
    )
    assert config.lock == "backup"
    assert config.has_pending
    assert {n: d.path for n, d in config.after_restart().devices().items()} == {1: "/dev/b"}
    assert free_indexes(config, 2) == (2, 3)


@pytest.mark.parametrize(
    ("line", "unprivileged"),
    [
        ("unprivileged: 1", True),
        ("unprivileged: YES", True),
        ("unprivileged: 0", False),
        ("unprivileged: Off", False),
        ("unprivileged: maybe", True),  # Perl's truth: pct keeps the word and takes it for true
        ("# unprivileged: 1", False),
        (" unprivileged: 1", False),
        ("unprivileged:\t1\r", True),
    ],
)
def test_privilege(line: str, unprivileged: bool) -> None:
    assert parse_conf(f"{BASE}{line}\n").unprivileged is unprivileged


@pytest.mark.parametrize(
    ("key", "value", "kept"),
    [
        ("memory", "0512", "512"),
        ("memory", "lots", "lots"),
        ("memory", "9" * 30, "9" * 30),
        ("onboot", "On", "1"),
        ("onboot", "FALSE", "0"),
        ("onboot", "2", "2"),
        ("hostname", "007", "007"),
    ],
)
def test_values_in_pct_s_own_form(key: str, value: str, kept: str) -> None:
    assert typed(key, value) == kept


@pytest.mark.parametrize(
    ("line", "header"),
    [
        ("[snap]", True),
        ("[Snap-1_b]  \r\n", True),
        ("[PVE:Pending]\n", True),
        ("[pve:pending] x", False),
        ("[1snap]", False),
        ("[x]", False),
        ("[my snap]", False),
        (" [snap]", False),
        ("[snap", False),
        ("[sn\u00e4p]", False),
    ],
)
def test_headers(line: str, header: bool) -> None:
    assert is_header(line) is header


def test_lines_after_no_header_belong_to_the_current_part() -> None:
    config = parse_conf(BASE + "[1snap]\nmemory: 128\n")
    assert config.current.keys["memory"] == "128"
    assert config.ignored == ("[1snap]",)


@pytest.mark.parametrize(
    "raw", [b"", b"#\xff\xfe: 1\r\n", b"a\x00b\n", "#gr\u00f6\u00dfe".encode()]
)
def test_bytes_come_back(raw: bytes) -> None:
    assert encode(decode(raw)) == raw


def test_force_marks_of_pending_deletions() -> None:
    config = parse_conf("mp0: /a,mp=/a\n[pve:pending]\ndelete: !mp0; dev1 ,swap\n")
    assert config.delete == ("mp0", "dev1", "swap")
    assert "mp0" not in config.after_restart().keys


def test_the_state_of_a_snapshot_is_not_the_container_s() -> None:
    config = parse_conf("snapstate: delete\n[s1]\nsnapstate: prepare\n")
    assert config.current.keys == {}
    assert config.snapshots["s1"].keys == {"snapstate": "prepare"}


@pytest.mark.parametrize(
    ("value", "path"),
    [
        ("/dev/nvidia0", "/dev/nvidia0"),
        ("path=/dev/nvidia0,mode=0666", "/dev/nvidia0"),
        ("gid=104,mode=0660,/dev/nvidia0", "/dev/nvidia0"),
        ("gid=104", ""),
    ],
)
def test_device_path_stands_anywhere(value: str, path: str) -> None:
    assert parse_device(value).path == path


def test_no_index_is_left() -> None:
    text = "".join(f"dev{n}: /dev/x{n}\n" for n in range(255))
    assert free_indexes(parse_conf(text), 1) == (255,)
    with pytest.raises(ValueError, match="only 1"):
        free_indexes(parse_conf(text), 2)


def test_dev_numbers_that_pct_does_not_know() -> None:
    config = parse_conf("dev01: /dev/a\ndev256: /dev/b\ndev: /dev/c\ndev7: /dev/d\n")
    assert list(config.current.devices()) == [7]


def test_mounted_devices() -> None:
    text = (
        "lxc.mount.entry = /dev/nvidia0 dev/nvidia0 none bind,optional,create=file\n"
        "lxc.mount.entry: /srv/models srv/models none bind 0 0\n"
    )
    assert mounted_devices(parse_conf(text).current) == ("/dev/nvidia0",)
