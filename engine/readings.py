"""From the cache and its routing records to trace events: moves, keyframes, memory readings.

Reads a cache and its routing records; changes nothing. Batch row 0.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from engine.cache import QEvictCache, RoutingRecord
from engine.trace import (
    Keyframe,
    MemoryReading,
    RoutingEvent,
    ScoreEvent,
    Tier,
    pack_migrations,
    score_levels,
)


def _row_zero(cache: QEvictCache, table: Tensor) -> NDArray[np.generic]:
    """Board rows of batch row 0, windows only: [L·G, windows]."""
    shape = cache.pool_shape
    part = table.view(shape.num_layers, shape.batch, shape.groups, -1)[:, 0].flatten(0, 1)
    out: NDArray[np.generic] = part[:, cache.lead.grid.sink_blocks :].cpu().numpy()
    return out


def memory_reading(cache: QEvictCache) -> MemoryReading:
    """Bytes that hold something now, by kind, all layers of batch row 0."""
    shape, plan = cache.pool_shape, cache.plan
    # Decision groups of one layer share its block bytes: a block held by one of G groups costs 1/G of them.
    costs, groups = plan.costs, shape.groups
    board = cache.board.view(shape.num_layers, shape.batch, groups, -1)[:, 0]
    sink = int((board == Tier.SINK).sum())
    full = int((board == Tier.FULL).sum())
    # The host has known these since the event; asking the device again would make it wait.
    held = cache.occupied.reshape(3, shape.num_layers, shape.batch, groups)[:, :, 0].sum((1, 2))
    arena, live, shadow = (int(count) for count in held)
    return MemoryReading(
        sink=sink * costs.full // groups,
        local=(arena - sink - full) * costs.full // groups,
        full=full * costs.full // groups,
        codes=live * costs.quant_codes // groups,
        metadata=live * costs.quant_metadata // groups,
        shadow=shadow * costs.quant // groups,
        budget=plan.total_bytes * shape.num_layers,
        full_kv=cache.kv_shape.full_kv_bytes(cache.lead.columns),
    )


def keyframe(cache: QEvictCache, record: RoutingRecord, memory: MemoryReading) -> Keyframe:
    """All cells after an event."""
    tiers = _row_zero(cache, record.after).astype(np.uint8)
    return Keyframe(record.event_id, record.columns, tiers, memory)


def routing_event(cache: QEvictCache, record: RoutingRecord, memory: MemoryReading) -> RoutingEvent:
    """What moved."""
    before = _row_zero(cache, record.before).astype(np.uint8)
    after = _row_zero(cache, record.after).astype(np.uint8)
    scores = _row_zero(cache, record.scores).astype(np.float64)
    rows, windows = np.nonzero(before != after)
    source, target = before[rows, windows], after[rows, windows]
    moves = pack_migrations(rows, source, target, windows, scores[rows, windows])
    return RoutingEvent(
        event_id=record.event_id,
        seq_len=record.columns,
        num_windows=after.shape[1],
        migrations=moves,
        memory=memory,
        route_ms=record.seconds * 1e3,
        promotions=int(((source == Tier.QUANT) & (target == Tier.FULL)).sum()),
        demotions=int(((source != Tier.QUANT) & (target == Tier.QUANT)).sum()),
        evictions=int((target == Tier.EVICTED).sum()),
        aged=int((source == Tier.LOCAL).sum()),
    )


def score_event(cache: QEvictCache, record: RoutingRecord, row: int) -> ScoreEvent:
    """Scores of one board row, log-coded; key-norm scores may be negative and are shifted to their least."""
    scores = _row_zero(cache, record.scores).astype(np.float64)
    row = min(max(0, row), scores.shape[0] - 1)
    values = scores[row]
    if values.min(initial=0.0) < 0.0:
        values = np.where(values == 0.0, 0.0, values - values.min() + 1e-3)
    top, levels = score_levels(values)
    return ScoreEvent(record.event_id, row, top, levels)
