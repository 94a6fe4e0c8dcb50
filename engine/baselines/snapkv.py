"""SnapKV: every head keeps the prompt tokens that the last queries look at."""

from __future__ import annotations

from dataclasses import dataclass

from engine.baselines.base import Context, Resident, Staged
from engine.baselines.kept import keep, top_mask
from engine.baselines.observation import Observer


@dataclass(frozen=True, kw_only=True)
class SnapKV(Observer):
    """Top n of each KV head by pooled attention of the observation window, which stays whole."""

    name = "snapkv"
    label = "systems.snapkv"

    def compress(self, staged: list[Staged], context: Context) -> list[Resident]:
        kept = self.kept(context.shape, context.columns, context.run)
        valid, room = context.valid(), context.run.planned_new_tokens
        return [
            keep(part, top_mask(self.base_scores(part, kept, context), kept), valid, room=room, dtype=context.dtype)
            for part in staged
        ]
