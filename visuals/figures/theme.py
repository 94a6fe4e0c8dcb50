"""The empty figure that all builders start from: colours of one theme, no default template, axes named.

Knows the palette and plotly; knows no metric.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import plotly.graph_objects as go

from visuals.palette import PALETTES, Theme

Words = Mapping[str, str]
"""Visible words by key; every builder names its keys in `WORDS` and falls back to the English ones there."""

FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Noto Sans', 'Noto Sans SC', sans-serif"

NOTHING = "nothing to show yet"


def say(words: Words | None, defaults: Words, key: str, **values: object) -> str:
    """The word for `key`, from `words` if it is there, with `values` put in."""
    text = words[key] if words is not None and key in words else defaults[key]
    return text.format(**values) if values else text


def blank(title: str, x: str, y: str, theme: Theme = "light", **layout: Any) -> go.Figure:
    """A figure without traces.

    Args:
        title: names the quantity and, where it has one, its scope.
        x, y: axis titles with units.
        theme: "light" or "dark"; paper and plot are painted, so that neither depends on the page.
        layout: further layout settings.
    """
    colors = PALETTES[theme]
    axis = {"gridcolor": colors.line, "linecolor": colors.line, "zeroline": False, "automargin": True}
    settings: dict[str, Any] = {
        # An empty template: plotly's default one would travel with every figure, 7 KB each.
        "template": go.layout.Template(),
        "title": {"text": title, "font": {"size": 16}, "x": 0.01, "xanchor": "left"},
        "font": {"family": FONT, "size": 13, "color": colors.ink},
        "paper_bgcolor": colors.paper,
        "plot_bgcolor": colors.paper,
        "xaxis": {**axis, "title": {"text": x}},
        "yaxis": {**axis, "title": {"text": y}},
        # Below the plot: a legend that wraps must not run into the title.
        "legend": {
            "orientation": "h",
            "yref": "container",
            "yanchor": "bottom",
            "y": 0.0,
            "xanchor": "left",
            "x": 0.0,
            "traceorder": "normal",
        },
        "margin": {"l": 56, "r": 16, "t": 52, "b": 48},
        "hoverlabel": {"bgcolor": colors.panel, "bordercolor": colors.line, "font": {"color": colors.ink}},
    }
    return go.Figure(layout=go.Layout({**settings, **layout}))


def event_axis(figure: go.Figure, events: int) -> None:
    """Whole numbers only on an axis of routing events; there is no event 0.5."""
    figure.update_xaxes(dtick=max(1, -(-events // 10)))


def note_if_empty(figure: go.Figure, theme: Theme, text: str = NOTHING) -> go.Figure:
    """Says so where a figure has no trace: an empty frame looks like a fault."""
    if not figure.data:
        place = {"x": 0.5, "y": 0.5, "xref": "paper", "yref": "paper", "showarrow": False}
        figure.add_annotation(text=text, font={"color": PALETTES[theme].muted, "size": 14}, **place)
    return figure
