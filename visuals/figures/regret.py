"""Evicted windows that FullKV wanted later, the most wanted first.

Takes the trace's `LateMetrics`; computes only sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Final

import plotly.graph_objects as go

from engine.trace import LateMetrics
from visuals.figures.theme import Words, blank, note_if_empty, say
from visuals.palette import PALETTES, Theme

WORDS: Final[dict[str, str]] = {
    "regret_title": "Evicted windows that FullKV wanted later",
    "regret_axis": "missed share, summed over events, mean over {rows} board rows",
    "window": "window {window}",
    "nothing": "nothing to show yet",
}


@dataclass(frozen=True, slots=True)
class Regretted:
    """One window: its missed mass summed over events and divided by the board's rows, and in how many rows it fell."""

    window: int
    mass: float
    rows: int
    events: int


def most_regretted(late: Sequence[LateMetrics], rows: int, most: int = 12) -> list[Regretted]:
    """The windows with most missed mass. A trace keeps the largest of each event only: these are lower bounds."""
    mass: dict[int, float] = {}
    where: dict[int, set[int]] = {}
    when: dict[int, set[int]] = {}
    for event in late:
        for row, window, value in event.regret:
            mass[window] = mass.get(window, 0.0) + value
            where.setdefault(window, set()).add(row)
            when.setdefault(window, set()).add(event.event_id)
    best = sorted(mass, key=lambda window: (-mass[window], window))[:most]
    return [Regretted(w, mass[w] / max(1, rows), len(where[w]), len(when[w])) for w in best]


def regret_figure(
    windows: Sequence[Regretted], rows: int, *, theme: Theme = "light", words: Words | None = None
) -> go.Figure:
    """One bar a window; its text stands in the table beside."""
    colors = PALETTES[theme]
    title, axis = say(words, WORDS, "regret_title"), say(words, WORDS, "regret_axis", rows=rows)
    figure = blank(title, axis, "", theme)
    if windows:
        labels = [escape(say(words, WORDS, "window", window=one.window)) for one in windows]
        figure.add_bar(
            y=labels,
            x=[one.mass for one in windows],
            orientation="h",
            marker={
                "color": colors.evicted,
                "pattern": {"shape": "x", "fgcolor": colors.paper, "bgcolor": colors.evicted, "size": 6},
            },
            hovertemplate="%{y}: %{x:.4%}<extra></extra>",
        )
        figure.update_yaxes(categoryorder="array", categoryarray=labels[::-1])
        figure.update_xaxes(tickformat=".2%", rangemode="tozero")
        figure.update_layout(height=150 + 24 * len(windows))
    return note_if_empty(figure, theme, say(words, WORDS, "nothing"))
