"""The summary of a run that did not reach its own end, from the events that were seen.

Same keys as the engine's summary as far as they can be known. Knows the trace only.
"""

from __future__ import annotations

import time
from typing import Any

from engine.trace import Keyframe, LateMetrics, MemoryReading, RoutingEvent, RunMeta, StepEvent, TraceEvent


class Tally:
    """Adds up a run's events."""

    def __init__(self) -> None:
        self._meta: RunMeta | None = None
        self._pieces: list[str] = []
        self._memory: MemoryReading | None = None
        self._peak = 0
        self._routing = {"events": 0, "promotions": 0, "demotions": 0, "evictions": 0}
        self._late: list[LateMetrics] = []
        self._first_token: float | None = None
        self._last_token: float | None = None

    def take(self, event: TraceEvent) -> None:
        """Counts one event."""
        match event:
            case RunMeta():
                self._meta = event
            case StepEvent():
                self._pieces += event.pieces
                self._last_token = time.monotonic()
                if self._first_token is None:
                    self._first_token = self._last_token
            case Keyframe():
                self._read(event.memory)
            case RoutingEvent():
                self._read(event.memory)
                self._routing["events"] += 1
                self._routing["promotions"] += event.promotions
                self._routing["demotions"] += event.demotions
                self._routing["evictions"] += event.evictions
            case LateMetrics():
                self._late.append(event)

    def _read(self, memory: MemoryReading) -> None:
        self._memory = memory
        self._peak = max(self._peak, memory.persistent)

    @property
    def num_tokens(self) -> int:
        """Tokens generated so far."""
        return len(self._pieces)

    def summary(self) -> dict[str, Any]:
        """What is known now; empty before the run began."""
        meta = self._meta
        if meta is None:
            return {}
        out: dict[str, Any] = {
            "text": "".join(self._pieces),
            "num_tokens": self.num_tokens,
            "settings": meta.settings,
            "backend": meta.backend,
            "kv": None,
            "metrics": self._metrics(),
            "routing": dict(self._routing),
            "timing": {"prompt_tokens": meta.prompt_tokens, "tokens_per_s": self._rate()},
        }
        if self._memory is not None:
            full = self._memory.full_kv
            out["kv"] = {
                "total_bytes": meta.total_bytes,
                "peak_persistent_bytes": self._peak,
                "full_kv_bytes": full,
                "share": round(self._memory.persistent / full, 6) if full else 0.0,
                "kv_dtype": meta.kv_dtype,
            }
        return out

    def _rate(self) -> float | None:
        if self._first_token is None or self._last_token is None or self._last_token <= self._first_token:
            return None
        return round((self.num_tokens - 1) / (self._last_token - self._first_token), 2)

    def _metrics(self) -> dict[str, Any] | None:
        late = self._late
        if not late:
            return None
        churns = [event.churn for event in late if event.churn is not None]
        full, quant, evicted = (sum(event.mass_share[tier] for event in late) / len(late) for tier in range(3))
        return {
            "fmm": sum(event.fmm for event in late) / len(late),
            "fmm_history": sum(event.fmm_history for event in late) / len(late),
            "fmm_fp_only": sum(event.fmm_fp_only for event in late) / len(late),
            "churn": sum(churns) / len(churns) if churns else None,
            "mass_share": {"full": full, "quant": quant, "evicted": evicted},
        }
