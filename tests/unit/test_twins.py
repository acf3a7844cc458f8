"""One machine under two names: seen when the inventory is loaded, else when both are asked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from deployer.catalog import Catalog
from deployer.errors import DocumentError
from deployer.inventory import Host
from deployer.model import ProbeOutput
from deployer.remote.machine import ABOVE, FOLDER, PROBE, Machine
from deployer.twins import Twins
from tests.local_transport import SHELLS, LocalTransport, shell_path

GPUS = ("0000:21:00.0", "0000:41:00.0")


def host(address: str, *gpus: str, guests: dict[int, Any] | None = None, **ssh: Any) -> Any:
    return {
        "ssh": {"address": address, **ssh},
        "gpus": [{"address": gpu} for gpu in gpus or GPUS],
        "containers": guests or {},
    }


def load(folder: Path, **hosts: Any) -> Catalog:
    (folder / "inventory").mkdir()
    (folder / "inventory" / "a.yaml").write_text(yaml.safe_dump({"hosts": hosts}))
    return Catalog.load(folder / "inventory")


@pytest.mark.parametrize(
    ("second", "shared"),
    [
        (host("gpu.example", GPUS[1]), f"GPU {GPUS[1]}"),
        (host("GPU.Example.", GPUS[1]), f"GPU {GPUS[1]}"),
        (host("gpu.example"), f"GPU {GPUS[0]}, GPU {GPUS[1]}"),
        (host("gpu.example", "0000:61:00.0", guests={129: {}}), "container 129"),
    ],
)
def test_two_names_at_one_address_share_nothing(tmp_path: Path, second: Any, shared: str) -> None:
    with pytest.raises(DocumentError) as caught:
        load(tmp_path, a=host("gpu.example", guests={129: {}}), b=second)
    assert caught.value.what == (
        f"hosts.b is reached at the address of hosts.a, and both claim {shared}"
    )
    assert "describe the machine once" in caught.value.fix
    assert "a.yaml:" in caught.value.where


def test_an_address_of_ipv6_has_many_forms(tmp_path: Path) -> None:
    with pytest.raises(DocumentError, match="both claim"):
        load(tmp_path, a=host("2001:db8::5"), b=host("[2001:DB8:0::5]"))


@pytest.mark.parametrize(
    "second",
    [
        host("gpu.example", port=2222),
        host("gpu.example", gateway="jump"),
        host("gpu2.example"),
        host("gpu.example", "0000:61:00.0", guests={130: {}}),
    ],
    ids=["another port", "behind a gateway", "another address", "nothing shared"],
)
def test_what_may_be_two_machines_is_taken_for_two(tmp_path: Path, second: Any) -> None:
    assert list(load(tmp_path, a=host("gpu.example", guests={129: {}}), b=second).hosts) == [
        "a",
        "b",
    ]


@pytest.mark.parametrize(
    ("ssh", "other"),
    [
        ({"address": "192.0.2.129"}, "hosts.a.containers.129"),
        ({"address": "192.0.2.5"}, "hosts.a"),
    ],
)
def test_a_container_has_an_address_of_its_own(
    tmp_path: Path, ssh: dict[str, Any], other: str
) -> None:
    first = host("192.0.2.5", guests={129: {"ssh": {"address": "192.0.2.129"}}})
    with pytest.raises(DocumentError) as caught:
        load(tmp_path, a=first, b=host("192.0.2.6", guests={130: {"ssh": ssh}}))
    assert caught.value.what == f"hosts.b.containers.130 is reached at the address of {other}"


def test_another_user_may_lead_somewhere_else(tmp_path: Path) -> None:
    guests = {129: {"ssh": {"address": "192.0.2.5", "user": "ct129"}}}
    load(tmp_path, a=host("192.0.2.5", guests=guests))


def said(boot: str, folder: str, above: str = "") -> Machine:
    rows = [f"boot {boot}", f"{FOLDER} {folder}" * bool(folder), f"{ABOVE} {above}" * bool(above)]
    return PROBE.parse(ProbeOutput(0, "\n".join(rows).encode(), b""))  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (said("b", "1:2"), said("b", "1:2"), True),
        # Containers of one kernel.
        (said("b", "1:2"), said("b", "3:2"), False),
        (said("b", "1:2"), said("c", "1:2"), False),
        # Before anything was changed there, and just after.
        (said("b", "", "1:1"), said("b", "", "1:1"), True),
        (said("b", "", "1:1"), said("b", "1:2", "1:1"), True),
        (said("b", "", "1:1"), said("b", "1:2", "3:1"), False),
        # Nothing known proves nothing.
        (said("", "1:2"), said("", "1:2"), False),
        (said("b", ""), said("b", ""), False),
        (Machine(), Machine(), False),
    ],
)
def test_what_tells_a_machine(one: Machine, other: Machine, same: bool) -> None:
    assert one.same_as(other) is other.same_as(one) is same


@pytest.mark.parametrize("shell", SHELLS)
def test_the_probe_tells_this_machine(shell: str, tmp_path: Path) -> None:
    answer = LocalTransport(shell_path(shell, tmp_path)).run(PROBE.script)
    seen = PROBE.parse(ProbeOutput(answer.exit, answer.stdout, answer.stderr))
    assert isinstance(seen, Machine)
    assert seen.boot == Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    status = Path(ABOVE).stat()
    assert seen.above == f"{status.st_dev}:{status.st_ino}"
    assert seen.same_as(seen)


def test_the_second_name_is_refused_or_told_once() -> None:
    twins, told = Twins(), list[str]()
    one, two, apart = (
        Host.model_validate(host(f"192.0.2.{number}", gpu))
        for number, gpu in ((5, GPUS[0]), (6, GPUS[0]), (7, GPUS[1]))
    )
    twins.meet("one", one, said("b", "1:2"), told.append)
    twins.meet("one", one, said("b", "1:2"), told.append)
    twins.meet("far", one, said("c", "1:2"), told.append)
    twins.meet("dark", one, None, told.append)
    assert told == []
    for _ in range(2):
        with pytest.raises(DocumentError) as caught:
            twins.meet("two", two, said("b", "1:2"), told.append)
    assert caught.value.what == f"one and two are one machine, and both claim GPU {GPUS[0]}"
    assert caught.value.exit_code == 2
    for _ in range(2):
        twins.meet("apart", apart, said("b", "1:2"), told.append)
    assert len(told) == 1 and told[0].startswith("apart is the same machine as one; describe")
