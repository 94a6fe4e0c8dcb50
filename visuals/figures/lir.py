"""Global LIR of policy and oracles, and how long the returning windows were away.

Takes `engine.metrics.lir.ReturnStats`; computes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Final, Literal

import plotly.graph_objects as go

from engine.metrics.lir import ReturnStats
from visuals.figures.theme import Words, blank, note_if_empty, say
from visuals.palette import METHODS, PALETTES, Theme

WORDS: Final[dict[str, str]] = {
    "lir_title": "Late returns to Full, absences of {events} events or more",
    "lir_axis": "returned share",
    "lir_bar": "{rescued} of {eligible}",
    "ttr_title": "Time to return, rescued absences only",
    "ttr_events": "routing events away",
    "ttr_tokens": "tokens away",
    "ttr_axis": "absences",
    "median": "median {value:g}",
    "nothing": "nothing to show yet",
}


def lir_figure(stats: Mapping[str, ReturnStats], *, theme: Theme = "light", words: Words | None = None) -> go.Figure:
    """One bar a policy or oracle, with the counts behind the share (paper Table 16)."""
    events = max((one.min_events for one in stats.values()), default=3)
    title = say(words, WORDS, "lir_title", events=events)
    figure = blank(title, "", say(words, WORDS, "lir_axis"), theme)
    figure.update_yaxes(tickformat=".1%", rangemode="tozero")
    if stats:
        figure.add_bar(
            x=[escape(name) for name in stats],
            y=[one.lir for one in stats.values()],
            text=[say(words, WORDS, "lir_bar", rescued=one.rescued, eligible=one.eligible) for one in stats.values()],
            textposition="outside",
            cliponaxis=False,
            marker={"color": PALETTES[theme].full},
            hovertemplate="%{x}: %{y:.2%} (%{text})<extra></extra>",
        )
    return note_if_empty(figure, theme, say(words, WORDS, "nothing"))


def time_to_return_figure(
    stats: Mapping[str, ReturnStats],
    *,
    unit: Literal["events", "tokens"] = "events",
    theme: Theme = "light",
    words: Words | None = None,
) -> go.Figure:
    """Histogram of rescued absences, with each median marked.

    Args:
        unit: "tokens" makes variants comparable that route at different rates.
    """
    title = say(words, WORDS, "ttr_title")
    figure = blank(
        title, say(words, WORDS, f"ttr_{unit}"), say(words, WORDS, "ttr_axis"), theme, barmode="overlay", bargap=0.1
    )
    styles = list(METHODS.values())
    found = [(name, one) for name, one in stats.items() if one.rescued]
    for place, (name, one) in enumerate(found):
        style = METHODS.get(name, styles[place % len(styles)])
        lengths = one.return_events if unit == "events" else one.return_tokens
        figure.add_histogram(
            x=lengths.tolist(),
            name=escape(name),
            marker={"color": style.color(theme)},
            # One bar a length where lengths are few; else plotly's own bins.
            xbins={"start": lengths.min() - 0.5, "size": 1} if unit == "events" and lengths.max() <= 64 else None,
            opacity=1.0 if len(found) == 1 else 0.6,
        )
        median = one.median_events if unit == "events" else one.median_tokens
        figure.add_vline(
            x=median,
            line={"color": PALETTES[theme].ink, "dash": style.dash, "width": 2},
            annotation={"text": say(words, WORDS, "median", value=median), "y": 1.0 - 0.08 * place},
        )
    return note_if_empty(figure, theme, say(words, WORDS, "nothing"))
