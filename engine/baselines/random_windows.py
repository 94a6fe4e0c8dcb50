"""Random windows: a control. Sinks and the prompt's end stay; of the rest, whole windows drawn by lot."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.baselines.base import Context, Resident, Rival, RunPlan, Staged, require
from engine.baselines.kept import keep, top_mask
from engine.baselines.matching import fit_tokens
from engine.budget import KVShape


@dataclass(frozen=True, kw_only=True)
class RandomWindows(Rival):
    """The same windows for all heads of a layer. sinks, recent: prompt tokens at either end that are sure to stay."""

    name = "random"
    label = "systems.random"

    window_size: int = 8
    sinks: int = 5
    recent: int = 8

    def __post_init__(self) -> None:
        require(self.window_size >= 1, "window_size must be 1 or more", self.window_size)
        require(self.sinks >= 0, "sinks must be 0 or more", self.sinks)
        require(self.recent >= 0, "recent must be 0 or more", self.recent)

    def kept(self, shape: KVShape, prompt_tokens: int, run: RunPlan) -> int:
        """n: prompt tokens that stay.

        Raises:
            BudgetError: fewer than sinks, recent tokens and one window.
        """
        fits = fit_tokens(
            run.budget,
            shape,
            prompt_tokens,
            run.planned_new_tokens,
            fixed=0,
            per_token=shape.token_bytes,
            smallest=self.sinks + self.recent + self.window_size,
            keeps_new=True,
        )
        return min(fits, prompt_tokens)

    def account(self, shape: KVShape, prompt_tokens: int, generated: int, run: RunPlan) -> int:
        return shape.full_kv_bytes(self.kept(shape, prompt_tokens, run) + generated)

    def compress(self, staged: list[Staged], context: Context) -> list[Resident]:
        kept = self.kept(context.shape, context.columns, context.run)
        valid, columns, device = context.valid(), context.columns, context.device
        pads = torch.tensor(context.pads, device=device)[:, None]
        place = torch.arange(columns, device=device)[None, :] - pads
        window = (place - self.sinks).clamp_min(0) // self.window_size
        out: list[Resident] = []
        for layer, part in enumerate(staged):
            # One lot per window of the row's own tokens; the last window may be cut to fill the budget.
            lots = torch.rand(columns // self.window_size + 2, generator=context.generator(layer)).to(device)
            scores = lots[window] + 1.0
            scores = scores.masked_fill((place < self.sinks) | (place >= columns - pads - self.recent), torch.inf)
            scores = scores.masked_fill(~valid, -torch.inf)
            mask = top_mask(scores, kept)[:, None].expand(-1, part.key.shape[1], -1)
            out.append(keep(part, mask, valid, room=context.run.planned_new_tokens, dtype=context.dtype))
        return out
