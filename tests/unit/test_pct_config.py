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
)
from deployer.pct_device import parse_device
from deployer.pct_keys import typed

BASE = "arch: amd64\nhostname: ct101\nmemory: 512\n"


def test_settings_after_a_snapshot_belong_to_it() -> None:
    config = parse_conf(BASE + "[before]\nmemory: 1\ndev0: /dev/nvidia0\n")
    assert config.current.devices() == {}
    assert config.snapshots["before"].devices()["dev0"].path == "/dev/nvidia0"


def test_lock_and_pending() -> None:
    config = parse_conf(
        BASE + "lock: backup\ndev0: /dev/a\n\n[pve:pending]\ndelete: dev0\ndev1: /dev/b\n"
    )
    assert config.lock == "backup"
    assert config.has_pending
    assert {n: d.path for n, d in config.after_restart().devices().items()} == {"dev1": "/dev/b"}
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
        ("memory", "0" * 20 + "512", "512"),
        ("memory", str(2**64 - 1), str(2**64 - 1)),
        ("memory", str(2**64), "1.84467440737096e+19"),  # Perl's numbers
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


def test_dev_numbers_that_pct_does_not_know_are_passed_on_all_the_same() -> None:
    config = parse_conf("dev01: /dev/a\ndev256: /dev/b\ndev: /dev/c\ndev7: /dev/d\n")
    assert list(config.current.devices()) == ["dev01", "dev256", "dev7"]


@pytest.mark.parametrize(
    ("value", "path", "fault"),
    [
        ("/dev/nvidia0,", "/dev/nvidia0", ""),
        (", ,/dev/nvidia0,,mode=0666", "/dev/nvidia0", ""),
        ("/dev/a=b", "", "/dev/a: property is not defined in schema; Path has to be defined"),
        ("/dev/nvidia0, mode=0666", "/dev/nvidia0", " mode: property is not defined in schema"),
        ("/dev/nvidia0,mode=666", "/dev/nvidia0", "mode: value does not match the regex pattern"),
        ("/dev/nvidia0,mode=", "/dev/nvidia0", "missing key in comma-separated list property"),
        ("/dev/x,/dev/y", "/dev/x", "duplicate key in comma-separated list property: path"),
        ("path=/dev/x,/dev/y", "/dev/x", "duplicate key in comma-separated list property: path"),
        ("/dev/x,uid=-1", "/dev/x", "uid: value must have a minimum value of 0"),
        ("/dev/x,gid=a", "/dev/x", "gid: type check ('integer') failed - got 'a'"),
        ("/dev/x,gid=+5,deny-write=Yes", "/dev/x", ""),
        ("/dev/x,deny-write=2", "/dev/x", "deny-write: type check ('boolean') failed - got '2'"),
        ("mode=0666", "", "Path has to be defined"),
        ("nvidia0", "nvidia0", "nvidia0 is not a valid device path"),
        ("/dev/../x", "/dev/../x", "/dev/../x is not a valid device path"),
        ("/dev/x/.", "/dev/x/.", "/dev/x/. is not a valid device path"),
    ],
)
def test_what_pct_has_against_a_device(value: str, path: str, fault: str) -> None:
    entry = parse_device(value)
    assert (entry.path, entry.fault) == (path, fault)


def test_write_is_denied_by_any_word_for_true() -> None:
    words = ("1", "on", "Yes", "TRUE", "0", "no")
    denied = [parse_device(f"/dev/x,deny-write={word}").denies_write for word in words]
    assert denied == [True, True, True, True, False, False]


def test_what_pct_config_prints_is_not_always_what_a_start_makes_of_it() -> None:
    config = parse_conf(
        "onboot: 0\nswap: 5\ncores: 1\n#old\n[pve:pending]\nswap: 9\n"
        "delete: swap,onboot,cores,description\n"
    )
    assert config.shown().keys == {"onboot": "0"}
    assert config.after_restart().keys == {"swap": "9"}
    assert (config.shown().description, config.after_restart().description) == ("", "")


@pytest.mark.parametrize(
    ("text", "unprivileged"),
    [
        ("lxc.idmap: u 0 100000 65536\n", True),
        ("unprivileged: 0\nlxc.idmap = g 0 100000 65536\n", True),
        ("[s1]\nlxc.idmap: u 0 100000 65536\n", False),
        ("lxc.id_map: u 0 100000 65536\n", False),  # pct asks for the new name only
    ],
)
def test_own_id_maps_are_those_of_an_unprivileged_container(text: str, unprivileged: bool) -> None:
    assert parse_conf(BASE + text).unprivileged is unprivileged


def test_what_perl_takes_for_nothing() -> None:
    config = parse_conf(BASE + "lock: 0\ndescription: 0\n")
    assert (config.lock, config.current.description) == ("", "")
    assert parse_conf("#0\n").current.description == "0\n"
    assert parse_conf("description: \r\n").current.description == "\r"


def test_names_that_pct_uses_for_itself_are_no_keys() -> None:
    config = parse_conf(BASE + "digest: abc\nsnapshots: x\n")
    assert not {"digest", "snapshots"} & set(config.current.keys)
    assert config.ignored == ("digest: abc", "snapshots: x")


def test_mounted_devices() -> None:
    text = (
        "lxc.mount.entry = /dev/nvidia0 dev/nvidia0 none bind,optional,create=file\n"
        "lxc.mount.entry: /srv/models srv/models none bind 0 0\n"
    )
    assert mounted_devices(parse_conf(text).current) == ("/dev/nvidia0",)
