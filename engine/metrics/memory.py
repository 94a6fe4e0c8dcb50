"""Persistent KV bytes over a run, against the budget and against FullKV at the same length.

Reads `MemoryReading`s of a trace; knows no tensors and formats nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from engine.trace import Keyframe, MemoryReading, RoutingEvent, TraceEvent

PARTS = ("sink", "local", "full", "codes", "metadata", "shadow")


@dataclass(frozen=True, slots=True)
class MemorySeries:
    """Bytes after each routing event, of one batch row and all layers.

    Attributes:
        event_ids: int64 [events].
        seq_lens: int64 [events].
        parts: by name (`PARTS`), int64 [events].
        budget: int64 [events], what may persist.
        full_kv: int64 [events], what FullKV would hold at that length.
    """

    event_ids: NDArray[np.int64]
    seq_lens: NDArray[np.int64]
    parts: dict[str, NDArray[np.int64]]
    budget: NDArray[np.int64]
    full_kv: NDArray[np.int64]

    @property
    def persistent(self) -> NDArray[np.int64]:
        """int64 [events]: the sum of all parts."""
        total: NDArray[np.int64] = np.sum([self.parts[name] for name in PARTS], axis=0, dtype=np.int64)
        return total

    def summary(self) -> MemorySummary | None:
        """Peak and last state; None without an event."""
        held = self.persistent
        if not len(held):
            return None
        metadata, codes = int(self.parts["metadata"][-1]), int(self.parts["codes"][-1])
        return MemorySummary(
            peak_persistent_bytes=int(held.max()),
            last_persistent_bytes=int(held[-1]),
            budget_bytes=int(self.budget[-1]),
            full_kv_bytes=int(self.full_kv[-1]),
            share=float(held[-1] / self.full_kv[-1]) if self.full_kv[-1] else 0.0,
            metadata_share=metadata / (metadata + codes) if metadata + codes else 0.0,
            within_budget=bool((held <= self.budget).all()),
        )


@dataclass(frozen=True, slots=True)
class MemorySummary:
    """Bytes of a run. `share` is the last persistent bytes over FullKV's at the same, actual length.

    `metadata_share` is what scales, zeros and the index take of the live Quant tier.
    """

    peak_persistent_bytes: int
    last_persistent_bytes: int
    budget_bytes: int
    full_kv_bytes: int
    share: float
    metadata_share: float
    within_budget: bool


def memory_series(events: Iterable[TraceEvent]) -> MemorySeries:
    """The readings of all keyframes and routing events, one per event id, in order."""
    seen: dict[int, tuple[int, MemoryReading]] = {}
    for event in events:
        if isinstance(event, (Keyframe, RoutingEvent)):
            seen[event.event_id] = (event.seq_len, event.memory)
    ids = sorted(seen)
    names = [f.name for f in fields(MemoryReading)]
    table = np.array([seen[i][1].to_list() for i in ids], dtype=np.int64).reshape(-1, len(names))
    columns = dict(zip(names, table.T, strict=True))
    return MemorySeries(
        np.array(ids, dtype=np.int64),
        np.array([seen[i][0] for i in ids], dtype=np.int64),
        {name: columns[name] for name in PARTS},
        columns["budget"],
        columns["full_kv"],
    )
