"""Quantized-score agreement: do INT2 windows rank as FullKV would rank them?

Compares two given score arrays; knows no torch, no cache, no way to obtain scores.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Bools: TypeAlias = NDArray[np.bool_]
Floats: TypeAlias = NDArray[np.float64]


def score_agreement(policy: NDArray[Any], reference: NDArray[Any], members: Bools) -> Floats:
    """Cosine of the scores of the windows in Q (paper §3.5, Table 15).

    QSA(r) = ⟨s_r^Q, s_r^Full⟩ / (‖s_r^Q‖₂ · ‖s_r^Full‖₂)

    Args:
        policy: [..., windows], scores under the quantized execution, ≥ 0.
        reference: [..., windows], FullKV's scores of the same windows.
        members: bool, broadcastable: the windows in Q.

    Returns:
        float64 [...], in [0, 1] for non-negative scores; NaN where Q is empty or has no mass.
    """
    ours, theirs = (np.where(members, np.asarray(x, dtype=np.float64), 0.0) for x in (policy, reference))
    # Scaled first: squares of tiny scores would underflow.
    ours = ours / np.maximum(np.abs(ours).max(axis=-1, keepdims=True, initial=0.0), np.finfo(float).tiny)
    theirs = theirs / np.maximum(np.abs(theirs).max(axis=-1, keepdims=True, initial=0.0), np.finfo(float).tiny)
    lengths = np.sqrt((ours**2).sum(-1)) * np.sqrt((theirs**2).sum(-1))
    out: Floats = np.full(lengths.shape, np.nan)
    np.divide((ours * theirs).sum(-1), lengths, out=out, where=lengths > 0)
    return np.clip(out, -1.0, 1.0)


def mass_ratio(policy: NDArray[Any], reference: NDArray[Any], members: Bools) -> Floats:
    """RQ: how much of FullKV's mass the windows in Q receive (paper §3.5, Tables 15 and 18).

    RQ(r) = Σ_{w∈Q_r} s_r^Q(w) / Σ_{w∈Q_r} s_r^Full(w)

    Arguments as in `score_agreement`. Returns float64 [...], ≥ 0; NaN where the reference has no mass in Q.
    """
    ours, theirs = (np.where(members, np.asarray(x, dtype=np.float64), 0.0).sum(-1) for x in (policy, reference))
    out: Floats = np.full(np.shape(theirs), np.nan)
    np.divide(ours, theirs, out=out, where=theirs > 0)
    return out


@dataclass(frozen=True, slots=True)
class Agreement:
    """QSA and RQ of a run; all arrays float64 [events, layers, heads], NaN where Q was empty.

    `qsa` and `ratio` compare cumulative scores of Q_r, the paper's form: 1.0 at the first event, where all
    scores still come from the full-precision prompt. `interval_*` compare what was added since the event
    before, over Q_{r−1}, the windows that really were quantized meanwhile; NaN at the first event.
    """

    event_ids: NDArray[np.int64]
    qsa: Floats
    ratio: Floats
    interval_qsa: Floats
    interval_ratio: Floats

    def summary(self) -> AgreementSummary | None:
        """Table 15's figures; None where no event had a window in Q."""
        if not np.isfinite(self.qsa).any():
            return None
        by_event = _mean(self.qsa, (1, 2))
        seen = by_event[np.isfinite(by_event)]
        by_layer = _mean(self.qsa, (0, 2))
        return AgreementSummary(
            mean=_number(self.qsa),
            first_event=float(seen[0]),
            last_event=float(seen[-1]),
            layer_min=float(np.nanmin(by_layer)),
            layer_max=float(np.nanmax(by_layer)),
            head_min=float(np.nanmin(_mean(self.qsa, (0,)))),
            mass_ratio=_number(self.ratio),
            interval_mean=_optional(self.interval_qsa),
            interval_mass_ratio=_optional(self.interval_ratio),
        )

    def by_head(self, *, interval: bool = False) -> Floats:
        """Mean over events, float64 [layers, heads]: what a heat map shows."""
        return _mean(self.interval_qsa if interval else self.qsa, (0,))

    def by_event(self, *, interval: bool = False) -> Floats:
        """Mean over layers and heads, float64 [events]."""
        return _mean(self.interval_qsa if interval else self.qsa, (1, 2))


@dataclass(frozen=True, slots=True)
class AgreementSummary:
    """Means per layer and head first, then over them. `head_min` is the lowest head, mean over events."""

    mean: float
    first_event: float
    last_event: float
    layer_min: float
    layer_max: float
    head_min: float
    mass_ratio: float
    interval_mean: float | None
    interval_mass_ratio: float | None


def agreement(
    policy: NDArray[Any], reference: NDArray[Any], in_quant: Bools, event_ids: NDArray[Any] | None = None
) -> Agreement:
    """QSA and RQ at every event, cumulative and per interval.

    Args:
        policy: [events, layers, heads, windows], cumulative scores of the run at each event.
        reference: the same of FullKV on the same tokens.
        in_quant: bool [events, layers, heads or 1, windows], Q_r right after each event.
        event_ids: int [events]; None = 0, 1, 2, …

    Raises:
        ValueError: shapes that differ.
    """
    if policy.shape != reference.shape or policy.ndim != 4:
        raise ValueError(f"scores must be [events, layers, heads, windows], got {policy.shape} and {reference.shape}.")
    ours, theirs = (np.asarray(x, dtype=np.float64) for x in (policy, reference))
    ids = np.arange(len(ours)) if event_ids is None else np.asarray(event_ids)
    interval_qsa, interval_ratio = (np.full(policy.shape[:3], np.nan) for _ in range(2))
    if len(ours) > 1:
        steps = np.diff(ours, axis=0), np.diff(theirs, axis=0)
        interval_qsa[1:] = score_agreement(*steps, in_quant[:-1])
        interval_ratio[1:] = mass_ratio(*steps, in_quant[:-1])
    return Agreement(
        ids.astype(np.int64),
        score_agreement(ours, theirs, in_quant),
        mass_ratio(ours, theirs, in_quant),
        interval_qsa,
        interval_ratio,
    )


def _mean(values: Floats, axes: tuple[int, ...]) -> Floats:
    """Mean over the finite values; NaN where there is none."""
    finite = np.isfinite(values)
    count = finite.sum(axis=axes)
    out: Floats = np.full(np.shape(count), np.nan)
    np.divide(np.where(finite, values, 0.0).sum(axis=axes), count, out=out, where=count > 0)
    return out


def _number(values: Floats) -> float:
    return float(_mean(values.reshape(-1), (0,)))


def _optional(values: Floats) -> float | None:
    return _number(values) if np.isfinite(values).any() else None
