"""A model as the numbers that memory depends on. Pure; all sizes are bytes."""

from __future__ import annotations

from dataclasses import dataclass

VISION_OFF = frozenset(
    {
        "Gemma3ForConditionalGeneration",
        "Llama4ForConditionalGeneration",
        "Step3VLForConditionalGeneration",
        "InklingForConditionalGeneration",
    }
)
"""Served as text models unless --enable-multimodal is given (configs/model_config.py)."""
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "half": 2, "float": 4}


@dataclass(frozen=True)
class LinearState:
    """The recurrent layers: what one request keeps instead of KV tokens.

    The names are those of gated delta nets. Mamba2 has groups, state size, heads and head size in
    their place; a short convolution has no state besides its window (`key_dim` 0).
    """

    layers: int
    key_heads: int
    key_dim: int
    value_heads: int
    value_dim: int
    conv_kernel: int
    ssm_dtype: str

    def slot_bytes(self, tp: int, ssm_dtype: str | None, conv_bytes: int = 2) -> int:
        """Bytes of one state slot on one GPU."""
        # SGLang gives every rank one group when the groups do not divide.
        groups = self.key_heads if self.key_heads % tp == 0 else tp
        channels = self.value_heads * self.value_dim + 2 * groups * self.key_dim
        conv = channels // tp * (self.conv_kernel - 1) * conv_bytes
        ssm = self.value_heads // tp * self.value_dim * self.key_dim
        return self.layers * (conv + ssm * DTYPE_BYTES[ssm_dtype or self.ssm_dtype])


@dataclass(frozen=True)
class Mla:
    """Multi-head latent attention: one compressed vector a token, the same on every GPU."""

    kv_rank: int
    rope_dim: int
    nope_dim: int
    q_rank: int
    index_dim: int = 0
    """Of the sparse-attention index (DeepSeek V3.2), which is kept beside it; 0 without one."""

    @property
    def index_bytes(self) -> int:
        """Bytes of the index for one token and layer: 8-bit keys, a 32-bit scale for each 128."""
        return self.index_dim + self.index_dim // 128 * 4


@dataclass(frozen=True)
class Window:
    """Layers that only look back a window, and keep their KV in a pool of their own."""

    layers: int
    kv_heads: int
    head_dim: int
    v_head_dim: int
    span: int = 0
    """Tokens that a layer looks back; 0: not known."""

    def token_bytes(self, tp: int, kv_bytes: int) -> int:
        """KV bytes of one token of this pool on one GPU."""
        heads = max(1, self.kv_heads // tp)
        return heads * (self.head_dim + self.v_head_dim) * self.layers * kv_bytes


@dataclass(frozen=True)
class Moe:
    """Experts of the sparse layers."""

    experts: int
    width: int
    shared_width: int
    layers: int


@dataclass(frozen=True)
class Vision:
    """The image encoder. `layers_field` is what SGLang's own formula reads (24 if absent)."""

    depth: int
    layers_field: int
    hidden: int
    width: int
    out: int
    patch: int
    positions: int
    merge: int


@dataclass(frozen=True)
class Quantization:
    """How the linear weights are stored."""

    method: str
    bits: float
    group: int
    kv_fp8: bool
    excluded: bool
    """Some modules are named as not quantised; the estimate does not follow that list."""
    block: int = 0
    """Side of the square blocks that share a scale (fp8: 128), 0 for none."""


@dataclass(frozen=True)
class ModelShape:
    """What the memory arithmetic needs to know about a model."""

    architecture: str
    model_type: str
    hidden: int
    width: int
    layers: int
    full_layers: int
    heads: int
    kv_heads: int
    head_dim: int
    v_head_dim: int
    vocab: int
    context: int
    dtype: str
    tied: bool
    gated_attention: bool
    rotary_dim: int
    linear: LinearState | None
    mla: Mla | None
    moe: Moe | None
    vision: Vision | None
    quantization: Quantization | None
    nextn_layers: int
    """`num_nextn_predict_layers`, which 0.5.23 charges to the KV budget; 0 when absent."""
    mtp_layers: int
    """Layers of the checkpoint's own draft head; 0 when it has none."""
    window: Window | None = None
    """The other layers of a model with sliding-window pools; `full_layers` counts the full ones."""
    head_dim_given: bool = True
    """Does its config class know `head_dim`, by the file or a default of its own?"""

    @property
    def multimodal(self) -> bool:
        """Does SGLang treat it as a vision model?"""
        if self.architecture in VISION_OFF:
            return False
        return self.vision is not None or self.architecture.endswith("ForConditionalGeneration")

    @property
    def hybrid(self) -> bool:
        """Has it recurrent layers?"""
        return self.linear is not None

    @property
    def dtype_bytes(self) -> int:
        """Bytes of an unquantised weight."""
        return DTYPE_BYTES.get(self.dtype, 2)

    def kv_token_bytes(self, tp: int, kv_bytes: int) -> int:
        """KV bytes of one token on one GPU, without a draft."""
        if self.mla is not None:
            latent = (self.mla.kv_rank + self.mla.rope_dim) * kv_bytes
            return (latent + self.mla.index_bytes) * self.full_layers
        per_gpu = max(1, self.kv_heads // tp)
        return per_gpu * (self.head_dim + self.v_head_dim) * self.full_layers * kv_bytes
