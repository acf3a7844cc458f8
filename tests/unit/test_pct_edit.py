"""Edits of a configuration: what pct next writes keeps them, and they change nothing else."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from deployer.gpu import Node
from deployer.model import Shell
from deployer.pct_config import PctConfig, decode, encode, parse_conf
from deployer.pct_edit import (
    ALLOW,
    DENY,
    Edit,
    RawDevice,
    allowed,
    apply,
    diff,
    mend,
    raw_edit,
    stale_rules,
)
from deployer.steps.container_changes import set_devices
from tests.unit.pctlab import PctLab, load_lab
from tests.unit.test_pct_cases import cases, raw

BASE = "arch: amd64\nmemory: 512\n"
UVM = Node("/dev/nvidia-uvm", "char", 506, 0)
TOOLS = Node("/dev/nvidia-uvm-tools", "char", 506, 1)
CARD = Node("/dev/nvidia0", "char", 195, 0)
DEVICES = [RawDevice("/dev/nvidia0", 195, 0), RawDevice("/dev/nvidia-uvm", 506, 0)]
LINES = st.sampled_from(
    [
        b"memory: 512",
        b"memory: 768",
        b"cores:2",
        b"hostname: a b",
        b"unprivileged: yes",
        b"lxc.cgroup2.devices.allow: c 195:* rwm",
        b"lxc.cgroup2.devices.allow = c 508:* rwm  ",
        b"lxc.cgroup2.devices.allow: c 508:0 rwm",
        b"lxc.mount.entry=/dev/nvidia0 dev/nvidia0 none bind",
        b"lxc.nosuch: 1",
        b"lxc.cap.drop:",
        b"lxc.environment.runtime: A=1",
        b"lxc.cap.drop : x",
        b"# note 100%",
        b"#\xff\xfe:",
        b"#%C3%B6",
        b"  indented: 1",
        b"[snap]",
        b"[Snap-2] \t",
        b"[x]",
        b"[1snap]",
        b"[my snap]",
        b"[pve:pending]",
        b"[PVE:PENDING]",
        b"[pending]",
        b"delete: dev0,!mp0",
        b"dev0: /dev/nvidia0",
        b"dev0: gid=4,/dev/x",
        b"dev256: /dev/y",
        b"description: two%0Athree",
        b"snapstate: delete",
        b"lock: backup",
        b"parent: snap",
        b"\xef\xbb\xbfarch: amd64",
        b"",
        b"\r",
        b"\t",
        b"\x0c",
        b"\xa0",
        b"tags:",
        b"tags: ",
        b"Cores: 2",
        b"futurekey: v",
        b"x" * 9000,
        b"lxc.mount.entry: /srv/gr\xc3\xb6\xdf g none bind 0 0",
        b"not a line",
        b"; c",
        b"a\x00b: c",
        b"lock: backup\r",
        b"snaptime: 0170",
        b"onboot: maybe",
    ]
)
FILES = st.builds(
    lambda lines, end, last: end.join(lines) + (end if last else b""),
    st.lists(LINES, max_size=12),
    st.sampled_from([b"\n", b"\r\n"]),
    st.booleans(),
)


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> PctLab:
    with pytest.MonkeyPatch.context() as patch:
        return load_lab(patch, tmp_path_factory.mktemp("lab"))


def view(config: PctConfig) -> object:
    """All that counts of a configuration; the order of raw lines in it too."""
    return (
        dict(config.current.keys),
        [pair for pair in config.current.raw if pair[0] == "lxc.environment.runtime"],
        [pair for pair in config.current.raw if pair[0] != "lxc.environment.runtime"],
        config.current.description.rstrip("\n"),
        dict(config.pending.keys),
        config.delete,
        {name: (dict(part.keys), part.raw) for name, part in config.snapshots.items()},
    )


def check(lab: PctLab, before: bytes, edit: Edit) -> None:
    text = decode(before)
    after = encode(apply(text, edit))
    old, new = parse_conf(text), parse_conf(decode(after))
    pairs = [tuple(line.split(": ", 1)) for line in edit.add]
    expected = [*old.current.raw, *[pair for pair in pairs if pair not in old.current.raw]]
    assert list(new.current.raw) == expected
    assert (new.current.keys, new.pending, new.delete) == (
        old.current.keys,
        old.pending,
        old.delete,
    )
    assert (new.snapshots, new.ignored) == (old.snapshots, old.ignored)
    assert new.current.description == old.current.description
    # The real writer, before and after: what it keeps of the one it keeps of the other.
    written, written_old = (parse_conf(decode(lab.rewritten(raw))) for raw in (after, before))
    assert set(pairs) <= set(written.current.raw)
    assert [p for p in written.current.raw if p not in pairs] == [
        p for p in written_old.current.raw if p not in pairs
    ]
    assert written.current.keys == written_old.current.keys
    assert (written.pending, written.snapshots) == (written_old.pending, written_old.snapshots)
    assert view(written)[3] == view(written_old)[3]  # type: ignore[index]
    # Bytes outside of the new lines are the file's own, but for a line end where none was.
    kept = after
    for line in edit.add:
        if tuple(line.split(": ", 1)) not in old.current.raw:
            kept = kept.replace(line.encode() + b"\n", b"", 1)
    assert kept in (before, before + b"\n") or kept.replace(b"\n", b"") == before.replace(
        b"\n", b""
    )


ADDED = Edit(tuple(line for device in DEVICES for line in device.lines()))


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(FILES)
def test_added_lines_survive_the_real_writer(lab: PctLab, before: bytes) -> None:
    check(lab, before, ADDED)


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(FILES)
@example(b"[pending]\ndelete: dev0,!mp0\nmemory: 1\n")
@example(b"[pve:pending]\ndelete: dev0,!mp0\n[pending]\n[PVE:PENDING]\ncores: 2\n")
def test_our_parser_and_the_writer_read_the_same(lab: PctLab, before: bytes) -> None:
    # What pct would write is what we saw, but for lines of no form.
    once = lab.rewritten(before)
    mine, its = parse_conf(decode(before)), parse_conf(decode(once))
    assert view(mine) == view(its)
    assert its.ignored == ()
    assert lab.rewritten(once) == once


@settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck))
@given(FILES)
def test_an_edit_is_taken_back(before: bytes) -> None:
    text = decode(before)
    edit = raw_edit(parse_conf(text).current, DEVICES, unprivileged=False)
    after = apply(text, edit)
    assert apply(after, edit) == after
    back = apply(after, edit.reverse())
    assert back == text or back == text + "\n" or back.replace("\n", "") == text.replace("\n", "")


@pytest.mark.parametrize("name", [n for n, c in cases().items() if c["conf_before"] is not None])
def test_recorded_files_are_edited_in_the_right_place(lab: PctLab, name: str) -> None:
    check(lab, raw(cases()[name], "conf_before"), ADDED)


def test_lines_go_before_the_first_section() -> None:
    text = apply(BASE + "\n[snap]\nmemory: 256\n", ADDED)
    assert text.index("195:0") < text.index("[snap]")
    assert text.endswith("\n\n[snap]\nmemory: 256\n")
    assert apply(text, ADDED) == text


def test_no_final_newline() -> None:
    assert apply("memory: 512", Edit(("lxc.cap.drop: x",))) == "memory: 512\nlxc.cap.drop: x\n"
    assert apply("", Edit(("lxc.cap.drop: x",))) == "lxc.cap.drop: x\n"


def test_privileged_and_unprivileged_lines_differ() -> None:
    device = DEVICES[0]
    assert len(device.lines()) == 2
    assert device.lines(unprivileged=True) == (device.lines()[1],)


@pytest.mark.parametrize(
    ("rules", "opens"),
    [
        ("", False),
        (f"{ALLOW}: c 506:* rwm\n", True),
        (f"{ALLOW} = c 506:0 rw\n", True),
        (f"{ALLOW}: c 506:1 rwm\n", False),
        (f"{ALLOW}: a\n", True),
        (f"{ALLOW}: c *:* rwm\n", True),
        (f"{ALLOW}: c 508:* rwm\n", False),
        (f"{ALLOW}: b 506:* rwm\n", False),
        (f"{ALLOW}: c 506:* rwm\n{DENY}: c 506:0 rwm\n", False),
        (f"{ALLOW}: c 506:* rwm\n{DENY}: c 506:0 w\n", False),
        (f"{ALLOW}: c 506:* rwm\n{DENY}: c 506:0 m\n", True),
        (f"{ALLOW}: c 506:* r\n", False),  # the driver's nodes are opened for both
        (f"{ALLOW}: c 506:* wr\n", True),
        (f"{ALLOW}: c 506:*\n", True),
        (f"{ALLOW}: c *:0 rwm\n", True),
        (f"{ALLOW}: c *:1 rwm\n", False),
        (f"{DENY}: a\n{ALLOW}: c 506:0 rwm\n", True),
        (f"{ALLOW}: c 506:0 rwm\n{DENY}: a\n", False),
        (f"[snap]\n{ALLOW}: c 506:* rwm\n", False),
        ("lxc.cgroup.devices.allow: c 506:* rwm\n", False),
    ],
)
def test_what_the_rules_allow(rules: str, opens: bool) -> None:
    assert allowed(parse_conf(BASE + rules).current, 506, 0) is opens


def test_a_stale_major_is_mended_in_its_line() -> None:
    text = BASE + f"{ALLOW}: c 195:* rwm\n{ALLOW} = c 508:* rwm\nlxc.cap.drop: x\n"
    text += f"\n[s1]\n{ALLOW}: c 508:* rwm\n"
    current = parse_conf(text).current
    assert stale_rules(current, {195, 506}) == {508: ("c 508:* rwm",)}
    edit = mend(current, [CARD, UVM, TOOLS], {195, 506})
    after = apply(text, edit)
    assert after == text.replace(f"{ALLOW} = c 508:*", f"{ALLOW}: c 506:*")
    assert apply(after, edit.reverse()) == text.replace(f"{ALLOW} = c", f"{ALLOW}: c")


def test_stale_lines_of_single_minors() -> None:
    text = BASE + f"{ALLOW}: c 195:* rwm\n{ALLOW}: c 508:0 rwm\n"
    edit = mend(parse_conf(text).current, [CARD, UVM, TOOLS], {195, 506})
    assert apply(text, edit) == BASE + (
        f"{ALLOW}: c 195:* rwm\n{ALLOW}: c 506:0 rwm\n{ALLOW}: c 506:1 rwm\n"
    )


@pytest.mark.parametrize(
    ("rules", "majors"),
    [
        # Another driver has that number now: whose the line is cannot be told.
        (f"{ALLOW}: c 508:* rwm\n", {195, 506, 508}),
        # Two old numbers: nor can it here.
        (f"{ALLOW}: c 508:* rwm\n{ALLOW}: c 237:* rwm\n", {195, 506}),
        # A fixed number is never stale.
        (f"{ALLOW}: c 226:* rwm\n", {195, 506}),
    ],
)
def test_lines_that_may_be_another_s_stay(rules: str, majors: set[int]) -> None:
    edit = mend(parse_conf(BASE + rules).current, [UVM], majors)
    assert edit == Edit((f"{ALLOW}: c 506:0 rwm",))


def test_nothing_to_mend() -> None:
    assert not mend(parse_conf(f"{ALLOW}: c 506:* rwm\n").current, [UVM, TOOLS], {506})


def test_the_diff_shows_odd_bytes() -> None:
    before = decode(b"#\xff\nmemory: 512\n")
    assert diff(before, before + "lxc.cap.drop: x\n", "/etc/pve/lxc/129.conf")[-1:] != []
    assert "+lxc.cap.drop: x" in diff(before, before + "lxc.cap.drop: x\n", "/x")


@pytest.mark.parametrize("extra", ["", "digest: abc\n"])
def test_devices_are_set_also_where_a_line_spoils_pct_s_digest(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, extra: str
) -> None:
    lab = load_lab(monkeypatch, tmp_path)
    text = BASE + "ostype: debian\nrootfs: local:101/d.raw\n" + extra
    lab.conf("129").write_text(text)
    action = set_devices(129, text, {0: "/dev/nvidia0"}, "").action
    assert isinstance(action, Shell)
    line = next(one for one in action.script.splitlines() if one.startswith("set -- pct"))
    words = shlex.split(line)[3:]
    assert ("--digest" in words) is (not extra)
    assert lab.run(*words).exit == 0
    assert "dev0: /dev/nvidia0,mode=0666\n" in lab.conf("129").read_text()
