"""Where every block is after each routing event, and the record of one event.

Follows the decisions; reads no scores but those that it is given, and stores no keys or values.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.attention.state import KVState
from engine.routing import Candidates
from engine.trace import Tier


@dataclass(frozen=True, slots=True)
class RoutingRecord:
    """One routing event as it happened, on the host.

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


@dataclass(frozen=True, slots=True)
class Decided:
    """A decision on the board, not applied yet.

    Attributes:
        before, after: tier of every block, uint8 [N, blocks]. scores: of those that competed, float32 [N, blocks].
        came_back: whether an evicted window is in a tier again, bool [].
    """

    before: Tensor
    after: Tensor
    scores: Tensor
    came_back: Tensor


class TierBoard:
    """Tier of every block of every decision row after the newest event: workspace, not storage."""

    def __init__(self, device: torch.device) -> None:
        self.tiers = torch.zeros(0, 0, dtype=torch.uint8, device=device)
        self.aged = 0
        """Leading blocks that had aged at the newest event."""
        self._copy: Tensor | None = None

    @property
    def on_host(self) -> Tensor:
        """The tiers where the host has read them with the newest event, else as they lie on the device."""
        return self.tiers if self._copy is None else self._copy

    def decided(self, state: KVState, candidates: Candidates, targets: Tensor, num_blocks: int) -> Decided:
        """What a decision makes of the board."""
        rows, device = state.shape.rows, state.device
        known = self.tiers
        if known.shape[0] != rows:
            known = torch.zeros(rows, 0, dtype=torch.uint8, device=device)
        blocks = torch.arange(known.shape[1], num_blocks, device=device)
        first = ((state.row_pads + state.grid.offset) // state.config.window_size)[:, None]
        end = first + state.pool.sink_blocks[:, None]
        fresh = torch.where(blocks < end, int(Tier.SINK), int(Tier.LOCAL))
        fresh = torch.where(blocks < first, int(Tier.EMPTY), fresh).to(torch.uint8)
        before = torch.cat([known, fresh], 1)
        # One column more than there are blocks takes the places that hold no candidate.
        where = torch.where(candidates.blocks >= 0, candidates.blocks, num_blocks)
        after = torch.nn.functional.pad(before, (0, 1)).scatter_(1, where, targets)[:, :num_blocks]
        came_back = ((before == int(Tier.EVICTED)) & (after != int(Tier.EVICTED))).any()
        scores = torch.zeros(rows, num_blocks + 1, device=device).scatter_(1, where, candidates.scores)
        return Decided(before, after, scores[:, :num_blocks], came_back)

    def apply(self, after: Tensor, aged: int, on_host: Tensor | None) -> None:
        """Takes a decision over; `on_host` is the host's copy of it, if there is one."""
        self.tiers, self.aged, self._copy = after, aged, on_host

    def select_rows(self, pick: Callable[[Tensor], Tensor]) -> None:
        """Keeps, repeats or reorders batch rows."""
        if self.tiers.shape[0]:
            self.tiers, self._copy = pick(self.tiers), None
