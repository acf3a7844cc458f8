"""Kernel module flavour by GPU and driver version."""

from __future__ import annotations

import pytest

from deployer.nvidia_arch import flavour_for, generation, wrong_flavour

A6000, H200, PRO6000, GTX1080, T4, GH200 = "0x2230", "2335", "0x2bb1", "1b80", "1eb8", "2342"


@pytest.mark.parametrize(
    ("device", "name"),
    [
        (A6000, "Ampere"),
        ("20b0", "Ampere"),
        (H200, "Hopper"),
        (PRO6000, "Blackwell or newer"),
        ("2b85", "Blackwell or newer"),
        ("2901", "Blackwell or newer"),
        ("26b9", "Ada"),
        (T4, "Turing"),
        ("2184", "Turing"),
        (GTX1080, "before Turing"),
        ("1db1", "before Turing"),
        ("", ""),
        ("zz", ""),
    ],
)
def test_generation(device: str, name: str) -> None:
    assert generation(device) == name


@pytest.mark.parametrize(
    ("devices", "version", "asked", "wanted", "forced"),
    [
        ((A6000,), "580.126.09", "auto", "open", False),
        ((A6000,), "550.54.14", "auto", "proprietary", False),
        ((A6000,), "580.126.09", "proprietary", "proprietary", False),
        ((A6000,), "470.256.02", "auto", "proprietary", False),
        ((PRO6000, A6000), "580.126.09", "auto", "open", True),
        ((GTX1080, A6000), "580.126.09", "auto", "proprietary", True),
        ((GH200,), "580.126.09", "auto", "open", True),
        ((), "580.126.09", "auto", "open", False),
    ],
)
def test_flavour(
    devices: tuple[str, ...], version: str, asked: str, wanted: str, forced: bool
) -> None:
    found = flavour_for(devices, version, asked)
    assert (found.wanted, found.forced, found.problem) == (wanted, forced, "")


@pytest.mark.parametrize(
    ("devices", "version", "asked", "words"),
    [
        ((PRO6000, GTX1080), "580.126.09", "auto", "no one driver serves both"),
        ((PRO6000,), "580.126.09", "proprietary", "runs with the open module only"),
        ((PRO6000,), "565.57.01", "auto", "needs driver 570 or newer"),
        ((GTX1080,), "595.45.04", "auto", "branch 580 or older"),
        ((GTX1080,), "580.126.09", "open", "runs with the proprietary module only"),
        ((A6000,), "470.256.02", "open", "has no open module"),
        ((A6000,), "620.10", "proprietary", "has no proprietary module"),
    ],
)
def test_nothing_fits(devices: tuple[str, ...], version: str, asked: str, words: str) -> None:
    found = flavour_for(devices, version, asked)
    assert found.wanted == ""
    assert words in found.problem


def test_the_loaded_one_may_be_the_wrong_one() -> None:
    assert "needs the open module" in wrong_flavour((A6000, PRO6000), "proprietary")
    assert "needs the proprietary module" in wrong_flavour((GTX1080,), "open")
    assert wrong_flavour((A6000, T4), "open") == wrong_flavour((PRO6000,), "open") == ""
    assert wrong_flavour((PRO6000,), "") == ""
