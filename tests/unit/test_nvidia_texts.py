"""Every known text and exit code of the driver has its cause and an action."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from deployer import nvidia_texts

ROWS = [
    tuple(line.split("\t"))
    for line in (Path(__file__).parents[1] / "fixtures/driver/texts.tsv").read_text().splitlines()
    if not line.startswith("#")
]


@pytest.mark.parametrize(("source", "code", "name", "standing", "text"), ROWS)
def test_text_and_code(source: str, code: str, name: str, standing: str, text: str) -> None:
    text = text.replace("\\n", "\n")
    if code == "-":
        cause = nvidia_texts.diagnose(f"[   12.345678] {text}")
    else:
        cause = nvidia_texts.smi_verdict(int(code), text)
    if name == "-":
        assert cause is None
        return
    assert cause is not None, source
    assert (cause.name, cause.standing) == (name, standing == "yes")
    assert cause.cause and cause.action
    assert "{" not in cause.on("kpro5")


def test_every_code_and_sign_has_a_row_that_it_alone_decides() -> None:
    codes = {int(row[1]) for row in ROWS if row[1].isdigit()}
    assert codes >= set(nvidia_texts.EXITS)
    texts = [row[4].replace("\\n", "\n") for row in ROWS]
    first = {
        next((n for n, sign in enumerate(nvidia_texts.SIGNS) if sign.pattern.search(text)), -1)
        for text in texts
    }
    lacking = set(range(len(nvidia_texts.SIGNS))) - first
    assert [nvidia_texts.SIGNS[n].pattern.pattern for n in lacking] == []


def test_each_wording_of_a_sign_has_a_row() -> None:
    """A pattern is alternatives; none of them is there without a text that needs it."""
    texts = [row[4].replace("\\n", "\n") for row in ROWS]
    unused = [
        one
        for sign in nvidia_texts.SIGNS
        for one in alternatives(sign.pattern.pattern)
        if not any(re.search(one, text, re.MULTILINE) for text in texts)
    ]
    assert unused == []


def alternatives(pattern: str) -> list[str]:
    """The parts of a pattern between its outermost bars."""
    parts, depth = [""], 0
    for char in pattern:
        depth += {"(": 1, ")": -1}.get(char, 0)
        if char == "|" and depth == 0:
            parts.append("")
        else:
            parts[-1] += char
    return parts


def test_a_reset_that_was_made_is_no_standing_cause() -> None:
    head = "NVRM: Xid (PCI:0000:0b:00): 154, GPU recovery action changed from"
    asked = f"{head} 0x0 (None) to 0x1 (GPU Reset Required)"
    done = f"{head} 0x1 (GPU Reset Required) to 0x0 (None)"
    assert [cause.name for cause, _ in nvidia_texts.standing([asked])] == ["reset"]
    assert nvidia_texts.standing([asked, done]) == ()
    assert [cause.name for cause, _ in nvidia_texts.standing([done, asked])] == ["reset"]


def test_an_answer_without_end_or_sense() -> None:
    assert nvidia_texts.smi_verdict(0, "", timed_out=True) is nvidia_texts.TIMED_OUT
    strange = nvidia_texts.smi_verdict(99, "\n  strange\n")
    assert strange is not None and "ended with 99: strange" in strange.cause
    assert nvidia_texts.diagnose("NVRM: loading NVIDIA UNIX Open Kernel Module") is None


def test_only_what_holds_until_a_reboot_is_kept() -> None:
    lines = [
        "NVRM: GPU 0000:01:00.0 is already bound to vfio-pci.",
        "NVRM: GPU 0000:02:00.0: RmInitAdapter failed! (0x22:0x56:1017)",
        "NVRM: GPU 0000:02:00.0: RmInitAdapter failed! (0x24:0x72:1568)",
    ]
    ((cause, line),) = nvidia_texts.standing(lines)
    assert cause.name == "init-failed"
    assert line == lines[-1]


OLD = """\
[  100.1] NVRM: API mismatch: the client has the version 570.148.08, but
[  100.1] NVRM: this kernel module has the version 570.148.06.  Please
[  100.1] NVRM: make sure that this kernel module and all NVIDIA driver
[  100.1] NVRM: components have the same version.
"""
NEW = """\
[  200.5] NVRM: API mismatch: the client 'kwin_wayland' (pid 1005)
[  200.5] NVRM: has the version 595.84, but this kernel module has
[  200.5] NVRM: the version 595.45.04.  Please make sure that this
[  200.5] NVRM: kernel module and all NVIDIA driver components
"""
SHORT = """\
NVRM: API mismatch: the client 'nvidia-smi' (pid 77) has the version 580.95.05, but this kernel \
module has the version 580.126.09
"""


def test_both_wordings_of_an_api_mismatch() -> None:
    first, second, third = nvidia_texts.api_mismatches(OLD + "other: line\n" + NEW + SHORT)
    assert first == nvidia_texts.ApiMismatch("570.148.08", "570.148.06")
    assert second == nvidia_texts.ApiMismatch("595.84", "595.45.04", "kwin_wayland", 1005)
    assert third == nvidia_texts.ApiMismatch("580.95.05", "580.126.09", "nvidia-smi", 77)
    assert nvidia_texts.api_mismatches("NVRM: API mismatch: the client") == ()
