"""Tiny models of real architectures, driven by `generate` or step by step, and two budgets for them."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from transformers import PreTrainedModel

from engine.adapter import cache_keyword
from engine.config import QEvictConfig
from tests.tiny import tiny_model

WHOLE = QEvictConfig(kv_budget=1.0, quant_share=0.0, planned_new_tokens=200)
"""Nothing is evicted or quantized."""
TIGHT = QEvictConfig(window_size=4, kv_budget=0.2, local_tokens=8, planned_new_tokens=80)
"""All four tiers are in use."""
NEAR = {"atol": 3e-3, "rtol": 1e-2}
"""Backends differ in the last bits, and those may turn a scale's float16 rounding; the oracle compares closely."""


@lru_cache(maxsize=4)
def model_of(architecture: str, rope: str = "default", groups: int = 3) -> PreTrainedModel:
    return tiny_model(architecture, rope=rope, groups=groups)


def prompt_of(length: int, batch: int = 1, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, 250, (batch, length), generator=torch.Generator().manual_seed(seed))


def greedy(model: PreTrainedModel, tokens: int, cache: Any = None, **inputs: Any) -> torch.Tensor:
    """New token ids [B, tokens]; stock eager attention where no cache is given, as gemma2's softcap needs it."""
    if cache is None:
        model.set_attn_implementation("eager")
    with torch.no_grad():
        out = model.generate(**inputs, **{cache_keyword(model): cache}, do_sample=False, max_new_tokens=tokens)
    return out[:, inputs["input_ids"].shape[1] :]


def step_logits(model: PreTrainedModel, ids: torch.Tensor, prompt: int, cache: Any) -> torch.Tensor:
    """Teacher-forced logits of every position after the prompt, without position_ids and without a mask."""
    name = cache_keyword(model)
    with torch.no_grad():
        out = [model(input_ids=ids[:, :prompt], use_cache=True, **{name: cache}).logits[:, -1]]
        for at in range(prompt, ids.shape[1]):
            out.append(model(input_ids=ids[:, at : at + 1], use_cache=True, **{name: cache}).logits[:, -1])
    return torch.stack(out, 1)
