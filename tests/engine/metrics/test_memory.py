"""Bytes over a run, from its readings."""

from __future__ import annotations

import pytest

from engine.metrics.memory import memory_series
from engine.trace import Tier
from tests.engine.metrics.traces import trace_of

L, F, Q, E = Tier.LOCAL, Tier.FULL, Tier.QUANT, Tier.EVICTED


def test_memory_summary_by_hand() -> None:
    # sink 64, local 128, full 64 then 64 · 1 and 64 · 2, codes 8, metadata 12: 276, 276, 340 bytes.
    series = memory_series(trace_of([[[F, L]], [[F, Q, L]], [[F, F, Q, L]]]))
    assert series.persistent.tolist() == [276, 276, 340]
    assert series.seq_lens.tolist() == [5, 7, 9]
    summary = series.summary()
    assert summary is not None
    assert summary.peak_persistent_bytes == summary.last_persistent_bytes == 340
    assert summary.share == pytest.approx(340 / 4200)
    assert summary.metadata_share == pytest.approx(12 / 20)
    assert summary.within_budget


def test_no_event_no_summary() -> None:
    series = memory_series([])
    assert series.persistent.tolist() == []
    assert series.summary() is None
