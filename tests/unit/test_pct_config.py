"""The conf parser must see what pct sees: recorded cases of the real pct, when they are at hand."""

from __future__ import annotations

import json
import re
from pathlib import Path
from urllib.parse import quote

import pytest

from deployer.pct_config import (
    RawDevice,
    Section,
    free_indexes,
    mounted_devices,
    parse_conf,
    parse_device,
    with_devices,
)

FIXTURES = Path(__file__).parents[1] / "fixtures" / "pct"
RECORDED = Path(__file__).parents[3] / "shared" / "field" / "pct-cases"
BASE = "arch: amd64\nhostname: ct101\nmemory: 512\n"
NVIDIA0 = RawDevice("/dev/nvidia0", 195, 0)


def recorded() -> list[Path]:
    own = sorted(FIXTURES.glob("*.json"))
    return own + [
        path
        for path in sorted(RECORDED.glob("[a-h]*.json"))
        if path.stem not in {one.stem for one in own}
    ]


def case(path: Path) -> dict[str, object]:
    return json.loads(path.read_text())  # type: ignore[no-any-return]


def printed(section: Section) -> str:
    """As `pct config` prints a section."""
    keys = dict(section.keys)
    keys.pop("snapstate", None)
    if section.description:
        # pct's own safe set.
        text = section.description
        keys["description"] = "".join(
            quote(c, safe="") if ord(c) < 32 or ord(c) > 126 or c in "%:" else c for c in text
        )
    lines = [f"{key}: {keys[key]}\n" for key in sorted(keys)]
    return "".join(lines) + "".join(f"{key}: {value}\n" for key, value in section.raw)


def config_cases() -> list[Path]:
    found = []
    for path in recorded():
        data = case(path)
        command = str(data["command"])
        if not re.fullmatch(r"pct config \d+( --current| --snapshot \w+)?", command):
            continue
        readable = data["conf_before"] is not None and data.get("conf_before_b64") is None
        # pct prints booleans in one form; the parser keeps them as written.
        if (
            data["exit_code"] == 0
            and not data.get("locale")
            and readable
            and "bool" not in path.stem
        ):
            found.append(path)
    return [path for path in found if "bool-words" not in path.stem]


@pytest.mark.parametrize("path", config_cases(), ids=lambda path: path.stem)
def test_sees_what_pct_prints(path: Path) -> None:
    data = case(path)
    config = parse_conf(str(data["conf_before"]))
    command = str(data["command"])
    if "--snapshot" in command:
        section = config.snapshots[command.split()[-1]]
    elif "--current" in command:
        section = config.current
    else:
        section = config.after_restart()
    assert printed(section) == data["stdout"]


def reading_cases() -> list[Path]:
    return [
        path
        for path in recorded()
        if case(path)["conf_before"] is not None
        and re.fullmatch(r"pct (config|set) \d+( --memory 1024)?", str(case(path)["command"]))
        and "locked" not in str(case(path)["stderr"])
    ]


@pytest.mark.parametrize("path", reading_cases(), ids=lambda path: path.stem)
def test_ignores_the_lines_that_pct_ignores(path: Path) -> None:
    data = case(path)
    said = re.findall(r"unable to parse config: (.*)$", str(data["stderr"]), re.MULTILINE)
    text = str(data["conf_before"])
    # pct also drops `delete:` outside [pve:pending], and keys that it makes itself, in other words.
    ignored = [
        line for line in parse_conf(text).ignored if not line.startswith(("delete:", "lxc.rootfs."))
    ]
    in_order = list(dict.fromkeys(said))
    assert [line.rstrip("\r") for line in dict.fromkeys(ignored)] == [
        line.rstrip("\r") for line in in_order if not line.startswith("lxc.rootfs.")
    ]


@pytest.mark.parametrize("path", reading_cases(), ids=lambda path: path.stem)
def test_raw_devices_land_in_the_current_part(path: Path) -> None:
    text = str(case(path)["conf_before"])
    before, after = parse_conf(text), parse_conf(with_devices(text, [NVIDIA0]))
    assert set(after.current.raw) - set(before.current.raw) == {
        ("lxc.cgroup2.devices.allow", "c 195:0 rwm"),
        ("lxc.mount.entry", "/dev/nvidia0 dev/nvidia0 none bind,optional,create=file"),
    }
    assert after.current.keys == before.current.keys
    assert after.snapshots == before.snapshots
    assert after.pending == before.pending


def test_adding_twice_changes_nothing() -> None:
    once = with_devices(BASE + "\n[snap]\nmemory: 256\n", [NVIDIA0])
    assert with_devices(once, [NVIDIA0]) == once
    assert once.index("195:0") < once.index("[snap]")
    assert once.endswith("\n\n[snap]\nmemory: 256\n")


def test_a_file_without_final_newline_keeps_its_last_key() -> None:
    assert parse_conf(with_devices("memory: 512", [NVIDIA0])).current.keys == {"memory": "512"}


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


def test_privilege_is_off_only_when_said() -> None:
    assert parse_conf("unprivileged: 1\n").unprivileged
    assert not parse_conf(BASE).unprivileged


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
