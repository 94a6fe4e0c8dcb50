"""FullKV traces made by hand or drawn at random, without a model."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.budget import KVShape
from engine.policies import FullTrace


def trace_of(probs: Tensor, prompt_tokens: int, *, kv_heads: int = 1, head_dim: int = 16) -> FullTrace:
    """A trace from whole attention [L, H, T, T], causal, rows summing to 1."""
    layers, _, total, _ = probs.shape
    steps = probs[:, :, prompt_tokens:].permute(2, 0, 1, 3).contiguous()
    prompt = probs[:, :, :prompt_tokens, :prompt_tokens].sum(2)
    if total - prompt_tokens != steps.shape[0]:
        raise ValueError("prompt_tokens must be below the number of tokens")
    return FullTrace(prompt_tokens, prompt, steps, KVShape(layers, kv_heads, head_dim, 2))


def random_trace(
    *, layers: int = 2, heads: int = 2, prompt: int = 96, steps: int = 40, seed: int = 0, spread: float = 2.0
) -> FullTrace:
    """Peaked random attention with a favourite half, so that windows differ."""
    draw = torch.Generator().manual_seed(seed)
    total = prompt + steps
    logits = spread * torch.randn(layers, heads, total, total, generator=draw)
    logits += spread * torch.randn(layers, heads, 1, total, generator=draw)
    mask = torch.ones(total, total, dtype=torch.bool).triu(1)
    return trace_of(logits.masked_fill(mask, -torch.inf).softmax(-1), prompt, kv_heads=heads)
