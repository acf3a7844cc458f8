"""Bytes of weights on one GPU, estimated from a config. Pure.

Against the tensors of SGLang's own model classes (tests/fixtures/sglang-plan) the target is within
1 %, the draft within 2 %. Where the size of the checkpoint is known, the estimate is scaled to it:
then only the split over GPUs is estimated. The server's log is the truth.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from deployer.sglang.modelshape import LinearState, ModelShape, Quantization, Vision


@dataclass(frozen=True)
class Weights:
    """Bytes on one GPU; the draft brings its own embeddings until they are shared."""

    target: int
    draft: int


WIDE = ("F32", "F64")


@dataclass(frozen=True)
class Tensors:
    """Bytes in the safetensors files: part (target, draft, vision) -> dtype -> bytes."""

    groups: Mapping[str, Mapping[str, int]]

    def loaded(self, part: str, dtype_bytes: int) -> int:
        """Bytes of a part once loaded: a checkpoint of mostly 32-bit weights is narrowed."""
        kinds = self.groups.get(part, {})
        total = sum(kinds.values())
        wide = sum(kinds.get(kind, 0) for kind in WIDE)
        if wide * 2 <= total or dtype_bytes > 2:
            return total
        narrowed = sum(
            kinds.get(kind, 0) * dtype_bytes // size
            for kind, size in zip(WIDE, (4, 8), strict=True)
        )
        return total - wide + narrowed


class OtherCheckpoint(ValueError):
    """The checkpoint's size does not go with its config: nothing can be said from it."""


@dataclass(frozen=True)
class _Parameters:
    """Numbers of parameters on one GPU: those that quantisation shrinks, and the others."""

    linear: float = 0.0
    plain: float = 0.0

    def __add__(self, other: _Parameters) -> _Parameters:
        return _Parameters(self.linear + other.linear, self.plain + other.plain)

    def times(self, count: int) -> _Parameters:
        return _Parameters(self.linear * count, self.plain * count)


def estimate(shape: ModelShape, tp: int, quantization: str | None = None) -> Weights:
    """The weights of one of `tp` GPUs; `quantization` is the flag (fp8 quantises while loading)."""
    linear_bytes = _linear_bytes(shape, quantization)
    embeddings = shape.vocab * shape.hidden / tp
    rotary = shape.context * shape.rotary_dim * 4
    heads = embeddings * (1 if shape.tied else 2) * shape.dtype_bytes
    body = _attention(shape, tp).times(shape.full_layers)
    if shape.linear is not None:
        body += _recurrent(shape.linear, shape.hidden, tp).times(shape.linear.layers)
    sparse = shape.moe.layers if shape.moe else 0
    body += _experts(shape, tp).times(sparse) + _dense(shape, tp).times(shape.layers - sparse)
    target = body.linear * linear_bytes + body.plain * shape.dtype_bytes + heads + rotary
    if shape.vision is not None:
        target += _vision(shape.vision, shape.hidden, tp) * shape.dtype_bytes
    draft = 0.0
    if shape.mtp_layers:
        layer = _attention(shape, tp) + (_experts(shape, tp) if shape.moe else _dense(shape, tp))
        layer += _Parameters(plain=2 * shape.hidden**2)
        draft = layer.linear * linear_bytes + layer.plain * shape.dtype_bytes
        draft = draft * shape.mtp_layers + 2 * embeddings * shape.dtype_bytes + rotary
    return Weights(int(target), int(draft))


SCALE = (0.85, 1.2)
"""Checkpoint over estimate: beyond it the config describes something else than the files."""


def measured(
    shape: ModelShape, tp: int, checkpoint_bytes: int, quantization: str | None = None
) -> Weights:
    """The weights of one GPU, from the bytes of all safetensors files of the model.

    Raises OtherCheckpoint when these are far from what the config makes.
    """
    stored, tables = _stored(shape)
    scale = checkpoint_bytes / stored
    if not SCALE[0] <= scale <= SCALE[1]:
        raise OtherCheckpoint(
            f"the safetensors files have {checkpoint_bytes / 1e9:.2f} GB, "
            f"the config makes {stored / 1e9:.2f} GB"
        )
    guess = estimate(shape, tp, quantization)
    draft = (guess.draft - tables) * scale + tables if guess.draft else 0.0
    return Weights(int((guess.target - tables) * scale + tables), int(draft))


def from_tensors(
    shape: ModelShape, tp: int, tensors: Tensors, quantization: str | None = None
) -> Weights:
    """The weights of one GPU from the tensors themselves; only their split over GPUs is estimated.

    Raises OtherCheckpoint when they are far from what the config makes.
    """
    whole = estimate(shape, 1)
    tables = shape.context * shape.rotary_dim * 4
    target = tensors.loaded("target", shape.dtype_bytes) + tensors.loaded(
        "vision", shape.dtype_bytes
    )
    scale = target / (whole.target - tables)
    if not SCALE[0] <= scale <= SCALE[1]:
        raise OtherCheckpoint(
            f"the tensors of the model have {target / 1e9:.2f} GB, "
            f"the config makes {(whole.target - tables) / 1e9:.2f} GB"
        )
    guess = estimate(shape, tp, quantization)
    draft = tensors.loaded("draft", shape.dtype_bytes)
    if draft:
        # Its embeddings are not in the files: it loads the target's a second time.
        embeddings = 2 * shape.vocab * shape.hidden * shape.dtype_bytes
        layers = max(1, whole.draft - embeddings - tables)
        split = max(0.0, guess.draft - embeddings / tp - tables) / layers
        draft = int(draft * (split or 1 / tp) + embeddings / tp + tables)
    return Weights(int((guess.target - tables) * scale + tables), draft)


def _stored(shape: ModelShape) -> tuple[int, int]:
    """Estimated bytes of the safetensors files, and of the rotary tables that are not in them."""
    tables = shape.context * shape.rotary_dim * 4
    whole = estimate(shape, 1)
    embeddings = 2 * shape.vocab * shape.hidden * shape.dtype_bytes
    draft = whole.draft - embeddings - tables if whole.draft else 0
    return whole.target - tables + draft, tables


def _linear_bytes(shape: ModelShape, flag: str | None) -> float:
    quantization = shape.quantization
    if quantization is None and flag in ("fp8", "w8a8_int8", "w8a8_fp8"):
        quantization = Quantization(flag, 8, 0, False, False)
    if quantization is None:
        return float(shape.dtype_bytes)
    if quantization.bits >= 16:
        return quantization.bits / 8
    # Scales: a 16-bit one and a packed zero point a group; a float32 one a 128x128 block of fp8.
    scales = 2.5 / quantization.group if quantization.group else 4 / (128 * 128)
    return quantization.bits / 8 + scales


def _attention(shape: ModelShape, tp: int) -> _Parameters:
    hidden, heads = shape.hidden, shape.heads
    if shape.mla is not None:
        mla = shape.mla
        wide = heads * (mla.nope_dim + mla.rope_dim)
        queries = mla.q_rank * wide / tp if mla.q_rank else hidden * wide / tp
        shared = hidden * (mla.kv_rank + mla.rope_dim) + hidden * mla.q_rank
        values = mla.kv_rank * heads * (mla.nope_dim + shape.v_head_dim) / tp
        return _Parameters(queries + shared + values + heads * shape.v_head_dim * hidden / tp)
    kv_heads = max(1, shape.kv_heads // tp)
    queries = hidden * heads * shape.head_dim * (2 if shape.gated_attention else 1) / tp
    keys = hidden * kv_heads * (shape.head_dim + shape.v_head_dim)
    return _Parameters(queries + keys + heads * shape.v_head_dim * hidden / tp)


def _recurrent(linear: LinearState, hidden: int, tp: int) -> _Parameters:
    keys = linear.key_heads * linear.key_dim
    values = linear.value_heads * linear.value_dim
    wide = hidden * (2 * keys + 2 * values) + values * hidden
    small = 2 * hidden * linear.value_heads + (2 * keys + values) * linear.conv_kernel
    return _Parameters(wide / tp, small / tp)


def _dense(shape: ModelShape, tp: int) -> _Parameters:
    return _Parameters(3 * shape.hidden * shape.width / tp)


def _experts(shape: ModelShape, tp: int) -> _Parameters:
    if shape.moe is None:
        return _Parameters()
    moe = shape.moe
    experts = 3 * shape.hidden * (moe.experts * moe.width + moe.shared_width) / tp
    return _Parameters(experts, shape.hidden * moe.experts)


def _vision(vision: Vision, hidden: int, tp: int) -> float:
    block = 4 * vision.hidden**2 + 2 * vision.hidden * vision.width
    merged = vision.hidden * vision.merge**2
    merger = merged**2 + merged * (vision.out or hidden)
    patches = 6 * vision.patch**2 * vision.hidden + vision.positions * vision.hidden
    return (vision.depth * block + merger) / tp + patches
