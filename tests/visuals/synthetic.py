"""Synthetic traces for tests of the pictures. The moves obey the rules; the numbers are made up, not measured."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from engine.trace import (
    EndEvent,
    Keyframe,
    LateMetrics,
    MemoryReading,
    RoutingEvent,
    RunMeta,
    ScoreEvent,
    StepEvent,
    Tier,
    TraceEvent,
    encode,
    num_windows,
    pack_migrations,
    score_levels,
)
from engine.trace_board import Board

TALE = (
    "the old harbour keeps its light over cold water while a clerk counts every box that left before noon "
    "and writes the number in a book nobody reads again until someone asks where the silver key was put"
)
WORDS = TALE.split()
NASTY = "</script><img src=x onerror=alert(1)>"


@dataclass(frozen=True)
class Plan:
    """What a synthetic run looks like."""

    rows: int = 30
    window: int = 8
    sink: int = 5
    local: int = 64
    prompt: int = 960
    events: int = 40
    full: int = 15
    quant: int = 60
    seed: int = 7
    reference: bool = True
    horizon_events: int = 4
    keyframe_every: int = 32
    nasty: bool = False
    end: bool = True


def _memory(plan: Plan, full: int, live: int, shadows: int, length: int, bytes_: tuple[int, int, int]) -> MemoryReading:
    block, low, codes = bytes_
    blocks = -(-min(plan.local + plan.window, length) // plan.window)
    rows = plan.rows
    budget = rows * block * (1 + (plan.local + plan.window) // plan.window + plan.full) + rows * low * plan.quant
    return MemoryReading(
        sink=rows * block,
        local=rows * blocks * block,
        full=full * block,
        codes=live * codes,
        metadata=live * (low - codes),
        shadow=shadows * low,
        budget=budget,
        full_kv=rows * -(-length // plan.window) * block,
    )


def synthetic_events(plan: Plan = Plan()) -> list[TraceEvent]:
    """A whole run: meta, tokens, keyframes, routing, late metrics, scores, end."""
    rng = np.random.default_rng(plan.seed)
    final = plan.prompt + plan.events * plan.window
    limit = num_windows(final, plan.sink, plan.window)
    costs = (6152, 1640, 768)
    pieces = [" " + WORDS[int(rng.integers(len(WORDS)))] for _ in range(final + 1)]
    if plan.nasty:
        pieces[3] = pieces[plan.prompt + 2] = NASTY
    out: list[TraceEvent] = []
    seq = iter(range(10**9))
    meta = RunMeta(
        session="synthetic", model="synthetic", policy="qevict", num_layers=plan.rows, rows=plan.rows,
        window_size=plan.window, sink_tokens=plan.sink, local_tokens=plan.local, max_windows=limit, kv_budget=0.2,
        quant_share=0.7, bits=2, kv_dtype="float16", backend="none",
        reference="fullkv-teacher" if plan.reference else "none", prompt_tokens=plan.prompt, planned_tokens=final,
        full_window_bytes=costs[0], quant_window_bytes=costs[1], quant_code_bytes=costs[2], full_capacity=plan.full,
        quant_capacity=plan.quant, total_bytes=_memory(plan, 0, 0, 0, final, costs).budget,
        full_kv_bytes=plan.rows * costs[0] * -(-final // plan.window), pieces=pieces[: plan.prompt],
        settings={"horizon": plan.horizon_events * plan.window}, versions={}, seq=next(seq),
    )  # fmt: skip
    out.append(meta)
    board = Board(meta)
    relevance = rng.gamma(0.4, 1.0, size=(plan.rows, limit)) + 1e-3
    ledger: list[set[int]] = [set() for _ in range(plan.rows)]

    def route(event_id: int, length: int) -> RoutingEvent:
        board._reach(length)
        count = num_windows(length, plan.sink, plan.window)
        aged_to = max(0, (length - plan.local - plan.sink) // plan.window)
        columns: list[tuple[int, int, int, int, float]] = []
        full = shadows = live = aged = 0
        for row in range(plan.rows):
            relevance[row] *= np.exp(rng.normal(0.0, 0.05, size=limit))
            for spike in rng.integers(0, max(1, aged_to), size=1):
                if rng.random() < 0.5 and board.tiers[row, spike] == Tier.QUANT:
                    relevance[row, spike] *= 8.0
            now = board.tiers[row, :aged_to]
            able = np.flatnonzero(now != Tier.EVICTED)
            order = able[np.argsort(-relevance[row, able], kind="stable")]
            top = set(order[: plan.full].tolist())
            masked = len(top & ledger[row])
            rest = set(order[plan.full : plan.full + plan.quant - masked].tolist())
            for w in able.tolist():
                target = Tier.FULL if w in top else Tier.QUANT if w in rest else Tier.EVICTED
                aged += now[w] == Tier.LOCAL
                if target != now[w]:
                    columns.append((row, int(now[w]), int(target), w, float(relevance[row, w])))
            ledger[row] = (ledger[row] & top) | rest
            full += len(top)
            live += len(rest)
            shadows += len(ledger[row] & top)
        rows_, sources, targets, windows, scores = (np.array(c) for c in zip(*columns, strict=True))
        moves = pack_migrations(rows_, sources, targets, windows, scores)
        event = RoutingEvent(
            event_id, length, count, moves, _memory(plan, full, live, shadows, length, costs),
            route_ms=2.0 + float(rng.random()),
            promotions=int(((sources == Tier.QUANT) & (targets == Tier.FULL)).sum()),
            demotions=int(((sources == Tier.FULL) & (targets == Tier.QUANT)).sum()),
            evictions=int((targets == Tier.EVICTED).sum()), aged=int(aged), seq=next(seq),
        )  # fmt: skip
        board.forward(event)
        return event

    def keyframe(event: RoutingEvent) -> Keyframe:
        tiers = board.tiers[:, : event.num_windows].copy()
        return Keyframe(event.event_id, event.seq_len, tiers, event.memory, next(seq))

    def late(event_id: int, steps: int) -> LateMetrics:
        fmm = 0.10 + 0.04 * float(np.sin(event_id / 5)) + 0.002 * event_id
        regret = [(int(rng.integers(plan.rows)), int(rng.integers(20)), 0.01) for _ in range(4)]
        churn = None if event_id == 0 else 0.012 + 0.004 * float(rng.random())
        return LateMetrics(event_id, fmm, fmm * 1.2, fmm * 2.1, (0.4, 0.5 - fmm, fmm), churn, steps, regret, next(seq))

    first = route(0, plan.prompt)
    seq = iter(range(1, 10**9))
    out.append(keyframe(first))
    length = plan.prompt
    for event_id in range(1, plan.events + 1):
        half = plan.window // 2
        for part in (half, plan.window - half):
            if part:
                start, length = length, length + part
                out.append(StepEvent(length, pieces[start:length], list(range(start, length)), next(seq)))
        event = route(event_id, length)
        out.append(event)
        row = event_id % plan.rows
        top, levels = score_levels(relevance[row, : event.num_windows])
        out.append(ScoreEvent(event_id, row, top, levels, next(seq)))
        if event_id % plan.keyframe_every == 0:
            out.append(keyframe(event))
        if plan.reference and event_id >= plan.horizon_events:
            out.append(late(event_id - plan.horizon_events, plan.horizon_events * plan.window))
    if plan.end:
        if plan.reference:
            for event_id in range(max(0, plan.events - plan.horizon_events + 1), plan.events):
                out.append(late(event_id, (plan.events - event_id) * plan.window))
        out.append(EndEvent("length", {"num_tokens": plan.events * plan.window}, next(seq)))
    return out


def synthetic_rows(plan: Plan = Plan()) -> list[bytes]:
    """The same run as wire rows."""
    return [encode(event) for event in synthetic_events(plan)]
