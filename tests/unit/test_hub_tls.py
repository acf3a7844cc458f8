"""The lab's hub behind TLS and behind a proxy; the tests' own authority and proxy."""

from __future__ import annotations

import base64
import http.client
import ssl
import sys
from pathlib import Path
from urllib.parse import urlsplit

import pytest

# The client puts the hub's folder on the path.
from hubclient import SHARD, ask, content, partial  # isort: skip
from hub import Hub

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from certs import Authority
from proxy import Proxy


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hub")


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("ca"))


def trusting(authority: Authority) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(authority.bundle))


def test_tls_on_every_origin(data: Path, authority: Authority) -> None:
    trust = trusting(authority)
    with Hub(data, shards=3, mb=1, tls=authority.server(), xet=True) as hub:
        assert hub.url.startswith("https://")
        url = f"{hub.url}/acme/tiny-hybrid/resolve/main/{SHARD}"
        where = ask(url, "HEAD", context=trust)[1]["location"]
        assert where.startswith("https://")
        assert ask(where, context=trust)[2] == content(hub)
        assert hub.stats()["sent"][SHARD] == len(content(hub))
        raw = f"{hub.url}/api/models/acme/tiny-hybrid/xet-read-token/main"
        assert ask(raw, context=trust)[1]["x-xet-cas-url"].startswith("https://")


@pytest.mark.parametrize("case", ["stranger", "expired", "name"])
def test_certificates_that_no_client_may_take(
    data: Path, authority: Authority, tmp_path: Path, case: str
) -> None:
    names = ["other.example"] if case == "name" else ["127.0.0.1"]
    pair = authority.server(names, expired=case == "expired")
    trust = trusting(Authority(tmp_path) if case == "stranger" else authority)
    why = {"stranger": "unable to get local issuer|self.signed", "expired": "expired"}
    with (
        Hub(data, shards=3, mb=1, tls=pair) as hub,
        pytest.raises(ssl.SSLCertVerificationError, match=why.get(case, "mismatch|not valid for")),
    ):
        ask(f"{hub.url}/_stats", context=trust)


def test_faults_inside_of_tls(data: Path, authority: Authority) -> None:
    trust = trusting(authority)
    with Hub(data, shards=3, mb=1, tls=authority.server()) as hub:
        url = f"{hub.url}/acme/tiny-hybrid/resolve/main/{SHARD}"
        for do in ("reset", "truncate"):
            hub.faults([{"where": "cdn", "do": do, "after": 100_000, "times": 1}])
            where = ask(url, "HEAD", context=trust)[1]["location"]
            with pytest.raises((OSError, http.client.IncompleteRead)):
                ask(where, context=trust)
            assert hub.stats()["sent"][SHARD] == 100_000
            assert ask(where, context=trust)[2] == content(hub)
            hub.shared.reset()
        hub.faults([{"where": "cdn", "do": "stall", "after": 10, "times": 1}])
        with pytest.raises(TimeoutError):
            ask(where, context=trust, timeout=1)


def through(proxy: Proxy, url: str, **fields: str) -> tuple[int, bytes]:
    """A GET of an absolute url."""
    host, _, port = proxy.address.partition(":")
    conn = http.client.HTTPConnection(host, int(port), timeout=5)
    try:
        conn.request("GET", url, headers=fields)
        got = conn.getresponse()
        return got.status, got.read()
    finally:
        conn.close()


def test_a_proxy_for_absolute_urls(data: Path) -> None:
    with Hub(data, shards=3, mb=1) as hub, Proxy("me", "p@ss") as proxy:
        url = f"{hub.url}/acme/tiny-hybrid/resolve/main/{SHARD}"
        assert through(proxy, url)[0] == 407
        basic = "Basic " + base64.b64encode(b"me:p@ss").decode()
        fields = {"Proxy-Authorization": basic}
        assert through(proxy, url, **fields)[0] == 302
        where = urlsplit(hub.url).netloc
        assert (proxy.opened, proxy.refused) == ([where], [where])
        assert "p%40ss" in proxy.url
        dead = f"http://127.0.0.1:{(urlsplit(hub.url).port or 0) + 3}/"
        assert through(proxy, dead, **fields)[0] in (404, 502)


def test_a_tunnel_carries_tls(data: Path, authority: Authority) -> None:
    with Hub(data, shards=3, mb=1, tls=authority.server()) as hub, Proxy() as proxy:
        host, _, port = proxy.address.partition(":")
        at = urlsplit(hub.url)
        conn = http.client.HTTPSConnection(host, int(port), timeout=5, context=trusting(authority))
        conn.set_tunnel(at.hostname or "", at.port)
        conn.request("GET", "/acme/tiny-hybrid/resolve/main/config.json")
        assert conn.getresponse().status == 307
        conn.close()
        assert proxy.opened == [at.netloc]
        assert proxy.passed > 500


def test_a_proxy_that_hangs_up(data: Path) -> None:
    with Hub(data, shards=3, mb=1) as hub, Proxy() as proxy:
        hub.faults([{"where": "cdn", "do": "stall", "after": 10}])
        where = ask(f"{hub.url}/acme/tiny-hybrid/resolve/main/{SHARD}", "HEAD")[1]["location"]
        host, _, port = proxy.address.partition(":")
        conn = http.client.HTTPConnection(host, int(port), timeout=5)
        conn.request("GET", where)
        got = conn.getresponse()
        assert got.read(10) == content(hub)[:10]
        proxy.hang_up()
        assert got.read1(10) == b""
        conn.close()
        assert partial(where, 10)[1] == "TimeoutError"
