"""The envelope of remote commands: text only, and through the shells of this machine."""

from __future__ import annotations

import os
import shutil
import subprocess
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deployer.remote.framing import AnswerParser, StreamParser, encode, frame

SHELLS = [["dash"], ["bash", "--posix"], ["busybox", "sh"]]
EXTRA_SHELLS = [name for name in ("fish", "tcsh", "zsh") if shutil.which(name)]


def run(framed, shell=("dash",), env=None, before=b""):
    """What a login shell makes of the command line."""
    process = subprocess.run(
        [*shell, "-c", framed.command],
        input=framed.stdin,
        capture_output=True,
        env={} if env is None else env,
        timeout=20,
    )
    parser = AnswerParser(framed.mark)
    parser.out.feed(before + process.stdout)
    parser.err.feed(process.stderr)
    return parser


@pytest.fixture(params=[100 * 1024, 0], ids=["argument", "stdin"])
def limit(request):
    return request.param


@pytest.mark.parametrize("shell", [*SHELLS, *[[name] for name in EXTRA_SHELLS]], ids=" ".join)
def test_every_login_shell_hands_over_script_args_and_stdin_unchanged(shell, limit):
    script = "printf '%s|' \"$@\"\ncat\nprintf 'e\\\\n!rr' >&2\nexit 7\n"
    args = ("a'b", "$(touch x)", "line\nbreak\n", "käse", "`id`; rm", "!!", "\\", "")
    answer = run(frame(script, args, b"\0\xff\nno end", argument_limit=limit), shell).answer()
    assert answer.stdout == "|".join((*args, "")).encode() + b"\0\xff\nno end"
    assert answer.stderr == b"e\\n!rr"
    assert answer.exit == 7


@pytest.mark.parametrize(
    ("script", "status"),
    [
        ("exit 3", 3),
        ("kill -KILL $$", 137),
        ("kill -TERM $$", 143),
        ("kill -TERM 0", 143),
        ("set -e; false; echo no", 1),
        ("nonsense-command", 127),
        ("", 0),
        ("exec sh -c 'exit 9'", 9),
        ("# a comment", 0),
    ],
)
def test_the_exit_status_survives_every_way_to_end(script, status, limit):
    framed = frame(script, argument_limit=limit)
    process = subprocess.run(
        ["dash", "-c", framed.command],
        input=framed.stdin,
        capture_output=True,
        start_new_session=True,
        timeout=20,
    )
    parser = AnswerParser(framed.mark)
    parser.out.feed(process.stdout)
    parser.err.feed(process.stderr)
    assert parser.answer().exit == status
    assert parser.answer().stdout == b""


def test_a_syntax_error_is_the_scripts_own(limit):
    answer = run(frame("if then", argument_limit=limit)).answer()
    assert answer.exit == 2
    assert b"yntax error" in answer.stderr


@pytest.mark.parametrize("env", [{}, {"PATH": ""}, {"PATH": "/nowhere", "LC_ALL": "de_DE"}])
def test_path_locale_and_home_are_always_set(env):
    script = 'printf "%s %s %s %s" "$PATH" "$LC_ALL" "$HOME" "$(pwd)"'
    assert run(frame(script), ("/bin/dash",), env).answer().text == (
        "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin C /root /"
    )


def test_home_of_the_session_is_kept():
    assert run(frame('echo "$HOME"'), env={"HOME": "/srv/me"}).answer().text == "/srv/me\n"


def test_a_script_that_prints_its_own_command_line_does_not_close_its_frame():
    answer = run(frame("cat /proc/$PPID/cmdline /proc/$$/cmdline; echo done")).answer()
    assert answer.text.endswith("done\n")
    assert ":end:" in answer.text


def test_a_script_longer_than_an_argument_keeps_stdin_to_itself():
    script = "cat\n" + "".join(f": {number}\n" for number in range(40_000)) + "echo last\n"
    framed = frame(script, ("x",), b"data")
    assert max(map(len, framed.argv)) < 2000
    assert run(framed).answer().stdout == b"datalast\n"


def test_no_stdin_is_end_of_file(limit):
    assert run(frame("cat; echo end", argument_limit=limit)).answer().text == "end\n"


def test_background_children_do_not_delay_the_marks():
    framed = frame("sleep 5 & echo here")
    process = subprocess.Popen(
        ["dash", "-c", framed.command], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    started = time.monotonic()
    parser = StreamParser(framed.mark)
    while not parser.complete:
        parser.feed(process.stdout.read1(100))
    assert parser.payload == b"here\n"
    assert time.monotonic() - started < 3
    process.stdout.close()
    process.stderr.close()
    process.wait()


def test_noise_before_and_after_is_left_out():
    parser = StreamParser(b"feed")
    parser.feed(b"motd\xff\nfeed:begin;an fee swer\n\nfeed:end:12;bye feed:end:0;")
    assert (parser.payload, parser.exit) == (b"an fee swer\n\n", 12)
    assert parser.noise == b"motd\xff\n"


def test_bytes_are_handed_on_as_soon_as_they_cannot_be_the_mark():
    parser = StreamParser(b"beef")
    assert parser.feed(b"beef:beg") == b""
    assert parser.feed(b"in;x") == b"x"
    assert parser.feed(b"one line\n") == b"one line\n"
    assert parser.feed(b"rest be") == b"rest "
    assert parser.feed(b"e") == b""
    assert parser.feed(b"tle") == b"beetle"
    assert parser.feed(b"beef:end:1") == b""
    assert not parser.complete
    assert parser.feed(b"4;") == b""
    assert parser.exit == 14


def test_an_answer_is_complete_only_with_both_marks():
    parser = AnswerParser(b"m")
    parser.out.feed(b"m:begin;x\nm:end:0;")
    assert not parser.complete
    with pytest.raises(ValueError):
        parser.answer()
    parser.err.feed(b"oops\nm:begin;half")
    assert parser.evidence() == ("x", "half")
    parser.err.feed(b"m:end:0;")
    assert parser.answer().stderr == b"half"


def test_nul_is_refused():
    with pytest.raises(ValueError):
        frame("a\0b")
    with pytest.raises(ValueError):
        frame("a", ("b\0",))


def test_undecodable_file_names_travel_as_their_bytes():
    name = os.fsdecode(b"caf\xe9")
    assert run(frame('printf %s "$1"', (name,))).answer().stdout == b"caf\xe9"
    with pytest.raises(ValueError):
        frame("\ud800")


@given(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])))
def test_encoded_text_has_nothing_that_a_login_shell_could_touch(text):
    encoded = encode(text)
    assert encoded.isascii()
    assert not set("'!\n\r\t") & set(encoded)
    assert "\\\\" not in encoded


@settings(max_examples=60)
@given(st.binary(max_size=400), st.integers(0, 255), st.integers(1, 9))
def test_any_cut_of_the_stream_gives_the_same_payload(payload, status, size):
    mark = b"c0ffee"
    stream = b"noise " + mark + b":begin;" + payload + mark + b":end:%d;" % status
    parser = StreamParser(mark)
    pieces = [parser.feed(stream[at : at + size]) for at in range(0, len(stream), size)]
    assert b"".join(pieces) == parser.payload == payload
    assert parser.exit == status
