"""Where FullKV's attention falls: in Full, Quant, Evicted, or the protected regions.

The result types of the live accumulator (`engine.metrics.fmm`) and what follows from them: future missed
mass, Figure 1's mass shares, the regret list. Knows numpy and the trace; knows no torch and no model.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from engine.trace import LateMetrics, Tier

Floats: TypeAlias = NDArray[np.float64]
Scope: TypeAlias = Literal["all", "history"]
SCOPES: tuple[Scope, ...] = ("all", "history")


def share(part: NDArray[Any], whole: NDArray[Any]) -> Floats:
    """`part / whole`, 0 where `whole` is 0: where nothing was there, nothing was missed."""
    out: Floats = np.zeros(np.broadcast_shapes(np.shape(part), np.shape(whole)), dtype=np.float64)
    np.divide(part, whole, out=out, where=np.asarray(whole) > 0)
    return out


@dataclass(frozen=True, slots=True)
class HorizonMass:
    """FullKV attention of the `steps` queries after one routing event, on the positions that existed at it.

    Attributes:
        event_id: the routing event r.
        steps: queries summed, min(r + H, T) - r.
        evicted: float64 [layers, heads], Σ_τ Σ_i A_τ(i) over the positions evicted at r.
        quant: the same over the Quant windows.
        full: the same over the Full windows.
        protected: the same over sink and local region, as they were at r.
        regret: (board row, window, mass) of evicted windows, largest first; the mass is the mean over the
            row's heads and over the steps, in [0, 1].
    """

    event_id: int
    steps: int
    evicted: Floats
    quant: Floats
    full: Floats
    protected: Floats
    regret: list[tuple[int, int, float]] = field(default_factory=list)

    def denominator(self, scope: Scope = "all") -> Floats:
        """float64 [layers, heads]: Σ_τ Σ_{i≤r} A_τ(i), without sink and local region if `scope` is "history".

        Raises:
            ValueError: an unknown scope.
        """
        if scope not in SCOPES:
            raise ValueError(f"scope must be one of {', '.join(SCOPES)}, got {scope!r}.")
        history = self.evicted + self.quant + self.full
        return history + self.protected if scope == "all" else history

    def missed(self, scope: Scope = "all", *, fp_only: bool = False) -> Floats:
        """Future missed mass of each head, float64 [layers, heads] in [0, 1] (paper §3.5, Table 14).

        FMM_H(r) = Σ_{τ=r+1..min(r+H,T)} Σ_{i∈E_r} A_τ(i) / Σ_{τ=r+1..min(r+H,T)} Σ_{i≤r} A_τ(i)

        Args:
            scope: "all" is the paper's denominator; "history" leaves sink and local region out.
            fp_only: count Quant as inaccessible as well (R3 FP-tier-only); never below the plain value.
        """
        missing = self.evicted + self.quant if fp_only else self.evicted
        return share(missing, self.denominator(scope))

    def mass_share(self, scope: Scope = "all") -> tuple[float, float, float]:
        """Shares in (Full, Quant, Evicted), means over layers and heads (paper §3.5, Figure 1, right).

        Paper silent: the denominator. Ours is FMM's, so that the Evicted share equals FMM in either scope;
        with "all" what is missing from 1 lies in sink and local region, with "history" they sum to 1.
        """
        whole = self.denominator(scope)
        full, quant, evicted = (float(share(part, whole).mean()) for part in (self.full, self.quant, self.evicted))
        return full, quant, evicted

    def late(self, churn: float | None, scope: Scope = "all") -> LateMetrics:
        """The trace event: means over layers and heads. `scope` decides the mass shares' denominator."""
        return LateMetrics(
            event_id=self.event_id,
            fmm=float(self.missed("all").mean()),
            fmm_history=float(self.missed("history").mean()),
            fmm_fp_only=float(self.missed("all", fp_only=True).mean()),
            mass_share=self.mass_share(scope),
            churn=churn,
            steps=self.steps,
            regret=self.regret,
        )


@dataclass(frozen=True, slots=True)
class MetricSummary:
    """Means over a run's routing events. `churn` is None where there was no second event."""

    fmm: float
    fmm_history: float
    fmm_fp_only: float
    churn: float | None
    full_share: float
    quant_share: float
    evicted_share: float
    events: int

    def to_dict(self) -> dict[str, Any]:
        """Plain values for a run's summary: fmm, fmm_history, fmm_fp_only, churn, mass_share."""
        return {
            "fmm": self.fmm,
            "fmm_history": self.fmm_history,
            "fmm_fp_only": self.fmm_fp_only,
            "churn": self.churn,
            "mass_share": {"full": self.full_share, "quant": self.quant_share, "evicted": self.evicted_share},
        }


def summarise_late(late: Iterable[LateMetrics], *, full_horizon: int | None = None) -> MetricSummary | None:
    """Mean of each value over events, every event alike; None where there is none.

    Paper silent: how events are averaged. A cut horizon weighs as much as a whole one.

    Args:
        full_horizon: take missed masses and shares only from events with this many steps (churn needs no future).
    """
    events = list(late)
    whole = [event for event in events if full_horizon is None or event.steps >= full_horizon]
    if not whole:
        return None
    churns = [event.churn for event in events if event.churn is not None]
    shares = np.mean([event.mass_share for event in whole], axis=0)
    return MetricSummary(
        fmm=float(np.mean([event.fmm for event in whole])),
        fmm_history=float(np.mean([event.fmm_history for event in whole])),
        fmm_fp_only=float(np.mean([event.fmm_fp_only for event in whole])),
        churn=float(np.mean(churns)) if churns else None,
        full_share=float(shares[0]),
        quant_share=float(shares[1]),
        evicted_share=float(shares[2]),
        events=len(whole),
    )


def mass_shares(mass: NDArray[Any], tiers: NDArray[np.uint8]) -> dict[Tier, Floats]:
    """Shares of attention mass by tier, offline (paper §3.5, Figure 1, right).

    Args:
        mass: [..., windows], attention mass of each window.
        tiers: uint8, `Tier` of each window, broadcastable to `mass`.

    Returns:
        For each tier but EMPTY, float64 [...]; over all tiers they sum to 1, or to 0 where there is no mass.
    """
    weights = np.where(tiers == Tier.EMPTY, 0.0, np.asarray(mass, dtype=np.float64))
    whole = weights.sum(-1)
    return {
        tier: share(np.where(tiers == tier, weights, 0.0).sum(-1), whole) for tier in Tier if tier is not Tier.EMPTY
    }


@dataclass(frozen=True, slots=True)
class Regret:
    """An evicted window that FullKV later wanted. `mass` is its largest value over `events` events."""

    row: int
    window: int
    mass: float
    event_id: int
    events: int
    text: str = ""


def window_text(pieces: Sequence[str], window: int, *, sink_tokens: int, window_size: int) -> str:
    """Text of one window's tokens, untrusted; `pieces` are all tokens from position 0."""
    start = sink_tokens + window * window_size
    return "".join(pieces[start : start + window_size])


def regret_list(
    late: Iterable[LateMetrics],
    pieces: Sequence[str] = (),
    *,
    sink_tokens: int = 0,
    window_size: int = 8,
    top: int = 16,
) -> list[Regret]:
    """The windows of a whole run whose eviction cost most, one entry per board row and window.

    Paper silent: our own diagnostic. Each event names its own largest; here an entry keeps its worst event.

    Returns:
        At most `top` entries, largest mass first; ties by row, then window.
    """
    found: dict[tuple[int, int], list[tuple[float, int]]] = defaultdict(list)
    for event in late:
        for row, window, mass in event.regret:
            found[row, window].append((mass, event.event_id))
    entries = []
    for (row, window), seen in found.items():
        mass, event_id = max(seen, key=lambda item: (item[0], -item[1]))
        text = window_text(pieces, window, sink_tokens=sink_tokens, window_size=window_size)
        entries.append(Regret(row, window, mass, event_id, len(seen), text))
    entries.sort(key=lambda entry: (-entry.mass, entry.row, entry.window))
    return entries[:top]
