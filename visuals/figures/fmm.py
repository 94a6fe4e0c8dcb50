"""Future missed mass over a run's events, and where FullKV's attention falls.

Takes the trace's `LateMetrics`; computes nothing but positions on a page. Every figure names its scope.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Final, Literal

import plotly.graph_objects as go

from engine.trace import LateMetrics
from visuals.figures.theme import Words, blank, event_axis, note_if_empty, say
from visuals.palette import METHODS, PALETTES, Theme

WORDS: Final[dict[str, str]] = {
    "fmm_title": "Future missed mass, {scope}, H = {horizon}",
    "scope_all": "all positions",
    "scope_history": "history only",
    "scope_both": "both scopes",
    "event": "routing event",
    "fmm_axis": "missed share",
    "fmm": "FMM, all positions",
    "fmm_history": "FMM, history only",
    "fmm_fp_only": "FMM, FP tier only",
    "cut": "horizon cut by the end of the run: {steps} of {horizon} steps",
    "mass_title": "Where FullKV looks",
    "mass_axis": "share of attention",
    "full": "Full",
    "quant": "Quantized",
    "evicted": "Evicted",
    "protected": "sink and local",
    "nothing": "nothing to show yet",
}

FmmScope = Literal["all", "history", "both"]


def fmm_figure(
    late: Sequence[LateMetrics],
    *,
    scope: FmmScope = "all",
    theme: Theme = "light",
    words: Words | None = None,
) -> go.Figure:
    """FMM by routing event; with positions of all kinds in the denominator, also the FP-tier-only value.

    Events whose horizon the run's end cut short have hollow markers and say how many steps they had.
    """
    events = sorted(late, key=lambda event: event.event_id)
    horizon = max((event.steps for event in events), default=0)
    colors = PALETTES[theme]
    title = say(words, WORDS, "fmm_title", scope=say(words, WORDS, f"scope_{scope}"), horizon=horizon)
    figure = blank(title, say(words, WORDS, "event"), say(words, WORDS, "fmm_axis"), theme)
    figure.update_yaxes(tickformat=".0%", range=[0, 1])
    figure.update_layout(hovermode="x unified")
    event_axis(figure, len(events))
    curves: list[tuple[str, list[float], str, str, str]] = []
    if scope != "history":
        curves.append(("fmm", [event.fmm for event in events], colors.evicted, "solid", "circle"))
        curves.append(("fmm_fp_only", [event.fmm_fp_only for event in events], colors.full, "dash", "square"))
    if scope != "all":
        curves.append(("fmm_history", [event.fmm_history for event in events], colors.ink, "dot", "diamond"))
    for key, values, color, dash, marker in curves if events else []:
        _curve(figure, say(words, WORDS, key), events, values, color, dash, horizon, words, marker)
    return note_if_empty(figure, theme, say(words, WORDS, "nothing"))


def fmm_comparison_figure(
    runs: Mapping[str, Sequence[LateMetrics]],
    *,
    scope: Literal["all", "history"] = "all",
    theme: Theme = "light",
    words: Words | None = None,
) -> go.Figure:
    """FMM of several runs on the same tokens, one curve each (paper Figure 1, left).

    Args:
        runs: late metrics by name; a name among `visuals.palette.METHODS` gets that method's style.
    """
    horizon = max((event.steps for late in runs.values() for event in late), default=0)
    title = say(words, WORDS, "fmm_title", scope=say(words, WORDS, f"scope_{scope}"), horizon=horizon)
    figure = blank(title, say(words, WORDS, "event"), say(words, WORDS, "fmm_axis"), theme)
    figure.update_yaxes(tickformat=".0%", range=[0, 1])
    figure.update_layout(hovermode="x unified")
    event_axis(figure, max(map(len, runs.values()), default=0))
    spare = [style for name, style in METHODS.items() if name not in runs] or list(METHODS.values())
    for place, (name, late) in enumerate(item for item in runs.items() if item[1]):
        events = sorted(late, key=lambda event: event.event_id)
        values = [event.fmm if scope == "all" else event.fmm_history for event in events]
        style = METHODS.get(name, spare[place % len(spare)])
        _curve(figure, escape(name), events, values, style.color(theme), style.dash, horizon, words, style.marker)
    return note_if_empty(figure, theme, say(words, WORDS, "nothing"))


def mass_share_figure(late: Sequence[LateMetrics], *, theme: Theme = "light", words: Words | None = None) -> go.Figure:
    """FullKV's attention by tier and event, stacked to 1 (paper Figure 1, right).

    What Full, Quant and Evicted leave is sink and local region; with history-scope shares that is nothing.
    """
    events = sorted(late, key=lambda event: event.event_id)
    colors = PALETTES[theme]
    title = say(words, WORDS, "mass_title")
    figure = blank(title, say(words, WORDS, "event"), say(words, WORDS, "mass_axis"), theme)
    figure.update_yaxes(tickformat=".0%", range=[0, 1])
    figure.update_layout(hovermode="x unified")
    event_axis(figure, len(events))
    shares = [(*event.mass_share, max(0.0, 1.0 - sum(event.mass_share))) for event in events]
    # Colours alone do not tell the tiers apart for every eye: each also has its own hatching.
    layers = (
        (0, "full", colors.full, ""),
        (1, "quant", colors.quant, "/"),
        (2, "evicted", colors.evicted, "."),
        (3, "protected", colors.local, ""),
    )
    for place, key, color, hatch in layers if events else ():
        figure.add_scatter(
            x=[event.event_id for event in events],
            y=[row[place] for row in shares],
            name=say(words, WORDS, key),
            mode="lines",
            line={"width": 1, "color": color},
            stackgroup="tiers",
            fillcolor=color,
            fillpattern={"shape": hatch, "fgcolor": colors.paper, "bgcolor": color, "size": 6},
            hovertemplate="%{y:.1%}",
        )
    return note_if_empty(figure, theme, say(words, WORDS, "nothing"))


def _curve(
    figure: go.Figure,
    name: str,
    events: Sequence[LateMetrics],
    values: Sequence[float],
    color: str,
    dash: str,
    horizon: int,
    words: Words | None,
    marker: str = "circle",
) -> None:
    notes = [
        "" if event.steps == horizon else " · " + say(words, WORDS, "cut", steps=event.steps, horizon=horizon)
        for event in events
    ]
    figure.add_scatter(
        x=[event.event_id for event in events],
        y=list(values),
        name=name,
        mode="lines+markers",
        line={"color": color, "dash": dash, "width": 2},
        marker={
            "size": 6,
            "color": color,
            "symbol": [marker if event.steps == horizon else f"{marker}-open" for event in events],
        },
        customdata=notes,
        hovertemplate="%{y:.2%}%{customdata}",
    )
