"""Late important returns: windows that leave the Full tier for long and come back, for a policy or an oracle.

Works on boolean arrays over events; knows no torch, no model, no tier but "in Full" and "aged".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from engine.metrics.history import TierHistory

Bools: TypeAlias = NDArray[np.bool_]
Floats: TypeAlias = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class ReturnStats:
    """Episodes of inactivity, and how many of them ended in a return (paper §3.5, Table 16).

    Attributes:
        min_events: m, events that a window must be inactive before its episode counts.
        eligible: episodes of at least m events; those that never end are among them.
        rescued: eligible episodes after which the window entered Full.
        return_events: int64 [rescued], length of each rescued episode in routing events.
        return_tokens: int64 [rescued], the same in tokens.
    """

    min_events: int
    eligible: int
    rescued: int
    return_events: NDArray[np.int64]
    return_tokens: NDArray[np.int64]

    @property
    def lir(self) -> float:
        """Share of eligible episodes that ended in a return, in [0, 1]; 0 without any."""
        return self.rescued / self.eligible if self.eligible else 0.0

    @property
    def median_events(self) -> float | None:
        """Median time to return in routing events; None where nothing returned."""
        return float(np.median(self.return_events)) if self.rescued else None

    @property
    def median_tokens(self) -> float | None:
        """Median time to return in tokens; None where nothing returned."""
        return float(np.median(self.return_tokens)) if self.rescued else None


def global_lir(active: Bools, aged: Bools, seq_lens: NDArray[Any], min_events: int = 3) -> ReturnStats:
    """Global LIR and time to return over maximal inactive episodes (paper §3.5, Table 16).

    GlobalLIR(m) = #{episodes of ≥ m inactive events, later active again} / #{episodes of ≥ m inactive events}

    An episode is a maximal run of events in which an aged window is not active. Each long absence counts once.
    Paper silent: whether an episode may begin before the window was ever active. Ours may: it begins at ageing.
    Unfinished episodes stay in the denominator; so do those of windows that were evicted for good.
    Time to return is the episode's whole length, not length − m + 1.

    Args:
        active: bool [events, rows, windows], the window is in Full (or in an oracle's set).
        aged: bool, same shape, the window has left the local region; once true, true for ever.
        seq_lens: int [events], tokens known at each event.
        min_events: m ≥ 1.

    Raises:
        ValueError: shapes that differ, or m < 1.
    """
    if active.shape != aged.shape or len(seq_lens) != len(active):
        raise ValueError(f"active, aged and seq_lens must agree, got {active.shape}, {aged.shape}, {len(seq_lens)}.")
    if min_events < 1:
        raise ValueError(f"min_events must be 1 or more, got {min_events}.")
    events = len(active)
    inactive = (aged & ~active).reshape(events, -1).T  # [cells, events]: the runs of a cell lie in one row
    edges = np.diff(np.pad(inactive, ((0, 0), (1, 1))).astype(np.int8), axis=1)
    _, starts = np.nonzero(edges == 1)
    _, ends = np.nonzero(edges == -1)  # first event after the run; `events` if it never ended
    lengths = ends - starts
    long_enough = lengths >= min_events
    rescued = long_enough & (ends < events)
    seq = np.asarray(seq_lens, dtype=np.int64)
    tokens = seq[ends[rescued]] - seq[starts[rescued]]
    return ReturnStats(
        min_events, int(long_enough.sum()), int(rescued.sum()), lengths[rescued].astype(np.int64), tokens
    )


def policy_lir(history: TierHistory, min_events: int = 3) -> ReturnStats:
    """Global LIR of the Full tier that the policy really kept."""
    return global_lir(history.in_full, history.aged, history.seq_lens, min_events)


def top_windows(scores: NDArray[Any], capacity: int | NDArray[Any], available: Bools) -> Bools:
    """The `capacity` best available windows of every row; ties go to the lower window id.

    Args:
        scores: [events, rows, windows], higher is better.
        capacity: windows to take, one number or one per event.
        available: bool, same shape: which windows may be taken.

    Returns:
        bool, same shape, with min(capacity, available windows) set in every row.
    """
    ranked = np.where(available, np.asarray(scores, dtype=np.float64), -np.inf)
    order = np.argsort(-ranked, axis=-1, kind="stable")
    places = np.empty_like(order)
    np.put_along_axis(places, order, np.broadcast_to(np.arange(scores.shape[-1]), order.shape), axis=-1)
    limits = np.asarray(capacity)
    picked: Bools = (places < (limits[:, None, None] if limits.ndim else limits)) & available
    return picked


def past_mass_oracle(mass: NDArray[Any], capacity: int | NDArray[Any], available: Bools) -> Bools:
    """The K_f windows with most reference mass so far (paper Table 16, "oracle top-K_f").

    Of all sets of that size it misses the least **past** mass; it says nothing about the future.

    Args:
        mass: [events, rows, windows], FullKV attention mass summed over all queries up to each event, mean over heads.
        capacity: K_f, one number or one per event.
        available: bool, same shape: aged windows.
    """
    return top_windows(mass, capacity, available)


def future_scores(mass: NDArray[Any], denominator: NDArray[Any]) -> Floats:
    """What each window adds to FMM if it is missing: mean over heads of its future mass over FMM's denominator.

    Args:
        mass: [events, rows, heads, windows], Σ_{τ∈(r,r+H]} A_τ(w).
        denominator: [events, rows, heads], Σ_{τ∈(r,r+H]} Σ_{i≤r} A_τ(i).

    Returns:
        float64 [events, rows, windows]; the sum over a missing set is that set's FMM, mean over heads.
    """
    whole = np.asarray(denominator, dtype=np.float64)[..., None]
    parts: Floats = np.zeros(mass.shape, dtype=np.float64)
    np.divide(mass, whole, out=parts, where=whole > 0)
    scores: Floats = parts.mean(axis=-2)
    return scores


def future_oracle(
    mass: NDArray[Any], denominator: NDArray[Any], capacity: int | NDArray[Any], available: Bools
) -> Bools:
    """The windows that the next H queries will want most; its FMM is ≤ that of any set of the same size.

    Paper silent: our lower bound. Arguments as in `future_scores`; `available` is bool [events, rows, windows].
    """
    return top_windows(future_scores(mass, denominator), capacity, available)


def missed(scores: NDArray[Any], kept: Bools, available: Bools) -> Floats:
    """Sum of the scores of available windows that were not kept, float64 [events, rows]."""
    gone: Floats = np.where(available & ~kept, np.asarray(scores, dtype=np.float64), 0.0).sum(axis=-1)
    return gone
