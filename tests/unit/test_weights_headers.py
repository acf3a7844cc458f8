"""Sizes of weights by their safetensors headers."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from serverworld import deployment

from deployer.agents import headers
from deployer.model import ProbeOutput
from deployer.remote.jobs import ROOT
from deployer.sglang.modelconfig import shape_of
from deployer.sglang.weights import OtherCheckpoint, Tensors, estimate, from_tensors
from deployer.steps.server_wanted import WEIGHTS_FILE
from deployer.steps.weights_facts import WeightsFact, parse_weights, weights_probe

FIXTURE = Path(__file__).parents[1] / "fixtures" / "sglang-plan" / "hybrid.json"
SHAPE = shape_of(next(iter(json.loads(FIXTURE.read_text())["models"].values()))["config"])
TABLES = SHAPE.context * SHAPE.rotary_dim * 4
REAL = {"target": 53_790_000_000, "vision": 920_000_000, "draft": 850_000_000}
"""Bytes of the 27B checkpoint in bf16, by the parameters of field/sglang.md."""


def shard(path: Path, tensors: dict[str, tuple[str, int]]) -> None:
    """A file with only a header; its data is a hole."""
    told: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, (kind, size) in tensors.items():
        told[name] = {"dtype": kind, "shape": [size], "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(told).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text)
    os.truncate(path, 8 + len(text) + at)


def model(folder: Path) -> Path:
    (folder / "config.json").write_text(json.dumps({"num_hidden_layers": 2}))
    shard(
        folder / "a.safetensors",
        {
            "model.layers.0.mlp.weight": ("BF16", 100),
            "model.layers.1.mlp.weight_scale_inv": ("F32", 8),
            "model.layers.2.mlp.weight": ("BF16", 40),
            "model.visual.blocks.0.weight": ("BF16", 30),
        },
    )
    shard(folder / "b.safetensors", {"mtp.fc.weight": ("BF16", 20), "lm_head.weight": ("BF16", 5)})
    return folder


def test_the_parts_of_a_checkpoint(tmp_path: Path) -> None:
    assert headers.summary(model(tmp_path)) == {
        "files": 2,
        "groups": {
            "target": {"BF16": 105, "F32": 8},
            "draft": {"BF16": 60},
            "vision": {"BF16": 30},
        },
    }


def test_only_the_files_of_the_index_count(tmp_path: Path) -> None:
    index = {"weight_map": {"lm_head.weight": "b.safetensors"}}
    (model(tmp_path) / "model.safetensors.index.json").write_text(json.dumps(index))
    assert headers.summary(tmp_path)["files"] == 1


@pytest.mark.parametrize(
    "data", [b"", b"\0" * 8, b"\xff" * 16, struct.pack("<Q", 9) + b"not json!"]
)
def test_a_broken_header_is_a_problem_not_a_crash(tmp_path: Path, data: bytes) -> None:
    (model(tmp_path) / "a.safetensors").write_bytes(data)
    done = subprocess.run(
        [sys.executable, "-I", "-S", headers.__file__, str(tmp_path)],
        capture_output=True,
        check=True,
    )
    assert "problem" in json.loads(done.stdout)
    assert parse_weights(ProbeOutput(0, done.stdout, b"")).problem


def test_the_probe_runs_as_shell(tmp_path: Path) -> None:
    want = deployment(
        model={"path": str(model(tmp_path)), "repo": "acme/tiny", "served_name": "tiny"}
    )
    script = weights_probe(want).script
    done = subprocess.run(["sh", "-c", script], capture_output=True, check=True)
    fact = parse_weights(ProbeOutput(0, done.stdout, done.stderr))
    assert fact.tensors is not None
    assert fact.tensors.loaded("draft", 2) == 60
    (tmp_path / "config.json").unlink()
    empty = subprocess.run(["sh", "-c", script], capture_output=True, check=True)
    assert parse_weights(ProbeOutput(0, empty.stdout, b"")).tensors is None


def test_unchanged_files_are_read_once_a_run_and_not_again_after_a_launch(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    path = str(model(folder))
    want = deployment(model={"path": path, "repo": "acme/tiny", "served_name": "tiny"})

    def look(known: str) -> WeightsFact:
        script = weights_probe(want, known).script.replace(ROOT, str(tmp_path / "jobs"))
        done = subprocess.run(["sh", "-c", script], capture_output=True, check=True)
        return parse_weights(ProbeOutput(0, done.stdout, done.stderr))

    first = look("")
    again = look(first.line)
    assert (first.read, again.read, look("").read) == (2, 0, 2)
    assert again.tensors == first.tensors
    assert look(again.line).read == 0
    for launch, text in (("1", "half a line"), ("2", first.line)):
        kept = tmp_path / "jobs" / "server-qwen" / launch
        kept.mkdir(parents=True)
        (kept / WEIGHTS_FILE).write_text(f"{text}\n", encoding="utf-8")
    assert look("").read == 0
    os.utime(folder / "a.safetensors", ns=(1, 1))
    touched = look(first.line)
    assert (touched.read, touched.tensors) == (2, first.tensors)
    shard(folder / "new", {"lm_head.weight": ("BF16", 6)})
    (folder / "new").replace(folder / "b.safetensors")
    replaced = look(touched.line)
    assert replaced.read == 2 and replaced.tensors != first.tensors


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"groups": 1}', "noise"])
def test_any_answer_gives_a_fact(text: str) -> None:
    assert parse_weights(ProbeOutput(0, text.encode(), b"")).tensors is None
    assert parse_weights(ProbeOutput(0, b"", b"", timed_out=True)).problem


def test_one_gpu_holds_exactly_the_tensors() -> None:
    tensors = Tensors({part: {"BF16": size} for part, size in REAL.items()})
    one = from_tensors(SHAPE, 1, tensors)
    assert one.target == pytest.approx(REAL["target"] + REAL["vision"] + TABLES, rel=1e-6)
    embeddings = 2 * SHAPE.vocab * SHAPE.hidden * 2
    assert one.draft == pytest.approx(REAL["draft"] + embeddings + TABLES, rel=1e-6)


def test_the_split_over_gpus_is_the_estimates() -> None:
    tensors = Tensors({part: {"BF16": size} for part, size in REAL.items()})
    two, guess = from_tensors(SHAPE, 2, tensors), estimate(SHAPE, 2)
    assert two.target == pytest.approx(guess.target, rel=0.01)
    assert two.target == pytest.approx(27_394_851_952, rel=0.01)
    assert two.draft == pytest.approx(guess.draft, rel=0.02)


def test_a_checkpoint_without_a_head_has_no_draft() -> None:
    tensors = Tensors({"target": {"BF16": REAL["target"]}, "vision": {"BF16": REAL["vision"]}})
    assert from_tensors(SHAPE, 2, tensors).draft == 0


def test_32_bit_checkpoints_are_narrowed_and_scales_are_not() -> None:
    assert Tensors({"target": {"F32": 1000}}).loaded("target", 2) == 500
    assert Tensors({"target": {"F8_E4M3": 1000, "F32": 100}}).loaded("target", 2) == 1100


def test_another_models_files_are_not_believed() -> None:
    with pytest.raises(OtherCheckpoint, match="the config makes"):
        from_tensors(SHAPE, 1, Tensors({"target": {"BF16": 10**9}}))
