"""What the shared test matrix runs: every registered system, and the modes that change what it computes."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from engine.adapter import cache_keyword
from engine.baselines import registry
from engine.baselines.base import RunPlan
from engine.baselines.matching import BudgetSpec
from engine.models import LoadedModel
from tests.tiny import tiny_loaded

torch.set_num_threads(1)

PROMPT, NEW = 160, 24
SHARE = 0.78
SMALL: dict[str, dict[str, Any]] = {
    "kivi-2": {"group_size": 8, "residual": 16},
    "kivi-4": {"group_size": 8, "residual": 16},
    "zipcache": {"gap": 10},
    "hf-quantized": {"group_size": 32, "residual": 16},
    **{name: {"calibration_tokens": 200} for name in ("kvquant-nuq2", "kvquant-nuq3", "kvquant-nuq4")},
    **{
        name: {"window": 8}
        for name in ("snapkv", "adakv", "criticalkv", "critical-adakv", "defensivekv", "layer-defensivekv")
    },
}
MODES: dict[str, tuple[str, dict[str, Any]]] = {
    "streamingllm original": ("streamingllm", {"positions": "original"}),
    "adakv original": ("adakv", {"floor": "original"}),
    "defensivekv repo": ("defensivekv", {"mode": "repo"}),
    "kivi-2 sinks": ("kivi-2", {"sinks": 4}),
    "zipcache repo": ("zipcache", {"mode": "repo"}),
    "kvquant fisher": ("kvquant-nuq3", {"fisher": True, "qnorm": True}),
}
# Oracles need FullKV beside them: test_oracle.py asks the same of them.
NAMES = [info.name for info in registry.systems() if info.unavailable is None and not info.needs_reference]
SYSTEMS = [*NAMES, *MODES]
STOCK = ["hf-quantized"]
"""Systems whose storage and attention are not ours: only what a transformers cache promises can be asked of them."""
RIVALS = [name for name in SYSTEMS if not name.startswith("qevict") and name not in STOCK]
BUDGETED = [name for name in SYSTEMS if registry.rival(MODES.get(name, (name,))[0]).budgeted]


@lru_cache
def loaded(architecture: str = "llama", groups: int = 3) -> LoadedModel:
    """One tiny model for the whole matrix."""
    return tiny_loaded(architecture, groups=groups, head_dim=32)


def settings(system: str) -> tuple[str, dict[str, Any]]:
    """Registered name and parameters, small enough for short prompts."""
    name, extra = MODES.get(system, (system, {}))
    return name, SMALL.get(name, {}) | extra


def build(system: str, budget: BudgetSpec | None = None, model: LoadedModel | None = None, **run: Any) -> Any:
    """A cache of the system."""
    name, parameters = settings(system)
    budget = BudgetSpec(share=SHARE) if budget is None else budget
    run = {"new_tokens": NEW} | run
    return registry.make(name, model or loaded(), budget, parameters=parameters, **run)


def plan(model: LoadedModel, budget: BudgetSpec | None = None, new: int = NEW, kv_dtype: str = "model") -> RunPlan:
    """The plan that `build` makes."""
    return RunPlan(BudgetSpec(share=SHARE) if budget is None else budget, new, kv_dtype, 0, model.tokenizer)


def prompt(rows: int = 1, tokens: int = PROMPT, seed: int = 0) -> Tensor:
    """Random token ids."""
    return torch.randint(0, 256, (rows, tokens), generator=torch.Generator().manual_seed(seed))


def feed(model: LoadedModel, cache: Any, ids: Tensor, pads: list[int] | None = None, start: int = 0) -> Tensor:
    """One forward of [B, T] ids at columns `start` on: logits [B, T, vocabulary]."""
    batch, tokens = ids.shape
    shift = torch.tensor(pads or [0] * batch)[:, None]
    columns = torch.arange(start, start + tokens)[None, :]
    extra = {}
    if pads and any(pads):
        extra["attention_mask"] = (torch.arange(start + tokens)[None, :] >= shift).long()
    with torch.inference_mode():
        out = model.model(
            input_ids=ids,
            position_ids=(columns - shift).clamp_min(0),
            use_cache=True,
            **{cache_keyword(model.model): cache},
            **extra,
        )
    return out.logits


def follow(
    model: LoadedModel, cache: Any, ids: Tensor, later: Tensor, pads: list[int] | None = None, chunk: int = 0
) -> Tensor:
    """Prompt, then `later` token by token: logits [B, 1 + later, vocabulary], the prompt's last one first."""
    tokens = ids.shape[1]
    step = chunk or tokens
    for begin in range(0, tokens, step):
        last = feed(model, cache, ids[:, begin : begin + step], pads, begin)[:, -1:]
    outs = [last]
    for number in range(later.shape[1]):
        outs.append(feed(model, cache, later[:, number : number + 1], pads, tokens + number))
    return torch.cat(outs, 1)
