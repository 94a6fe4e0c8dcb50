"""DefensiveKV: guards against the worst query of the window, weighs by values, shares budgets over heads.

`mode="paper"` is what the article means; `mode="repo"` follows the published code, with its quirks: the
window's bias is read from the wrong columns, a negative count selects from the other end, and a
window token may lose a tie.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from engine.baselines.adakv import ranks, shared_mask
from engine.baselines.base import Context, Resident, Staged, require
from engine.baselines.kept import keep, top_mask
from engine.baselines.observation import Observer, observed_window, pool_columns, value_norms, window_attention

MODES = ("paper", "repo")
SURE_MASS = 0.9


def pooled_rows(rows: Tensor, kernel: int) -> Tensor:
    """Average pooling over columns, every row rescaled to the mass that it had."""
    pooled = pool_columns(rows, kernel, "avg")
    mass, now = rows.sum(-1, keepdim=True), pooled.sum(-1, keepdim=True)
    return torch.where(now > 0, pooled * mass / now.clamp_min(1e-30), 0.0)


def worst_case(rows: Tensor, lengths: Tensor | None = None) -> Tensor:
    """Largest over group members and queries, not below the head's mean: [B, H, g, w, i] → [B, H, i].

    lengths: columns of each row that are no padding, [B]; None = all.
    """
    worst = rows.amax((2, 3))
    count = worst.shape[-1] if lengths is None else lengths[:, None, None]
    return torch.maximum(worst, worst.sum(-1, keepdim=True) / count)


def sure_columns(mean: Tensor, bias: Tensor, most: Tensor, mode: str) -> Tensor:
    """bool [B, H, i]: the smallest set whose share of the attention reaches 0.9 - bias, without the one that crosses.

    Args:
        mean: unpooled attention, mean over queries and group. bias: [B, H]. most: int64 [B, 1], the set's largest
            size; where negative, the repository's mode counts from the other end.
    """
    share = mean / mean.sum(-1, keepdim=True).clamp_min(1e-30)
    ordered = share.sort(dim=-1, descending=True, stable=True).values
    counts = (ordered.cumsum(-1) < (SURE_MASS - bias).unsqueeze(-1)).sum(-1)
    counts = torch.minimum(counts, most)
    from_the_end = torch.where(counts < 0, counts + mean.shape[-1], counts)
    counts = counts.clamp_min(0) if mode == "paper" else from_the_end
    return ranks(share) < counts.unsqueeze(-1)


def defensive_scores(
    probs: Tensor, norms: Tensor, lengths: Tensor, *, window: int, kernel: int, kept: int, mode: str
) -> Tensor:
    """Scores of all columns, [B, H, P].

    Args:
        probs: [B, H, g, w, P]. norms: [B, H, P]. lengths: int64 [B], prompt tokens that are no padding. kept: n.
    """
    columns = probs.shape[-1]
    prefix = probs[..., : columns - window]
    scores = worst_case(pooled_rows(prefix, kernel), lengths - window)
    weights = norms[..., : columns - window]
    scores = scores * weights / weights.sum(1, keepdim=True).clamp_min(1e-30)
    mean = prefix.mean((2, 3))
    if mode == "paper":
        bias = probs[..., columns - window :].sum(-1).mean((2, 3))
    else:
        bias = (mean / mean.sum(-1, keepdim=True).clamp_min(1e-30))[..., -window:].sum(-1)
    most = ((lengths - window) * kept / lengths - window).trunc().long()[:, None]
    sure = sure_columns(mean, bias, most, mode)
    top = scores.amax((1, 2), keepdim=True)
    scores = torch.where(sure, top, scores)
    edge = torch.full_like(top, torch.inf) if mode == "paper" else top
    return torch.cat([scores, edge.expand(*scores.shape[:2], window)], -1)


@dataclass(frozen=True, kw_only=True)
class DefensiveKV(Observer):
    """Worst-case scores, value-weighted, one budget of H·n per layer."""

    name = "defensivekv"
    label = "systems.defensivekv"
    heads_differ = True
    over_layers: ClassVar[bool] = False

    kernel: int = 5
    pool: str = "avg"
    mode: str = "paper"

    def __post_init__(self) -> None:
        Observer.__post_init__(self)
        require(self.mode in MODES, f"mode must be one of {', '.join(MODES)}", self.mode)

    def scores(self, part: Staged, kept: int, context: Context) -> Tensor:
        """Scores of one layer, padding at -inf."""
        window = observed_window(self.window, kept, context.columns)
        if window == 0:
            return self.base_scores(part, kept, context)
        probs = window_attention(part, window, context)
        norms = value_norms(part, context.num_heads)
        valid = context.valid()
        scores = defensive_scores(
            probs, norms, valid.sum(-1), window=window, kernel=self.kernel, kept=kept, mode=self.mode
        )
        return scores.masked_fill(~valid.unsqueeze(1), -torch.inf)

    def compress(self, staged: list[Staged], context: Context) -> list[Resident]:
        kept = self.kept(context.shape, context.columns, context.run)
        valid, room = context.valid(), context.run.planned_new_tokens
        every = [self.scores(part, kept, context) for part in staged]
        masks = layered_masks(every, kept) if self.over_layers else [shared_mask(scores, kept) for scores in every]
        return [
            keep(part, mask, valid, room=room, dtype=context.dtype, per_head=True)
            for part, mask in zip(staged, masks, strict=True)
        ]


def layered_masks(every: list[Tensor], kept: int) -> list[Tensor]:
    """One cut over layers, heads and columns decides how many tokens each layer gets; then the top of each."""
    stacked = torch.stack(every, 1)
    batch, layers, heads = stacked.shape[:3]
    mask = top_mask(stacked.view(batch, -1), layers * heads * kept).view_as(stacked) & (stacked > -torch.inf)
    return [mask[:, layer] for layer in range(layers)]


@dataclass(frozen=True, kw_only=True)
class LayerDefensiveKV(DefensiveKV):
    """The same with one budget for all layers."""

    name = "layer-defensivekv"
    label = "systems.layer_defensivekv"
    over_layers = True
