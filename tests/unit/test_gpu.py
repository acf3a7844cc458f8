"""Driver versions, /proc texts and nvidia-smi answers."""

from __future__ import annotations

from pathlib import Path

import pytest

from deployer import gpu

FIXTURES = Path(__file__).parents[1] / "fixtures" / "nvidia-smi"


def fixture(name: str) -> str:
    return (FIXTURES / name).read_text()


def test_versions_compare_as_numbers() -> None:
    assert gpu.version_key("580.126.09") > gpu.version_key("580.95.05")
    assert gpu.same_version("580.126.09", "580.126.9")
    assert not gpu.same_version("580.126", "580.126.09")
    assert not gpu.same_version("", "")
    assert gpu.version_key("none") == ()


def test_both_wordings_of_the_module() -> None:
    assert gpu.module_version(fixture("nvrm-open.txt")) == "580.159.04"
    assert gpu.module_flavour(fixture("nvrm-open.txt")) == "open"
    assert gpu.module_version(fixture("nvrm-proprietary.txt")) == "535.129.03"
    assert gpu.module_flavour(fixture("nvrm-proprietary.txt")) == "proprietary"
    assert gpu.module_version("") == gpu.module_flavour("") == ""


def test_minor_is_not_the_index() -> None:
    assert gpu.device_minor(fixture("information.txt")) == 0
    assert gpu.device_minor("Model: x\n") is None


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("00000000:21:00.0", "0000:21:00.0"),
        ("0000:AF:00.1", "0000:af:00.1"),
        ("01:00.0", "0000:01:00.0"),
        ("01:00", "0000:01:00"),
        ("[N/A]", ""),
    ],
)
def test_addresses_as_sysfs_writes_them(text: str, address: str) -> None:
    assert gpu.pci_address(text) == address


def test_rows() -> None:
    (row,) = gpu.parse_smi(fixture("query-one.txt"))
    assert (row.address, row.memory_total_mib, row.compute_cap) == ("0000:00:06.0", 143771, "9.0")
    first, second = gpu.parse_smi(fixture("query-two.txt"))
    assert first.memory_used_mib is None
    assert (second.name, second.address) == ("NVIDIA, A thing", "0000:41:00.0")
    assert gpu.parse_smi("No devices were found\n") == ()


def test_library_versions_have_three_parts() -> None:
    path = "/usr/lib/x86_64-linux-gnu/libnvidia-ml.so.580.126.09"
    assert gpu.library_version(path) == ("libnvidia-ml.so", "580.126.09")
    assert gpu.library_version("/usr/lib/libcuda.so.1") == ("", "")


def test_a_file_with_the_name_of_a_node_is_no_node() -> None:
    nodes = gpu.parse_nodes(
        [
            "/dev/nvidia0|character special file|c3:0",
            "/dev/nvidia1|regular empty file|0:0",
            "/dev/nvidia-caps|directory|0:0",
            "/dev/nvidia-uvm|character special file|1fd:0",
        ]
    )
    assert nodes["/dev/nvidia0"] == gpu.Node("/dev/nvidia0", "char", 195, 0)
    assert not nodes["/dev/nvidia1"].is_char
    assert nodes["/dev/nvidia-uvm"].major == 509
    assert nodes["/dev/nvidia-caps"].kind == "other"


def test_needed_nodes() -> None:
    assert gpu.needed_nodes([1]) == (
        "/dev/nvidia1",
        "/dev/nvidiactl",
        "/dev/nvidia-uvm",
        "/dev/nvidia-uvm-tools",
    )
