"""CriticalKV: attention chooses half, attention times the size of the projected value the rest."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.baselines.adakv import ranks, shared_mask
from engine.baselines.base import Context, Resident, Staged, require
from engine.baselines.kept import keep, top_mask
from engine.baselines.observation import Observer, value_norms

ALLOCATIONS = ("uniform", "ada")
EPSILON = 1e-4


def critical_mask(scores: Tensor, norms: Tensor, kept: int, first_share: float) -> Tensor:
    """bool [B, H, P], n per head: top int(ρ·n) by score, the rest by (score + 1e-4) · ‖v W_o‖₁.

    Columns of infinite score (the observation window) always belong to the first stage.
    """
    count = max(int(first_share * kept), int((scores == torch.inf).sum(-1).amax()))
    first = top_mask(scores, count)
    second = ((scores + EPSILON) * norms).masked_fill(first, torch.inf).masked_fill(scores == -torch.inf, -torch.inf)
    return top_mask(second, kept)


def critical_ada_mask(scores: Tensor, norms: Tensor, kept: int, first_share: float, floor_share: float) -> Tensor:
    """The same with one budget of H·n per layer: head budgets come from the base scores."""
    sure = top_mask(scores, int(floor_share * kept))
    budgets = shared_mask(scores, kept, sure).sum(-1)
    inside = (scores == torch.inf).sum(-1)
    counts = torch.maximum((budgets * first_share).long(), inside)
    first = (ranks(scores) < counts.unsqueeze(-1)) | sure
    second = ((scores + EPSILON) * norms).masked_fill(scores == -torch.inf, -torch.inf)
    return shared_mask(second, kept, first)


@dataclass(frozen=True, kw_only=True)
class CriticalKV(Observer):
    """Two-stage selection. first_share: ρ. allocation: "uniform" per head, or "ada" over the layer's heads."""

    name = "criticalkv"
    label = "systems.criticalkv"

    first_share: float = 0.5
    allocation: str = "uniform"
    floor_share: float = 0.2

    def __post_init__(self) -> None:
        Observer.__post_init__(self)
        require(0.0 <= self.first_share <= 1.0, "first_share must be in [0, 1]", self.first_share)
        require(self.allocation in ALLOCATIONS, f"allocation must be one of {', '.join(ALLOCATIONS)}", self.allocation)
        require(0.0 <= self.floor_share <= 1.0, "floor_share must be in [0, 1]", self.floor_share)

    def ragged(self) -> bool:
        return self.allocation == "ada"

    def compress(self, staged: list[Staged], context: Context) -> list[Resident]:
        kept = self.kept(context.shape, context.columns, context.run)
        valid, room = context.valid(), context.run.planned_new_tokens
        out: list[Resident] = []
        for part in staged:
            scores, norms = self.base_scores(part, kept, context), value_norms(part, context.num_heads)
            if self.allocation == "uniform":
                mask = critical_mask(scores, norms, kept, self.first_share)
            else:
                mask = critical_ada_mask(scores, norms, kept, self.first_share, self.floor_share)
            out.append(keep(part, mask, valid, room=room, dtype=context.dtype, per_head=self.ragged()))
        return out
