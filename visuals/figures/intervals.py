"""Points with their intervals, one line each: paired differences with a verdict, and measured beside printed figures.

Takes plain rows; knows no engine and no server.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any, Final

import plotly.graph_objects as go

from visuals.figures.theme import Words, blank, note_if_empty, say
from visuals.palette import PALETTES, Palette, Theme

WORDS: Final[dict[str, str]] = {
    "measured": "measured here",
    "article": "the article, other set-up",
    "holds": "holds",
    "contradicted": "contradicted",
    "unsettled": "not settled: interval includes 0",
    "few": "too few items for a verdict",
    "count": "n {n}",
    "nothing": "nothing to show yet",
}

VERDICTS: Final = {
    "holds": "holds",
    "CONTRADICTED": "contradicted",
    "not settled": "unsettled",
    "too few items": "few",
}
"""What the tables say, and which of `WORDS` is shown for it."""

LINE: Final = 30
"""Pixels for each line."""


def interval_figure(
    points: Sequence[Mapping[str, Any]],
    *,
    title: str,
    axis: str,
    zero: bool = False,
    tickformat: str = "",
    theme: Theme = "light",
    words: Words | None = None,
) -> go.Figure:
    """One line a point: the value, its interval, and the article's figure as an open diamond where there is one.

    Args:
        points: label, value (None where only the article has one), low and high (None without an interval), n,
            kind ("" or a verdict, see `VERDICTS`), paper (None without one). The first stands on top.
        zero: a line at 0 is drawn: the points are differences.
    """
    colors = PALETTES[theme]
    figure = blank(title, axis, "", theme)
    labels = [_label(point, words) for point in points]
    kinds = list(dict.fromkeys(str(point.get("kind") or "") for point in points if point["value"] is not None))
    for kind in kinds:
        mine = [
            (label, point)
            for label, point in zip(labels, points, strict=True)
            if point["value"] is not None and str(point.get("kind") or "") == kind
        ]
        color, symbol = _look(kind, colors)
        figure.add_scatter(
            name=say(words, WORDS, VERDICTS.get(kind, "measured")),
            x=[point["value"] for _, point in mine],
            y=[label for label, _ in mine],
            error_x=_ends([point for _, point in mine]),
            mode="markers",
            marker={"size": 10, "color": color, "symbol": symbol, "line": {"width": 2, "color": color}},
            hovertemplate="%{y}: %{x:.5g}<extra></extra>",
        )
    printed = [
        (label, point["paper"]) for label, point in zip(labels, points, strict=True) if point.get("paper") is not None
    ]
    if printed:
        figure.add_scatter(
            name=say(words, WORDS, "article"),
            x=[value for _, value in printed],
            y=[label for label, _ in printed],
            mode="markers",
            marker={"size": 11, "color": colors.quant, "symbol": "diamond-open", "line": {"width": 2}},
            hovertemplate="%{y}: %{x:.5g}<extra></extra>",
        )
    if points:
        figure.update_yaxes(
            categoryorder="array", categoryarray=labels[::-1], tickvals=labels, showgrid=True, title={"text": ""}
        )
        figure.update_xaxes(tickformat=tickformat, exponentformat="power")
        figure.update_layout(height=150 + LINE * len(points), showlegend=True)
        if zero:
            figure.add_vline(x=0.0, line_width=1, line_color=colors.ink)
    return note_if_empty(figure, theme, say(words, WORDS, "nothing"))


def _label(point: Mapping[str, Any], words: Words | None) -> str:
    label = escape(str(point["label"]))
    return label if point.get("n") is None else f"{label} · {say(words, WORDS, 'count', n=point['n'])}"


def _look(kind: str, colors: Palette) -> tuple[str, str]:
    """Colour and, as the second code, symbol."""
    looks = {
        "holds": (colors.full, "circle"),
        "CONTRADICTED": (colors.alarm, "x"),
        "not settled": (colors.muted, "circle-open"),
        "too few items": (colors.muted, "square-open"),
    }
    return looks.get(kind, (colors.full, "circle"))


def _ends(points: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Error bars; none for a point without an interval."""
    up = [None if p.get("high") is None else max(0.0, p["high"] - p["value"]) for p in points]
    down = [None if p.get("low") is None else max(0.0, p["value"] - p["low"]) for p in points]
    return {"type": "data", "symmetric": False, "array": up, "arrayminus": down, "thickness": 2, "width": 5}
