"""FullKV: nothing is dropped, nothing is rounded but to the stored dtype."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.baselines.base import Context, Resident, Rival, RunPlan, Staged
from engine.baselines.kept import keep
from engine.budget import KVShape


@dataclass(frozen=True, kw_only=True)
class FullKV(Rival):
    """Keys and values of every token. L · τ · S bytes."""

    name = "fullkv"
    label = "systems.fullkv"
    family = "exact"
    keeps = "exact"
    budgeted = False

    def account(self, shape: KVShape, prompt_tokens: int, generated: int, run: RunPlan) -> int:
        return shape.full_kv_bytes(prompt_tokens + generated)

    def compress(self, staged: list[Staged], context: Context) -> list[Resident]:
        valid = context.valid()
        everything = torch.ones_like(staged[0].key[..., 0], dtype=torch.bool)
        room = context.run.planned_new_tokens
        return [keep(part, everything, valid, room=room, dtype=context.dtype) for part in staged]
