"""A made-up run for tests of the app: right events in the right order, no model, no torch."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from engine.config import QEvictConfig
from engine.errors import BudgetError, EngineError
from engine.trace import (
    EndEvent,
    Keyframe,
    LateMetrics,
    MemoryReading,
    Progress,
    RoutingEvent,
    RunMeta,
    ScoreEvent,
    StepEvent,
    Tier,
    TraceEvent,
    num_windows,
    pack_migrations,
    score_levels,
)

ROWS = 4
PROMPT_TOKENS = 85
SINK = 5


@dataclass(frozen=True)
class FakeOptions:
    max_new_tokens: int = 64
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    reference: bool = True
    horizon: int = 32
    keyframe_every: int = 4
    prefill_chunk: int | None = None
    chat: bool = True
    ignore_eos: bool = False


@dataclass
class FakeEngine:
    """Callable like `engine.generate.generate`.

    Attributes:
        delay: seconds before each token.
        gate: if set, tokens wait until it is set.
        fail_after: raise `error` after so many tokens.
        smallest_share: a budget below it is a `BudgetError`.
        deaf: goes on when it is asked to stop.
        closed: how many streams were closed or ended.
        started: prompts, in the order in which they began.
    """

    delay: float = 0.0
    gate: threading.Event | None = None
    fail_after: int | None = None
    error: Exception = field(default_factory=lambda: RuntimeError("boom"))
    smallest_share: float = 0.0
    deaf: bool = False
    closed: int = 0
    started: list[str] = field(default_factory=list)
    rows_watched: list[int] = field(default_factory=list)
    running: int = 0
    most_running: int = 0

    def __call__(
        self,
        loaded: Any,
        prompt: str,
        config: QEvictConfig,
        options: FakeOptions,
        *,
        session: str = "",
        watched_row: Callable[[], int] | None = None,
        should_stop: Callable[[], bool] | None = None,
        policy: str = "qevict",
        system: str = "",
        document: str = "",
        prefixes: Any = None,
    ) -> Iterator[TraceEvent]:
        self.started.append(prompt)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            yield from self._events(
                loaded, prompt, config, options, session, watched_row or _first_row, should_stop or _never
            )
        finally:
            self.running -= 1
            self.closed += 1

    def _events(
        self,
        loaded: Any,
        prompt: str,
        config: QEvictConfig,
        options: FakeOptions,
        session: str,
        watched_row: Callable[[], int],
        should_stop: Callable[[], bool],
    ) -> Iterator[TraceEvent]:
        if config.kv_budget < self.smallest_share:
            raise BudgetError(
                f"kv_budget must be at least {self.smallest_share}, got {config.kv_budget}.",
                smallest_bytes=1000,
                smallest_share=self.smallest_share,
            )
        omega = config.window_size
        length = PROMPT_TOKENS
        planned = PROMPT_TOKENS + options.max_new_tokens
        tiers = np.full((ROWS, num_windows(planned, SINK, omega)), Tier.LOCAL, dtype=np.uint8)
        yield make_meta(session, loaded, prompt, config, planned, tiers.shape[1])
        yield Progress("prefill", 1, 1)
        count = num_windows(length, SINK, omega)
        tiers[:, : count - 4] = Tier.QUANT
        tiers[:, : max(1, (count - 4) // 2)] = Tier.FULL
        yield Keyframe(0, length, tiers[:, :count].copy(), reading(length))
        event_id = 0
        for number in range(options.max_new_tokens):
            if should_stop() and not self.deaf:
                yield EndEvent("stop", {"text": "stopped", "num_tokens": number, "engine": True})
                return
            if self.gate is not None:
                self.gate.wait(30)
            if self.delay:
                time.sleep(self.delay)
            if self.fail_after is not None and number >= self.fail_after:
                raise self.error
            length += 1
            yield StepEvent(length, [f" <b>{number}</b>"], [number])
            if (length - SINK) % omega:
                continue
            event_id += 1
            count = num_windows(length, SINK, omega)
            yield self._route(event_id, length, count, tiers)
            row = watched_row()
            self.rows_watched.append(row)
            top, levels = score_levels(np.linspace(0.0, 1.0, count))
            yield ScoreEvent(event_id, row % ROWS, top, levels)
            if event_id % options.keyframe_every == 0:
                yield Keyframe(event_id, length, tiers[:, :count].copy(), reading(length))
            if options.reference and event_id > 4:
                yield LateMetrics(event_id - 4, 0.1, 0.2, 0.3, (0.7, 0.2, 0.1), 0.05, 32, [(1, 2, 0.01)])
        yield EndEvent(
            "length",
            {"text": "done", "num_tokens": options.max_new_tokens, "settings": config.to_dict(), "backend": "eager"},
        )

    def _route(self, event_id: int, length: int, count: int, tiers: np.ndarray[Any, Any]) -> RoutingEvent:
        oldest = max(0, count - 5)
        rows = np.arange(ROWS)
        sources = tiers[:, oldest].copy()
        targets = np.full(ROWS, Tier.QUANT if event_id % 2 else Tier.EVICTED, dtype=np.uint8)
        tiers[:, oldest] = targets
        moves = pack_migrations(rows, sources, targets, np.full(ROWS, oldest), np.full(ROWS, 0.5))
        return RoutingEvent(event_id, length, count, moves, reading(length), 0.5, 0, ROWS, 0, 1)


def _first_row() -> int:
    return 0


def _never() -> bool:
    return False


def reading(length: int) -> MemoryReading:
    return MemoryReading(100, 400, 1000, 200, 150, 10, 4000, 100 * length)


def make_meta(session: str, loaded: Any, prompt: str, config: QEvictConfig, planned: int, max_windows: int) -> RunMeta:
    return RunMeta(
        session=session,
        model=str(loaded),
        policy="qevict",
        num_layers=ROWS,
        rows=ROWS,
        window_size=config.window_size,
        sink_tokens=SINK,
        local_tokens=32,
        max_windows=max_windows,
        kv_budget=config.kv_budget,
        quant_share=config.quant_share,
        bits=config.bits,
        kv_dtype="float32",
        backend="eager",
        reference="fullkv",
        prompt_tokens=PROMPT_TOKENS,
        planned_tokens=planned,
        full_window_bytes=6152,
        quant_window_bytes=1640,
        quant_code_bytes=768,
        full_capacity=10,
        quant_capacity=20,
        total_bytes=4000,
        full_kv_bytes=100 * planned,
        pieces=prompt.split(),
        settings=config.to_dict(),
        versions={"engine": "test"},
    )


@dataclass
class FakeLoader:
    """Callable like `engine.models.load_model`; a "model" is its name."""

    gate: threading.Event | None = None
    error: EngineError | None = None
    loads: list[str] = field(default_factory=list)

    def __call__(
        self,
        name: str,
        *,
        device: str = "auto",
        dtype: str = "auto",
        progress: Callable[[Progress], None] | None = None,
    ) -> str:
        self.loads.append(name)
        if progress is not None:
            progress(Progress("load", 1, 2))
        if self.gate is not None:
            self.gate.wait(30)
        if self.error is not None:
            raise self.error
        return name
