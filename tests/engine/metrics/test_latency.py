"""Sums over measured durations."""

from __future__ import annotations

import pytest

from engine.errors import ConfigError
from engine.metrics.latency import summarise_latency


def test_latency_by_hand() -> None:
    # First token after 100 ms, then 10, 10, 40 ms; routing 30 ms once; the reference 40 ms of 200 in all.
    summary = summarise_latency(
        prompt_tokens=7, ttft_ms=100.0, step_ms=[10.0, 10.0, 40.0], route_ms=[30.0], reference_ms=40.0
    )
    assert summary.new_tokens == 4
    assert summary.tpot_ms == pytest.approx(20.0)
    assert summary.tpot_median_ms == pytest.approx(10.0)
    assert summary.tokens_per_s == pytest.approx(50.0)
    assert summary.reference_share == pytest.approx(0.2)
    assert set(summary.to_dict()) == {
        "prompt_tokens", "ttft_ms", "tpot_ms", "tokens_per_s", "reference_share", "route_ms",
    }  # fmt: skip


def test_a_single_token_has_no_time_per_token() -> None:
    summary = summarise_latency(prompt_tokens=1, ttft_ms=5.0, step_ms=[])
    assert (summary.tpot_ms, summary.tokens_per_s, summary.route_ms, summary.reference_share) == (0.0, 0.0, 0.0, 0.0)


def test_a_clock_that_runs_backwards_is_refused() -> None:
    with pytest.raises(ConfigError, match="durations"):
        summarise_latency(prompt_tokens=1, ttft_ms=5.0, step_ms=[1.0, -1.0])
