"""Agreement of quantized scores with FullKV's: by layer and head, and over the run.

Takes `engine.metrics.qsa.Agreement`; computes only its means.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import plotly.graph_objects as go
from numpy.typing import NDArray

from engine.metrics.qsa import Agreement
from visuals.figures.theme import Words, blank, event_axis, note_if_empty, say
from visuals.palette import PALETTES, Theme

WORDS: Final[dict[str, str]] = {
    "heat_title": "QSA by layer and head, {form}",
    "series_title": "Quantized scores against FullKV",
    "cumulative": "cumulative",
    "interval": "per interval",
    "layer": "layer",
    "head": "head",
    "event": "routing event",
    "series_axis": "agreement",
    "qsa": "QSA, cumulative",
    "interval_qsa": "QSA, per interval",
    "ratio": "mass ratio, cumulative",
    "interval_ratio": "mass ratio, per interval",
    "nothing": "nothing to show yet",
}


def qsa_heatmap(
    result: Agreement, *, interval: bool = False, theme: Theme = "light", words: Words | None = None
) -> go.Figure:
    """Mean QSA of every layer and head (paper Table 15). Cells without a quantized window stay empty."""
    colors = PALETTES[theme]
    values = result.by_head(interval=interval)
    form = say(words, WORDS, "interval" if interval else "cumulative")
    title = say(words, WORDS, "heat_title", form=form)
    figure = blank(title, say(words, WORDS, "head"), say(words, WORDS, "layer"), theme)
    figure.update_yaxes(autorange="reversed", dtick=max(1, len(values) // 10), showgrid=False)
    figure.update_xaxes(dtick=max(1, values.shape[1] // 16), showgrid=False)
    if np.isfinite(values).any():
        figure.add_heatmap(
            z=_plain(values),
            zmax=1.0,
            zmin=min(float(np.nanmin(values)), 0.95),
            # One hue from dark to the paper: order survives greyscale.
            colorscale=[[0.0, colors.quant], [1.0, colors.panel]],
            xgap=1,
            ygap=1,
            hoverongaps=False,
            hovertemplate=f"{say(words, WORDS, 'layer')} %{{y}}, {say(words, WORDS, 'head')} %{{x}}: "
            "%{z:.4f}<extra></extra>",
        )
    return note_if_empty(figure, theme, say(words, WORDS, "nothing"))


def qsa_series_figure(result: Agreement, *, theme: Theme = "light", words: Words | None = None) -> go.Figure:
    """QSA and mass ratio by event, in the paper's cumulative form and per interval."""
    colors = PALETTES[theme]
    figure = blank(
        say(words, WORDS, "series_title"), say(words, WORDS, "event"), say(words, WORDS, "series_axis"), theme
    )
    figure.update_layout(hovermode="x unified")
    event_axis(figure, len(result.event_ids))
    curves = (
        ("qsa", result.qsa, colors.quant, "solid"),
        ("interval_qsa", result.interval_qsa, colors.quant, "dot"),
        ("ratio", result.ratio, colors.ink, "solid"),
        ("interval_ratio", result.interval_ratio, colors.ink, "dot"),
    )
    for key, values, color, dash in curves:
        if np.isfinite(values).any():
            figure.add_scatter(
                x=result.event_ids.tolist(),
                y=_plain(_over_heads(values)),
                name=say(words, WORDS, key),
                mode="lines+markers",
                line={"color": color, "dash": dash, "width": 2},
                marker={"size": 5, "color": color},
                hovertemplate="%{y:.4f}",
            )
    return note_if_empty(figure, theme, say(words, WORDS, "nothing"))


def _over_heads(values: NDArray[np.float64]) -> NDArray[np.float64]:
    finite = np.isfinite(values)
    count = finite.sum(axis=(1, 2))
    out = np.full(len(values), np.nan)
    np.divide(np.where(finite, values, 0.0).sum(axis=(1, 2)), count, out=out, where=count > 0)
    return out


def _plain(values: NDArray[np.float64]) -> list[object]:
    """Nested lists with None for NaN: JSON has no NaN."""
    cells = values.astype(object)
    cells[~np.isfinite(values)] = None
    plain: list[object] = cells.tolist()
    return plain
