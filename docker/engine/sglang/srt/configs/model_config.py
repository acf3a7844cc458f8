"""What config.json says of a model, and the errors of a folder that is not one."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

KNOWN = {
    "qwen2", "qwen3", "qwen3_moe", "qwen3_next", "qwen3_5", "qwen3_5_moe", "llama", "mistral",
    "gemma3", "deepseek_v3", "gpt_oss",
}  # fmt: skip


class ModelConfig:
    """The parts of config.json that the start needs."""

    def __init__(self, model_path: str, context_length: int | None, quantization: str | None):
        self.model_path = model_path
        self.hf_config = get_config(model_path)
        self.text: dict[str, Any] = self.hf_config.get("text_config") or self.hf_config
        names = self.hf_config.get("architectures") or ["Qwen3ForCausalLM"]
        self.architecture: str = names[0]
        self.model_type: str = self.hf_config["model_type"]
        self.hybrid = "linear_num_value_heads" in self.text
        self._verify_quantization(quantization)
        self._derive_context_length(context_length)

    @classmethod
    def from_server_args(cls, args: Any) -> ModelConfig:
        return cls(args.model_path, args.context_length, args.quantization)

    def _derive_context_length(self, wanted: int | None) -> None:
        derived = int(self.text.get("max_position_embeddings", 4096))
        self.context_len = wanted or derived
        longer = os.environ.get("SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN") == "1"
        if self.context_len > derived and not longer:
            raise ValueError(
                f"Warning: User-specified context_length ({wanted}) is greater than the derived "
                f"context_length ({derived}). This may lead to incorrect model outputs or CUDA "
                "errors. Note that the derived context_length may differ from "
                "max_position_embeddings in the model's config. To allow overriding this maximum, "
                "set the env var SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN=1"
            )

    def _verify_quantization(self, wanted: str | None) -> None:
        found = (self.hf_config.get("quantization_config") or {}).get("quant_method")
        if wanted and found and wanted != found:
            raise ValueError(
                f"Quantization method specified in the model config ({found}) does not match the "
                f"quantization method specified in the 'quantization' argument ({wanted})."
            )


def get_config(model_path: str) -> dict[str, Any]:
    folder = Path(model_path)
    if not folder.is_dir():
        raise OSError(
            "Repo id must be in the form 'repo_name' or 'namespace/repo_name': "
            f"'{model_path}'. Use `repo_type` argument if needed."
        )
    path = folder / "config.json"
    try:
        config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        config = {}
    except ValueError:
        raise OSError(
            f"It looks like the config file at '{path}' is not a valid JSON file."
        ) from None
    if "model_type" not in config:
        raise ValueError(
            f"Unrecognized model in {model_path}. Should have a `model_type` key in its "
            "config.json."
        )
    if config["model_type"] not in KNOWN:
        raise ValueError(
            f"The checkpoint you are trying to load has model type `{config['model_type']}` but "
            "Transformers does not recognize this architecture. This could be because of an issue "
            "with the checkpoint, or because your version of Transformers is out of date.\n\nYou "
            "can update Transformers with the command `pip install --upgrade transformers`. If "
            "this does not work, and the checkpoint is very new, then there may not be a release "
            "version that supports this model yet. In this case, you can get the most up-to-date "
            "code by installing Transformers from source with the command `pip install "
            "git+https://github.com/huggingface/transformers.git`"
        )
    return config
