"""The whole shards step through TLS and a proxy: who is trusted, and who sees the token."""

from __future__ import annotations

import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "docker" / "hub"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))
import proxy as proxies
from certs import Authority
from fault_bench import Bench, sha256, truth
from hub import Hub
from proxy import Proxy

from deployer import hub as hub_client
from deployer.errors import DeployError

pytestmark = pytest.mark.container
TOKEN = "hf_right"
HIDDEN = "hub.invalid"
"""A name that no resolver knows: only the proxy finds the way, so nobody goes around it."""


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@pytest.fixture
def plain(tmp_path: Path) -> Iterator[Hub]:
    """What the controller asks; the target goes to another hub with the same repository."""
    with Hub(tmp_path / "hub", shards=3, mb=2, token=TOKEN) as hub:
        yield hub


@pytest.fixture
def secure(tmp_path: Path, authority: Authority, plain: Hub) -> Iterator[Hub]:
    tls = authority.server((HIDDEN, "127.0.0.1", "localhost"))
    with Hub(tmp_path / "hub", shards=3, mb=2, token=TOKEN, tls=tls) as hub:
        yield hub


def bench_of(plain: Hub, folder: Path, target: str, **download: Any) -> Bench:
    settings = {"target_endpoint": target, **download}
    return Bench(plain.url, plain.repo.name, folder / "box", token=TOKEN, download=settings)


def failed(bench: Bench, code: int, within_s: float = 60) -> str:
    """The error and its fix, each one line; nothing came, and no token is told anywhere."""
    with pytest.raises(DeployError) as caught:
        bench.run_within(within_s)
    error = caught.value
    assert bench.agent_ends() == [f"code {code}"], (str(error), bench.agent_log())
    assert "\n" not in str(error) and error.fix and "\n" not in error.fix
    assert not list(bench.model.glob("*.safetensors")) and not list(bench.model.glob("*.json"))
    return f"{error} | {error.fix}"


def right(bench: Bench, hub: Hub) -> bool:
    return all(sha256(bench.model / name) == value for name, value in truth(hub).items())


def untold(bench: Bench, secret: str) -> None:
    """The secret stands in no file of the job, no event and no command line."""
    for path in Path(bench.jobs_root).rglob("*"):
        assert not path.is_file() or secret.encode() not in path.read_bytes(), path
    assert secret not in repr(bench.events)


# ---- who is trusted
def test_an_untrusted_certificate_is_named_with_the_way_out(
    plain: Hub, secure: Hub, tmp_path: Path
) -> None:
    bench = bench_of(plain, tmp_path, secure.url)
    text = failed(bench, 16)
    assert secure.url in text and "certificate" in text and "download.ca_bundle" in text, text
    assert not secure.stats()["log"], "a request went to somebody whom nobody vouches for"


def test_with_the_ca_bundle_it_works(
    plain: Hub, secure: Hub, authority: Authority, tmp_path: Path
) -> None:
    bench = bench_of(plain, tmp_path, secure.url, ca_bundle=str(authority.bundle))
    bench.run_within(60)
    assert right(bench, secure)
    assert secure.stats()["auth_leaks"] == plain.stats()["auth_leaks"] == 0
    assert any(entry["auth"] for entry in secure.stats()["log"]), "the hub never saw the token"
    untold(bench, TOKEN)


@pytest.mark.parametrize("case", ["expired", "another name"])
def test_a_bad_certificate_of_a_trusted_authority(
    plain: Hub, authority: Authority, tmp_path: Path, case: str
) -> None:
    names = ("127.0.0.1",) if case == "expired" else ("elsewhere.example",)
    tls = authority.server(names, expired=case == "expired")
    with Hub(tmp_path / "hub", shards=3, mb=2, token=TOKEN, tls=tls) as hub:
        bench = bench_of(plain, tmp_path, hub.url, ca_bundle=str(authority.bundle))
        text = failed(bench, 16)
        assert hub.url in text and "certificate" in text, text
        assert ("expired" in text) == (case == "expired"), text
        assert not hub.stats()["log"]


@pytest.mark.parametrize("case", ["missing", "no PEM", "folder"])
def test_a_ca_bundle_that_is_none(plain: Hub, secure: Hub, tmp_path: Path, case: str) -> None:
    bundle = tmp_path / "bundle.pem"
    if case == "no PEM":
        bundle.write_text("not a certificate\n")
    elif case == "folder":
        bundle.mkdir()
    bench = bench_of(plain, tmp_path, secure.url, ca_bundle=str(bundle))
    text = failed(bench, 16)
    assert str(bundle) in text, text


def test_the_controller_names_an_untrusted_certificate_too(secure: Hub, tmp_path: Path) -> None:
    bench = Bench(secure.url, secure.repo.name, tmp_path / "box", token=TOKEN)
    with pytest.raises(hub_client.HubError) as caught:
        bench.run_within(60)
    text = f"{caught.value} | {caught.value.fix}"
    assert secure.url in text and "certificate" in text.lower() and "\n" not in text, text
    assert not bench.job_folders() and not secure.stats()["log"]


# ---- the proxy
@pytest.fixture
def heads(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Everything that proxies of this test read from their clients in the open."""
    seen: list[bytes] = []
    honest = proxies._read_head

    def read_head(client: socket.socket) -> tuple[bytes, bytes]:
        head, rest = honest(client)
        seen.append(head + rest)
        return head, rest

    monkeypatch.setattr(proxies, "_read_head", read_head)
    return seen


@pytest.fixture
def hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    """The proxies of this test know where HIDDEN is; the target's own resolver does not."""
    honest = socket.create_connection

    def connect(address: tuple[str, int], *more: Any, **named: Any) -> socket.socket:
        host, port = address
        return honest(("127.0.0.1" if host == HIDDEN else host, port), *more, **named)

    monkeypatch.setattr(socket, "create_connection", connect)


def elsewhere(hub: Hub) -> str:
    return hub.url.replace("127.0.0.1", HIDDEN)


def test_through_a_proxy_nobody_goes_around_it_and_nobody_sees_the_token(
    plain: Hub,
    secure: Hub,
    authority: Authority,
    tmp_path: Path,
    heads: list[bytes],
    hidden: None,
) -> None:
    with Proxy() as proxy:
        bench = bench_of(
            plain,
            tmp_path,
            elsewhere(secure),
            ca_bundle=str(authority.bundle),
            proxy=proxy.url,
        )
        bench.run_within(60)
        assert right(bench, secure)
        hub, cdn, _ = (server.server_address[1] for server in secure.servers)
        assert set(proxy.opened) == {f"{HIDDEN}:{hub}", f"{HIDDEN}:{cdn}"}
    total = sum(blob.size for blob in secure.repo.blobs.values() if blob.lfs)
    assert proxy.passed > total
    assert heads and all(head.startswith(b"CONNECT ") for head in heads)
    assert not any(TOKEN.encode() in head for head in heads)
    assert secure.stats()["auth_leaks"] == 0
    assert any(entry["auth"] for entry in secure.stats()["log"])
    untold(bench, TOKEN)


def test_without_the_proxy_there_is_no_way(
    plain: Hub, secure: Hub, authority: Authority, tmp_path: Path, hidden: None
) -> None:
    """What the test above stands on: the agent has no other way to that name."""
    bench = bench_of(plain, tmp_path, elsewhere(secure), ca_bundle=str(authority.bundle))
    text = failed(bench, 14, within_s=150)
    assert HIDDEN in text, text
    assert not secure.stats()["log"]


def test_a_plain_hub_through_a_proxy(plain: Hub, tmp_path: Path, hidden: None) -> None:
    """Whole urls instead of CONNECT; the CDN still sees no token."""
    with Proxy() as proxy:
        bench = bench_of(plain, tmp_path, elsewhere(plain), proxy=proxy.url)
        bench.run_within(60)
        assert right(bench, plain)
        assert {where.split(":")[0] for where in proxy.opened} == {HIDDEN}
    assert plain.stats()["auth_leaks"] == 0


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_a_proxy_that_wants_a_password_is_named(
    plain: Hub, secure: Hub, authority: Authority, tmp_path: Path, hidden: None, scheme: str
) -> None:
    hub = secure if scheme == "https" else plain
    with Proxy("me", "geheim") as proxy:
        where = f"http://{proxy.address}"
        bench = bench_of(
            plain, tmp_path, elsewhere(hub), ca_bundle=str(authority.bundle), proxy=where
        )
        text = failed(bench, 11)
        assert proxy.refused and not proxy.opened
    assert proxy.address in text and "407" in text, text
    assert "terms" not in text and "proxy" in text.partition(" | ")[2], text


def test_a_proxy_that_is_not_there_is_named(plain: Hub, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
    bench = bench_of(plain, tmp_path, plain.url, proxy=f"http://{address}")
    text = failed(bench, 14, within_s=150)
    assert address in text and "refused" in text, text
    assert plain.stats()["sent"].keys() <= {"model.safetensors.index.json", "config.json"}, "around"


def test_a_proxy_that_dies_in_the_middle_costs_a_retry(
    plain: Hub, secure: Hub, authority: Authority, tmp_path: Path, hidden: None
) -> None:
    secure.shared.set["bps"] = 500_000.0
    with Proxy() as proxy:
        bench = bench_of(
            plain,
            tmp_path,
            elsewhere(secure),
            ca_bundle=str(authority.bundle),
            proxy=proxy.url,
        )

        def hang_up() -> None:
            secure.shared.set["bps"] = 0.0
            proxy.hang_up()

        timer = threading.Timer(3.0, hang_up)
        timer.start()
        bench.run_within(90)
        timer.join()
    assert right(bench, secure)
    assert "going on at" in bench.agent_log()
    total = sum(blob.size for blob in secure.repo.blobs.values() if blob.lfs)
    assert sum(secure.stats()["sent"].values()) < 1.2 * total
