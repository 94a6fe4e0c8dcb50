"""Interleaved timing: cases take turns, so that whatever else the machine does hits all of them.

Knows a clock and callables; knows nothing of what they do.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

Clock: TypeAlias = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of one case: median, quartiles, least, and how often it ran."""

    median: float
    lower: float
    upper: float
    least: float
    runs: int

    def divided(self, parts: int) -> Timing:
        """The time of one of `parts` equal pieces of work."""
        return Timing(self.median / parts, self.lower / parts, self.upper / parts, self.least / parts, self.runs)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def summarize(seconds: list[float]) -> Timing:
    """Median, quartiles and least of one case's runs."""
    ordered = sorted(seconds)
    quarter = len(ordered) // 4
    return Timing(
        median=statistics.median(ordered),
        lower=ordered[quarter],
        upper=ordered[-1 - quarter],
        least=ordered[0],
        runs=len(ordered),
    )


def named_clock(name: str) -> Clock:
    """ "wall", or "cpu": processor time of all threads, for a machine that others use too."""
    return time.process_time if name == "cpu" else time.perf_counter


def interleave(
    cases: Mapping[str, Callable[[int], object]],
    *,
    rounds: int,
    warmup: int = 2,
    clock: Clock = time.perf_counter,
) -> dict[str, Timing]:
    """Times each case `rounds` times, one after the other in every round; each gets the round's number."""
    taken: dict[str, list[float]] = {name: [] for name in cases}
    for number in range(warmup + rounds):
        for name, work in cases.items():
            began = clock()
            work(number)
            spent = clock() - began
            if number >= warmup:
                taken[name].append(spent)
    return {name: summarize(seconds) for name, seconds in taken.items()}


def paired_ratio(base: Timing, other: Timing) -> float:
    """How many times faster `other` is than `base`, by medians."""
    return base.median / other.median if other.median else 0.0
