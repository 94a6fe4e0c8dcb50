"""Selection churn: how much of the retained history changes from one routing event to the next.

Works on arrays of `Tier` values, live or from a stored run. Knows numpy and the trace; knows no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from engine.metrics.history import TierHistory
from engine.trace import Tier

Floats: TypeAlias = NDArray[np.float64]
Tiers: TypeAlias = NDArray[np.uint8]


def retained(tiers: Tiers) -> NDArray[np.bool_]:
    """Whether each window is accessible history, F ∪ Q. The local region is not history: its slide is no churn."""
    kept: NDArray[np.bool_] = (tiers == Tier.FULL) | (tiers == Tier.QUANT)
    return kept


def selection_churn(before: Tiers, after: Tiers, sizes: NDArray[Any] | None = None) -> Floats:
    """Jaccard distance of two retained sets, per row (paper §3.5, Table 14).

    Churn(r) = 1 − |R_r ∩ R_{r+1}| / |R_r ∪ R_{r+1}|,   R = positions of F ∪ Q

    A window that ages into F or Q between the two events is new in R_{r+1} and counts.
    Paper silent: two empty sets; ours is 0.

    Args:
        before: uint8 [rows, windows], `Tier` after event r; it may know fewer windows than `after`.
        after: uint8 [rows, windows], `Tier` after event r + 1.
        sizes: tokens of each window, [windows]; None = all alike. Sets are sets of positions.

    Returns:
        float64 [rows], in [0, 1].

    Raises:
        ValueError: the rows differ.
    """
    if before.shape[0] != after.shape[0]:
        raise ValueError(f"both events must have the same rows, got {before.shape[0]} and {after.shape[0]}.")
    count = max(before.shape[1], after.shape[1])
    old, new = (np.pad(retained(tiers), ((0, 0), (0, count - tiers.shape[1]))) for tiers in (before, after))
    weights = np.ones(count) if sizes is None else np.asarray(sizes, dtype=np.float64)[:count]
    union = (old | new) @ weights
    common = (old & new) @ weights
    out: Floats = np.zeros(len(union))
    np.divide(union - common, union, out=out, where=union > 0)
    return out


@dataclass(frozen=True, slots=True)
class ChurnSeries:
    """Churn of a whole run; entry e compares event e with event e + 1.

    Attributes:
        event_ids: int [events − 1], the later event of each pair.
        values: float64 [events − 1, rows], in [0, 1].
        steps: tokens between the first and the last event.
    """

    event_ids: NDArray[np.int64]
    values: Floats
    steps: int

    @property
    def per_event(self) -> Floats:
        """float64 [events − 1], mean over rows."""
        return self.values.mean(axis=1) if self.values.size else np.zeros(len(self.values))

    @property
    def mean(self) -> float:
        """Mean over events and rows; 0 without a second event."""
        return float(self.values.mean()) if self.values.size else 0.0

    @property
    def per_step(self) -> float:
        """Churn per generated token: variants that route at different rates compare by this one."""
        return float(self.per_event.sum() / self.steps) if self.steps else 0.0


def churn_series(history: TierHistory) -> ChurnSeries:
    """Churn between all consecutive events of a stored run."""
    pairs = range(1, len(history.event_ids))
    rows = history.tiers.shape[1]
    values = [selection_churn(history.tiers[e - 1], history.tiers[e]) for e in pairs]
    steps = int(history.seq_lens[-1] - history.seq_lens[0]) if len(history.seq_lens) else 0
    return ChurnSeries(history.event_ids[1:], np.array(values).reshape(-1, rows), steps)
