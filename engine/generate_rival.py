"""One prompt by a system of `engine.baselines`: the same events as a QEvict run, as far as the system has them.

    for event in generate_rival(loaded, "Once upon a time", QEvictConfig(kv_budget=0.2), system="snapkv"):
        ...

Tokens and memory as always. A rival decides by tokens and heads, so that a window may stay in part: after the
prompt and at every window's end a cell is shown in the tier that most of its tokens are in, heads together.
There are no scores, no regret and no reference. Of the settings a rival takes the budget, the stored dtype and
the size of the windows that are drawn. Knows the registry and the decode loop; knows no server and no file.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from torch import Tensor

from engine.baselines import registry
from engine.baselines.base import RunPlan
from engine.baselines.matching import BudgetSpec
from engine.budget import KVShape
from engine.comparison import frame
from engine.config import QEvictConfig
from engine.generate import alone
from engine.model_shape import model_shape
from engine.models import LoadedModel
from engine.pieces import pieces_of
from engine.prompt import PREFILL_CHUNK, prompt_ids, prompt_parts
from engine.run import WORKSPACE, Run
from engine.run_options import RunOptions
from engine.trace import (
    EndEvent,
    Keyframe,
    MemoryReading,
    Progress,
    RoutingEvent,
    RunMeta,
    Tier,
    TraceEvent,
    num_windows,
    pack_migrations,
)
from engine.version import VERSION

BACKEND = "torch"
"""A rival attends by PyTorch's own operations, whatever QEvict's kernels could do here."""
CELLS_BY_MAJORITY = "cells_by_majority"
"""Notice: a window is drawn in the tier that most of its tokens are in."""


def generate_rival(
    loaded: LoadedModel,
    prompt: str,
    config: QEvictConfig | None = None,
    options: RunOptions | None = None,
    *,
    system: str,
    session: str = "",
    watched_row: Callable[[], int] | None = None,
    should_stop: Callable[[], bool] | None = None,
    parameters: Mapping[str, Any] | None = None,
) -> Iterator[TraceEvent]:
    """Runs one prompt and yields its trace; events carry seq 0, 1, 2, ….

    Args:
        config: its budget, `kv_dtype`, `window_size` and `sink_tokens`; the rest is not used.
        options: as for `generate.generate`; `reference` is not used.
        system: a name of `registry.names()`. parameters: those that differ from the system's defaults.
        watched_row: not used; there are no scores.

    Raises:
        ConfigError: no such system. PromptError, BudgetError, BackendError, UnsupportedModelError, OutOfMemoryError:
            before or during the run.
    """
    run = RivalRun(loaded, prompt, config, options, system=system, session=session, parameters=parameters)
    yield from alone(run, watched_row, should_stop)


class RivalRun(Run):
    """One run of a rival: settled at construction, so that mistakes show before any work. Fits into a batch."""

    def __init__(
        self,
        loaded: LoadedModel,
        prompt: str,
        config: QEvictConfig | None = None,
        options: RunOptions | None = None,
        *,
        system: str,
        session: str = "",
        parameters: Mapping[str, Any] | None = None,
    ) -> None:
        config, options = config or QEvictConfig(), replace(options or RunOptions(), reference=False)
        self._rival = registry.rival(system, parameters)
        self.system, self.info = system, registry.info(system)
        self.split, self.prefixes, self.with_reference = 0, None, False
        self._settle(loaded, prompt_ids(loaded, prompt, options.chat), config, options, session, system)
        budget = _budget(config) if self._rival.budgeted else None
        plan = RunPlan(budget, self.new_tokens, config.kv_dtype, options.seed, loaded.tokenizer)
        shape = model_shape(loaded, config)
        self._rival.check(shape, shape.head_dim)
        self.cache: Any = self._rival.build(loaded.model, plan)
        self.shape = KVShape(len(self.cache.managed_layers), shape.num_kv_heads, shape.head_dim, shape.element_bytes)
        self.expected_bytes = self._rival.account(self.shape, len(self.ids), self.new_tokens - 1, plan)
        total = self.shape.full_kv_bytes(len(self.ids) + self.new_tokens)
        self.budget_bytes = (
            self.expected_bytes if budget is None else budget.model_bytes(self.shape, len(self.ids), self.new_tokens)
        )
        self.budget_share = min(1.0, self.budget_bytes / total)
        self.notices += [*self._rival.notices(self.shape, len(self.ids), plan), CELLS_BY_MAJORITY]
        self.quant_window = self._quant_window_bytes(plan)
        self.tiers: NDArray[np.uint8] = np.full((self.shape.num_layers, 0), int(Tier.LOCAL), dtype=np.uint8)
        self.persistent = self.allocated = 0

    def _quant_window_bytes(self, plan: RunPlan) -> int:
        """What one more window of coded tokens takes in one layer, by the accountant; 0 where nothing is coded."""
        if self.info.family != "quantize":
            return 0
        few, many = 4096, 8192
        slope = self._rival.account(self.shape, many, 0, plan) - self._rival.account(self.shape, few, 0, plan)
        return slope * self.config.window_size // (many - few) // self.shape.num_layers

    # ---- events -------------------------------------------------------------------------------------

    def events(
        self, watched_row: Callable[[], int] | None, should_stop: Callable[[], bool] | None
    ) -> Iterator[TraceEvent]:
        began = time.perf_counter()
        stopped = should_stop or (lambda: False)
        yield self._meta()
        done = 0
        for part in prompt_parts(self.ids, self.options.prefill_chunk or PREFILL_CHUNK):
            if stopped():
                yield self._end("stop")
                return
            self.tally.prefill_seconds += self._forward(part)
            done += len(part)
            yield Progress("prefill", done, len(self.ids))
        with torch.inference_mode():
            self.cache.settle()
        self._look_is_due = True
        yield from self._routed(watched_row)
        yield from self._decode(self._logits, began, watched_row, stopped)

    _look_is_due = False

    def _forward(self, ids: list[int]) -> float:
        seconds = super()._forward(ids)
        self._note_end_of_window()
        return seconds

    def fed_with(self, logits: Tensor, seconds: float, rows: int) -> None:
        super().fed_with(logits, seconds, rows)
        self._note_end_of_window()

    def _note_end_of_window(self) -> None:
        columns = self._columns()
        self._look_is_due = self.tally.events > 0 and (columns - self.config.sink_tokens) % self.config.window_size == 0

    def _columns(self) -> int:
        return int(self.cache.get_seq_length(self.cache.managed_layers[0]))

    @property
    def routing_due(self) -> bool:
        return self._look_is_due

    @torch.inference_mode()
    def _routed(self, watched_row: Callable[[], int] | None) -> Iterator[TraceEvent]:
        """What is resident now, and what has moved since the last look."""
        self._look_is_due = False
        columns = self._columns()
        residency = self.cache.residency().cpu()
        before, after = self.tiers, self._cells(residency)
        self.memory = self._reading(residency, columns)
        self.tally.peak = max(self.tally.peak, self.memory.persistent)
        self.tiers = after
        known = np.full_like(after, int(Tier.LOCAL))
        known[:, : before.shape[1]] = before
        event = self._moves(known, after, columns, self.memory)
        self.tally.count(event)
        first = self.tally.events == 0
        self.tally.events += 1
        if first:
            yield Keyframe(0, columns, after, self.memory)
            return
        yield event
        if event.event_id % self.options.keyframe_every == 0:
            yield Keyframe(event.event_id, columns, after, self.memory)

    def _cells(self, residency: Tensor) -> NDArray[np.uint8]:
        """uint8 [layers, windows]: the tier that most tokens of a window are in; the open window is local."""
        sink, window = self.config.sink_tokens, self.config.window_size
        layers, columns = residency.shape[0], residency.shape[2]
        windows = num_windows(columns, sink, window)
        if not windows:
            return np.zeros((layers, 0), dtype=np.uint8)
        now = frame(residency, sink, window)
        shares = [part.reshape(layers, -1, windows).mean(1) for part in (now.full, now.quant)]
        stacked = np.stack([*shares, 255.0 - shares[0] - shares[1]])
        kinds = np.array([Tier.FULL, Tier.QUANT, Tier.EVICTED], dtype=np.uint8)
        cells: NDArray[np.uint8] = kinds[stacked.argmax(0)]
        if (columns - sink) % window:
            cells[:, -1] = int(Tier.LOCAL)
        return cells

    def _moves(
        self, before: NDArray[np.uint8], after: NDArray[np.uint8], columns: int, memory: MemoryReading
    ) -> RoutingEvent:
        rows, windows = np.nonzero(before != after)
        source, target = before[rows, windows], after[rows, windows]
        return RoutingEvent(
            event_id=self.tally.events,
            seq_len=columns,
            num_windows=after.shape[1],
            migrations=pack_migrations(rows, source, target, windows, np.zeros(len(rows))),
            memory=memory,
            route_ms=None,
            promotions=int(((source == Tier.QUANT) & (target == Tier.FULL)).sum()),
            demotions=int(((source != Tier.QUANT) & (target == Tier.QUANT)).sum()),
            evictions=int((target == Tier.EVICTED).sum()),
            aged=int((source == Tier.LOCAL).sum()),
        )

    def _reading(self, residency: Tensor, columns: int) -> MemoryReading:
        """Measured bytes: tokens in full precision, and everything else (codes with their metadata) as codes."""
        self.persistent = max(self.persistent, int(self.cache.persistent_bytes))
        self.allocated = max(self.allocated, int(self.cache.allocated_bytes))
        held = int(self.cache.persistent_bytes)
        entry = 2 * self.shape.head_dim * self.shape.element_bytes
        full = min(held, int((residency == int(Tier.FULL)).sum()) * entry)
        coded = bool((residency == int(Tier.QUANT)).any())
        return MemoryReading(
            sink=0,
            local=0,
            full=full if coded else held,
            codes=held - full if coded else 0,
            metadata=0,
            shadow=0,
            budget=self.budget_bytes,
            full_kv=self.shape.full_kv_bytes(columns),
        )

    # ---- facts ---------------------------------------------------------------------------------------

    def needed_bytes(self) -> int:
        return int(self.shape.full_kv_bytes(len(self.ids)) * WORKSPACE) + self.expected_bytes

    def _meta(self) -> RunMeta:
        config = self.config
        planned = len(self.ids) + self.new_tokens
        return RunMeta(
            session=self.session,
            model=self.loaded.label,
            policy=self.policy,
            num_layers=self.shape.num_layers,
            rows=self.shape.num_layers,
            window_size=config.window_size,
            sink_tokens=config.sink_tokens,
            local_tokens=0,
            max_windows=max(1, num_windows(planned, config.sink_tokens, config.window_size)),
            kv_budget=self.budget_share,
            quant_share=0.0,
            bits=int(getattr(self._rival, "bits", 2)),
            kv_dtype=self.kv_dtype,
            backend=BACKEND,
            reference="none",
            prompt_tokens=len(self.ids),
            planned_tokens=planned,
            full_window_bytes=self.shape.token_bytes * config.window_size,
            quant_window_bytes=self.quant_window,
            quant_code_bytes=0,
            full_capacity=0,
            quant_capacity=0,
            total_bytes=self.budget_bytes,
            full_kv_bytes=self.shape.full_kv_bytes(planned),
            pieces=pieces_of(self.loaded.tokenizer, self.ids),
            notices=self.notices,
            settings=self.settings(),
            versions={
                "qevict": VERSION,
                "torch": torch.__version__,
                "transformers": transformers.__version__,
                "model": self.loaded.fingerprint,
            },
        )

    def settings(self) -> dict[str, Any]:
        settings = super().settings()
        for name in ("quant_share", "bits", "promotion", "ranker", "local_tokens", "local_share", "backend"):
            settings.pop(name, None)
        return settings | {"system": self.system, "kv_budget": self.budget_share}

    def _end(self, why: str) -> EndEvent:
        tally = self.tally
        length = max(1, self._columns())
        steps = max(1, tally.tokens - 1)
        held = int(self.cache.persistent_bytes)
        self.persistent = max(self.persistent, held)
        full = self.shape.full_kv_bytes(length)
        summary = {
            "text": "".join(tally.text),
            "num_tokens": tally.tokens,
            "settings": self.settings(),
            "backend": BACKEND,
            "kv": {
                "system": self.system,
                "family": self.info.family,
                "keeps": self.info.keeps,
                "storage": self.info.storage,
                "total_bytes": self.budget_bytes,
                "expected_bytes": self.expected_bytes,
                "peak_persistent_bytes": self.persistent,
                "persistent_bytes": held,
                "allocated_bytes": max(self.allocated, int(self.cache.allocated_bytes)),
                "full_kv_bytes": full,
                "planned_full_kv_bytes": self.shape.full_kv_bytes(len(self.ids) + self.new_tokens),
                "share": self.persistent / full,
                "kv_dtype": self.kv_dtype,
                "prefill_peak_bytes": int(self.cache.prefill_peak_bytes),
            },
            "metrics": None,
            "routing": {
                "events": tally.events,
                "promotions": tally.promotions,
                "demotions": tally.demotions,
                "evictions": tally.evictions,
            },
            "timing": {
                "prompt_tokens": len(self.ids),
                "document_tokens": 0,
                "prefix_used": False,
                "ttft_ms": tally.ttft_seconds * 1e3,
                "tpot_ms": tally.decode_seconds / steps * 1e3,
                "tokens_per_s": steps / tally.decode_seconds if tally.decode_seconds else 0.0,
                "batch_rows": self.most_rows,
                "reference_share": 0.0,
                "compress_ms": float(self.cache.compress_seconds) * 1e3,
            },
        }
        return EndEvent(why, summary)


def _budget(config: QEvictConfig) -> BudgetSpec:
    if config.kv_budget_bytes is not None:
        return BudgetSpec(total_bytes=config.kv_budget_bytes)
    return BudgetSpec(share=config.kv_budget)
