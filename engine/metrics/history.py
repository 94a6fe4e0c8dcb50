"""The tiers of all windows after every routing event of a stored run, and the transitions between them.

Reads a trace through `engine.trace_board.Board`; knows no torch and no model.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from engine.errors import TraceError
from engine.trace import Keyframe, RoutingEvent, RunMeta, StepEvent, Tier, TraceEvent
from engine.trace_board import Board

Bools: TypeAlias = NDArray[np.bool_]
Tiers: TypeAlias = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class TierHistory:
    """State after each routing event.

    Attributes:
        event_ids: int64 [events], ascending.
        seq_lens: int64 [events], tokens known at each.
        tiers: uint8 [events, rows, windows], `Tier`; EMPTY where a window has not begun.
    """

    event_ids: NDArray[np.int64]
    seq_lens: NDArray[np.int64]
    tiers: Tiers

    @property
    def aged(self) -> Bools:
        """bool [events, rows, windows]: the window has left the local region."""
        aged: Bools = np.isin(self.tiers, (Tier.FULL, Tier.QUANT, Tier.EVICTED))
        return aged

    @property
    def in_full(self) -> Bools:
        """bool [events, rows, windows]: the window is in the Full tier."""
        in_full: Bools = self.tiers == Tier.FULL
        return in_full


def read_history(events: Iterable[TraceEvent]) -> TierHistory:
    """Plays a trace and keeps the board after every routing event.

    Raises:
        TraceError: the trace does not begin with its `RunMeta`.
    """
    board: Board | None = None
    seen: dict[int, tuple[int, Tiers]] = {}
    for event in events:
        if isinstance(event, RunMeta):
            board = Board(event)
        elif isinstance(event, (StepEvent, Keyframe, RoutingEvent)):
            if board is None:
                raise TraceError(f"a trace must begin with its meta event, got {event.kind!r} first.")
            board.forward(event)
            if not isinstance(event, StepEvent):
                # A keyframe may repeat the routing event before it: same id, same state.
                seen[event.event_id] = (event.seq_len, board.tiers.copy())
    if board is None:
        raise TraceError("a trace must begin with its meta event, got none.")
    ids = sorted(seen)
    # A run may outgrow the planned length: earlier boards are then narrower.
    width = max((seen[i][1].shape[1] for i in ids), default=0)
    tiers = np.full((len(ids), board.meta.rows, width), Tier.EMPTY, dtype=np.uint8)
    for place, event_id in enumerate(ids):
        state = seen[event_id][1]
        tiers[place, :, : state.shape[1]] = state
    lengths = np.array([seen[i][0] for i in ids], dtype=np.int64)
    return TierHistory(np.array(ids, dtype=np.int64), lengths, tiers)


@dataclass(frozen=True, slots=True)
class TransitionCounts:
    """How often a window moved between two tiers, over all rows.

    Attributes:
        counts: int64 [events, 6, 6], moves from tier to tier at each event; the diagonal is 0.
    """

    counts: NDArray[np.int64]

    def total(self, source: Tier, target: Tier) -> int:
        """Moves from `source` to `target` in the whole run."""
        return int(self.counts[:, source, target].sum())

    @property
    def promotions(self) -> int:
        """Q → F, the arrow that tells QEvict from one-way eviction (paper Table 18)."""
        return self.total(Tier.QUANT, Tier.FULL)

    @property
    def demotions(self) -> int:
        """F → Q."""
        return self.total(Tier.FULL, Tier.QUANT)

    @property
    def evictions(self) -> int:
        """Anything → E."""
        return int(self.counts[:, :, Tier.EVICTED].sum())


def count_transitions(history: TierHistory) -> TransitionCounts:
    """Moves at each event, first one included: a window that had not begun counts as LOCAL before it moved."""
    before = np.concatenate([np.full_like(history.tiers[:1], Tier.EMPTY), history.tiers[:-1]])
    before = np.where(before == Tier.EMPTY, np.uint8(Tier.LOCAL), before)
    moved = (before != history.tiers) & (history.tiers != Tier.EMPTY)
    kinds = len(Tier)
    counts = np.zeros((len(history.tiers), kinds, kinds), dtype=np.int64)
    event, row, window = np.nonzero(moved)
    np.add.at(counts, (event, before[event, row, window], history.tiers[event, row, window]), 1)
    return TransitionCounts(counts)
