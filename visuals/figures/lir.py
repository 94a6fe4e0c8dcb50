"""Global LIR of policy and oracles, and how long the returning windows were away.

Takes `engine.metrics.lir.ReturnStats`; computes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Final, Literal

import numpy as np
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
    "median": "median {value}",
    "nothing": "nothing to show yet",
}

MOST_BINS: Final = 40
HATCHES: Final = ("", "/", "x", ".", "-", "+")


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
        title, say(words, WORDS, f"ttr_{unit}"), say(words, WORDS, "ttr_axis"), theme, barmode="group", bargap=0.1
    )
    styles = list(METHODS.values())
    found = [(name, one) for name, one in stats.items() if one.rescued]
    counted = [one.return_events if unit == "events" else one.return_tokens for _, one in found]
    bins: dict[str, float] = {}
    if found:
        # The same bins for all, one a length where lengths are few.
        every = np.concatenate(counted)
        low, high = int(every.min()), int(every.max())
        bins = {"start": low - 0.5, "size": max(1, -(-(high - low + 1) // MOST_BINS))}
    for place, ((name, one), lengths) in enumerate(zip(found, counted, strict=True)):
        style = METHODS.get(name, styles[place % len(styles)])
        color = style.color(theme)
        figure.add_histogram(
            x=lengths.tolist(),
            name=escape(name),
            # Colours alone do not tell the bars apart for every eye.
            marker={
                "color": color,
                "pattern": {
                    "shape": HATCHES[place % len(HATCHES)],
                    "fgcolor": PALETTES[theme].paper,
                    "bgcolor": color,
                    "size": 6,
                },
            },
            xbins=bins,
        )
        median = one.median_events if unit == "events" else one.median_tokens
        said = say(words, WORDS, "median", value=f"{median:g}")
        figure.add_vline(
            x=median,
            line={"color": PALETTES[theme].ink, "dash": style.dash, "width": 2},
            annotation={
                "text": said if len(found) == 1 else f"{escape(name)}: {said}",
                "bgcolor": PALETTES[theme].paper,
                "y": 1.0 - 0.09 * place,
            },
        )
    return note_if_empty(figure, theme, say(words, WORDS, "nothing"))
