"""What a diagnosis found event by event and head by head, as plain values that a figure can be drawn from.

The tables hold means; this holds what they are means of. Knows policies' runs; prints and draws nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from engine.metrics.lir import ReturnStats
from engine.metrics.qsa import Agreement

if TYPE_CHECKING:  # a server that only shows what was found needs no torch for it
    from engine.evaluation.live import LiveRun
    from engine.policies import PolicyRun

DIGITS = 6


def series(runs: Mapping[str, PolicyRun], live: Mapping[str, LiveRun]) -> dict[str, Any]:
    """FMM by known tokens, absences that ended in a return, and agreement of scores by layer and head.

    Returns:
        "fmm": by policy, {"tokens", "all", "history", "steps"} as equally long lists (paper Figure 1, left);
        "returns": by policy, {"min_events", "eligible", "rescued", "events", "tokens"}, the last two as counts by
        length (Table 16); "agreement": by live policy, see `agreement_values` (Table 15).
    """
    named: dict[str, PolicyRun] = dict(runs) | {f"{name} (live)": found.run for name, found in live.items()}
    return {
        "fmm": {name: _fmm(run) for name, run in named.items() if run.masses},
        "returns": {name: return_values(run.returns()) for name, run in named.items() if not run.policy.fp_only},
        "agreement": {name: agreement_values(run.agreement) for name, run in live.items() if run.agreement is not None},
    }


def _fmm(run: PolicyRun) -> dict[str, list[Any]]:
    missed = run.fmm_by_event()
    history = run.fmm_by_event("history")
    columns = dict(zip(run.history.event_ids.tolist(), run.history.seq_lens.tolist(), strict=True))
    return {
        "tokens": list(missed),
        "all": [round(value, DIGITS) for value in missed.values()],
        "history": [round(history[boundary], DIGITS) for boundary in missed],
        "steps": [mass.steps for mass in run.masses if columns[mass.event_id] in missed],
    }


def return_values(stats: ReturnStats) -> dict[str, Any]:
    """Absences by length: {"3": 5} are five that lasted three events, or three tokens."""

    def counts(lengths: NDArray[np.int64]) -> dict[str, int]:
        found, times = np.unique(lengths, return_counts=True)
        return {str(length): int(count) for length, count in zip(found.tolist(), times.tolist(), strict=True)}

    return {
        "min_events": stats.min_events,
        "eligible": stats.eligible,
        "rescued": stats.rescued,
        "events": counts(stats.return_events),
        "tokens": counts(stats.return_tokens),
    }


def return_stats(values: Mapping[str, Any]) -> ReturnStats:
    """The reverse of `return_values`.

    Raises:
        KeyError, TypeError, ValueError: `values` are not such.
    """

    def lengths(counts: Mapping[str, int]) -> NDArray[np.int64]:
        keys = [int(length) for length in counts]
        return np.repeat(np.array(keys, dtype=np.int64), np.array(list(counts.values()), dtype=np.int64))

    return ReturnStats(
        int(values["min_events"]),
        int(values["eligible"]),
        int(values["rescued"]),
        lengths(values["events"]),
        lengths(values["tokens"]),
    )


def agreement_values(found: Agreement) -> dict[str, Any]:
    """QSA and RQ by layer and head (mean over events) and by event (mean over heads); None where Q was empty."""
    forms = {"cumulative": (found.qsa, found.ratio), "interval": (found.interval_qsa, found.interval_ratio)}
    return {
        "events": found.event_ids.tolist(),
        "by_head": {form: _plain(found.by_head(interval=form == "interval")) for form in forms},
        "qsa": {form: _plain(_over_heads(qsa)) for form, (qsa, _) in forms.items()},
        "ratio": {form: _plain(_over_heads(ratio)) for form, (_, ratio) in forms.items()},
    }


def _over_heads(values: NDArray[np.float64]) -> NDArray[np.float64]:
    finite = np.isfinite(values)
    count = finite.sum(axis=(1, 2))
    out = np.full(len(values), np.nan)
    np.divide(np.where(finite, values, 0.0).sum(axis=(1, 2)), count, out=out, where=count > 0)
    return out


def _plain(values: NDArray[np.float64]) -> list[Any]:
    """Nested lists; JSON has no NaN."""
    cells = np.round(values, DIGITS).astype(object)
    cells[~np.isfinite(values)] = None
    plain: list[Any] = cells.tolist()
    return plain
