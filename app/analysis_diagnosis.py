"""The figures that a diagnosis of one text allows, each beside what the article printed.

Knows what `engine.evaluation.diagnose` returns; measures nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from app.analysis_card import TABLES, Card, Say
from app.analysis_cards import paper_shares
from visuals.figures.intervals import interval_figure
from visuals.figures.lir import lir_figure, time_to_return_figure
from visuals.figures.policies import shares_figure, steps_figure
from visuals.figures.qsa import agreement_figure, heat_figure

Row = Mapping[str, Any]

DRAWN = ("R3", "R1", "R2", "R4", "R3 FP-tier-only", "promotion off", "oracle future-H")
"""Policies whose curves are drawn; the table has all."""
RETURNING = ("R3", "R3 (live)", "R4", "oracle past-mass", "oracle future-H")


def diagnosis_cards(stem: str, found: Row, say: Say) -> list[Card]:
    """All cards of one diagnosis.

    Raises:
        KeyError, TypeError, ValueError: it is not as `diagnose` makes it.
    """
    budget = found["setup"]["config"]["kv_budget"]
    values = {"budget": f"{budget:.0%}", "horizon": found["setup"]["horizon"], "file": stem}
    more = found.get("series") or {}
    return [
        *_steps(stem, more.get("fmm") or {}, values, say),
        *_shares(stem, found.get("figure1") or [], values, say),
        *_returns(stem, more.get("returns") or {}, values, say),
        *_agreement(stem, more.get("agreement") or {}, values, say),
        *_printed(stem, found, say),
    ]


def _steps(stem: str, runs: Mapping[str, Row], values: Row, say: Say) -> list[Card]:
    if not runs:
        return []
    lines = [
        {"policy": name, "tokens": tokens, "fmm": missed, "fmm_history": history, "steps": steps}
        for name, run in runs.items()
        for tokens, missed, history, steps in zip(run["tokens"], run["all"], run["history"], run["steps"], strict=True)
    ]
    drawn = {name: runs[name] for name in DRAWN if name in runs}
    return [
        Card(
            "steps",
            "diagnostics",
            partial(steps_figure, drawn, words=say.figure("policies")),
            ("policy", "tokens", "fmm", "fmm_history", "steps"),
            lines,
            "engine/metrics/mass.py",
            values,
            part=stem,
        )
    ]


def _shares(stem: str, rows: Sequence[Row], values: Row, say: Say) -> list[Card]:
    bars: dict[str, dict[str, Any]] = {}
    for row in rows:
        label = f"{row['system']} · {say('live' if row['source'] == 'live' else 'measured')}"
        share = None if row["measured"] is None else row["measured"] / 100.0
        bars.setdefault(label, {"label": label, "full": None, "quant": None, "evicted": None})[row["quantity"]] = share
    if not bars:
        return []
    lines = [*bars.values(), *paper_shares(say)]
    return [
        Card(
            "shares",
            "diagnostics",
            partial(shares_figure, lines, words=say.figure("policies")),
            ("label", "full", "quant", "evicted"),
            lines,
            "engine/metrics/mass.py",
            values,
            say("one_text"),
            stem,
        )
    ]


def _returns(stem: str, runs: Mapping[str, Row], values: Row, say: Say) -> list[Card]:
    if not runs:
        return []
    from engine.evaluation.series import return_stats

    stats = {name: return_stats(runs[name]) for name in RETURNING if name in runs}
    every = {name: return_stats(run) for name, run in runs.items()}
    return [
        Card(
            "returns",
            "diagnostics",
            partial(lir_figure, stats, words=say.figure("lir")),
            ("policy", "eligible", "rescued", "lir", "median_events", "median_tokens"),
            [
                {
                    "policy": name,
                    "eligible": one.eligible,
                    "rescued": one.rescued,
                    "lir": one.lir,
                    "median_events": one.median_events,
                    "median_tokens": one.median_tokens,
                }
                for name, one in every.items()
            ],
            "engine/metrics/lir.py",
            values,
            part=stem,
        ),
        Card(
            "absence",
            "diagnostics",
            partial(time_to_return_figure, stats, unit="tokens", words=say.figure("lir")),
            ("policy", "tokens", "absences"),
            [
                {"policy": name, "tokens": int(length), "absences": count}
                for name, run in runs.items()
                for length, count in run["tokens"].items()
            ],
            "engine/metrics/lir.py",
            values,
            part=stem,
        ),
    ]


def _agreement(stem: str, runs: Mapping[str, Row], values: Row, say: Say) -> list[Card]:
    cards = []
    for name, run in runs.items():
        heads, interval = (_array(run["by_head"][form]) for form in ("cumulative", "interval"))
        curves = {
            "qsa": _array(run["qsa"]["cumulative"]),
            "interval_qsa": _array(run["qsa"]["interval"]),
            "ratio": _array(run["ratio"]["cumulative"]),
            "interval_ratio": _array(run["ratio"]["interval"]),
        }
        if heads.ndim != 2 or heads.shape != interval.shape:
            raise ValueError(f"agreement by head must be [layers, heads], got {heads.shape}")
        mine = {**values, "policy": name}
        cards.append(
            Card(
                "heads",
                "diagnostics",
                partial(heat_figure, heads, words=say.figure("qsa")),
                ("layer", "head", "qsa", "interval_qsa"),
                [
                    {
                        "layer": layer,
                        "head": head,
                        "qsa": _number(heads[layer, head]),
                        "interval_qsa": _number(interval[layer, head]),
                    }
                    for layer in range(heads.shape[0])
                    for head in range(heads.shape[1])
                ],
                "engine/metrics/qsa.py",
                mine,
                part=f"{stem}-{name}",
            )
        )
        events = [int(event) for event in run["events"]]
        cards.append(
            Card(
                "agreement",
                "diagnostics",
                partial(agreement_figure, events, curves, words=say.figure("qsa")),
                ("event", "qsa", "interval_qsa", "ratio", "interval_ratio"),
                [
                    {"event": event, **{key: _number(curve[place]) for key, curve in curves.items()}}
                    for place, event in enumerate(events)
                ],
                "engine/metrics/qsa.py",
                mine,
                part=f"{stem}-{name}",
            )
        )
    return cards


def _array(values: Any) -> NDArray[np.float64]:
    """Nested lists with None for what was not there."""
    return np.array(values, dtype=np.float64)


def _number(value: Any) -> float | None:
    return float(value) if np.isfinite(value) else None


PRINTED = (
    ("table14", "Table 14", ("fmm",), "percent"),
    ("table14", "Table 14", ("churn",), "share"),
    ("table15", "Table 15", None, "share"),
    ("table16", "Table 16", ("lir",), "percent"),
    ("table18", "Table 18", ("fmm", "lir"), "percent"),
    ("table18", "Table 18", ("qsa_mean", "mass_ratio"), "share"),
)
"""(key, table, quantities, or None for all, and their unit): what is drawn on one axis."""


def _printed(stem: str, found: Row, say: Say) -> list[Card]:
    """Measured beside printed, table by table."""
    cards = []
    for key, table, quantities, unit in PRINTED:
        rows = [
            row
            for row in found.get(key) or []
            if (quantities is None or row["quantity"] in quantities)
            and (row["measured"] is not None or row["paper"] is not None)
        ]
        if not any(row["paper"] is not None for row in rows):
            continue
        several = len({row["quantity"] for row in rows}) > 1
        sources = {row["source"] for row in rows}
        points = [
            {
                "label": " · ".join(
                    [str(row["system"])]
                    + ([str(row["quantity"])] if several else [])
                    + ([say("live" if row["source"] == "live" else "simulated")] if len(sources) > 1 else [])
                ),
                "value": row["measured"],
                "low": None,
                "high": None,
                "n": None,
                "paper": row["paper"],
            }
            for row in rows
        ]
        part = f"{stem}-{key}-{unit}"
        promotion = "quantity_promotion" if unit == "percent" else "quantity_promotion_scores"
        what = say(promotion if key == "table18" else f"quantity_{quantities[0] if quantities else 'qsa'}")
        cards.append(
            Card(
                "printed",
                "article",
                partial(
                    interval_figure,
                    points,
                    title=say("printed_title", table=say(TABLES[table]), what=what),
                    axis=say(f"unit_{unit}"),
                    words=say.figure("intervals"),
                ),
                ("system", "quantity", "measured", "paper", "unit", "source"),
                rows,
                "engine/evaluation/diagnose.py",
                {"table": say(TABLES[table]), "what": what},
                say("one_text"),
                part,
            )
        )
    return cards
