"""Model classes that came after 0.5.9, with the release that has them first. Pure data.

`EntryClass` of the files in sglang/srt/models/ in the wheels of every release from 0.5.9 to 0.5.23
(0.5.10, 0.5.12, 0.5.13 and 0.5.15 in their post releases), without those of drafts.
"""

from __future__ import annotations

FIRST_WITH: tuple[tuple[int, str], ...] = (
    (
        10,
        "Lfm2VlForConditionalGeneration SarvamMLAForCausalLM SarvamMoEForCausalLM "
        "WhisperForConditionalGeneration",
    ),
    (
        11,
        "Gemma4ForCausalLM Gemma4ForConditionalGeneration HYV3ForCausalLM MiMoV2ForCausalLM "
        "MossVLForConditionalGeneration NemotronH_Nano_Omni_Reasoning_V3 "
        "Qwen3ASRForConditionalGeneration VoxtralForConditionalGeneration",
    ),
    (
        12,
        "DeepseekV4ForCausalLM InternS2PreviewForConditionalGeneration LagunaForCausalLM "
        "MiniCPMV4_6ForConditionalGeneration",
    ),
    (
        13,
        "Cohere2MoeForCausalLM Cohere2VisionForConditionalGeneration "
        "Gemma4UnifiedForConditionalGeneration NemotronHPuzzleForCausalLM "
        "Step3p7ForConditionalGeneration",
    ),
    (
        14,
        "MiMoV2ASRForCausalLM ZayaForCausalLM",
    ),
    (
        15,
        "HrmTextForCausalLM LocateAnythingForConditionalGeneration UnlimitedOCRForCausalLM",
    ),
    (
        16,
        "GlmImageForConditionalGeneration InklingForConditionalGeneration MellumForCausalLM "
        "MiniMaxM3SparseForCausalLM MiniMaxM3SparseForConditionalGeneration",
    ),
    (
        17,
        "EmbeddingGemmaModel KimiK3ForConditionalGeneration Lfm2BidirectionalModel Qwen3Model "
        "Qwen3_5ForCausalLM Qwen3_5MoeForCausalLM",
    ),
    (
        18,
        "InternS2MobiusForConditionalGeneration MuseGlimmerForCausalLM "
        "MuseGlimmerForConditionalGeneration",
    ),
    (
        19,
        "BailingMoeV3ForCausalLM Dots3NoteForCausalLM GraniteMoeSWAForCausalLM "
        "GraniteMoeSharedForCausalLM GraniteSWAForCausalLM KimiK3LinearForCausalLM "
        "MiniCPMSALAForCausalLM Spark2_5ForCausalLM",
    ),
    (
        20,
        "Cosmos3EdgeForConditionalGeneration Cosmos3ForConditionalGeneration "
        "FalconMambaForCausalLM Glm5NextForConditionalGeneration HYV4ForCausalLM "
        "K2HorizonForCausalLM Mamba2ForCausalLM MambaForCausalLM NanbeigeForCausalLM "
        "NanbeigeForSequenceClassification NemotronH_Omni_Reasoning_V3 "
        "Qwen2ForSequenceClassification Qwen4ExpForConditionalGeneration XllmForCausalLM",
    ),
    (
        21,
        "BailingMM2NativeForConditionalGeneration BailingMMNativeForConditionalGeneration "
        "BailingMoeV3VLForConditionalGeneration DiffusionGemmaForBlockDiffusion "
        "GigaChat35ForCausalLM IQuestQ1ForCausalLM",
    ),
    (
        22,
        "EmbeddingGemma2Model ExaoneMoeForCausalLM",
    ),
    (
        23,
        "BeamForCausalLM MiniCPMV4_7ForConditionalGeneration MuseSparkForConditionalGeneration",
    ),
)
"""(patch of 0.5, architectures), oldest first."""


def first_with(architecture: str) -> int | None:
    """The patch of 0.5 that has this class first; None: 0.5.9 has it, or none that was read."""
    return next((patch for patch, names in FIRST_WITH if architecture in names.split()), None)
