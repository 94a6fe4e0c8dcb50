"""Small traces for the tests of this folder and of the figures."""

from __future__ import annotations

import numpy as np

from engine.trace import (
    EndEvent,
    Keyframe,
    MemoryReading,
    RoutingEvent,
    RunMeta,
    StepEvent,
    Tier,
    TraceEvent,
    num_windows,
    pack_migrations,
)


def meta(rows: int = 1, window_size: int = 2, sink_tokens: int = 1, max_windows: int = 8) -> RunMeta:
    return RunMeta(
        session="t", model="m", policy="qevict", num_layers=rows, rows=rows, window_size=window_size,
        sink_tokens=sink_tokens, local_tokens=window_size, max_windows=max_windows, kv_budget=0.2, quant_share=0.7,
        bits=2, kv_dtype="float32", backend="eager", reference="fullkv", prompt_tokens=1, planned_tokens=32,
        full_window_bytes=64, quant_window_bytes=20, quant_code_bytes=8, full_capacity=1, quant_capacity=1,
        total_bytes=1000, full_kv_bytes=4000,
    )  # fmt: skip


def reading(**changes: int) -> MemoryReading:
    values = dict(sink=64, local=128, full=64, codes=8, metadata=12, shadow=0, budget=1000, full_kv=4000)
    return MemoryReading(**{**values, **changes})


def trace_of(boards: list[list[list[int]]], *, window_size: int = 2, sink_tokens: int = 1) -> list[TraceEvent]:
    """A trace that passes through the given boards [events][rows][windows]; a board's last window is whole.

    The first event is a keyframe, the others are routing events with the moves between the boards.
    """
    info = meta(len(boards[0]), window_size, sink_tokens)
    lengths = [sink_tokens + window_size * len(board[0]) for board in boards]
    events: list[TraceEvent] = [info]
    state = np.array(boards[0], dtype=np.uint8)
    events.append(Keyframe(0, lengths[0], state, reading()))
    for event_id in range(1, len(boards)):
        seq_len = lengths[event_id]
        events.append(StepEvent(seq_len, ["x"]))
        count = num_windows(seq_len, sink_tokens, window_size)
        before = np.full((info.rows, count), Tier.LOCAL, dtype=np.uint8)
        before[:, : state.shape[1]] = state
        state = np.array(boards[event_id], dtype=np.uint8)
        rows, windows = np.nonzero(before != state)
        moves = pack_migrations(rows, before[rows, windows], state[rows, windows], windows, np.ones(len(rows)))
        memory = reading(full=64 * event_id, full_kv=4000 + 100 * event_id)
        events.append(
            RoutingEvent(
                event_id=event_id,
                seq_len=seq_len,
                num_windows=count,
                migrations=moves,
                memory=memory,
                route_ms=1.0,
                promotions=0,
                demotions=0,
                evictions=0,
                aged=0,
            )
        )
    events.append(EndEvent("length"))
    return events
