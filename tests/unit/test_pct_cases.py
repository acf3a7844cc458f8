"""Every recorded observation of the real `pct`: what it reads, what it writes, what it says.

Beside them stand derived ones (fixtures/pct/derived.jsonl): pct's rules, read in its source, run in
Perl over odd files; that model gave the recorded answers (but for what making LXC's own file says)
before it was believed. Three things are held to all of them: our parser (deployer/pct_config.py),
and the lab's `pct` (docker/host/lab), both as a writer and as a command. Each case stands in one
class below; a case of no class fails `test_no_case_is_forgotten`.
"""

from __future__ import annotations

import base64
import json
import re
import shlex
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from deployer.pct_config import Section, decode, encode, parse_conf
from deployer.pct_keys import NO_KEYS
from tests.unit.pctlab import PctLab, argv_of, load_lab

FIXTURES = Path(__file__).parents[1] / "fixtures" / "pct"
RECORDED = Path(__file__).parents[3] / "shared" / "field" / "pct-cases"

FILE_SYSTEM = {
    "g01": "mode and owner of pmxcfs: no other can be set, so our edits set none",
    "g02": "chmod is refused there: our edit script calls none",
    "g04": "chown is refused there: our edit script calls none",
    "g05": "chown to what it is: our edit script calls none",
    "g06": "times are kept: we do not read them",
    "g08": "no hard links there: we make none",
    "g09": "a copy beside the conf: our copies lie elsewhere",
    "g10": "the same, seen by pct list",
    "g12": "temp file and rename: what our edit script does (test_step_container_edit.py)",
    "g13": "mv from another file system: we write the temp file in the same folder",
    "g14": "install fails there: we do not call it",
    "g16": "append: we never do; b37 and b38 show why",
    "g17": "overwrite in place is not atomic: we rename",
    "g18": "writing in the middle: we never do",
    "g20": "500 kB fit: the limit of 1 MiB is checked before an edit",
    "g21": "an id that a VM has cannot be taken: create looks first",
    "g22": "an id that another node has cannot be taken: create looks first",
    "g24": "a flock on the conf itself works but pct takes another: we take pct's",
    "g29": "files of no id: pct list leaves them out, and so do we",
    "g30": "pct set without a change writes all the same: digests are taken after, not before",
    "g31": "fsync works there",
    "g33": "replace from Python: the same as g12",
    "g34": "copied modes are ignored there",
    "g35": "0101.conf is no container",
}
"""Observations of the file system /etc/pve, not of pct: the reason why none runs here."""
DIGEST_OF_PERL = {"e25": "the digest is the sha1 of the bytes: test_digest_is_over_the_bytes"}
NO_MATTER = ("echo rc=$?", "mkdir ", "flock ", "wait", "ls ", "cat ", "sleep ")
"""Beside pct: marks, what holds its lock, and looks into the real container."""


@cache
def cases() -> dict[str, dict[str, Any]]:
    """All cases at hand, by id: our own copies, then the recorded ones."""
    paths = {path.stem: path for path in sorted(RECORDED.glob("[a-h]*.json"))}
    paths.update({path.stem: path for path in sorted(FIXTURES.glob("*.json"))})
    own = [json.loads(line) for line in (FIXTURES / "cases.jsonl").read_text().splitlines()]
    found = {case["id"]: case for case in own}
    found.update({case["id"]: case for case in derived()})
    found.update({name: json.loads(path.read_text()) for name, path in paths.items()})
    return dict(sorted(found.items()))


def derived() -> list[dict[str, Any]]:
    """The derived cases, with what is usual put in."""
    made = []
    for line in (FIXTURES / "derived.jsonl").read_text().splitlines():
        case = json.loads(line)
        if "conf_after" not in case:
            case |= {
                f"conf_after{k}": case[f"conf_before{k}"]
                for k in ("", "_b64")
                if f"conf_before{k}" in case
            }
        usual = {"stdout": "", "stderr": "", "exit_code": 0}
        made.append({"conf_path": "/etc/pve/lxc/101.conf", **usual, **case})
    return made


def group(name: str) -> str:
    """`b37` of `b37-append-after-snapshot-set`."""
    return name.split("-")[0]


def kind(name: str) -> str:
    """The class of a case."""
    command = cases()[name]["command"]
    if group(name) in FILE_SYSTEM or (name[0] == "g" and not asks_pct(command)):
        return "file system"
    if group(name) in DIGEST_OF_PERL or command.startswith("perl "):
        return "digest"
    if re.fullmatch(r"pct config \d+( --current| --snapshot [\w-]+)?", command):
        return "config"
    return "pct" if "pct " in command else ""


def asks_pct(command: str) -> bool:
    """Whether pct is asked and no other program changes the file."""
    others = [one for one in commands(command) if not one.startswith(("pct ", *NO_MATTER))]
    return "pct " in command and not others


def commands(command: str) -> list[str]:
    """The commands of a line, one after the other."""
    parts = re.findall(r"(?:'[^']*'|\"[^\"]*\"|[^;'\"])+", command)
    return [part.strip() for part in parts if part.strip()]


def of_kind(*kinds: str) -> list[str]:
    """The names of all recorded cases of these classes."""
    return [name for name in cases() if kind(name) in kinds and not is_derived(name)]


def is_derived(name: str) -> bool:
    """Those run in a few tests together: there are hundreds of them."""
    return name.startswith("x")


def all_derived(check: Callable[[str], None], *kinds: str) -> None:
    """`check` of every derived case of these classes; all that failed are told."""
    names = [name for name in cases() if is_derived(name) and kind(name) in kinds]
    assert len(names) > 100
    failed = []
    for name in names:
        try:
            check(name)
        except AssertionError as error:
            failed.append(f"{name} {cases()[name]['conf_before'][-60:]!r}: {str(error)[:300]}")
    assert failed == []


def raw(case: dict[str, Any], key: str) -> bytes:
    """A text of a case as bytes."""
    if encoded := case.get(f"{key}_b64"):
        return base64.b64decode(encoded)
    return str(case[key] or "").encode()


def test_no_case_is_forgotten() -> None:
    assert [name for name in cases() if not kind(name)] == []


def test_all_recorded_cases_are_at_hand() -> None:
    if not any(RECORDED.glob("*.json")):
        pytest.skip(f"{RECORDED} is not here: only the {len(cases())} cases of our own ran")
    assert len(cases()) >= 276
    unused = {*FILE_SYSTEM, *DIGEST_OF_PERL} - {group(name) for name in cases()}
    assert unused == set()


def printed(section: Section) -> bytes:
    """As `pct config` prints a section."""
    keys = dict(section.keys)
    if section.description:
        # pct's own safe set.
        keys["description"] = "".join(
            chr(byte) if 32 <= byte <= 126 and byte not in b"%:" else f"%{byte:02X}"
            for byte in section.description.encode()
        )
    lines = [f"{key}: {keys[key]}\n" for key in sorted(keys)]
    return encode("".join(lines) + "".join(f"{key}: {value}\n" for key, value in section.raw))


def seen(name: str) -> Section:
    """What our parser sees of what `pct config` shows."""
    case = cases()[name]
    config = parse_conf(decode(raw(case, "conf_before")))
    command = case["command"]
    if "--snapshot" in command:
        return config.snapshots.get(command.split()[-1], Section())
    return config.current if "--current" in command else config.shown()


@pytest.mark.parametrize("name", of_kind("config"))
def test_our_parser_sees_what_pct_prints(name: str) -> None:
    check_sight(name)


def test_our_parser_sees_what_pct_prints_of_derived_cases() -> None:
    all_derived(check_sight, "config")


def check_sight(name: str) -> None:
    """Our parser against what `pct config` says."""
    case = cases()[name]
    if case["exit_code"] == 0:
        assert printed(seen(name)) == raw(case, "stdout")
        return
    # pct reads the file and then refuses to print a value of it: we must have that very value.
    for key in re.findall(r"unable to parse value of '(\w+)'", case["stderr"]):
        if key not in NO_KEYS:
            line = f"{key}: {seen(name).keys[key]}"
            assert line in re.sub(r":[ \t]+", ": ", decode(raw(case, "conf_before")))


@pytest.mark.parametrize(
    "name",
    [name for name in of_kind("config", "pct") if cases()[name]["conf_before"] is not None],
)
def test_our_parser_ignores_what_pct_ignores(name: str) -> None:
    check_ignored(name)


def test_our_parser_ignores_what_pct_ignores_in_derived_cases() -> None:
    all_derived(check_ignored, "config", "pct")


def check_ignored(name: str) -> None:
    """Our parser against what pct says that it cannot read."""
    case = cases()[name]
    text = decode(raw(case, "conf_before"))
    ignored = parse_conf(text).ignored
    if "CT is locked" in case["stderr"] or "parameter" in case["stderr"].lower():
        return  # pct ended before it read the file, or said only that
    told = raw(case, "stderr" if "snapshot" not in case["command"] else "stdout")
    form = rb"vm \d+ - (?:unable to parse config: (.*)|(lxc\.rootfs\.(?:path|options)): .*)$"
    said = [line or key for line, key in re.findall(form, told, re.MULTILINE)]
    mine = [
        encode(re.sub(r"^(lxc\.rootfs\.(path|options)).*", r"\1", line))
        for line in ignored
        # What pct tells of these is no line of this form.
        if not re.match(r"delete:\s*\S|digest:", line)
    ]
    assert [line.rstrip() for line in mine] == [line.rstrip() for line in dict.fromkeys(said)]


@pytest.fixture
def lab(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> PctLab:
    return load_lab(monkeypatch, tmp_path)


def run_case(lab: PctLab, name: str) -> tuple[int, bytes, bytes]:
    """Exit code, stdout and stderr of a case's commands; looks into the real container say nothing.

    What a case had run before belongs to its set-up.
    """
    case = cases()[name]
    for command in commands(case.get("setup") or ""):
        if command.startswith("pct "):
            lab.run(*argv_of(command)[1:])
    out, err, code = b"", b"", 0
    for command in commands(case["command"]):
        command, _, wanted = command.partition(" | grep ")
        if command == "echo rc=$?":
            out, code = out + f"rc={code}\n".encode(), 0
        elif command.startswith("pct "):
            words = argv_of(command) if "$" in command else shlex.split(command)
            said = lab.run(*words[1:])
            lines = said.stdout.splitlines(keepends=True)
            out += b"".join(line for line in lines if wanted.encode() in line)
            err, code = err + said.stderr, said.exit
        else:
            assert command.startswith(NO_MATTER), command
    return code, out, err


def set_up(lab: PctLab, case: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Path:
    vmid = Path(case["conf_path"]).stem
    if case["conf_before"] is not None:
        lab.conf(vmid).write_bytes(raw(case, "conf_before"))
    if vmid == "102":
        lab.running.add(vmid)
    snippets = lab.root / "vz/snippets"
    snippets.mkdir(parents=True, exist_ok=True)
    for file, mode in (("hook.sh", 0o755), ("hook2.sh", 0o644)):
        (snippets / file).write_text("#!/bin/sh\n")
        (snippets / file).chmod(mode)
    monkeypatch.setattr(lab.modules["ctdisk"], "STORAGES", ("local",))
    return lab.conf(vmid)


def plain(text: str, *, sort: bool) -> list[str]:
    """Lines without what differs from run to run."""
    text = re.sub(r"snaptime: \d+", "snaptime: N", text)
    lines = text.replace("/etc/pve/", "").splitlines()
    return sorted(lines) if sort else lines


@pytest.mark.parametrize(
    "name", [name for name in of_kind("config", "pct") if group(name) not in ("g25", "g26")]
)
def test_the_lab_s_pct_answers_as_recorded(
    lab: PctLab, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_lab(lab, name, monkeypatch)


def test_the_lab_s_pct_answers_as_derived(lab: PctLab, monkeypatch: pytest.MonkeyPatch) -> None:
    all_derived(lambda name: check_lab(lab, name, monkeypatch), "config", "pct")


def check_lab(lab: PctLab, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lab's pct against a case: what it prints, its exit code, what it leaves."""
    case = cases()[name]
    conf = set_up(lab, case, monkeypatch)
    code, out, err = run_case(lab, name)
    recorded_out = raw(case, "stdout").decode("utf-8", "replace")
    if re.search(r"; (ls|cat) ", case["command"]):
        recorded_out = "".join(re.findall(r"rc=\d+\n", recorded_out))
    # The order of several errors comes from a hash in Perl.
    assert plain(err.decode("utf-8", "replace"), sort=True) == plain(
        raw(case, "stderr").decode("utf-8", "replace"), sort=True
    )
    assert plain(out.decode("utf-8", "replace"), sort=False) == plain(recorded_out, sort=False)
    assert code == case["exit_code"] or "; echo rc" in case["command"]
    if case["conf_after"] is not None:
        after = decode(raw(case, "conf_after"))
        assert plain(decode(conf.read_bytes()), sort=False) == plain(after, sort=False)


def test_a_held_lock_is_waited_for_and_told(lab: PctLab, monkeypatch: pytest.MonkeyPatch) -> None:
    import fcntl

    lab.conf().write_text("memory: 512\n")
    monkeypatch.setattr(lab.modules["ctconf"], "LOCK_WAIT_S", 0.05)
    (lab.root / "locks").mkdir()
    with (lab.root / "locks/pve-config-101.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        said = lab.run("set", "101", "--memory", "1024")
        assert lab.run("config", "101").exit == 0  # g26: reading takes no lock
    assert said.exit == 4
    name = f"{lab.root}/locks/pve-config-101.lock"
    assert said.stderr.decode() == (
        f"trying to acquire lock...\ncan't lock file '{name}' - got timeout\n"
    )


def test_digest_is_over_the_bytes(lab: PctLab) -> None:
    lab.conf().write_bytes(b"#\xff\r\nmemory: 512")
    digest = lab.modules["ctconf"].digest("101")
    assert lab.run("set", "101", "--memory", "600", "--digest", "0" * 40).exit == 255
    said = lab.run("set", "101", "--memory", "600", "--digest", digest)
    assert b"detected modified" not in said.stderr
