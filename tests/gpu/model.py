"""Makes a tiny checkpoint of the Qwen3.5 kind: hybrid linear attention, MTP head, vision tower.

    python3 model.py FOLDER random     weights as initialised: it talks rubbish
    python3 model.py FOLDER learned    trained here until it knows the lessons of texts.py by heart

Needs torch and transformers >= 5.6; uses the GPU when there is one. The last line of the output is
one JSON object of figures.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import texts
import torch
from checkpoint import MODEL, TEXT, make_tokenizer, save
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional
from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration, Qwen3_5TextConfig
from transformers.models.qwen3_5 import modeling_qwen3_5 as parts

DRAFTS = 3
"""So many draft steps in a row are taught to the MTP head (speculative-num-steps)."""
SURE = 0.99
"""Training ends when every token of every answer is at least so probable."""
RATE, FAST = 2e-3, 150
"""The learning rate, and the step from which it is lower: else some tokens stay unsure."""
SHORT, LONG = 160, 1000
"""Tokens: lessons below SHORT are one padded batch, those below LONG another, the rest a third."""
RARELY = 4
"""The long lessons are part of each so many-th step: they cost more than all others together."""


class Mtp(nn.Module):
    """The multi-token-prediction head as SGLang runs it: input t is token t+1 and hidden t."""

    def __init__(self, text: Qwen3_5TextConfig) -> None:
        super().__init__()
        alone = {"layer_types": ["full_attention"], "num_hidden_layers": 1}
        one = Qwen3_5TextConfig(**{**text.to_dict(), **alone})
        one._attn_implementation = text._attn_implementation
        norm = lambda: parts.Qwen3_5RMSNorm(text.hidden_size, eps=text.rms_norm_eps)  # noqa: E731
        self.fc = nn.Linear(2 * text.hidden_size, text.hidden_size, bias=False)
        self.pre_fc_norm_embedding, self.pre_fc_norm_hidden = norm(), norm()
        self.layers = nn.ModuleList([parts.Qwen3_5DecoderLayer(one, 0)])
        self.norm = norm()
        self.rotary = parts.Qwen3_5TextRotaryEmbedding(config=one)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.02)
            elif isinstance(module, parts.Qwen3_5RMSNorm):
                nn.init.zeros_(module.weight)

    def forward(self, embedded: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """The hidden states after the head's own norm."""
        both = (self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(hidden))
        x = self.fc(torch.cat(both, dim=-1))
        length = x.shape[1]
        at = torch.arange(length, device=x.device).view(1, 1, -1).expand(3, x.shape[0], -1)
        mask = torch.full((length, length), float("-inf"), device=x.device, dtype=x.dtype).triu(1)
        x = self.layers[0](
            x, position_embeddings=self.rotary(x, at), attention_mask=mask[None, None]
        )
        return self.norm(x)


def batches(tokenizer: Any, device: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(tokens, whether the token is part of an answer), padded on the right, by length."""

    def count(text: str) -> int:
        return len(tokenizer.encode(text).ids)

    rows = []
    for lesson in [*texts.lessons(), *texts.long_lessons(count)]:
        head = tokenizer.encode(lesson.prompt).ids
        tail = tokenizer.encode(lesson.answer + ("<|im_end|>" if lesson.ends else "")).ids
        rows.append((head + tail, [False] * len(head) + [True] * len(tail)))
    groups = [[row for row in rows if len(row[0]) < SHORT]]
    groups.append([row for row in rows if SHORT <= len(row[0]) < LONG])
    groups.append([row for row in rows if len(row[0]) >= LONG])
    out = []
    for group in groups:
        width = max(len(ids) for ids, _ in group)
        ids = [ids + [0] * (width - len(ids)) for ids, _ in group]
        said = [said + [False] * (width - len(said)) for _, said in group]
        out.append((torch.tensor(ids, device=device), torch.tensor(said, device=device)))
    return out


def losses(logits: torch.Tensor, ids: torch.Tensor, said: torch.Tensor) -> torch.Tensor:
    """Cross entropy of each token that is part of an answer; logits[t] predicts ids[t]."""
    return functional.cross_entropy(logits[said].float(), ids[said], reduction="none")


def train_trunk(model: Any, data: list[Any], limit_s: float, steps: int) -> dict[str, float]:
    """Until the least probable token of all answers is SURE, a deadline or a number of steps."""
    text = model.model.language_model
    learn = [*text.parameters(), *model.lm_head.parameters()]
    optimiser = torch.optim.AdamW(learn, lr=2e-3, betas=(0.9, 0.95), weight_decay=0.0)
    began, worst, done = time.monotonic(), 0.0, 0
    while done < steps and time.monotonic() - began < limit_s:
        done += 1
        for group in optimiser.param_groups:
            group["lr"] = RATE * min(1.0, done / 40) * (0.35 if done > FAST or worst > 0.5 else 1.0)
        seen: list[float] = []
        optimiser.zero_grad()
        whole = done % RARELY == 0
        for ids, said in data:
            if ids.shape[1] >= LONG and not whole:
                continue
            hidden = text(input_ids=ids, use_cache=False).last_hidden_state
            loss = losses(model.lm_head(hidden[:, :-1]), ids[:, 1:], said[:, 1:])
            (loss.sum() / 400).backward()
            seen.append(loss.max().item())
        nn.utils.clip_grad_norm_(learn, 1.0)
        optimiser.step()
        worst = float(torch.tensor(-max(seen)).exp())
        if done % 20 == 0:
            print(f"step {done}: least probable token {worst:.4f}", flush=True)
        if worst >= SURE and whole:
            break
    seconds = round(time.monotonic() - began, 1)
    return {"steps": done, "seconds": seconds, "least_probable": round(worst, 4)}


def train_mtp(
    model: Any, mtp: Mtp, data: list[Any], limit_s: float, steps: int
) -> dict[str, float]:
    """Teaches the head on the finished trunk; the share of right drafts, step by step."""
    text = model.model.language_model
    with torch.no_grad():
        known = [(ids, said, text(input_ids=ids, use_cache=False).last_hidden_state)
                 for ids, said in data]  # fmt: skip
    optimiser = torch.optim.AdamW(mtp.parameters(), lr=1e-3, weight_decay=0.0)
    began, done, right = time.monotonic(), 0, [0.0] * DRAFTS
    while done < steps and time.monotonic() - began < limit_s:
        done += 1
        optimiser.zero_grad()
        hits = [[0, 0] for _ in range(DRAFTS)]
        for ids, said, hidden in known:
            carried = hidden
            for step in range(DRAFTS):
                # carried[t] with token t+1+step predicts token t+2+step.
                carried = mtp(text.embed_tokens(ids[:, 1 + step :]), carried[:, :-1])
                wanted, asked = ids[:, 2 + step :], said[:, 2 + step :]
                logits = model.lm_head(carried[:, :-1])
                loss = losses(logits, wanted, asked)
                (loss.sum() / 400).backward(retain_graph=step < DRAFTS - 1)
                hits[step][0] += int((logits[asked].argmax(-1) == wanted[asked]).sum())
                hits[step][1] += int(asked.sum())
        nn.utils.clip_grad_norm_(mtp.parameters(), 1.0)
        optimiser.step()
        right = [round(good / max(1, all_), 4) for good, all_ in hits]
        if done % 25 == 0:
            print(f"mtp step {done}: right drafts {right}", flush=True)
        if min(right) > 0.995:
            break
    figures = {"mtp_steps": done, "mtp_seconds": round(time.monotonic() - began, 1)}
    return {**figures, **{f"mtp_right_{i + 1}": share for i, share in enumerate(right)}}


def load(folder: Path, model: Any, mtp: Mtp) -> None:
    """Takes the weights of an earlier checkpoint of the same shape as the start."""
    found: dict[str, torch.Tensor] = {}
    for shard in sorted(folder.glob("*.safetensors")):
        found |= load_file(shard)
    heads = {name.removeprefix("mtp."): value for name, value in found.items()
             if name.startswith("mtp.")}  # fmt: skip
    rest = {name: value for name, value in found.items() if not name.startswith("mtp.")}
    for part, values in ((model, rest), (mtp, heads)):
        lost = part.load_state_dict(values, strict=False)
        if lost.unexpected_keys or any("rotary" not in name for name in lost.missing_keys):
            raise RuntimeError(f"{folder} is another model: {lost}")


def build(
    folder: Path, kind: str, limit_s: float, steps: int, start: Path | None = None
) -> dict[str, Any]:
    """Writes the checkpoint. Raises RuntimeError when the lessons were not learnt in time."""
    torch.manual_seed(20)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = make_tokenizer()
    config = Qwen3_5Config(**{**MODEL, "text_config": dict(TEXT)})
    for part in (config, config.text_config):
        part._attn_implementation = "sdpa"
    model = Qwen3_5ForConditionalGeneration(config).to(device)
    mtp = Mtp(config.text_config).to(device)
    if start is not None:
        load(start, model, mtp)
    figures: dict[str, Any] = {
        "kind": kind,
        "device": device,
        "parameters": sum(p.numel() for p in [*model.parameters(), *mtp.parameters()]),
    }
    if kind == "learned":
        data = batches(tokenizer, device)
        figures["lessons"] = sum(ids.shape[0] for ids, _ in data)
        figures["longest_tokens"] = max(ids.shape[1] for ids, _ in data)
        figures |= train_trunk(model, data, limit_s, steps)
        figures |= train_mtp(model, mtp, data, limit_s / 2, steps)
    names = save(folder, model, mtp, tokenizer)
    figures["bytes"] = sum((folder / name).stat().st_size for name in names)
    if kind == "learned" and figures["least_probable"] < 0.5:
        raise RuntimeError(f"the lessons were not learnt in {limit_s:g} s: {figures}")
    return figures


def main() -> None:
    """See the module's text."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("kind", choices=["random", "learned"])
    parser.add_argument("--limit-s", type=float, default=300.0)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--start", type=Path, help="a checkpoint to go on from")
    options = parser.parse_args()
    figures = build(options.folder, options.kind, options.limit_s, options.steps, options.start)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
