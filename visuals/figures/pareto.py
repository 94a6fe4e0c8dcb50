"""Quality against measured bytes, and a setting against quality: every point with its interval.

Takes plain rows, as `engine.evaluation.tables` makes them; knows no engine and no server.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import plotly.graph_objects as go

from visuals.figures.theme import Words, blank, note_if_empty, say
from visuals.palette import PALETTES, Theme

WORDS: Final[dict[str, str]] = {
    "title": "Distance from FullKV against bytes kept",
    "share": "share of FullKV's bytes, measured, %",
    "kl": "KL to FullKV, nats per token",
    "score": "score",
    "agreement": "same likeliest token as FullKV",
    "output_error": "relative error of attention outputs",
    "front": "Pareto front",
    "ablation_title": "{setting}: {figure}",
    "directions_title": "The article's directions, with 95 % intervals",
    "difference": "difference, should be below 0",
    "nothing": "nothing to show yet",
}
LEGEND_COLUMNS: Final = 2
LEGEND_LINE: Final = 21
PLOT_HEIGHT: Final = 330
"""Pixels of a line of the legend, and of the plot with its axes above it."""
LOWER_IS_BETTER: Final = frozenset({"kl", "nll", "perplexity", "output_error"})


def front(points: Sequence[Mapping[str, Any]], *, lower_is_better: bool = True) -> list[int]:
    """Indices of the points that no other beats in both bytes and value, by share; of equals the first stays."""
    sign = 1.0 if lower_is_better else -1.0
    order = sorted(range(len(points)), key=lambda i: (points[i]["share"], sign * points[i]["value"], i))
    best = float("inf")
    kept = []
    for index in order:
        value = sign * points[index]["value"]
        if value < best:
            best = value
            kept.append(index)
    return kept


def pareto_figure(
    points: Sequence[Mapping[str, Any]], *, figure: str = "kl", theme: Theme = "light", words: Words | None = None
) -> go.Figure:
    """One trace per system, its budgets joined, intervals as bars; the dotted line is the Pareto front.

    Args:
        points: label, system, share in [0, 1], value, low and high (None without an interval), n; name, what a reader
            calls the system, where it differs.
        figure: what `value` is: "kl", "score" or "agreement".
    """
    colors = PALETTES[theme]
    axis = say(words, WORDS, figure) if figure in WORDS else figure
    out = blank(say(words, WORDS, "title"), say(words, WORDS, "share"), axis, theme)
    systems = list(dict.fromkeys(str(point["system"]) for point in points))
    shapes = ("circle", "square", "diamond", "cross", "x", "triangle-up", "star", "hexagon", "pentagon", "bowtie")
    others = (colors.full, colors.local, colors.evicted, colors.alarm, colors.sink, colors.muted)
    inks = [colors.quant if name == "qevict" else others[at % len(others)] for at, name in enumerate(systems)]
    for number, system in enumerate(systems):
        mine = sorted((p for p in points if p["system"] == system), key=lambda p: float(p["share"]))
        out.add_scatter(
            name=str(mine[0].get("name", system)),
            x=[100 * p["share"] for p in mine],
            y=[p["value"] for p in mine],
            error_y=_bars(mine),
            mode="lines+markers",
            line={"color": inks[number], "width": 1},
            marker={"color": inks[number], "symbol": shapes[number % len(shapes)], "size": 9},
            customdata=[[p["label"], p["n"]] for p in mine],
            hovertemplate="%{customdata[0]}: %{y:.4f} at %{x:.1f} %, n %{customdata[1]}<extra></extra>",
        )
    shares = [100 * float(p["share"]) for p in points]
    if shares and min(shares) > 0 and max(shares) > 4 * min(shares):
        # Budgets halve from step to step: on a plain axis the small ones would lie on one another.
        ticks = [1, 2, 5, 10, 20, 40, 70, 100]
        out.update_xaxes(type="log", tickvals=ticks, ticktext=[str(tick) for tick in ticks])
    kept = [points[i] for i in front(points, lower_is_better=figure in LOWER_IS_BETTER)]
    if len(kept) > 1:
        out.add_scatter(
            name=say(words, WORDS, "front"),
            x=[100 * p["share"] for p in kept],
            y=[p["value"] for p in kept],
            mode="lines",
            line={"color": colors.ink, "dash": "dot", "width": 1},
            hoverinfo="skip",
        )
    rows = -(-len(out.data) // LEGEND_COLUMNS)
    if rows > 2:
        # A legend of many systems would take the plot's room and hide its own end behind a scroll bar.
        out.update_layout(height=PLOT_HEIGHT + LEGEND_LINE * rows)
    return note_if_empty(out, theme, say(words, WORDS, "nothing"))


def ablation_figure(
    rows: Sequence[Mapping[str, Any]], *, theme: Theme = "light", words: Words | None = None
) -> go.Figure:
    """One setting's values against one figure; rows without a mean were infeasible and are left out."""
    colors = PALETTES[theme]
    known = [row for row in rows if row["mean"] is not None]
    setting = str(known[0]["setting"]) if known else ""
    figure = str(known[0]["figure"]) if known else ""
    title = say(words, WORDS, "ablation_title", setting=setting, figure=figure)
    out = blank(title, setting, say(words, WORDS, figure) if figure in WORDS else figure, theme)
    if known:
        points = [row["mean"] | {"value": row["mean"]["mean"]} for row in known]
        out.add_scatter(
            x=[str(row["value"]) for row in known],
            y=[point["value"] for point in points],
            error_y=_bars(points),
            mode="lines+markers",
            line={"color": colors.quant, "width": 2},
            marker={"size": 9, "color": colors.quant},
            hovertemplate="%{x}: %{y:.4f}<extra></extra>",
            showlegend=False,
        )
        out.update_xaxes(type="category")
    return note_if_empty(out, theme, say(words, WORDS, "nothing"))


def directions_figure(
    rows: Sequence[Mapping[str, Any]], *, theme: Theme = "light", words: Words | None = None
) -> go.Figure:
    """Each claim's paired difference with its interval; a bar that reaches across 0 settles nothing."""
    colors = PALETTES[theme]
    out = blank(say(words, WORDS, "directions_title"), say(words, WORDS, "difference"), "", theme)
    by = {"holds": colors.full, "CONTRADICTED": colors.alarm, "not settled": colors.muted, "too few items": colors.line}
    for verdict, color in by.items():
        mine = [row for row in rows if row["verdict"] == verdict]
        if not mine:
            continue
        points = [row["difference"] | {"value": row["difference"]["mean"]} for row in mine]
        out.add_scatter(
            name=verdict,
            x=[point["value"] for point in points],
            y=[f"{row['claim']} ({row['kv_budget']:.0%})" for row in mine],
            error_x=_bars(points),
            mode="markers",
            marker={"size": 9, "color": color},
            hovertemplate="%{y}: %{x:.5f}<extra></extra>",
        )
    if rows:
        out.add_vline(x=0.0, line_width=1, line_color=colors.ink)
        out.update_layout(height=160 + 26 * len(rows))
    return note_if_empty(out, theme, say(words, WORDS, "nothing"))


def _bars(points: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Error bars from low and high; none for a point without an interval."""
    up = [0.0 if p["high"] is None else max(0.0, p["high"] - p["value"]) for p in points]
    down = [0.0 if p["low"] is None else max(0.0, p["value"] - p["low"]) for p in points]
    return {"type": "data", "symmetric": False, "array": up, "arrayminus": down, "thickness": 1}
