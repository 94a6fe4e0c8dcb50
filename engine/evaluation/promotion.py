"""The promotion experiment, paired: one text, one trajectory, and at each event both decisions from one state.

For every promotion: the window that rose, the one that it displaced, and what FullKV wanted of both over the next
H queries. Two currencies are kept apart: attention served in full precision (what a promotion buys), and attention
lost because the promoted window's ledger entry stays charged (what it may cost). Knows a trace and boards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from engine.budget import make_plan
from engine.config import QEvictConfig
from engine.evaluation.statistics import Estimate, estimate, paired, paired_ratio
from engine.metrics.history import TierHistory
from engine.policies import HORIZON, FullTrace, Policy, PolicyRun, future_shares, row_scores, simulate
from engine.routing import Candidates, decide
from engine.trace import Tier
from engine.windows import Grid


@dataclass(frozen=True, slots=True)
class Promotion:
    """One promotion against the same event without it; shares of the row's next attention, in [-1, 1].

    Attributes:
        boundary: columns known at the event. row: board row. window: what rose.
        displaced: the window that would have been in Full in its place, None where that slot would have been empty.
        wanted: next attention on the promoted window. displaced_wanted: on the displaced one.
        eviction_cost: next attention on windows that are evicted with promotion and not without, less the reverse;
            shared equally among the promotions of the same row and event.
        stayed_wanted: mean next attention of the windows that stayed in Quant, for the lift.
    """

    boundary: int
    row: int
    window: int
    displaced: int | None
    wanted: float
    displaced_wanted: float
    eviction_cost: float
    stayed_wanted: float

    @property
    def precision_gain(self) -> float:
        """Next attention served in full precision, gained."""
        return self.wanted - self.displaced_wanted

    @property
    def net_gain(self) -> float:
        """Attention gained in full precision less attention lost to eviction."""
        return self.precision_gain - self.eviction_cost


@dataclass(frozen=True, slots=True)
class PromotionResult:
    """One text: all promotions, and the two whole runs paired by event.

    Attributes:
        on, off: simulated runs. fmm_difference: by boundary, FMM on - FMM off; negative favours promotion.
        full_difference: by boundary, share of next attention in Full, on - off; positive favours promotion.
    """

    promotions: list[Promotion]
    on: PolicyRun
    off: PolicyRun
    fmm_difference: dict[int, float] = field(default_factory=dict)
    full_difference: dict[int, float] = field(default_factory=dict)


def promotion_experiment(trace: FullTrace, config: QEvictConfig, *, horizon: int = HORIZON) -> PromotionResult:
    """Both policies on one trace, and every promotion's own counterfactual.

    Raises:
        BudgetError: the budget is infeasible at this length.
    """
    settings = config.replace(promotion=True, planned_new_tokens=trace.steps)
    make_plan(settings, trace.shape, trace.prompt_tokens)
    (on, off), _ = simulate(
        trace,
        [Policy("promotion on", settings), Policy("promotion off", settings.replace(promotion=False))],
        horizon=horizon,
    )
    found = single_promotions(trace, settings, on.history, horizon=horizon)
    with_, without = on.fmm_by_event(), off.fmm_by_event()
    shares = [
        {run.history.seq_lens[mass.event_id].item(): mass.mass_share()[0] for mass in run.masses} for run in (on, off)
    ]
    return PromotionResult(
        found,
        on,
        off,
        {boundary: with_[boundary] - without[boundary] for boundary in with_},
        {boundary: shares[0][boundary] - shares[1][boundary] for boundary in shares[0]},
    )


def single_promotions(
    trace: FullTrace, config: QEvictConfig, history: TierHistory, *, horizon: int = HORIZON
) -> list[Promotion]:
    """Every Q → F move of a simulated history, against the same event decided with promotion barred."""
    plan = make_plan(config.replace(planned_new_tokens=trace.steps), trace.shape, trace.prompt_tokens)
    sink = Grid(config.window_size, config.sink_tokens).sink_blocks
    rows, windows = history.tiers.shape[1:]
    full = torch.full((rows,), plan.full_capacity)
    quant = torch.full((rows,), plan.quant_capacity)
    recorded = np.zeros((rows, windows), dtype=np.bool_)
    before = np.full((rows, windows), int(Tier.EMPTY), dtype=np.uint8)
    out: list[Promotion] = []
    for place, boundary in enumerate(history.seq_lens.tolist()):
        after = history.tiers[place]
        rose = (before == Tier.QUANT) & (after == Tier.FULL)
        if rose.any() and boundary < trace.total_tokens:
            scores = _wide(row_scores(trace.past(boundary), config, trace.shape)[:, sink:], windows)
            ids = np.broadcast_to(np.arange(windows), (rows, windows))
            competes = np.isin(after, (Tier.FULL, Tier.QUANT, Tier.EVICTED)) & (before != Tier.EVICTED)
            barred = decide(
                Candidates(
                    torch.from_numpy(np.where(competes, ids, -1)),
                    torch.from_numpy(scores),
                    torch.from_numpy(before == Tier.QUANT),
                    torch.from_numpy(recorded.copy()),
                ),
                full,
                quant,
                False,
            ).numpy()
            wanted = _wide(future_shares(trace, boundary, config, horizon)[:, sink:], windows)
            for row in np.flatnonzero(rose.any(1)).tolist():
                out += _of_row(boundary, row, rose[row], before[row], after[row], barred[row], scores[row], wanted[row])
        recorded = (recorded | (after == Tier.QUANT)) & (after != Tier.EVICTED)
        before = after
    return out


def _wide(table: torch.Tensor, windows: int) -> NDArray[np.float64]:
    out = np.zeros((table.shape[0], windows))
    out[:, : table.shape[1]] = table.double().numpy()[:, :windows]
    return out


def _of_row(
    boundary: int,
    row: int,
    rose: NDArray[np.bool_],
    before: NDArray[np.uint8],
    after: NDArray[np.uint8],
    barred: NDArray[np.uint8],
    scores: NDArray[np.float64],
    wanted: NDArray[np.float64],
) -> list[Promotion]:
    """The promotions of one row and event; the strongest that rose is paired with the strongest displaced."""
    up = sorted(np.flatnonzero(rose).tolist(), key=lambda w: (-scores[w], w))
    out_of_full = (barred == Tier.FULL) & (after != Tier.FULL)
    down = sorted(np.flatnonzero(out_of_full).tolist(), key=lambda w: (-scores[w], w))
    lost = float(wanted[(after == Tier.EVICTED) & np.isin(barred, (Tier.FULL, Tier.QUANT))].sum())
    spared = float(wanted[(barred == Tier.EVICTED) & np.isin(after, (Tier.FULL, Tier.QUANT))].sum())
    stayed = (before == Tier.QUANT) & (after == Tier.QUANT)
    rest = float(wanted[stayed].mean()) if stayed.any() else 0.0
    found = []
    for number, window in enumerate(up):
        other = down[number] if number < len(down) else None
        found.append(
            Promotion(
                boundary,
                row,
                window,
                other,
                float(wanted[window]),
                0.0 if other is None else float(wanted[other]),
                (lost - spared) / len(up),
                rest,
            )
        )
    return found


def summarise(results: Sequence[PromotionResult]) -> dict[str, Any]:
    """Figures over one or several texts; intervals resample texts where there are two or more, else events.

    `lift` is what FullKV next wanted of promoted windows over what it wanted of those that stayed in Quant.
    """
    if not results:
        raise ValueError("a promotion summary needs at least one text.")
    every = [p for result in results for p in result.promotions]
    several = len(results) > 1
    if several:
        fmm = [float(np.mean(list(result.fmm_difference.values()))) for result in results]
        full = [float(np.mean(list(result.full_difference.values()))) for result in results]
        groups = [result.promotions for result in results if result.promotions]
    else:
        fmm, full = list(results[0].fmm_difference.values()), list(results[0].full_difference.values())
        at = sorted({p.boundary for p in every})
        groups = [[p for p in every if p.boundary == boundary] for boundary in at]
    gains: dict[str, dict[str, Any] | None] = {}
    for name in ("precision_gain", "eviction_cost", "net_gain"):
        means = [float(np.mean([getattr(p, name) for p in group])) for group in groups]
        gains[name] = estimate(means).to_dict() if means else None
    lift: Estimate | None = None
    if groups and any(p.stayed_wanted > 0 for p in every):
        lift = paired_ratio(
            [sum(p.wanted for p in group) for group in groups],
            [sum(p.stayed_wanted for p in group) for group in groups],
        )
    return {
        "texts": len(results),
        "resampled": "texts" if several else "events of one text",
        "promotions": len(every),
        "positive": sum(p.net_gain > 0 for p in every),
        "fmm_on_minus_off": paired(fmm, [0.0] * len(fmm)).to_dict() if fmm else None,
        "full_share_on_minus_off": paired(full, [0.0] * len(full)).to_dict() if full else None,
        "each_promotion": gains,
        "lift": None if lift is None else lift.to_dict(),
        "lir_on": float(np.mean([result.on.returns().lir for result in results])),
        "lir_off": float(np.mean([result.off.returns().lir for result in results])),
    }


def listed(result: PromotionResult, top: int | None = None) -> list[dict[str, Any]]:
    """Promotions as plain values, largest net gain first."""
    ranked = sorted(result.promotions, key=lambda p: (-p.net_gain, p.boundary, p.row, p.window))
    return [asdict(p) | {"precision_gain": p.precision_gain, "net_gain": p.net_gain} for p in ranked[:top]]
