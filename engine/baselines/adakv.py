"""AdaKV: heads of a layer share one budget; a head with flat attention gets more of it.

Storage is ragged, so bytes fall with the tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.baselines.base import Context, Resident, Staged, require
from engine.baselines.kept import keep, top_mask
from engine.baselines.observation import Observer

FLOORS = ("kvpress", "original")


def shared_mask(scores: Tensor, kept: int, forced: Tensor | None = None) -> Tensor:
    """bool [B, H, P]: the H·n largest over heads and columns; `forced` ones first; never padding (-inf)."""
    batch, heads, columns = scores.shape
    ranked = scores if forced is None else scores.masked_fill(forced & (scores > -torch.inf), torch.inf)
    mask = top_mask(ranked.reshape(batch, -1), heads * kept).view(batch, heads, columns)
    return mask & (scores > -torch.inf)


def ranks(scores: Tensor) -> Tensor:
    """int64 like `scores`: place of each entry along the last axis, 0 the largest, lower index first."""
    order = scores.sort(dim=-1, descending=True, stable=True).indices
    places = torch.arange(scores.shape[-1], device=scores.device).expand_as(order)
    return torch.empty_like(order).scatter_(-1, order, places)


def mixed_counts(counts: Tensor, kept: int, floor: float) -> Tensor:
    """Head budgets n_h(1-f) + f·n as integers [B, H] that sum to H·n, by largest remainder.

    The original rounds each head by itself and may lose a slot.
    """
    heads = counts.shape[-1]
    wanted = counts.cpu().double() * (1.0 - floor) + floor * kept
    whole = (wanted + 1e-9).floor()
    missing = (counts.cpu().sum(-1) - whole.sum(-1)).round().long()
    # Equal remainders give the slot to the lower head.
    order = ranks(((wanted - whole) * 1e6).round() - torch.arange(heads) * 1e-3)
    return (whole.long() + (order < missing[:, None]).long()).to(counts.device)


def ada_mask(scores: Tensor, kept: int, floor: str, share: float) -> Tensor:
    """bool [B, H, P], H·n in each row (fewer only where padding leaves fewer).

    "kvpress" first forces the top int(α·n) of every head; "original" mixes the adaptive head budgets with the
    uniform one.
    """
    if floor == "kvpress":
        return shared_mask(scores, kept, top_mask(scores, int(share * kept)))
    counts = shared_mask(scores, kept).sum(-1)
    budgets = mixed_counts(counts, kept, share)
    return (ranks(scores) < budgets.unsqueeze(-1)) & (scores > -torch.inf)


@dataclass(frozen=True, kw_only=True)
class AdaKV(Observer):
    """SnapKV's scores, one budget of H·n tokens per layer. floor, floor_share: what every head is sure of."""

    name = "adakv"
    label = "systems.adakv"
    heads_differ = True

    floor: str = "kvpress"
    floor_share: float = 0.2

    def __post_init__(self) -> None:
        Observer.__post_init__(self)
        require(self.floor in FLOORS, f"floor must be one of {', '.join(FLOORS)}", self.floor)
        require(0.0 <= self.floor_share <= 1.0, "floor_share must be in [0, 1]", self.floor_share)

    def compress(self, staged: list[Staged], context: Context) -> list[Resident]:
        kept = self.kept(context.shape, context.columns, context.run)
        valid, room = context.valid(), context.run.planned_new_tokens
        out: list[Resident] = []
        for part in staged:
            mask = ada_mask(self.base_scores(part, kept, context), kept, self.floor, self.floor_share)
            out.append(keep(part, mask, valid, room=room, dtype=context.dtype, per_head=True))
        return out
