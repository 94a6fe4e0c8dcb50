"""The cells of one run as its events leave them, forwards and backwards: what a reader of a trace holds.

Knows the events of `engine.trace`; knows nothing of who drew or stored them.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from engine.trace import Keyframe, MemoryReading, RoutingEvent, RunMeta, StepEvent, Tier, TraceEvent, num_windows


class Board:
    """The cells of one run, moved forwards and backwards by its events.

    `tiers` is uint8 [rows, max_windows], EMPTY where no window has begun.
    """

    def __init__(self, meta: RunMeta) -> None:
        self.meta = meta
        self.event_id = -1
        self.seq_len = 0
        self.tiers: NDArray[np.uint8] = np.full((meta.rows, meta.max_windows), Tier.EMPTY, dtype=np.uint8)
        self.memory: MemoryReading | None = None

    def _reach(self, seq_len: int) -> None:
        count = num_windows(seq_len, self.meta.sink_tokens, self.meta.window_size)
        if count > self.tiers.shape[1]:
            more = np.full((self.meta.rows, count - self.tiers.shape[1]), Tier.EMPTY, dtype=np.uint8)
            self.tiers = np.concatenate([self.tiers, more], axis=1)
        begun = self.tiers[:, :count]
        begun[begun == Tier.EMPTY] = Tier.LOCAL
        self.tiers[:, count:] = Tier.EMPTY
        self.seq_len = seq_len

    def forward(self, event: TraceEvent) -> None:
        """Applies one event; events that move nothing are ignored."""
        if isinstance(event, StepEvent):
            self._reach(event.seq_len)
        elif isinstance(event, Keyframe):
            self._reach(event.seq_len)
            self.tiers[:, : event.tiers.shape[1]] = event.tiers
            self.event_id, self.memory = event.event_id, event.memory
        elif isinstance(event, RoutingEvent):
            self._reach(event.seq_len)
            moves = event.migrations
            self.tiers[moves["layer"], moves["window"]] = moves["move"] & 15
            self.event_id, self.memory = event.event_id, event.memory

    def backward(self, event: RoutingEvent, earlier: RoutingEvent | Keyframe) -> None:
        """Undoes `event`; `earlier` is the event before it, whose length and memory hold again."""
        moves = event.migrations
        self.tiers[moves["layer"], moves["window"]] = moves["move"] >> 4
        self._reach(earlier.seq_len)
        self.event_id, self.memory = earlier.event_id, earlier.memory
