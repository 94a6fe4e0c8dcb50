"""Times of one run: to the first token, per token, throughput; what routing and the reference took of them.

Sums up durations that the caller measured; reads no clock and formats nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from engine.errors import ConfigError


@dataclass(frozen=True, slots=True)
class LatencySummary:
    """Times of one run (paper Table 4), reference excluded unless a name says otherwise.

    Attributes:
        prompt_tokens: tokens of the prompt.
        new_tokens: generated tokens, the first one included.
        ttft_ms: from the request to the first token.
        tpot_ms: mean time per token after the first; 0 where there was none.
        tpot_median_ms, tpot_p95_ms: the same, median and 95th percentile (routing steps show in the latter).
        tokens_per_s: tokens after the first, over the time that they took.
        route_ms: mean cost of one routing event, part of the step that it falls in.
        reference_share: time of the FullKV reference over the run's whole time with it, in [0, 1].
    """

    prompt_tokens: int
    new_tokens: int
    ttft_ms: float
    tpot_ms: float
    tpot_median_ms: float
    tpot_p95_ms: float
    tokens_per_s: float
    route_ms: float
    reference_share: float

    def to_dict(self) -> dict[str, Any]:
        """Plain values for a run's summary."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "ttft_ms": self.ttft_ms,
            "tpot_ms": self.tpot_ms,
            "tokens_per_s": self.tokens_per_s,
            "reference_share": self.reference_share,
            "route_ms": self.route_ms,
        }


def summarise_latency(
    *,
    prompt_tokens: int,
    ttft_ms: float,
    step_ms: Sequence[float],
    route_ms: Sequence[float] = (),
    reference_ms: float = 0.0,
) -> LatencySummary:
    """Sums up one run.

    Args:
        ttft_ms: time to the first token, without the reference's work.
        step_ms: time of each later token, without the reference's work.
        route_ms: time of each routing event, already inside the steps.
        reference_ms: all of the reference's work.

    Raises:
        ConfigError: a negative duration.
    """
    steps, routes = np.asarray(step_ms, dtype=np.float64), np.asarray(route_ms, dtype=np.float64)
    smallest = min(ttft_ms, reference_ms, steps.min(initial=0.0), routes.min(initial=0.0))
    if smallest < 0:
        raise ConfigError(f"durations must be 0 or more, got {smallest}: the clock must be monotonic.")
    decode = float(steps.sum())
    whole = ttft_ms + decode + reference_ms
    return LatencySummary(
        prompt_tokens=prompt_tokens,
        new_tokens=len(steps) + 1,
        ttft_ms=float(ttft_ms),
        tpot_ms=float(steps.mean()) if len(steps) else 0.0,
        tpot_median_ms=float(np.median(steps)) if len(steps) else 0.0,
        tpot_p95_ms=float(np.percentile(steps, 95)) if len(steps) else 0.0,
        tokens_per_s=len(steps) / decode * 1000.0 if decode > 0 else 0.0,
        route_ms=float(routes.mean()) if len(routes) else 0.0,
        reference_share=float(reference_ms / whole) if whole > 0 else 0.0,
    )
