"""KV page size and state strategies that follow from a model, a version and a GPU. Pure.

Source: `_get_default_attn_backend`, `_handle_attention_backend_compatibility` and
`_handle_model_specific_adjustments` in server_args.py of 0.5.9 and 0.5.11.
"""

from __future__ import annotations

from deployer.sglang.modelshape import ModelShape
from deployer.sglang.modelstate import HYBRID_ARCHITECTURES
from deployer.sglang.serveflags import ServeFlags

TRTLLM_MLA = frozenset(
    {
        "DeepseekV3ForCausalLM",
        "KimiK25ForConditionalGeneration",
        "MistralLarge3ForCausalLM",
        "PixtralForConditionalGeneration",
    }
)
"""MLA models that get the TensorRT-LLM backend on Blackwell by themselves."""
TRITON_ON_SM100 = frozenset({"FalconH1ForCausalLM", "GraniteMoeHybridForCausalLM"})
FLASHINFER_ON_SM100 = frozenset({"NemotronHForCausalLM", "Lfm2ForCausalLM"})
LATER_BUFFERED = frozenset(
    {"FalconH1ForCausalLM", "GraniteMoeHybridForCausalLM", "NemotronHForCausalLM"}
)
"""State models with the extra buffer since 0.5.14."""
PAGES: dict[str, tuple[int, ...]] = {
    "flashmla": (64,),
    "cutlass_mla": (128,),
    "trtllm_mla": (64, 32),
    "trtllm_mha": (64, 16, 32),
    "nsa": (64,),
}
"""Backend -> page sizes that it takes; the first replaces any other."""


def lacks_head_dim(engine: int, shape: ModelShape) -> bool:
    """Does this version fail on a config without `head_dim`?

    `_derive_model_shapes` takes v_head_dim from a head_dim that is still None. Mixtral's config
    class has None in transformers 4.57.1 and 5.6.0, Mistral's only in 4.57.1 (SGLang 0.5.9).
    """
    if shape.head_dim_given:
        return False
    if shape.architecture == "MixtralForCausalLM":
        return engine <= 11
    return shape.architecture == "MistralForCausalLM" and engine <= 9


def has_extra_buffer(engine: int, architecture: str) -> bool:
    """Does this version (its patch number) keep states in extra buffers for this model?"""
    if architecture in HYBRID_ARCHITECTURES:
        return True
    if architecture == "KimiLinearForCausalLM":
        return engine >= 18
    return engine >= 14 and architecture in LATER_BUFFERED


def page_size(
    engine: int,
    shape: ModelShape,
    flags: ServeFlags,
    capability: tuple[int, int] | None,
    no_buffer: bool,
) -> int:
    """Tokens of a KV page; `no_buffer`: a state model whose radix cache has no extra buffer."""
    if shape.mla is not None and shape.mla.index_dim:
        return 64
    given = flags.page_size or 1
    if shape.hybrid and no_buffer and engine < 14:
        given = 1
    backend = flags.attention_backend
    if not backend and capability is not None and capability[0] == 10:
        backend = _on_sm100(engine, shape, flags, no_buffer)
    allowed = PAGES.get(backend, ())
    return given if not allowed or given in allowed else allowed[0]


def _on_sm100(engine: int, shape: ModelShape, flags: ServeFlags, no_buffer: bool) -> str:
    """The default backend of a data-centre Blackwell GPU."""
    if shape.mla is not None:
        return "trtllm_mla" if shape.architecture in TRTLLM_MLA else "flashinfer"
    if shape.architecture in TRITON_ON_SM100 | FLASHINFER_ON_SM100:
        return "triton"
    if shape.window is not None:
        return "trtllm_mha"
    if flags.speculative and flags.topk != 1:
        return "flashinfer"
    if shape.hybrid and (engine <= 9 or (no_buffer and not flags.speculative)):
        return "triton"
    return "trtllm_mha"
