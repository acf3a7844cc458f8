"""SGLang's memory arithmetic against recorded inputs and outputs of SGLang's own code."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from deployer.sglang.engineversion import Engine, engine_of
from deployer.sglang.fit import gpu_of
from deployer.sglang.memory import Pools, largest, size
from deployer.sglang.modelconfig import shape_of
from deployer.sglang.modelshape import ModelShape
from deployer.sglang.resolved import Refusal, resolve
from deployer.sglang.serveflags import ServeFlags, token_count
from deployer.sglang.statepool import GIB
from deployer.sglang.weights import estimate

FIXTURES = Path(__file__).parents[1] / "fixtures" / "sglang-plan"
FULL = Path(__file__).parents[3] / "shared" / "field" / "sglang-plan-cases.json"
A6000, H200 = 49140, 143771
EXAMPLE = (
    "--tp-size 2 --context-length 32768 --mem-fraction-static 0.88 --max-running-requests 16 "
    "--mamba-full-memory-ratio 0.5"
)
NEXTN = (
    " --speculative-algorithm NEXTN --speculative-num-steps 3 --speculative-eagle-topk 1"
    " --speculative-num-draft-tokens 4"
)
EXTRA = " --mamba-scheduler-strategy extra_buffer"


def flags_of(words: Sequence[str]) -> ServeFlags:
    """From words as on a command line."""
    args: dict[str, Any] = {}
    left = list(words)
    while left:
        flag, equals, value = left.pop(0)[2:].partition("=")
        if equals:
            args[flag] = value
        elif left and not re.match(r"--|-[^0-9]", left[0]):
            args[flag] = left.pop(0)
        else:
            args[flag] = True
    return ServeFlags.from_args(args)


def recorded(path: Path) -> list[Any]:
    """(model's config, case) of a file of recorded cases."""
    data = json.loads(path.read_text())
    return [
        pytest.param(
            data["models"][case["model"]]["config"], case, id=f"{case['id']}-{case['version']}"
        )
        for case in data["cases"]
    ]


def check(config: dict[str, Any], case: dict[str, Any]) -> None:
    """The plan of a case: errors, slots, requests exactly; tokens within 1 %."""
    shape, flags = shape_of(config), flags_of(case["flags"])
    try:
        gpu, capability = case["gpu"]["smi_mib"], divmod(case["gpu"]["sm"], 10)
        resolved = resolve(engine_of(case["version"])[0], shape, flags, gpu, None, capability)
        pools = size(shape, resolved, flags, case["pre_gib"], case["post_gib"])
    except Refusal as refusal:
        assert (refusal.error, refusal.phase) == (case["error"], case["raised_at"])
        return
    want = case["outputs"]
    assert case["error"] is None
    assert resolved.mem_fraction == pytest.approx(case["mem_fraction_static"], abs=1e-9)
    assert resolved.mem_fraction_auto == case["mem_fraction_is_auto"]
    assert pools.slots == want.get("slots")
    assert pools.slots_per_request == want.get("slots_per_request", pools.slots_per_request)
    assert pools.slot_bytes == want.get("state_bytes_per_slot")
    assert pools.kv_token_bytes == pytest.approx(want["kv_bytes_per_token"], abs=1e-6)
    assert pools.window_tokens == want.get("swa_tokens")
    assert pools.max_running == want["effective_max_running_requests"]
    assert pools.tokens == pytest.approx(want["max_total_num_tokens"], rel=0.01)
    assert pools.context == want["context_len"]


@pytest.mark.parametrize(
    ("config", "case"), [one for path in sorted(FIXTURES.glob("*.json")) for one in recorded(path)]
)
def test_recorded_cases(config: dict[str, Any], case: dict[str, Any]) -> None:
    check(config, case)


@pytest.mark.skipif(not FULL.exists(), reason=f"the full recording is not here: {FULL}")
def test_all_recorded_cases() -> None:
    for one in recorded(FULL):
        check(*one.values)


@pytest.mark.parametrize(
    ("config", "case"),
    [
        one
        for path in sorted(FIXTURES.glob("*.json"))
        for one in recorded(path)
        if one.values[1]["weight_bytes_per_gpu"] is not None
    ],
)
def test_estimated_weights(config: dict[str, Any], case: dict[str, Any]) -> None:
    weights = estimate(shape_of(config), case["tp"])
    assert weights.target == pytest.approx(case["weight_bytes_per_gpu"], rel=0.01)
    if case["draft_weight_bytes_per_gpu"]:
        assert weights.draft == pytest.approx(case["draft_weight_bytes_per_gpu"], rel=0.02)


def model(name: str = "hybrid") -> ModelShape:
    """The first model of a fixture."""
    data = json.loads((FIXTURES / f"{name}.json").read_text())
    return shape_of(next(iter(data["models"].values()))["config"])


def plan(version: str, words: str, before: float, after: float, mib: int = A6000) -> Pools:
    """The pools of the 27B model."""
    flags = flags_of(words.split())
    return size(model(), resolve(engine_of(version)[0], model(), flags, mib), flags, before, after)


@pytest.mark.parametrize(
    ("version", "words", "after", "slots", "each", "tokens", "running"),
    [
        ("0.5.9", EXAMPLE + NEXTN, 20.86, 16, 1, 312_775, 16),
        ("0.5.11", EXAMPLE + NEXTN + EXTRA, 20.86, 49, 5, 235_258, 9),
        ("0.5.11", EXAMPLE + NEXTN + " --disable-radix-cache", 20.86, 16, 1, 312_775, 16),
        ("0.5.11", EXAMPLE, 20.86, 71, 3, 333_916, 16),
        ("0.5.23", EXAMPLE + NEXTN, 18.04, 29, 5, 278_165, 5),
        (
            "0.5.23",
            EXAMPLE + NEXTN + " --speculative-draft-model-path /m",
            18.04,
            29,
            5,
            261_803,
            5,
        ),
    ],
)
def test_worked_example_of_two_48_gb_cards(
    version: str, words: str, after: float, slots: int, each: int, tokens: int, running: int
) -> None:
    pools = plan(version, words, 46.5, after)
    assert (pools.slots, pools.slots_per_request, pools.max_running) == (slots, each, running)
    assert pools.tokens == pytest.approx(tokens, rel=0.01)


def test_the_real_27b_run() -> None:
    words = EXAMPLE.replace("0.88", "0.2975") + NEXTN + EXTRA
    pools = plan("0.5.11", words, 138.31, 112.67, H200)
    assert (pools.slots, pools.max_running) == (50, 10)
    assert pools.tokens == pytest.approx(239_785, rel=0.01)


@pytest.mark.parametrize(
    ("version", "words", "fraction"),
    [
        ("0.5.9", NEXTN, 0.7546),
        ("0.5.11", NEXTN + EXTRA, 0.7167),
        ("0.5.9", "", 0.7934),
        ("0.5.11", "", 0.7934),
    ],
)
def test_automatic_memory_fraction(version: str, words: str, fraction: float) -> None:
    flags = flags_of(["--tp-size", "2", *words.split()])
    resolved = resolve(engine_of(version)[0], model(), flags, A6000)
    assert resolved.mem_fraction == pytest.approx(fraction, abs=1e-4)


@pytest.mark.parametrize(("chunk", "sizes"), [(2048, 42), (4096, 50), (8192, 58)])
def test_text_models_of_0_5_11_reserve_for_captured_tokens(chunk: int, sizes: int) -> None:
    flags = ServeFlags(chunked_prefill=chunk)
    without = dataclasses.replace(flags, no_piecewise=True)
    have, base = (
        resolve(Engine.V0_5_11, model("dense"), one, A6000).mem_fraction for one in (flags, without)
    )
    assert (base - have) * A6000 == pytest.approx(8 * sizes, abs=50)


def test_extra_buffer_slots_by_version_and_overlap() -> None:
    def each(version: str, words: str, env: dict[str, str] | None = None) -> int:
        flags = flags_of((EXAMPLE + words).split())
        return resolve(engine_of(version)[0], model(), flags, A6000, env).slots_per_request

    assert each("0.5.9", NEXTN + EXTRA) == 4
    assert each("0.5.9", EXTRA) == 5
    assert each("0.5.10", NEXTN + EXTRA) == 4
    assert each("0.5.10", NEXTN + EXTRA, {"SGLANG_ENABLE_SPEC_V2": "1"}) == 5
    assert each("0.5.11", NEXTN + EXTRA, {"SGLANG_ENABLE_SPEC_V2": "0"}) == 4
    assert each("0.5.23", "") == 5
    assert each("0.5.23", " --disable-overlap-schedule") == 3


@pytest.mark.parametrize(
    ("version", "after", "error"),
    [
        ("0.5.9", 4.0, "Current value: self.server_args.mem_fraction_static=0.88"),
        ("0.5.11", 4.0, "RuntimeError: Not enough memory. Please try to increase"),
        ("0.5.23", 4.0, "RuntimeError: Not enough GPU memory for hybrid"),
    ],
)
def test_no_memory_left(version: str, after: float, error: str) -> None:
    words = EXAMPLE if version == "0.5.23" else EXAMPLE + EXTRA + NEXTN
    with pytest.raises(Refusal) as caught:
        plan(version, words, 46.5, after)
    assert error in caught.value.error


def test_dense_weights_over_the_budget_on_0_5_23() -> None:
    flags = ServeFlags(mem_fraction=0.5)
    resolved = resolve(Engine.V0_5_23, model("dense"), flags, A6000)
    with pytest.raises(Refusal) as caught:
        size(model("dense"), resolved, flags, 46.5, 20.0)
    assert "Raise --mem-fraction-static above 0.570 (minimum viable" in caught.value.error


def test_too_few_slots_is_silent_before_0_5_23() -> None:
    words = EXAMPLE + " --max-mamba-cache-size 2"
    assert plan("0.5.11", words, 46.5, 20.86).max_running == 0
    with pytest.raises(Refusal, match="too small to serve any"):
        plan("0.5.23", words, 46.5, 20.86)


def test_extra_buffer_and_no_radix_cache_exclude_each_other() -> None:
    with pytest.raises(Refusal, match="not compatible with --disable-radix-cache"):
        plan("0.5.11", EXAMPLE + EXTRA + " --disable-radix-cache", 46.5, 20.86)


def test_a_context_beyond_the_model_is_refused_unless_allowed() -> None:
    flags = ServeFlags(context_length=50_000)
    with pytest.raises(Refusal, match=r"\(50000\) is greater than the derived .* \(40960\)"):
        resolve(Engine.V0_5_11, model("dense"), flags, A6000)
    env = {"SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1"}
    resolve(Engine.V0_5_11, model("dense"), flags, A6000, env)


def test_ssm_dtype_halves_the_state() -> None:
    pools = plan("0.5.11", EXAMPLE + NEXTN + EXTRA + " --mamba-ssm-dtype bfloat16", 46.5, 20.86)
    assert pools.slot_bytes == pytest.approx(37.4 * (1 << 20), rel=0.01)
    assert (pools.slots, pools.max_running) == (118, 16)


def test_requests_when_none_are_asked_for() -> None:
    dense = model("dense")

    def running(engine: Engine, cap: int | None) -> int:
        flags = ServeFlags(max_total_tokens=cap)
        pools = size(dense, resolve(engine, dense, flags, A6000), flags, 46.5, 30.0)
        return pools.max_running

    assert running(Engine.V0_5_11, 1000) == 500
    # 0.5.9 estimates from the pool before the cap cuts it.
    assert running(Engine.V0_5_9, 1000) == running(Engine.V0_5_9, None) > 2048


def test_fp8_kv_and_pages() -> None:
    dense = model("dense")
    flags = ServeFlags.from_args({"kv-cache-dtype": "fp8_e4m3", "page-size": 64})
    pools = size(dense, resolve(Engine.V0_5_11, dense, flags, A6000), flags, 46.5, 30.0)
    assert pools.kv_token_bytes == 147456 // 2
    assert pools.tokens % 64 == 0


def test_the_parts_add_up_to_the_free_memory() -> None:
    pools = plan("0.5.11", EXAMPLE + NEXTN + EXTRA, 46.5, 20.86)
    parts = pools.weights + pools.states + pools.intermediate + pools.kv + pools.slack
    assert parts == pytest.approx(46.5, abs=pools.kv_token_bytes / GIB)


def test_versions_that_were_not_read_are_told() -> None:
    assert engine_of("0.5.11") == (Engine.V0_5_11, "")
    assert engine_of("0.5.10.post1") == (Engine.V0_5_10, "")
    assert engine_of("0.5.12.post1") == (Engine.V0_5_11, "")
    assert engine_of("0.5.15.post1") == (Engine.V0_5_15, "")
    assert engine_of("0.5.19") == (Engine.V0_5_18, "")
    assert engine_of("0.5.21") == (Engine.V0_5_20, "")
    assert not any(engine_of(f"0.5.{patch}")[1] for patch in range(9, 24))
    engine, warning = engine_of("0.5.24")
    assert engine is Engine.V0_5_23
    assert "0.5.24 was not read" in warning
    assert engine_of("0.6.0")[0] is Engine.V0_5_23
    assert engine_of("0.5.8")[0] is Engine.V0_5_9


@pytest.mark.parametrize(
    ("version", "words", "after", "slots", "left", "running"),
    [
        ("0.5.13", EXTRA, 20.86, 39, 10.477052, 7),
        ("0.5.16", "", 18.04, 32, 8.445596, 6),
        ("0.5.17", "", 18.04, 29, 8.588967, 5),
        ("0.5.22", "", 18.04, 29, 8.491311, 5),
    ],
)
def test_states_between_the_versions_of_the_tables(
    version: str, words: str, after: float, slots: int, left: float, running: int
) -> None:
    """`_handle_max_mamba_cache` of each wheel was run: slots, and GiB that it leaves for KV."""
    pools = plan(version, EXAMPLE + NEXTN + words, 46.5, after)
    assert (pools.slots, pools.max_running) == (slots, running)
    assert pools.tokens == int(left * GIB) // 32_768


@pytest.mark.parametrize(
    ("version", "words", "mib"),
    [
        # What is set aside for graphs, in MiB; graphs that are off take nothing since 0.5.15.
        ("0.5.14", "--tp 2 --disable-cuda-graph", 64),
        ("0.5.15", "--tp 2 --disable-cuda-graph", 0),
        # A vision model of these has its prefill captured since 0.5.16.
        ("0.5.15", "--tp 2", 64),
        ("0.5.16", "--tp 2", 64 + 8 * 50),
        # A given context bounded what is captured up to 0.5.16; small batches since 0.5.22.
        ("0.5.16", "--tp 2 --context-length 1024", 64 + 8 * 36),
        ("0.5.17", "--tp 2 --context-length 1024", 64 + 8 * 50),
        ("0.5.20", "--tp 2 --max-running-requests 10", 64 + 8 * 50),
        ("0.5.22", "--tp 2 --max-running-requests 10", 20 + 8 * 50),
    ],
)
def test_what_graphs_take_of_the_fraction(version: str, words: str, mib: int) -> None:
    flags = flags_of(words.split())
    fraction = resolve(engine_of(version)[0], model(), flags, A6000).mem_fraction
    reserved = 512 + 1.5 * 4096 + 256 + mib
    assert fraction == pytest.approx(round((A6000 - reserved) / A6000, 3) * 0.92477, abs=1e-4)


def test_lazy_buffers_with_drafts_came_with_0_5_17() -> None:
    words = EXAMPLE + NEXTN + " --mamba-radix-cache-strategy extra_buffer_lazy"
    assert plan("0.5.17", words, 46.5, 18.04).slots_per_request == 4
    with pytest.raises(Refusal, match="unsupported with spec"):
        plan("0.5.16", words, 46.5, 18.04)


def test_flags_by_their_aliases() -> None:
    flags = ServeFlags.from_args({"tp": 4, "context_length": "32k", "speculative-algo": "nextn"})
    assert (flags.tp, flags.context_length, flags.speculative) == (4, 32_000, "NEXTN")
    assert ServeFlags.from_args({"dp-size": 2}).unmodelled == ("dp-size",)
    assert ServeFlags.from_args({"disable-radix-cache": False}).no_radix is False
    with pytest.raises(ValueError, match="--tp-size"):
        ServeFlags.from_args({"tp-size": "two"})
    for args in ({"tp-size": 0}, {"mem-fraction-static": 1.2}, {"mamba-full-memory-ratio": -1}):
        with pytest.raises(ValueError, match=r"--m|--tp"):
            ServeFlags.from_args(args)
    with pytest.raises(ValueError, match="is not a count"):
        token_count("32K")


def test_largest() -> None:
    assert largest(1, 100, lambda n: n <= 37) == 37
    assert largest(1, 100, lambda n: False) == 0


def test_free_memory_of_an_empty_h200_as_real_servers_saw_it() -> None:
    """`Load weight begin. avail mem` of four runs at tp 1 and one at tp 2."""
    assert abs(gpu_of(143771, None, 1)[0].free - 139.13) < 0.01
    assert abs(gpu_of(143771, None, 2)[0].free - 138.31) < 0.01
