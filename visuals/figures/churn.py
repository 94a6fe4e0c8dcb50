"""Selection churn by routing event, and the moves between tiers behind it.

Takes the trace's `LateMetrics` or the results of `engine.metrics`; computes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import plotly.graph_objects as go

from engine.metrics.churn import ChurnSeries
from engine.metrics.history import TransitionCounts
from engine.trace import LateMetrics, Tier
from visuals.figures.theme import Words, blank, event_axis, note_if_empty, say
from visuals.palette import PALETTES, Theme

WORDS: Final[dict[str, str]] = {
    "churn_title": "Selection churn, mean over layers",
    "event": "routing event",
    "churn_axis": "changed share",
    "churn": "churn",
    "moves_title": "Windows moved, all layers",
    "moves_axis": "windows",
    "promotions": "Quantized → Full",
    "demotions": "Full → Quantized",
    "aged_full": "local → Full",
    "aged_quant": "local → Quantized",
    "evictions": "→ Evicted",
    "nothing": "nothing to show yet",
}


def churn_figure(
    churn: ChurnSeries | Sequence[LateMetrics], *, theme: Theme = "light", words: Words | None = None
) -> go.Figure:
    """Churn between each event and the one before it; the first event has none."""
    if isinstance(churn, ChurnSeries):
        points = list(zip(churn.event_ids.tolist(), churn.per_event.tolist(), strict=True))
    else:
        points = sorted((event.event_id, event.churn) for event in churn if event.churn is not None)
    figure = blank(say(words, WORDS, "churn_title"), say(words, WORDS, "event"), say(words, WORDS, "churn_axis"), theme)
    figure.update_yaxes(tickformat=".1%", rangemode="tozero")
    event_axis(figure, len(points))
    if points:
        figure.add_scatter(
            x=[event for event, _ in points],
            y=[value for _, value in points],
            name=say(words, WORDS, "churn"),
            mode="lines+markers",
            line={"color": PALETTES[theme].ink, "width": 2},
            marker={"size": 6, "color": PALETTES[theme].ink},
            hovertemplate="%{x}: %{y:.2%}<extra></extra>",
        )
    return note_if_empty(figure, theme, say(words, WORDS, "nothing"))


def transition_figure(
    counts: TransitionCounts, event_ids: Sequence[int], *, theme: Theme = "light", words: Words | None = None
) -> go.Figure:
    """Moves at each event, stacked by kind.

    Args:
        event_ids: one per event of `counts`.
    """
    colors = PALETTES[theme]
    title = say(words, WORDS, "moves_title")
    figure = blank(title, say(words, WORDS, "event"), say(words, WORDS, "moves_axis"), theme, barmode="stack")
    table = counts.counts
    event_axis(figure, len(table))
    kinds = (
        ("promotions", table[:, Tier.QUANT, Tier.FULL], colors.full, ""),
        ("aged_full", table[:, Tier.LOCAL, Tier.FULL], colors.full, "."),
        ("demotions", table[:, Tier.FULL, Tier.QUANT], colors.quant, ""),
        ("aged_quant", table[:, Tier.LOCAL, Tier.QUANT], colors.quant, "."),
        ("evictions", table[:, :, Tier.EVICTED].sum(axis=1), colors.evicted, "x"),
    )
    for key, values, color, hatch in kinds if len(table) else ():
        figure.add_bar(
            x=list(event_ids),
            y=values.tolist(),
            name=say(words, WORDS, key),
            marker={"color": color, "pattern": {"shape": hatch, "fgcolor": colors.paper, "bgcolor": color, "size": 6}},
        )
    return note_if_empty(figure, theme, say(words, WORDS, "nothing"))
