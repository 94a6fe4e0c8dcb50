"""Paired bootstrap: an interval for a mean, and for the difference of two systems on the same items.

Percentile intervals over items; knows numpy and nothing of what is measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

RESAMPLES = 2000


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over n items with a bootstrap interval. With fewer than 2 items the interval is empty (None)."""

    mean: float
    low: float | None
    high: float | None
    n: int

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)

    @property
    def sign(self) -> int:
        """+1 or -1 where the interval lies on one side of 0, else 0."""
        if self.low is None or self.high is None or self.low <= 0.0 <= self.high:
            return 0
        return 1 if self.low > 0 else -1


def estimate(values: Sequence[float], *, level: float = 0.95, seed: int = 0, resamples: int = RESAMPLES) -> Estimate:
    """Mean of `values` and its percentile bootstrap interval, items resampled with replacement.

    Raises:
        ValueError: no value.
    """
    data = np.asarray(values, dtype=np.float64)
    if data.ndim != 1 or not len(data):
        raise ValueError("an estimate needs at least one value.")
    mean = float(data.mean())
    if len(data) < 2:
        return Estimate(mean, None, None, len(data))
    draw = np.random.default_rng(seed).integers(0, len(data), (resamples, len(data)))
    means = data[draw].mean(axis=1)
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return Estimate(mean, float(low), float(high), len(data))


def paired(
    first: Sequence[float], second: Sequence[float], *, level: float = 0.95, seed: int = 0, resamples: int = RESAMPLES
) -> Estimate:
    """Estimate of mean(first - second); entry i of both is the same item.

    Raises:
        ValueError: different lengths, or no item.
    """
    if len(first) != len(second):
        raise ValueError(f"paired values must come from the same items, got {len(first)} and {len(second)}.")
    differences = [a - b for a, b in zip(first, second, strict=True)]
    return estimate(differences, level=level, seed=seed, resamples=resamples)


def perplexity_difference(
    first: Sequence[float], second: Sequence[float], *, level: float = 0.95, seed: int = 0
) -> Estimate:
    """exp(mean first) - exp(mean second) of mean NLLs in nats per item, items resampled together.

    Raises:
        ValueError: different lengths, or no item.
    """
    ours, theirs = np.asarray(first, dtype=np.float64), np.asarray(second, dtype=np.float64)
    if len(ours) != len(theirs) or not len(ours):
        raise ValueError("a difference of perplexities needs the same items on both sides, at least one.")
    mean = float(np.exp(ours.mean()) - np.exp(theirs.mean()))
    if len(ours) < 2:
        return Estimate(mean, None, None, len(ours))
    draw = np.random.default_rng(seed).integers(0, len(ours), (RESAMPLES, len(ours)))
    low, high = np.quantile(
        np.exp(ours[draw].mean(axis=1)) - np.exp(theirs[draw].mean(axis=1)), [(1 - level) / 2, (1 + level) / 2]
    )
    return Estimate(mean, float(low), float(high), len(ours))


def paired_ratio(
    numerator: Sequence[float], denominator: Sequence[float], *, level: float = 0.95, seed: int = 0
) -> Estimate:
    """Ratio of sums over items, resampled together: a lift whose items may be single zeros."""
    top, bottom = np.asarray(numerator, dtype=np.float64), np.asarray(denominator, dtype=np.float64)
    if len(top) != len(bottom) or not len(top):
        raise ValueError("a ratio needs the same items above and below, at least one.")
    whole = float(bottom.sum())
    value = float(top.sum()) / whole if whole > 0 else float("nan")
    if len(top) < 2 or whole <= 0:
        return Estimate(value, None, None, len(top))
    draw = np.random.default_rng(seed).integers(0, len(top), (RESAMPLES, len(top)))
    sums = bottom[draw].sum(axis=1)
    ratios = top[draw].sum(axis=1)[sums > 0] / sums[sums > 0]
    low, high = np.quantile(ratios, [(1 - level) / 2, (1 + level) / 2])
    return Estimate(value, float(low), float(high), len(top))


def stratified(groups: Sequence[Sequence[float]], *, level: float = 0.95, seed: int = 0) -> Estimate:
    """Mean of the groups' means, items resampled within their own group: a macro average over tasks.

    Raises:
        ValueError: no group, or an empty one.
    """
    data = [np.asarray(group, dtype=np.float64) for group in groups]
    if not data or not all(len(group) for group in data):
        raise ValueError("a macro average needs groups of at least one value.")
    mean = float(np.mean([group.mean() for group in data]))
    count = sum(len(group) for group in data)
    if any(len(group) < 2 for group in data):
        return Estimate(mean, None, None, count)
    draw = np.random.default_rng(seed)
    means = [group[draw.integers(0, len(group), (RESAMPLES, len(group)))].mean(axis=1) for group in data]
    low, high = np.quantile(np.mean(means, axis=0), [(1 - level) / 2, (1 + level) / 2])
    return Estimate(mean, float(low), float(high), count)
