"""Several policies on the same tokens: what each misses over the steps, and where FullKV looks under each.

Takes plain values, as `engine.evaluation` makes them; knows no engine and no server.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any, Final, Literal

import plotly.graph_objects as go

from visuals.figures.theme import Words, blank, note_if_empty, say
from visuals.palette import PALETTES, Palette, Theme

WORDS: Final[dict[str, str]] = {
    "steps_title": "Future missed mass over the steps, {scope}",
    "scope_all": "all positions",
    "scope_history": "history only",
    "tokens": "tokens known",
    "missed": "missed share",
    "cut": "horizon cut: {steps} steps",
    "shares_title": "Where FullKV looks, by tier",
    "share": "share of attention to history",
    "full": "Full",
    "quant": "Quantized",
    "evicted": "Evicted",
    "nothing": "nothing to show yet",
}

LEAST_WRITTEN: Final = 0.07
"""Smallest share whose bar has room for its number."""


def policy_styles(colors: Palette) -> tuple[tuple[str, str, str], ...]:
    """(colour, dash, marker) of the first, second, … curve: no two are alike without their colours."""
    return (
        (colors.quant, "solid", "circle"),
        (colors.full, "dash", "square"),
        (colors.evicted, "dot", "x"),
        (colors.sink, "dashdot", "diamond"),
        (colors.ink, "longdash", "triangle-up"),
        (colors.local, "longdashdot", "cross"),
        (colors.alarm, "dash", "star"),
        (colors.muted, "dot", "hexagon"),
        (colors.full, "dashdot", "triangle-down"),
        (colors.quant, "dot", "bowtie"),
    )


def steps_figure(
    runs: Mapping[str, Mapping[str, Sequence[Any]]],
    *,
    scope: Literal["all", "history"] = "all",
    theme: Theme = "light",
    words: Words | None = None,
) -> go.Figure:
    """FMM of each policy at its own routing events, over the tokens known then (paper Figure 1, left).

    Args:
        runs: by name, "tokens", "all", "history" and "steps" as equally long lists. Events whose horizon the end of
            the text cut short have hollow markers.
    """
    title = say(words, WORDS, "steps_title", scope=say(words, WORDS, f"scope_{scope}"))
    figure = blank(title, say(words, WORDS, "tokens"), say(words, WORDS, "missed"), theme)
    figure.update_yaxes(tickformat=".0%", rangemode="tozero")
    styles = policy_styles(PALETTES[theme])
    horizon = max((max(run["steps"], default=0) for run in runs.values()), default=0)
    for place, (name, run) in enumerate(item for item in runs.items() if item[1]["tokens"]):
        color, dash, marker = styles[place % len(styles)]
        # A policy that routes at every token would be a row of markers: it keeps one in eight.
        every = max(1, len(run["tokens"]) // 16)
        figure.add_scatter(
            x=list(run["tokens"]),
            y=list(run[scope]),
            name=escape(name),
            mode="lines+markers",
            line={"color": color, "dash": dash, "width": 2},
            marker={
                "size": [8 if at % every == 0 else 0 for at in range(len(run["tokens"]))],
                "color": color,
                "symbol": [marker if steps == horizon else f"{marker}-open" for steps in run["steps"]],
            },
            customdata=[
                "" if steps == horizon else " · " + say(words, WORDS, "cut", steps=steps) for steps in run["steps"]
            ],
            hovertemplate="%{x}: %{y:.2%}%{customdata}",
        )
    return note_if_empty(figure, theme, say(words, WORDS, "nothing"))


def shares_figure(
    rows: Sequence[Mapping[str, Any]], *, theme: Theme = "light", words: Words | None = None
) -> go.Figure:
    """Attention to history by tier, one bar a row (paper Figure 1, right); hatching tells the tiers apart too.

    Args:
        rows: label, and "full", "quant", "evicted" in [0, 1] or None. The first stands on top.
    """
    colors = PALETTES[theme]
    figure = blank(say(words, WORDS, "shares_title"), say(words, WORDS, "share"), "", theme, barmode="stack")
    labels = [escape(str(row["label"])) for row in rows]
    tiers = (("full", colors.full, ""), ("quant", colors.quant, "/"), ("evicted", colors.evicted, "x"))
    for tier, color, hatch in tiers if rows else ():
        figure.add_bar(
            name=say(words, WORDS, tier),
            y=labels,
            x=[row[tier] for row in rows],
            orientation="h",
            marker={
                "color": color,
                "pattern": {"shape": hatch, "fgcolor": colors.paper, "bgcolor": color, "size": 7, "solidity": 0.2},
            },
            hovertemplate="%{y}: %{x:.1%}",
        )
    if rows:
        figure.update_yaxes(categoryorder="array", categoryarray=labels[::-1])
        figure.update_xaxes(tickformat=".0%", range=[0, 1])
        figure.update_layout(height=150 + 34 * len(rows))
    for label, row in zip(labels, rows, strict=True):
        begin = 0.0
        for tier, _, _ in tiers:
            share = row[tier] or 0.0
            if share >= LEAST_WRITTEN:
                # On paper of its own: words on hatching can't be read.
                place = {"x": begin + share / 2, "y": label, "showarrow": False, "borderpad": 1}
                font = {"size": 12, "color": colors.ink}
                figure.add_annotation(text=f"{share:.0%}", bgcolor=colors.paper, font=font, **place)
            begin += share
    return note_if_empty(figure, theme, say(words, WORDS, "nothing"))
