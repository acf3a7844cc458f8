"""One contract, two transports, against real OpenSSH servers on loopback.

`pct` is a shim here: it shows its own refusals and runs the rest with an almost empty environment.
"""

from __future__ import annotations

import contextlib
import shutil
import signal
import socket
import subprocess
import threading
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from deployer import errors
from deployer.inventory import Container, Ssh
from deployer.remote import hostkeys, trust
from deployer.remote.connect import open_guest, open_host
from deployer.remote.pct import ContainerMissing, ContainerStopped, PctTransport
from deployer.shell import quote
from tests.container import sshd as servers

pytestmark = [
    pytest.mark.container,
    pytest.mark.skipif(bool(servers.WHY_NOT), reason=servers.WHY_NOT or "-"),
]

PCT = """#!/bin/sh
[ "$1" = exec ] && [ "$3" = -- ] || { echo "400 not enough arguments" >&2; exit 255; }
id=$2
shift 3
case $id in
    130) echo "container '130' not running!" >&2; exit 255 ;;
    131) echo "Configuration file 'nodes/kpro5/lxc/131.conf' does not exist" >&2; exit 2 ;;
    132) kill -9 $$ ;;
esac
exec env -i PATH=/sbin:/bin:/usr/sbin:/usr/bin "$@"
"""

NOISE = 'echo "Welcome!"; printf "no newline \\377"; echo "a warning" >&2\n'
RUN = 'exec /bin/bash -c "$SSH_ORIGINAL_COMMAND"'


class WithPct:
    """A host transport on whose PATH the shim lies."""

    def __init__(self, inner, folder):
        self.inner = inner
        self.folder = folder
        self.name = inner.name

    def run(self, script, **options):
        return self.inner.run(f"PATH={quote(str(self.folder))}:$PATH\n{script}", **options)

    def close(self):
        self.inner.close()


def ssh_entry(server, **changes):
    """The inventory entry of a test server."""
    values = {
        "address": "127.0.0.1",
        "port": server.port,
        "user": server.user,
        "identity_file": str(server.user_key),
        "known_hosts": str(server.known_hosts),
        "connect_timeout_s": 10.0,
    }
    return Ssh(**{**values, **changes})


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return tmp_path_factory.mktemp("sshd")


@pytest.fixture(scope="module")
def plain(base):
    server = servers.start_sshd(base / "plain", bashrc="#")
    yield server
    server.stop()


@pytest.fixture(scope="module")
def noisy(base):
    banner = base / "banner"
    banner.write_text("AUTHORISED USE ONLY\n")
    server = servers.start_sshd(
        base / "noisy",
        options=(f"Banner {banner}", "SetEnv LC_ALL=xx_XX.UTF-8 LANG=xx_XX LANGUAGE=xx"),
        bashrc=NOISE,
    )
    yield server
    server.stop()


@pytest.fixture(scope="module")
def pct_folder(base):
    folder = base / "bin"
    folder.mkdir()
    (folder / "pct").write_text(PCT)
    (folder / "pct").chmod(0o755)
    return folder


@pytest.fixture
def opened():
    """Transports to close at the end."""
    found = []
    yield found
    for transport in found:
        transport.close()


@pytest.fixture
def connect(opened, base, pct_folder):
    def make(server, kind="ssh", **changes):
        transport = open_host("box", ssh_entry(server, **changes), base)
        opened.append(transport)
        if kind == "pct":
            return PctTransport(WithPct(transport, pct_folder), 129, "box/129")
        return transport

    return make


@pytest.fixture(params=["ssh", "pct"])
def kind(request):
    return request.param


@pytest.fixture(params=["plain", "noisy"])
def target(request, connect, kind):
    return connect(request.getfixturevalue(request.param), kind)


def test_streams_arguments_and_status(target):
    answer = target.run('printf "%s|" "$@"; echo oops >&2; exit 5', args=("a b", "", "$HOME"))
    assert (answer.exit, answer.stdout, answer.stderr) == (5, b"a b||$HOME|", b"oops\n")


def test_no_output_at_all(target):
    answer = target.run("true")
    assert (answer.exit, answer.stdout, answer.stderr) == (0, b"", b"")


def test_binary_stdin_comes_back_unchanged(target):
    data = bytes(range(256)) * 4000 + b"no newline"
    assert target.run("cat", stdin=data).stdout == data


def test_stdin_is_at_its_end_when_there_is_none(target):
    assert target.run("cat; wc -c", timeout_s=10).text.strip() == "0"


def test_a_script_that_does_not_read_its_stdin(target):
    assert target.run("echo early", stdin=b"x" * 5_000_000, timeout_s=20).text == "early\n"


def test_fifty_megabytes_of_stdin(target):
    answer = target.run("wc -c", stdin=b"x" * 50_000_000, timeout_s=60)
    assert answer.text.strip() == "50000000"


@pytest.mark.parametrize("status", [0, 1, 2, 126, 127, 255])
def test_exit_codes(target, status):
    assert target.run(f"exit {status}").exit == status


@pytest.mark.parametrize("name", ["KILL", "TERM", "HUP", "INT", "SEGV"])
def test_a_signal_is_128_plus_its_number(target, name):
    answer = target.run(f"echo before; kill -{name} $$")
    assert answer.exit == 128 + getattr(signal, f"SIG{name}")
    assert answer.stdout == b"before\n"


def test_ten_megabytes_on_both_streams_at_once(target):
    script = (
        "head -c 10485760 /dev/zero >&2 & head -c 10485760 /dev/zero | tr '\\0' x; wait; exit 4"
    )
    answer = target.run(script, timeout_s=60)
    assert answer.exit == 4
    assert answer.stdout == b"x" * 10485760
    assert answer.stderr == b"\0" * 10485760


def test_two_busy_streams_never_stall(plain, connect):
    # With the channel's own fileno() about one run in twelve crept on at 256 KiB a second.
    target = connect(plain)
    for _ in range(30):
        started = time.monotonic()
        answer = target.run(
            "head -c 6000000 /dev/zero >&2 & head -c 6000000 /dev/zero; wait", timeout_s=60
        )
        assert len(answer.stdout) == len(answer.stderr) == 6_000_000
        assert time.monotonic() - started < 6


def test_stderr_beyond_the_window_does_not_block_stdout(target):
    answer = target.run("head -c 40000000 /dev/zero >&2; echo done", timeout_s=60)
    assert answer.text == "done\n"
    assert len(answer.stderr) == 40_000_000


def test_output_that_is_no_utf8_and_utf8_cut_anywhere(target):
    assert target.run(r"printf '\377\376\0x'").stdout == b"\xff\xfe\0x"
    assert (
        target.run("i=0; while [ $i -lt 9000 ]; do printf €; i=$((i+1)); done").text == "€" * 9000
    )


def test_environment_is_the_same_everywhere(target):
    text = target.run('echo "$PATH|$LC_ALL|${LANGUAGE-unset}|$(pwd)|$(umask)"; command -v sh').text
    path, locale, language, folder, umask = text.splitlines()[0].split("|")
    assert path.endswith("/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin")
    assert (locale, language, folder, umask) == ("C", "unset", "/", "0022")


def test_locale_noise_is_no_stderr(target):
    assert target.run("bash -c true; ls /").stderr == b""


@pytest.mark.parametrize(
    "script",
    [
        "nohup sleep 30 & echo started",
        "sleep 30 >/dev/null & echo started",
        "setsid sleep 30 & echo started",
        "sleep 30 2>/dev/null & echo started",
    ],
)
def test_a_background_child_on_the_channel_does_not_hold_the_answer(target, script):
    started = time.monotonic()
    answer = target.run(script + "\necho $! >&2", timeout_s=20)
    assert answer.text.endswith("started\n")
    assert time.monotonic() - started < 8
    # It lives on: what was started is not killed with its channel.
    child = int(answer.error_text.split()[-1])
    assert target.run(f"kill -0 {child} && kill {child}").exit == 0


def test_output_arrives_as_it_is_written(target):
    seen = []
    started = time.monotonic()

    def on_stdout(data):
        seen.append((time.monotonic() - started, data))

    answer = target.run("echo one; sleep 1.5; echo two", on_stdout=on_stdout)
    assert b"".join(data for _, data in seen) == answer.stdout == b"one\ntwo\n"
    first = next(at for at, data in seen if data.startswith(b"one"))
    assert seen[-1][0] - first > 1.0


def test_scripts_longer_than_an_argument(target):
    script = "".join(f"v{number}='{number} it''s'\n" for number in range(20_000))
    answer = target.run(script + 'cat; echo " $v19999 $1"', args=("x",), stdin=b"in")
    assert answer.text == "in 19999 its x\n"


def test_the_deadline_holds_and_the_next_command_works(target):
    started = time.monotonic()
    with pytest.raises(errors.DeadlineExceeded, match="box") as caught:
        target.run("echo last words; sleep 30", timeout_s=1.0)
    assert 0.9 < time.monotonic() - started < 4
    assert "last words" in "".join(caught.value.evidence)
    assert target.run("echo again").text == "again\n"


def test_an_answer_without_its_end_mark_is_lost(target):
    # The whole frame dies with the script.
    with pytest.raises(errors.ConnectionLost) as caught:
        target.run("echo half; kill -9 $PPID; sleep 1", timeout_s=20)
    assert "half" in "".join(caught.value.evidence)
    assert target.run("echo alive").text == "alive\n"


def test_a_bad_callback_is_the_callers_error(target):
    def broken(_):
        raise KeyError("mine")

    with pytest.raises(KeyError):
        target.run("echo x; sleep 0.2", on_stdout=broken)
    assert target.run("echo on").text == "on\n"


hostile = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=60)
nasty = st.sampled_from(
    [
        "$(touch {0})",
        "`touch {0}`",
        "; touch {0};",
        "'; touch {0}; '",
        '"; touch {0}; "',
        "\n touch {0} \n",
        "| touch {0}",
        "&& touch {0} &",
        "-rf",
        "--",
        "!!",
        "\\",
        "'",
        '"',
        "*",
        "~root",
        "${HOME}",
        "%s%n\\c",
        "käse € \U0001f600",
        "\r\n\t\x01\x7f",
        "trailing\n\n",
    ]
)


@pytest.fixture(scope="module", params=["ssh", "pct"])
def lasting(request, plain, base, pct_folder):
    """One transport for all examples of a property."""
    transport = open_host("box", ssh_entry(plain), base)
    yield (
        transport
        if request.param == "ssh"
        else PctTransport(WithPct(transport, pct_folder), 129, "box/129")
    )
    transport.close()


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(words=st.lists(hostile | nasty, max_size=6), data=st.binary(max_size=200))
def test_hostile_arguments_come_back_byte_for_byte_and_nothing_runs(lasting, base, words, data):
    trap = base / "it-ran"
    args = [word.replace("{0}", str(trap)) for word in words]
    answer = lasting.run('cat; for word do printf "%s\\0" "$word"; done', args=args, stdin=data)
    expected = data + b"".join(word.encode() + b"\0" for word in args)
    assert answer.stdout == expected
    assert answer.stderr == b""
    assert not trap.exists()


@pytest.mark.parametrize(
    "login",
    [
        NOISE + RUN,
        'PATH= exec /bin/bash -c "$SSH_ORIGINAL_COMMAND"',
        'exec env -u PATH -u HOME /bin/bash -c "$SSH_ORIGINAL_COMMAND"',
        'exec env -i /bin/dash -c "$SSH_ORIGINAL_COMMAND"',
        'exec busybox sh -c "$SSH_ORIGINAL_COMMAND"',
        "yes 'much noise' | head -c 3000000\n" + RUN,
        "trap '' HUP INT TERM\n" + RUN,
    ],
    ids=["noise", "PATH empty", "PATH unset", "no environment", "ash", "3 MB noise", "traps"],
)
def test_odd_logins(login, kind, connect, tmp_path):
    server = servers.start_sshd(tmp_path / "odd", login=login)
    try:
        target = connect(server, kind)
        answer = target.run('cat; echo "$HOME $1"; ls / >/dev/null', args=("ä",), stdin=b"\xff")
        assert answer.exit == 0
        assert answer.stdout.startswith(b"\xff/")
        assert answer.stdout.endswith(" ä\n".encode())
        assert answer.stderr == b""
    finally:
        server.stop()


def test_a_login_shell_that_refuses_is_told(connect, tmp_path):
    login = 'echo "This account is currently not available."; exit 1'
    server = servers.start_sshd(tmp_path / "nologin", login=login)
    try:
        with pytest.raises(errors.ConnectionLost, match="status 1") as caught:
            connect(server).run("true")
        assert "not available" in "".join(caught.value.evidence)
    finally:
        server.stop()


def test_max_sessions_one_allows_command_after_command(kind, connect, tmp_path):
    server = servers.start_sshd(tmp_path / "one", options=("MaxSessions 1",), bashrc="#")
    try:
        target = connect(server, kind)
        for number in range(8):
            assert target.run(f"echo {number}").text == f"{number}\n"
        assert server.log.count("Accepted publickey") == 1
    finally:
        server.stop()


def test_all_commands_share_one_connection(plain, connect):
    before = plain.log.count("Accepted publickey")
    target = connect(plain)
    assert plain.log.count("Accepted publickey") == before
    for _ in range(5):
        target.run("true")
    assert plain.log.count("Accepted publickey") == before + 1


def test_a_connection_that_died_in_between_is_made_again(plain, connect):
    proxy = servers.Proxy(plain.port)
    target = connect(plain, known_hosts=known_at(plain, proxy.port), port=proxy.port)
    assert target.run("echo 1").text == "1\n"
    proxy.fin()
    deadline = time.monotonic() + 5
    while target._transport.is_active() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert target.run("echo 2").text == "2\n"
    proxy.close()


def known_at(server, port, folder=None):
    """A known_hosts file with the server's key under another port."""
    text = server.known_hosts.read_text().replace(f":{server.port} ", f":{port} ")
    path = (folder or server.folder) / f"known_hosts_{port}"
    path.write_text(text)
    return str(path)


@pytest.mark.parametrize("how", ["fin", "rst"])
def test_a_connection_cut_in_the_middle_of_an_answer(how, kind, plain, connect):
    proxy = servers.Proxy(plain.port)
    target = connect(plain, kind, known_hosts=known_at(plain, proxy.port), port=proxy.port)
    seen = threading.Event()
    threading.Thread(target=lambda: seen.wait(20) and getattr(proxy, how)(), daemon=True).start()
    started = time.monotonic()
    with pytest.raises(errors.ConnectionLost, match="box") as caught:
        target.run("echo part; sleep 30", timeout_s=25, on_stdout=lambda _: seen.set())
    assert time.monotonic() - started < 10
    assert "part" in "".join(caught.value.evidence)
    assert target.run("echo back").text == "back\n"
    proxy.close()


def test_a_frozen_peer_ends_at_our_deadline(kind, plain, connect):
    with servers.frozen_proxy(plain.port) as (port, process):
        target = connect(plain, kind, known_hosts=known_at(plain, port), port=port)
        target.run("true")
        process.send_signal(signal.SIGSTOP)
        started = time.monotonic()
        with pytest.raises(errors.DeadlineExceeded, match="box"):
            target.run("echo never", timeout_s=1.5, stdin=b"x" * 3_000_000)
        assert time.monotonic() - started < 5
        process.send_signal(signal.SIGCONT)
        assert target.run("echo thawed").text == "thawed\n"


def test_a_peer_that_freezes_while_answering(plain, connect):
    with servers.frozen_proxy(plain.port) as (port, process):
        target = connect(plain, known_hosts=known_at(plain, port), port=port)
        started = time.monotonic()
        with pytest.raises(errors.DeadlineExceeded) as caught:
            target.run(
                "echo hello; sleep 1; echo more",
                timeout_s=2.5,
                on_stdout=lambda _: process.send_signal(signal.SIGSTOP),
            )
        assert time.monotonic() - started < 6
        assert "hello" in "".join(caught.value.evidence)


@contextlib.contextmanager
def packets_dropped(port):
    """No packet from or to this port of loopback arrives any more."""
    rules = [
        ["INPUT", "-i", "lo", "-p", "tcp", side, str(port), "-j", "DROP"]
        for side in ("--dport", "--sport")
    ]
    done = []
    try:
        for rule in rules:
            made = subprocess.run(["iptables", "-w", "5", "-I", *rule], capture_output=True)
            if made.returncode != 0:
                pytest.skip(f"iptables: {made.stderr.decode(errors='replace').strip()}")
            done.append(rule)
        yield
    finally:
        for rule in done:
            subprocess.run(["iptables", "-w", "5", "-D", *rule], check=True)


@pytest.mark.skipif(shutil.which("iptables") is None, reason="no iptables here")
def test_a_host_that_goes_dark_while_answering_is_noticed(plain, connect):
    target = connect(plain)
    seen = threading.Event()
    failure = []

    def work():
        try:
            target.run("echo lit; sleep 60", timeout_s=90, on_stdout=lambda _: seen.set())
        except errors.DeployError as error:
            failure.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    assert seen.wait(20)
    started = time.monotonic()
    with packets_dropped(plain.port):
        thread.join(40)
        took = time.monotonic() - started
        assert not thread.is_alive()
    assert type(failure[0]) is errors.ConnectionLost
    assert 5 < took < 30
    assert target.run("echo lit again").text == "lit again\n"


def test_the_socket_notices_a_dead_peer_and_does_not_stall(plain, connect):
    import socket

    target = connect(plain)
    target.run("true")
    sock = target._transport.sock
    for option, value in (("TCP_NODELAY", 1), ("TCP_KEEPIDLE", 5), ("TCP_USER_TIMEOUT", 15000)):
        assert sock.getsockopt(socket.IPPROTO_TCP, getattr(socket, option)) == value
    assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1


def test_close_from_another_thread_ends_the_wait(plain, connect):
    target = connect(plain)
    threading.Timer(0.5, target.close).start()
    started = time.monotonic()
    with pytest.raises(errors.ConnectionLost):
        target.run("sleep 30")
    assert time.monotonic() - started < 5
    target.close()
    target.close()


def refusal(connect, server, expected, **changes):
    """The error of a first command, and how long it took."""
    started = time.monotonic()
    with pytest.raises(errors.Unreachable) as caught:
        connect(server, **changes).run("true")
    assert type(caught.value) is expected
    assert caught.value.exit_code == 3
    assert caught.value.fix
    return str(caught.value), time.monotonic() - started


@pytest.mark.parametrize("peer", ["dark", "silent"])
def test_close_from_another_thread_ends_a_connect(peer, plain, connect):
    place = servers.dark_host() if peer == "dark" else servers.silent_server()
    with place as port:
        target = connect(plain, port=port, connect_timeout_s=60.0)
        threading.Timer(0.3, target.close).start()
        started = time.monotonic()
        with pytest.raises(errors.ConnectionLost, match="closed while connecting"):
            target.run("true")
    assert time.monotonic() - started < 5


def test_closed_port(plain, connect):
    from deployer.remote.sshlogin import Refused

    port = servers.free_port()
    text, took = refusal(connect, plain, Refused, port=port)
    assert f"127.0.0.1:{port} refuses the connection" in text
    assert took < 4


def test_dark_host(plain, connect):
    with servers.dark_host() as port:
        text, took = refusal(connect, plain, errors.Unreachable, port=port, connect_timeout_s=1.0)
    assert f"no answer from 127.0.0.1:{port} within 1 s" in text
    assert took < 3


def test_accepts_but_never_answers(plain, connect):
    with servers.silent_server() as port:
        text, took = refusal(connect, plain, errors.Unreachable, port=port, connect_timeout_s=1.0)
    assert f"127.0.0.1:{port} accepts connections, but no SSH banner" in text
    assert took < 3


def test_banner_and_then_silence(plain, connect):
    with servers.silent_server(b"SSH-2.0-OpenSSH_9.2\r\n") as port:
        text, took = refusal(connect, plain, errors.Unreachable, port=port, connect_timeout_s=1.0)
    assert "key exchange never ends" in text
    assert took < 3


def test_not_an_ssh_server(plain, connect):
    with servers.silent_server(b"HTTP/1.1 400 Bad Request\r\n" * 101) as port:
        text, _ = refusal(connect, plain, errors.Unreachable, port=port)
    assert "no SSH server" in text


def test_a_name_that_does_not_resolve(plain, connect):
    text, _ = refusal(connect, plain, errors.Unreachable, address="no-such-host.invalid")
    assert "no-such-host.invalid cannot be resolved" in text


def test_connections_dropped_before_the_banner_are_tried_again(plain, connect):
    proxy = servers.Proxy(plain.port, drop_first=2)
    target = connect(plain, known_hosts=known_at(plain, proxy.port), port=proxy.port)
    assert target.run("echo in").text == "in\n"
    assert proxy.accepted == 3
    proxy.close()


def test_a_server_that_always_drops_is_given_up(plain, connect):
    from deployer.remote.sshlogin import ATTEMPTS, DroppedEarly

    proxy = servers.Proxy(plain.port, drop_first=1000)
    text, took = refusal(connect, plain, DroppedEarly, port=proxy.port)
    assert "closed the connection before the SSH handshake" in text
    assert proxy.accepted == ATTEMPTS
    assert took < 12
    proxy.close()


def test_more_at_once_than_sshd_lets_log_in(connect, tmp_path):
    """Its limit is below our own: some are dropped, say so, and come again."""
    server = servers.start_sshd(tmp_path / "few", options=("MaxStartups 2:100:2",), bashrc="#")
    try:
        targets = [connect(server) for _ in range(16)]
        exits = []
        threads = [
            threading.Thread(target=lambda one=target: exits.append(one.run("true").exit))
            for target in targets
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert exits == [0] * 16
        assert "past MaxStartups" in server.log
        assert server.log.count("Accepted publickey") == 16
    finally:
        server.stop()


def test_a_server_that_stays_busy_is_named(connect, tmp_path):
    from deployer.remote.sshlogin import Busy

    server = servers.start_sshd(tmp_path / "busy", options=("MaxStartups 1:100:1",), bashrc="#")
    try:
        with contextlib.ExitStack() as stack:
            said = b""
            while said != b"SSH-":  # the start's own look at the port counts for a moment
                peer = socket.create_connection(("127.0.0.1", server.port), timeout=10)
                said = stack.enter_context(peer).recv(4)
            text, took = refusal(connect, server, Busy, connect_timeout_s=2.0)
        assert "too many log in at once (MaxStartups)" in text
        assert 1 < took < 4
        assert server.log.count("past MaxStartups") >= 1
        assert connect(server).run("echo in").text == "in\n"
    finally:
        server.stop()


def test_wrong_key_is_refused_once_and_names_the_key(plain, connect, tmp_path):
    key = servers.make_key(tmp_path / "other")
    before = plain.log.count("Connection from")
    text, took = refusal(connect, plain, errors.AuthenticationRefused, identity_file=str(key))
    assert f"{plain.user}@127.0.0.1:{plain.port} refuses every key" in text
    assert str(key) in text
    assert servers.fingerprint(key) in text
    assert took < 5
    assert plain.log.count("Connection from") == before + 1


def test_missing_key_file(plain, connect, tmp_path):
    with pytest.raises(errors.AuthenticationRefused, match="no usable key") as caught:
        connect(plain, identity_file=str(tmp_path / "none")).run("true")
    assert f"{tmp_path}/none: there is no such file" in caught.value.evidence


def test_encrypted_key_without_agent_never_prompts(plain, connect, tmp_path, monkeypatch):
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    key = servers.make_key(tmp_path / "locked", passphrase="secret")
    with pytest.raises(errors.AuthenticationRefused) as caught:
        connect(plain, identity_file=str(key)).run("true")
    assert "is encrypted and not in the agent" in "".join(caught.value.evidence)


@pytest.fixture
def agent(tmp_path, monkeypatch):
    """A real ssh-agent."""
    path = tmp_path / "agent"
    process = subprocess.Popen(["ssh-agent", "-D", "-a", str(path)], stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 5
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    monkeypatch.setenv("SSH_AUTH_SOCK", str(path))
    yield path
    process.kill()
    process.wait()


def test_the_agents_keys_are_used(plain, connect, agent, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    subprocess.run(["ssh-add", "-q", str(plain.user_key)], check=True)
    assert connect(plain, identity_file=None).run("echo ok").text == "ok\n"


def test_a_frozen_agent_does_not_hang(plain, connect, tmp_path, monkeypatch):
    import socket

    with socket.socket(socket.AF_UNIX) as frozen:
        frozen.bind(str(tmp_path / "agent"))
        frozen.listen(1)
        monkeypatch.setenv("SSH_AUTH_SOCK", str(tmp_path / "agent"))
        target = connect(plain, connect_timeout_s=1.0)
        assert target.run("echo ok").text == "ok\n"


def test_default_keys_of_the_home_folder(plain, connect, tmp_path, monkeypatch):
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".ssh").mkdir()
    (tmp_path / ".ssh/id_ed25519").write_bytes(plain.user_key.read_bytes())
    (tmp_path / ".ssh/id_ed25519").chmod(0o600)
    assert connect(plain, identity_file=None).run("echo ok").text == "ok\n"


def test_rsa_user_and_host_keys(connect, tmp_path):
    server = servers.start_sshd(
        tmp_path / "rsa",
        user_key=servers.make_key(tmp_path / "user_rsa", "rsa"),
        host_key=servers.make_key(tmp_path / "host_rsa", "rsa"),
        bashrc="#",
    )
    try:
        assert connect(server).run("echo rsa").text == "rsa\n"
    finally:
        server.stop()


def test_the_recorded_kind_of_host_key_is_asked_for(connect, tmp_path):
    second = servers.make_key(tmp_path / "host_ecdsa", "ecdsa")
    server = servers.start_sshd(tmp_path / "two", options=(f"HostKey {second}",), bashrc="#")
    public = second.with_name("host_ecdsa.pub").read_text().split()
    server.known_hosts.write_text(f"[127.0.0.1]:{server.port} {public[0]} {public[1]}\n")
    try:
        assert connect(server).run("echo ok").text == "ok\n"
    finally:
        server.stop()


def test_partial_login_is_no_prompt(connect, tmp_path):
    server = servers.start_sshd(
        tmp_path / "twice", options=("AuthenticationMethods publickey,publickey",), bashrc="#"
    )
    try:
        with pytest.raises(errors.AuthenticationRefused, match="asks for publickey as well"):
            connect(server).run("true")
    finally:
        server.stop()


def test_a_server_that_wants_a_password_is_no_prompt(connect, tmp_path):
    server = servers.start_sshd(
        tmp_path / "password",
        options=("PubkeyAuthentication no", "KbdInteractiveAuthentication yes"),
        bashrc="#",
    )
    try:
        with pytest.raises(errors.AuthenticationRefused, match="accepts no keys"):
            connect(server).run("true")
    finally:
        server.stop()


def test_a_wrong_user(plain, connect):
    text, _ = refusal(connect, plain, errors.AuthenticationRefused, user="nobody-here")
    assert "nobody-here@127.0.0.1" in text


def test_max_auth_tries_ends_the_offers(connect, tmp_path, monkeypatch):
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("id_ed25519", "id_ecdsa"):
        servers.make_key(tmp_path / ".ssh" / name, name.removeprefix("id_"))
    server = servers.start_sshd(tmp_path / "few", options=("MaxAuthTries 1",), bashrc="#")
    try:
        with pytest.raises(errors.AuthenticationRefused) as caught:
            connect(server, identity_file=None).run("true")
        assert "closed the connection" in "".join(caught.value.evidence)
    finally:
        server.stop()


def test_unknown_host_key_says_fingerprint_and_way_out(plain, connect, tmp_path):
    text, _ = refusal(connect, plain, errors.HostKeyUnknown, known_hosts=str(tmp_path / "none"))
    assert servers.fingerprint(plain.host_key) in text
    with pytest.raises(errors.HostKeyUnknown) as caught:
        connect(plain, known_hosts=str(tmp_path / "none")).run("true")
    assert "`deploy trust box`" in caught.value.fix


def test_changed_host_key_says_both_fingerprints_and_the_line(plain, connect, tmp_path):
    other = servers.make_key(tmp_path / "other_host")
    public = other.with_name("other_host.pub").read_text().split()
    known = tmp_path / "known"
    known.write_text(f"# comment\n[127.0.0.1]:{plain.port} {public[0]} {public[1]}\n")
    text, _ = refusal(connect, plain, errors.HostKeyChanged, known_hosts=str(known))
    assert servers.fingerprint(plain.host_key) in text
    assert servers.fingerprint(other) in text
    assert f"{known}:2" in text
    assert known.read_text().count("\n") == 2


def test_trust_fetches_records_and_then_the_host_is_known(plain, connect, base, tmp_path):
    known = tmp_path / "new/known_hosts"
    entry = ssh_entry(plain, known_hosts=str(known))
    offered = trust.fetch("box", entry, base)
    assert offered.fingerprint == servers.fingerprint(plain.host_key)
    assert (offered.key_type, offered.path, offered.known) == ("ssh-ed25519", known, False)
    assert not known.exists()
    trust.record(offered)
    assert connect(plain, known_hosts=str(known)).run("echo ok").text == "ok\n"
    assert trust.fetch("box", entry, base).known
    trust.record(offered)
    assert len(hostkeys.load(known)) == 1


def test_trust_never_replaces_a_changed_key(plain, base, tmp_path):
    public = servers.make_key(tmp_path / "k").with_name("k.pub").read_text().split()
    known = tmp_path / "known"
    known.write_text(f"[127.0.0.1]:{plain.port} {public[0]} {public[1]}\n")
    with pytest.raises(errors.HostKeyChanged):
        trust.fetch("box", ssh_entry(plain, known_hosts=str(known)), base)


def gateway_known(base, *pairs):
    known = base / "known_both"
    known.write_text("".join(server.known_hosts.read_text() for server in pairs))
    return str(known)


def test_proxy_jump_through_a_gateway(plain, noisy, kind, connect, base):
    known = gateway_known(base, plain, noisy)
    (noisy.folder / "authorized_keys").write_text(
        "".join(server.user_key.with_name("user_key.pub").read_text() for server in (plain, noisy))
    )
    target = connect(plain, kind, gateway=f"{noisy.user}@127.0.0.1:{noisy.port}", known_hosts=known)
    assert target.run("cat; echo $SSH_CONNECTION", stdin=b"hi ").text.startswith("hi ")
    assert target.run("exit 3").exit == 3


def test_hosts_behind_one_gateway_share_its_connection(plain, connect, tmp_path):
    gate = servers.start_sshd(
        tmp_path / "gate", options=("MaxSessions 1",), user_key=plain.user_key, bashrc="#"
    )
    known = gateway_known(tmp_path, plain, gate)
    gateway = f"{gate.user}@127.0.0.1:{gate.port}"
    try:
        targets = [connect(plain, gateway=gateway, known_hosts=known) for _ in range(4)]
        threads = [threading.Thread(target=target.run, args=("true",)) for target in targets]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert gate.log.count("Accepted publickey") == 1
        targets[0].close()
        assert [target.run("echo on").text for target in targets[1:]] == ["on\n"] * 3
        for target in targets:
            target.close()
        assert targets[1].run("echo new").text == "new\n"
        assert gate.log.count("Accepted publickey") == 2
    finally:
        gate.stop()


def test_one_dark_target_behind_a_gateway_leaves_the_others_alone(plain, connect, tmp_path):
    gate = servers.start_sshd(tmp_path / "gate", user_key=plain.user_key, bashrc="#")
    known = gateway_known(tmp_path, plain, gate)
    gateway = f"{gate.user}@127.0.0.1:{gate.port}"
    way = {"gateway": gateway, "known_hosts": known, "connect_timeout_s": 1.0}
    try:
        fine = connect(plain, **way)
        assert fine.run("echo on").text == "on\n"
        with servers.dark_host() as port:
            text, took = refusal(connect, plain, errors.Unreachable, port=port, **way)
            assert f"gave no connection to 127.0.0.1:{port} within 1 s" in text
            assert took < 4
            assert fine.run("echo still on").text == "still on\n"
        assert gate.log.count("Accepted publickey") == 1
    finally:
        gate.stop()


def test_many_behind_a_dark_gateway_fail_together(plain, connect, base):
    with servers.dark_host() as port:
        way = {"gateway": f"{plain.user}@127.0.0.1:{port}", "connect_timeout_s": 1.0}
        targets = [connect(plain, **way) for _ in range(10)]
        errors_seen = []

        def run(target):
            with pytest.raises(errors.Unreachable) as caught:
                target.run("true")
            errors_seen.append(str(caught.value))

        started = time.monotonic()
        threads = [threading.Thread(target=run, args=(target,)) for target in targets]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert time.monotonic() - started < 4
    assert len(errors_seen) == 10
    assert all(f"no answer from 127.0.0.1:{port}" in text for text in errors_seen)


def test_gateway_that_cannot_reach_the_target(plain, connect, base):
    port = servers.free_port()
    text, took = refusal(
        connect,
        plain,
        errors.Unreachable,
        gateway=f"{plain.user}@127.0.0.1:{plain.port}",
        port=port,
    )
    assert "gateway" in text
    assert f"127.0.0.1:{port}" in text
    assert took < 5


def test_gateway_with_an_unknown_key_is_trusted_first(plain, noisy, connect, base, tmp_path):
    known = tmp_path / "known"
    entry = ssh_entry(plain, gateway=f"{noisy.user}@127.0.0.1:{noisy.port}", known_hosts=str(known))
    (noisy.folder / "authorized_keys").write_text(
        plain.user_key.with_name("user_key.pub").read_text()
    )
    names = []
    for _ in range(3):
        offered = trust.fetch("box", entry, base)
        if offered.known:
            break
        names.append(offered.name)
        trust.record(offered)
    assert names == ["box (gateway 127.0.0.1)", "box"]
    assert open_host("box", entry, base).run("echo ok").text == "ok\n"


def test_ssh_config_is_honoured(plain, connect, base, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    (tmp_path / ".ssh").mkdir()
    (tmp_path / ".ssh/config").write_text("Include more/*\nHost other\n  Port 1\n")
    (tmp_path / ".ssh/more").mkdir()
    (tmp_path / ".ssh/more/one").write_text(
        f"Host lab\n  HostName 127.0.0.1\n  Port {plain.port}\n  User {plain.user}\n"
        f"  IdentityFile {plain.user_key}\n  UserKnownHostsFile {plain.known_hosts}\n"
        f"Host behind\n  HostName 127.0.0.1\n  Port {plain.port}\n  User {plain.user}\n"
        f"  IdentityFile {plain.user_key}\n  UserKnownHostsFile {plain.known_hosts}\n"
        "  ProxyJump lab\n"
    )
    for name in ("lab", "behind"):
        transport = open_host("box", Ssh(address=name), base)
        assert transport.run("echo ok").text == "ok\n"
        transport.close()


def test_guest_with_its_own_ssh_and_guest_through_the_host(plain, connect, base):
    host = connect(plain)
    own = open_guest(host, "box", 129, Container(ssh=ssh_entry(plain)), base)
    assert own.name == "box/129"
    assert own.run("echo own").text == "own\n"
    own.close()
    through = open_guest(host, "box", 129, Container(), base)
    assert isinstance(through, PctTransport)
    assert through.name == "box/129"


def test_container_that_does_not_run(plain, connect, pct_folder):
    guest = PctTransport(WithPct(connect(plain), pct_folder), 130, "box/130")
    with pytest.raises(ContainerStopped, match="container 130 on box is not running") as caught:
        guest.run("true")
    assert "pct start 130" in caught.value.fix


def test_container_that_does_not_exist(plain, connect, pct_folder):
    with pytest.raises(ContainerMissing, match="box has no container 131"):
        PctTransport(WithPct(connect(plain), pct_folder), 131, "box/131").run("true")


def test_pct_that_dies_is_a_lost_answer(plain, connect, pct_folder):
    with pytest.raises(errors.ConnectionLost, match="pct exec never began"):
        PctTransport(WithPct(connect(plain), pct_folder), 132, "box/132").run("true")


def test_host_without_pct(plain, connect):
    with pytest.raises(errors.Unreachable, match="no `pct`"):
        PctTransport(connect(plain), 129, "box/129").run("true")


def test_nothing_of_the_environment_of_the_host_reaches_the_container(plain, connect):
    text = connect(plain, "pct").run("env").text
    names = {line.partition("=")[0] for line in text.splitlines()}
    assert names <= {"PATH", "LC_ALL", "HOME", "PWD", "OLDPWD", "_", "SHLVL"}


def test_many_hosts_at_once(plain, connect):
    targets = [connect(plain) for _ in range(12)]
    results = []

    def work(target):
        results.append(target.run("echo $$").exit)

    threads = [threading.Thread(target=work, args=(target,)) for target in targets]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert results == [0] * 12


def test_no_descriptor_is_left_open(plain, connect):
    def count():
        return len(list(Path("/proc/self/fd").iterdir()))

    target = connect(plain)
    target.run("true")
    before = count()
    for _ in range(20):
        target.run("echo x", stdin=b"y")
    assert count() <= before + 1
