"""Scores from an observation window: what the last w prompt queries look at.

Shared by SnapKV, AdaKV, CriticalKV and DefensiveKV. Pure functions of tensors; knows no storage.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.baselines.base import Context, Needs, Rival, RunPlan, Staged, require
from engine.baselines.matching import fit_tokens
from engine.budget import KVShape
from engine.errors import UnsupportedModelError

POOLS = ("avg", "max")
GROUPS = ("mean", "max")


def observed_window(window: int, kept: int, prompt_tokens: int) -> int:
    """Queries that observe: w = min(w, n // 2, P - 1), so that a short prompt still has a prefix to choose from."""
    return max(0, min(window, kept // 2, prompt_tokens - 1))


def window_attention(staged: Staged, window: int, context: Context) -> Tensor:
    """Probabilities of the last `window` queries over all keys, causal, float32 [B, H_kv, g, w, P].

    Rows of padding queries are 0.
    """
    key = staged.key.float()
    batch, kv, tokens, dim = key.shape
    query = staged.query[:, :, staged.query.shape[2] - window :].float()
    grouped = query.reshape(batch, kv, -1, window, dim)
    logits = grouped @ key.unsqueeze(2).transpose(-1, -2) * context.scale
    if context.softcap is not None:
        logits = context.softcap * torch.tanh(logits / context.softcap)
    columns = torch.arange(tokens, device=key.device)
    seen = columns[None, :] <= columns[tokens - window :, None]
    valid = context.valid()
    seen = seen[None] & valid[:, None, :] & valid[:, tokens - window :, None]
    return logits.masked_fill(~seen[:, None, None], -torch.inf).softmax(-1).nan_to_num(0.0)


def pool_columns(scores: Tensor, kernel: int, pool: str) -> Tensor:
    """1-D pooling over the last axis, stride 1, padding k // 2; zeros at the edges count in the average."""
    flat = scores.reshape(-1, 1, scores.shape[-1])
    if pool == "max":
        out = F.max_pool1d(flat, kernel, stride=1, padding=kernel // 2)
    else:
        out = F.avg_pool1d(flat, kernel, stride=1, padding=kernel // 2)
    return out.reshape(scores.shape)


def snap_scores(probs: Tensor, window: int, kernel: int, pool: str, group: str = "mean") -> Tensor:
    """SnapKV's score of every prefix column: mean over the window's queries, pooled, then over the query heads.

    Args:
        probs: [B, H_kv, g, w, P].

    Returns:
        [B, H_kv, P - w].
    """
    prefix = probs[..., : probs.shape[-1] - window]
    pooled = pool_columns(prefix.mean(-2), kernel, pool)
    return pooled.mean(2) if group == "mean" else pooled.amax(2)


def with_window(scores: Tensor, window: int, valid: Tensor) -> Tensor:
    """Scores of all columns [B, H_kv, P]: the window above everything, padding below."""
    full = F.pad(scores, (0, window), value=torch.inf)
    return full.masked_fill(~valid.unsqueeze(1), -torch.inf)


def output_weight(module: nn.Module, width: int, like: Tensor) -> Tensor:
    """Weight of the attention's output projection, float32 [hidden, width].

    A projection that holds its weight in another form is asked what it does to unit vectors.

    Raises:
        UnsupportedModelError: the module has no o_proj of this width.
    """
    projection = getattr(module, "o_proj", None)
    if isinstance(projection, nn.Linear) and projection.weight.shape[1] == width:
        return projection.weight.detach().float()
    if isinstance(projection, nn.Module) and getattr(projection, "in_features", None) == width:
        with torch.no_grad():
            units = torch.eye(width, dtype=like.dtype, device=like.device)
            answer: Tensor = projection(units) - projection(torch.zeros_like(units[:1]))
        return answer.float().T
    raise UnsupportedModelError(
        f"{type(module).__name__} must have an o_proj over {width} channels: this system weighs values by it."
    )


def value_norms(staged: Staged, num_heads: int) -> Tensor:
    """mean over the group of ‖v · W_o^h‖₁ for every token, float32 [B, H_kv, P].

    Raises:
        UnsupportedModelError: the attention module has no o_proj of the usual shape.
    """
    batch, kv, tokens, dim = staged.value.shape
    weight = output_weight(staged.module, num_heads * dim, staged.value).view(-1, kv, num_heads // kv, dim)
    value = staged.value.float()
    total = torch.zeros(batch, kv, tokens, device=value.device)
    for member in range(num_heads // kv):
        # [B, H_kv, P, d] x [H_kv, d, hidden]: one group member at a time bounds the workspace.
        total += (value @ weight[:, :, member].permute(1, 2, 0)).abs().sum(-1)
    return total / (num_heads // kv)


@dataclass(frozen=True, kw_only=True)
class Observer(Rival):
    """Base of the prefill-only methods: one selection at the prompt's end, generated tokens stay.

    window: queries that observe. kernel, pool: smoothing over columns. group: how query heads of a KV head are joined.
    """

    heads_differ: ClassVar[bool] = False

    window: int = 32
    kernel: int = 7
    pool: str = "max"
    group: str = "mean"

    def __post_init__(self) -> None:
        require(self.window >= 1, "window must be 1 or more", self.window)
        require(self.kernel >= 1 and self.kernel % 2 == 1, "kernel must be odd and positive", self.kernel)
        require(self.pool in POOLS, f"pool must be one of {', '.join(POOLS)}", self.pool)
        require(self.group in GROUPS, f"group must be one of {', '.join(GROUPS)}", self.group)

    def needs(self) -> Needs:
        return Needs(queries=self.window)

    def ragged(self) -> bool:
        """Whether heads keep numbers of their own, so that a table of them is stored."""
        return self.heads_differ

    def head_table_bytes(self, shape: KVShape) -> int:
        """cu_seqlens of one layer."""
        return 4 * (shape.num_kv_heads + 1) if self.ragged() else 0

    def kept(self, shape: KVShape, prompt_tokens: int, run: RunPlan) -> int:
        """n: prompt tokens that a head keeps, mean over heads.

        Raises:
            BudgetError: fewer than 2.
        """
        fits = fit_tokens(
            run.budget,
            shape,
            prompt_tokens,
            run.planned_new_tokens,
            fixed=self.head_table_bytes(shape),
            per_token=shape.token_bytes,
            smallest=2,
            keeps_new=True,
        )
        return min(fits, prompt_tokens)

    def account(self, shape: KVShape, prompt_tokens: int, generated: int, run: RunPlan) -> int:
        kept = self.kept(shape, prompt_tokens, run)
        return shape.full_kv_bytes(kept + generated) + shape.num_layers * self.head_table_bytes(shape)

    def notices(self, shape: KVShape, prompt_tokens: int, run: RunPlan) -> list[str]:
        window = observed_window(self.window, self.kept(shape, prompt_tokens, run), prompt_tokens)
        return ["window_shrunk"] if window < self.window else []

    def base_scores(self, part: Staged, kept: int, context: Context) -> Tensor:
        """SnapKV's scores with the window forced, [B, H_kv, P]."""
        window = observed_window(self.window, kept, context.columns)
        if window == 0:
            scores = torch.zeros(part.key.shape[:3], device=part.key.device)
            return scores.masked_fill(~context.valid().unsqueeze(1), -torch.inf)
        probs = window_attention(part, window, context)
        return with_window(snap_scores(probs, window, self.kernel, self.pool, self.group), window, context.valid())
