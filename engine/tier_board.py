"""Where every block is after each routing event, and the record of one event.

Follows the decisions; reads no scores but those that it is given, and stores no keys or values.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.attention.state import KVState
from engine.errors import CacheUseError
from engine.routing import Candidates
from engine.trace import Tier


@dataclass(frozen=True, slots=True)
class RoutingRecord:
    """One routing event as it happened, on the device.

    Attributes:
        event_id: 0 for the end of the prompt.
        columns: columns known at the event.
        before, after: tier of every block, uint8 [N, blocks]; blocks include the sink's.
        scores: what candidates were ranked by, [N, blocks], 0 where a block did not compete.
        seconds: measured cost of scoring, deciding and moving.
    """

    event_id: int
    columns: int
    before: Tensor
    after: Tensor
    scores: Tensor
    seconds: float


class TierBoard:
    """Tier of every block of every decision row after the newest event: workspace, not storage."""

    def __init__(self, device: torch.device) -> None:
        self.tiers = torch.zeros(0, 0, dtype=torch.uint8, device=device)
        self.aged = 0
        """Leading blocks that had aged at the newest event."""

    def update(
        self, state: KVState, candidates: Candidates, targets: Tensor, aged: int, num_blocks: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Applies a decision: (before, after, scores of those that competed), each [N, blocks]."""
        rows, device = state.shape.rows, state.device
        if self.tiers.shape[0] != rows:
            self.tiers, self.aged = torch.zeros(rows, 0, dtype=torch.uint8, device=device), 0
        have = self.tiers.shape[1]
        blocks = torch.arange(num_blocks, device=device).expand(rows, -1)
        pads = state.rows(torch.tensor(state.pads))
        first = ((pads + state.grid.offset) // state.config.window_size)[:, None]
        sink = (blocks >= first) & (blocks < first + state.pool.sink_blocks[:, None])
        fresh = torch.where(blocks < first, int(Tier.EMPTY), int(Tier.LOCAL)).to(torch.uint8)
        before = torch.where(sink, int(Tier.SINK), fresh).to(torch.uint8)
        before[:, :have] = self.tiers
        where = torch.where(candidates.blocks >= 0, candidates.blocks, num_blocks)
        after = torch.cat([before, before[:, :1]], 1).scatter(1, where, targets)[:, :num_blocks]
        if bool(((before == int(Tier.EVICTED)) & (after != int(Tier.EVICTED))).any()):
            raise CacheUseError("an evicted window came back: the cache's tensors were changed from outside.")
        scores = torch.zeros(rows, num_blocks + 1, device=device).scatter(1, where, candidates.scores)
        self.tiers, self.aged = after, aged
        return before, after, scores[:, :num_blocks]

    def select_rows(self, pick: Callable[[Tensor], Tensor]) -> None:
        """Keeps, repeats or reorders batch rows."""
        if self.tiers.shape[0]:
            self.tiers = pick(self.tiers)
