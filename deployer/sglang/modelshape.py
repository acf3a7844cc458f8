"""A model as the numbers that memory depends on. Pure; all sizes are bytes."""

from __future__ import annotations

from dataclasses import dataclass

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "half": 2, "float": 4}


@dataclass(frozen=True)
class LinearState:
    """The recurrent layers: what one request keeps instead of KV tokens."""

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

    @property
    def multimodal(self) -> bool:
        """Does SGLang treat it as a vision model?"""
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
            return (self.mla.kv_rank + self.mla.rope_dim) * self.full_layers * kv_bytes
        per_gpu = max(1, self.kv_heads // tp)
        return per_gpu * (self.head_dim + self.v_head_dim) * self.full_layers * kv_bytes
