"""What cuInit's answers mean."""

from __future__ import annotations

import pytest

from deployer.model import ProbeOutput
from deployer.steps.cuda_proof import CAUSES, NAMES, CudaProof, parse


def said(text: str, code: int = 0, error: str = "", timed_out: bool = False) -> CudaProof:
    return parse(ProbeOutput(code, text.encode(), error.encode(), timed_out))


def test_good() -> None:
    proof = said("cuinit 0 CUDA_SUCCESS\ndevices 2\ncuda 13000\n")
    assert proof == CudaProof(0, "CUDA_SUCCESS", 2, (13, 0))
    assert proof.good and proof.cause is None and proof.describe() == ""
    assert said("cuinit 0 \ncuda 12080\n").cuda == (12, 8)


@pytest.mark.parametrize("code", [*CAUSES, 3, 101, 4711])
def test_every_code_has_a_name_a_cause_and_an_action(code: int) -> None:
    proof = said(f"cuinit {code} {NAMES.get(code, '')}\n")
    assert not proof.good
    assert proof.cause is not None and proof.cause.on("kpro5")
    assert proof.describe().startswith(f"cuInit answers {code} (")
    assert (code in NAMES) == ("CUDA_ERROR_" in proof.describe())


@pytest.mark.parametrize(
    ("proof", "name"),
    [
        (said("cuinit 0 CUDA_SUCCESS\ndevices 0\n"), "cuda-no-device"),
        (said("stale 508 511\n"), "cuda-stale-uvm"),
        (said("nolibrary libcuda.so.1: cannot open shared object file\n"), "cuda-library"),
        (said("", timed_out=True), "cuda-hangs"),
    ],
)
def test_what_is_no_code(proof: CudaProof, name: str) -> None:
    assert proof.cause is not None and proof.cause.name == name
    assert proof.describe()
    assert not proof.good


@pytest.mark.parametrize(
    ("proof", "why"),
    [
        (said("skip the nvidia module is not loaded\n"), "the nvidia module is not loaded"),
        (said("", 139, "sh: Segmentation fault\n"), "ended with 139: sh: Segmentation fault"),
        (said("", 1), "ended with 1: no word"),
        (said("cuinit\nnonsense\n"), "ended with 0"),
    ],
)
def test_what_was_not_asked_is_no_failure_and_no_proof(proof: CudaProof, why: str) -> None:
    assert why in proof.skipped
    assert proof.cause is None
    assert not proof.good
