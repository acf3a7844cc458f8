"""What the inventory model accepts and its defaults."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from deployer.inventory import Container, Host, Ssh


def ssh(**values: object) -> Ssh:
    return Ssh.model_validate({"address": "192.0.2.5", **values})


def test_defaults() -> None:
    host = Host.model_validate({"ssh": {"address": "h"}, "gpus": [{"address": "0000:21:00.0"}]})
    assert host.kind == "proxmox"
    assert (host.ssh.user, host.ssh.port, host.ssh.connect_timeout_s) == ("root", None, 15.0)
    assert host.containers == {}
    assert Container().restart == "allowed"


@pytest.mark.parametrize(
    "address", ["kpro5", "kpro5.example.com", "192.0.2.5", "fe80::1%eth0", "2001:db8::5", "my_host"]
)
def test_addresses(address: str) -> None:
    assert ssh(address=address).address == address


@pytest.mark.parametrize("address", ["", "-oProxyCommand=id", "a b", "a\nb", "a;b", "a" * 300])
def test_refused_addresses(address: str) -> None:
    with pytest.raises(ValidationError):
        ssh(address=address)


@pytest.mark.parametrize("gateway", ["bastion", "root@192.0.2.1:2222", "me@a,root@b"])
def test_gateways(gateway: str) -> None:
    assert ssh(gateway=gateway).gateway == gateway


@pytest.mark.parametrize(
    "values",
    [
        {"gateway": "-x"},
        {"gateway": "a b"},
        {"user": "Root;id"},
        {"user": ""},
        {"identity_file": "a\nb"},
        {"known_hosts": ""},
        {"port": 0},
        {"port": 65536},
        {"connect_timeout_s": 0},
        {"connect_timeout_s": float("nan")},
        {"unknown": 1},
    ],
)
def test_refused_values(values: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        ssh(**values)


def test_a_loaded_inventory_does_not_change() -> None:
    loaded = ssh()
    with pytest.raises(ValidationError):
        loaded.port = 22
