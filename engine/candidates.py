"""The table of windows that compete at one routing event, gathered from arena, ledger and staging.

Reads the state; decides nothing and moves nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.attention.state import KVState
from engine.routing import Candidates
from engine.trace import Tier


def gather_candidates(state: KVState, aged: int, owner: Tensor) -> tuple[Candidates, Tensor]:
    """All windows that compete, and the tier of every block that does not."""
    store, staging, grid = state.pool, state.staging, state.grid
    sink_first = ((state.row_pads + grid.offset) // state.config.window_size)[:, None]
    sink_end = sink_first + store.sink_blocks[:, None]

    def sort_out(blocks: Tensor) -> tuple[Tensor, Tensor]:
        """(competes, protected tier) of blocks in full precision."""
        there = blocks >= sink_first
        sink = there & (blocks < sink_end)
        competes = there & ~sink & (blocks < aged)
        held = torch.where(sink, int(Tier.SINK), int(Tier.LOCAL))
        return competes, torch.where(there & ~competes, held, int(Tier.EMPTY)).to(torch.uint8)

    arena = store.arena_ids.long()
    ledger = store.ledger_ids.long()
    live = ledger >= 0
    competes, tier = sort_out(arena)
    none = torch.full_like(ledger, int(Tier.EMPTY), dtype=torch.uint8)
    blocks = [torch.where(competes, arena, -1), torch.where(live, ledger, -1)]
    scores = [store.arena_scores, store.ledger_scores]
    quantized = [torch.zeros_like(competes), live]
    recorded = [owner >= 0, live]
    tiers = [tier, none]
    if staging is not None:
        count = staging.scores.shape[1]
        ids = staging.first_block + torch.arange(count, device=state.device)
        staged = ids.expand(state.shape.rows, -1)
        competes, tier = sort_out(staged)
        blocks.append(torch.where(competes, staged, -1))
        scores.append(staging.scores)
        quantized.append(torch.zeros_like(competes))
        recorded.append(torch.zeros_like(competes))
        tiers.append(tier)
    ids = torch.cat(blocks, 1)
    raw = torch.cat(scores, 1)
    first = (ids * state.config.window_size - grid.offset).clamp_min(0)
    ranked = state.ranker.rank(raw, first, state.columns)
    return Candidates(ids, ranked, torch.cat(quantized, 1), torch.cat(recorded, 1)), torch.cat(tiers, 1)
