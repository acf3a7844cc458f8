"""Where a target is, how failures are told, what is imported. No network."""

from __future__ import annotations

import contextlib
import errno
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from deployer import errors
from deployer.inventory import Ssh
from deployer.remote import sshconfig, sshlogin
from deployer.remote.gateways import Pool
from deployer.remote.ramp import Ramp
from deployer.remote.refusals import Refusals
from deployer.remote.socket import Dial
from deployer.remote.ssh import SshTransport
from deployer.remote.sshconfig import Endpoint, resolve, split_port
from deployer.remote.sshlogin import Busy, DroppedEarly, Peer, Refused

FOUND = (socket.AF_INET, socket.SOCK_STREAM, 6, "")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "home"
    (folder / ".ssh").mkdir(parents=True)
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.setattr(sshconfig, "SYSTEM_CONFIG", tmp_path / "etc/ssh_config")
    (tmp_path / "etc").mkdir()
    return folder


def endpoint(home: Path, config: str = "", **entry: Any) -> Endpoint:
    (home / ".ssh/config").write_text(config)
    return resolve("kpro5", Ssh(**{"address": "box", **entry}), Path("/srv/inventory"))


def test_defaults(home: Path) -> None:
    found = endpoint(home)
    assert (found.place, found.user, found.gateway, found.use_agent) == ("box:22", "root", None, 1)
    assert found.key_name == "box"
    assert [path.name for path in found.identity_files] == ["id_ed25519", "id_ecdsa", "id_rsa"]
    assert found.known_hosts[0] == home / ".ssh/known_hosts"
    assert Path("/etc/ssh/ssh_known_hosts") in found.known_hosts


def test_an_ipv6_address_stands_in_brackets(home: Path) -> None:
    assert endpoint(home, address="2001:db8::5", port=2222).place == "[2001:db8::5]:2222"


def test_config_fills_what_the_inventory_leaves_out(home: Path) -> None:
    config = """
Host box
    HostName 192.0.2.9
    Port 2222
    User admin
    IdentityFile ~/keys/%h
    UserKnownHostsFile ~/known "~/two words"
Host *
    User nobody
"""
    found = endpoint(home, config)
    assert (found.place, found.user) == ("192.0.2.9:2222", "admin")
    assert found.key_name == "[192.0.2.9]:2222"
    assert found.identity_files == (home / "keys/192.0.2.9",)
    assert found.known_hosts[:2] == (home / "known", home / "two words")


def test_the_inventory_wins(home: Path) -> None:
    config = "Host box\n Port 1\n User a\n IdentityFile /a\n UserKnownHostsFile /k\n ProxyJump p\n"
    found = endpoint(
        home,
        config,
        port=5,
        user="root",
        identity_file="keys/id",
        known_hosts="known",
        gateway="none",
    )
    assert (found.port, found.user, found.gateway) == (5, "root", None)
    assert found.identity_files == (Path("/srv/inventory/keys/id"),)
    assert found.known_hosts == (Path("/srv/inventory/known"),)
    assert not found.use_agent


def test_user_before_system_and_includes_where_they_stand(home: Path, tmp_path: Path) -> None:
    (tmp_path / "etc/ssh_config").write_text("Include *.d/*.conf\nHost *\n User late\n")
    (tmp_path / "etc/x.d").mkdir()
    (tmp_path / "etc/x.d/1.conf").write_text("Host other\n Port 1\nHost box\n Port 7\n")
    found = endpoint(home, "Host nobody\n Port 3\n")
    assert (found.port, found.user) == (7, "late")
    assert endpoint(home, "Port 4\n").port == 4


def test_an_include_does_not_swallow_the_lines_behind_it(home: Path) -> None:
    (home / ".ssh/more").write_text("Host other\n")
    assert endpoint(home, "Include more\nPort 77\n").port == 77


def test_gateways(home: Path) -> None:
    config = "Host jump\n HostName 192.0.2.1\n Port 99\n"
    found = endpoint(home, config, gateway="ops@first,me@jump:2200", known_hosts="known")
    assert found.gateway is not None
    assert (found.gateway.place, found.gateway.user) == ("192.0.2.1:2200", "me")
    assert found.gateway.known_hosts == found.known_hosts
    assert found.gateway.name == "kpro5 (gateway jump)"
    assert found.gateway.gateway is not None
    assert (found.gateway.gateway.place, found.gateway.gateway.user) == ("first:22", "ops")
    assert found.gateway.gateway.gateway is None


def test_proxy_jump_of_the_config_is_followed_but_not_for_ever(home: Path) -> None:
    found = endpoint(home, "Host box\n ProxyJump jump\nHost jump\n User j\n")
    assert found.gateway is not None
    assert (found.gateway.place, found.gateway.user) == ("jump:22", "j")
    with pytest.raises(errors.DocumentError) as caught:
        endpoint(home, "Host *\n ProxyJump jump\n")
    assert str(caught.value) == "kpro5: the gateways lead in a circle: jump"
    with pytest.raises(errors.DocumentError, match=r"circle: a, b$"):
        endpoint(home, "Host box b\n ProxyJump a\nHost a\n ProxyJump b\n")


@pytest.mark.parametrize(
    ("config", "entry", "what"),
    [
        ("Host box\n Port ssh\n", {}, "gives box a port that is none: ssh"),
        ("Host box\n Port 0\n", {}, "a port that is none: 0"),
        ("Include 'half\n", {}, "not an Include line"),
        ("Include ~nobody-has-this-name/x\n", {}, "not an Include line"),
        ("Host box\n UserKnownHostsFile 'half\n", {}, "names files that are none"),
        ("Match host 'half\n Port 22\n", {}, "cannot be parsed"),
        ("Include self\nHost box\n Port 22\n", {}, "too many nested Include lines"),
        ("", {"gateway": "a,,b"}, "not a gateway: 'a,'"),
        ("", {"gateway": "a:99999"}, "not a port of a gateway"),
    ],
)
def test_a_config_that_means_nothing_is_told(
    home: Path, config: str, entry: dict[str, Any], what: str
) -> None:
    (home / ".ssh/self").write_text("Include self\n")
    with pytest.raises(errors.DocumentError) as caught:
        endpoint(home, config, **entry)
    assert what in str(caught.value)


@pytest.mark.parametrize(
    ("match", "port"),
    [
        ("all", 99),
        ("host box", 99),
        ("host other", 22),
        ("host=box", 99),
        ("host=other", 22),
        ("host box # the GPU box", 99),
        ("originalhost box !user nobody", 99),
        ("final host box", 99),
        ("tagged prod", 22),
        ("host box localnetwork 192.0.2.0/24", 22),
        ("!version OpenSSH_9.*", 22),
    ],
)
def test_match(home: Path, match: str, port: int) -> None:
    """What is not known here is no match: it could be meant for other places."""
    assert endpoint(home, f"Match {match}\n Port 99\n").port == port


def test_a_process_without_a_user_name(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody() -> str:
        raise KeyError("getpwuid(): uid not found: 4711")

    monkeypatch.setattr(sshconfig.getpass, "getuser", nobody)
    with pytest.raises(errors.DocumentError, match="no user name for the gateway"):
        endpoint(home, gateway="jump")
    assert endpoint(home, gateway="me@jump").gateway


def test_an_address_that_is_dark_leaves_the_next_one_its_share(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As a name with an address of IPv6 that a firewall swallows."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as dark, contextlib.ExitStack() as stack:
        for _ in range(4):
            # With its backlog full, a listening socket answers no further SYN.
            filler = stack.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex(dark.getsockname())
        live = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        places = [(*found[:4], one.getsockname()) for one in (dark, live) for found in [FOUND]]
        monkeypatch.setattr("deployer.remote.socket._resolve", lambda *words: list(places))
        began = time.monotonic()
        with Dial("box", 22, 2.0).finish() as connected:
            assert connected.getpeername() == live.getsockname()
        assert 0.9 < time.monotonic() - began < 1.9
        monkeypatch.setattr("deployer.remote.socket._resolve", lambda *words: places[:1] * 2)
        with pytest.raises(TimeoutError):
            Dial("box", 22, 0.4).finish()


def test_proxy_command_is_refused_in_words(home: Path) -> None:
    with pytest.raises(errors.DocumentError, match="ProxyCommand"):
        endpoint(home, "Host box\n ProxyCommand nc %h %p\n")


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("box", "box", None),
        ("box:22", "box", 22),
        ("[2001:db8::1]:22", "2001:db8::1", 22),
        ("2001:db8::1", "2001:db8::1", None),
        ("[2001:db8::1]", "2001:db8::1", None),
    ],
)
def test_places(text: str, host: str, port: int | None) -> None:
    assert split_port(text) == (host, port)


def test_a_port_out_of_range() -> None:
    with pytest.raises(errors.DocumentError):
        split_port("box:70000")


PEER = Peer("kpro5", "192.0.2.5:22", 15.0)


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (ConnectionRefusedError(errno.ECONNREFUSED, "x"), Refused, "refuses"),
        (InterruptedError(errno.EINTR, "x"), errors.ConnectionLost, "closed while connecting"),
        (ConnectionResetError(errno.ECONNRESET, "x"), DroppedEarly, "reset"),
        (TimeoutError(errno.ETIMEDOUT, "x"), errors.Unreachable, "within 15 s"),
        (OSError(errno.EHOSTUNREACH, "No route to host"), errors.Unreachable, "No route to host"),
        (socket.gaierror(-2, "Name not known"), errors.Unreachable, "cannot be resolved"),
    ],
)
def test_every_way_not_to_connect_has_its_words(
    error: OSError, kind: type[errors.DeployError], text: str
) -> None:
    told = sshlogin._dial_error(error, PEER)
    assert type(told) is kind
    assert text in str(told)
    assert "192.0.2.5" in str(told) or kind is errors.ConnectionLost
    assert told.where == "kpro5"


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, which goes on only while the retry sleeps."""
    now = [1000.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    monkeypatch.setattr("tenacity.nap.time.sleep", sleep)
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    return now


def attempts(error: errors.DeployError, times: int = 10**6) -> list[float]:
    """The time that each try was given; after `times` of them it works."""
    given: list[float] = []

    def attempt(peer: Peer) -> Any:
        given.append(peer.timeout_s)
        if len(given) <= times:
            raise error
        return "in"

    try:
        assert sshlogin._with_retry(attempt, PEER) == "in"
    except errors.DeployError as raised:
        assert raised is error
    return given


def test_only_what_passes_by_itself_is_tried_again(clock: list[float]) -> None:
    assert len(attempts(DroppedEarly("x"))) == sshlogin.ATTEMPTS
    assert len(attempts(DroppedEarly("x"), times=2)) == 3
    for final in (
        errors.AuthenticationRefused("x"),
        errors.HostKeyChanged("x"),
        errors.HostKeyUnknown("x"),
        errors.ConnectionLost("x"),
        errors.Unreachable("x"),
    ):
        assert len(attempts(final)) == 1


def test_a_busy_sshd_is_tried_until_the_connect_deadline(clock: list[float]) -> None:
    given = attempts(Busy("x"))
    assert len(given) > sshlogin.ATTEMPTS
    assert clock[0] - 1000.0 < PEER.timeout_s
    assert given == sorted(given, reverse=True), "each try has what is left"
    assert len(attempts(Busy("x"), times=9)) == 10


def test_a_refused_connection_is_tried_for_a_second(clock: list[float]) -> None:
    assert len(attempts(Refused("x"))) > 1
    assert clock[0] - 1000.0 < sshlogin.REFUSED_S + 2.0


@pytest.mark.parametrize(
    ("said", "kind", "text"),
    [
        (b"Exceeded MaxStartups\r\n", Busy, "MaxStartups"),
        (b"Not allowed at this time\r\n", errors.AuthenticationRefused, "for a while"),
        (b"", DroppedEarly, "before the SSH handshake"),
    ],
)
def test_sshd_says_why_it_hangs_up(said: bytes, kind: type[errors.DeployError], text: str) -> None:
    failure = Exception("Error reading SSH protocol banner")
    told = sshlogin._handshake_error(failure, "", True, PEER, said)
    assert type(told) is kind
    assert text in str(told)


def test_so_many_logins_at_once_to_one_sshd() -> None:
    ramp, now, most, lock = Ramp(3), [0], [0], threading.Lock()

    def one(sshd: str) -> None:
        with ramp.turn(sshd, 10):
            with lock:
                now[0] += 1
                most[0] = max(most[0], now[0])
            pause.wait(0.01)
            with lock:
                now[0] -= 1

    pause = threading.Event()
    threads = [threading.Thread(target=one, args=("a",)) for _ in range(12)]
    with ramp.turn("b", 10):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
    assert most[0] == 3
    assert ramp._gates == {}


def test_a_turn_that_never_comes() -> None:
    ramp = Ramp(1)
    with ramp.turn("a", 1):
        with pytest.raises(TimeoutError, match="other logins"), ramp.turn("a", 0.02):
            pass
        with pytest.raises(TimeoutError), ramp.turn("a", 20, lambda: False):
            pass
        with ramp.turn("b", 0.02):
            pass
    with ramp.turn("a", 0.02):
        pass


def test_who_waits_for_a_connection_shares_its_failure(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """50 targets behind a dark gateway: one deadline, not 50 one after the other."""
    tries: list[int] = []
    waiting = threading.Event()

    def login(*words: Any, **more: Any) -> Any:
        tries.append(1)
        assert waiting.wait(10)
        raise errors.Unreachable("dark", where="gateway", fix="power")

    monkeypatch.setattr("deployer.remote.ssh.login", login)
    transport = SshTransport("gateway", lambda: endpoint(home))
    seen: list[errors.DeployError] = []

    def connect() -> None:
        try:
            transport.connect()
        except errors.DeployError as error:
            seen.append(error)

    threads = [threading.Thread(target=connect) for _ in range(5)]
    for thread in threads:
        thread.start()
    for _ in range(500):
        if tries:
            break
        waiting.wait(0.01)
    # The others stand at the lock by now or will see the failure as their own first look.
    threading.Timer(0.1, waiting.set).start()
    for thread in threads:
        thread.join(10)
    assert len(tries) == 1
    assert [(error.what, error.fix) for error in seen] == [("dark", "power")] * 5
    assert len({id(error) for error in seen}) == 5
    with pytest.raises(errors.Unreachable):
        transport.connect()
    assert len(tries) == 2, "the next one tries again"


def test_a_login_that_was_refused_is_not_tried_again(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By no other deployment of the host, and by no other host behind the gateway."""
    tries: list[str] = []

    def login(found: Endpoint, *words: Any, **more: Any) -> Any:
        tries.append(found.address)
        raise errors.AuthenticationRefused("no key", where=found.name, fix="`deploy trust kpro5`")

    monkeypatch.setattr("deployer.remote.ssh.login", login)
    monkeypatch.setattr("deployer.remote.ssh._refusals", Refusals())
    transport = SshTransport("kpro5", lambda: endpoint(home))
    for _ in range(3):
        with pytest.raises(errors.AuthenticationRefused):
            transport.connect()
    with pytest.raises(errors.AuthenticationRefused) as caught:
        SshTransport("twin", lambda: resolve("twin", Ssh(address="box"), home)).connect()
    assert tries == ["box"]
    assert (caught.value.where, caught.value.fix) == ("twin", "`deploy trust twin`")
    tries.clear()
    for name in ("kpro5", "kpro6", "kpro7"):
        behind = Ssh(address=name, gateway="jump")
        found = resolve(name, behind, home)
        with pytest.raises(errors.AuthenticationRefused) as caught:
            SshTransport(name, lambda found=found: found).connect()
        assert caught.value.where == f"{name} (gateway jump)"
    assert tries == ["jump"]


def test_what_may_pass_is_tried_again(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tries: list[str] = []

    def login(found: Endpoint, *words: Any, **more: Any) -> Any:
        tries.append(found.address)
        raise errors.HostKeyUnknown("unknown", where=found.name)

    monkeypatch.setattr("deployer.remote.ssh.login", login)
    transport = SshTransport("kpro5", lambda: endpoint(home))
    for _ in range(2):
        with pytest.raises(errors.HostKeyUnknown):
            transport.connect()
    assert len(tries) == 2


def test_opening_a_transport_imports_neither_paramiko_nor_invoke(home: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from deployer.inventory import Ssh;"
        "from deployer.remote.connect import open_host;"
        "open_host('a', Ssh(address='192.0.2.1'), Path('/'));"
        "from deployer.remote.sshconfig import resolve; resolve('a', Ssh(address='b'), Path('/'));"
        "heavy = {'paramiko', 'invoke', 'fabric', 'tenacity', 'cryptography'} & set(sys.modules);"
        "assert not heavy, heavy;"
        "from deployer.remote.socket import import_paramiko; import_paramiko();"
        "assert 'invoke' not in sys.modules; import invoke"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


class Connection:
    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self.closed = 0

    def close(self) -> None:
        self.closed += 1


def test_a_gateway_is_shared_and_closed_by_its_last_user(home: Path) -> None:
    pool = Pool(Connection)
    first = endpoint(home, gateway="jump").gateway
    other_name = resolve("kpro6", Ssh(address="b", gateway="jump"), home).gateway
    other_place = endpoint(home, gateway="jump:2222").gateway
    assert first and other_name and other_place
    connection = pool.borrow(first)
    assert pool.borrow(other_name) is connection
    assert pool.borrow(other_place) is not connection
    pool.give_back(first)
    assert not connection.closed
    pool.give_back(other_name)
    assert connection.closed == 1
    assert pool.borrow(first) is not connection


def test_closing_a_connection_whose_gateway_is_gone_is_no_error(home: Path) -> None:
    """paramiko says goodbye through the gateway's channel and raises when that is closed."""

    class Gone:
        def close(self) -> None:
            raise EOFError

    transport = SshTransport("h", lambda: endpoint(home))
    transport._transport = Gone()  # type: ignore[assignment]
    transport.close()
    transport.close()
