"""Agreement of quantized scores with FullKV's: by layer and head, and over the run.

Takes `engine.metrics.qsa.Agreement`; computes only its means.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
    return heat_figure(result.by_head(interval=interval), interval=interval, theme=theme, words=words)


def heat_figure(
    values: NDArray[np.float64], *, interval: bool = False, theme: Theme = "light", words: Words | None = None
) -> go.Figure:
    """The same from means, float64 [layers, heads], NaN where there is none."""
    colors = PALETTES[theme]
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
            # The lowest are written out: colour is not the only thing that finds them.
            text=_lowest(values),
            texttemplate="%{text}",
            textfont={"size": 11},  # its colour is chosen against the cell
            hovertemplate=f"{say(words, WORDS, 'layer')} %{{y}}, {say(words, WORDS, 'head')} %{{x}}: "
            "%{z:.4f}<extra></extra>",
        )
    return note_if_empty(figure, theme, say(words, WORDS, "nothing"))


def qsa_series_figure(result: Agreement, *, theme: Theme = "light", words: Words | None = None) -> go.Figure:
    """QSA and mass ratio by event, in the paper's cumulative form and per interval."""
    curves = {
        "qsa": _over_heads(result.qsa),
        "interval_qsa": _over_heads(result.interval_qsa),
        "ratio": _over_heads(result.ratio),
        "interval_ratio": _over_heads(result.interval_ratio),
    }
    return agreement_figure(result.event_ids.tolist(), curves, theme=theme, words=words)


def agreement_figure(
    event_ids: Sequence[int],
    curves: Mapping[str, NDArray[np.float64]],
    *,
    theme: Theme = "light",
    words: Words | None = None,
) -> go.Figure:
    """The same from means over layers and heads, float64 [events], NaN where there is none.

    Args:
        curves: some of "qsa", "interval_qsa", "ratio", "interval_ratio".
    """
    colors = PALETTES[theme]
    figure = blank(
        say(words, WORDS, "series_title"), say(words, WORDS, "event"), say(words, WORDS, "series_axis"), theme
    )
    figure.update_layout(hovermode="x unified")
    event_axis(figure, len(event_ids))
    looks = {
        "qsa": (colors.quant, "solid", "circle"),
        "interval_qsa": (colors.quant, "dot", "circle-open"),
        "ratio": (colors.ink, "solid", "square"),
        "interval_ratio": (colors.ink, "dot", "square-open"),
    }
    for key, (color, dash, marker) in looks.items():
        if key in curves and np.isfinite(curves[key]).any():
            figure.add_scatter(
                x=list(event_ids),
                y=_plain(curves[key]),
                name=say(words, WORDS, key),
                mode="lines+markers",
                line={"color": color, "dash": dash, "width": 2},
                marker={"size": 6, "color": color, "symbol": marker},
                hovertemplate="%{y:.4f}",
            )
    return note_if_empty(figure, theme, say(words, WORDS, "nothing"))


def _lowest(values: NDArray[np.float64], count: int = 5) -> list[list[str]]:
    """The `count` lowest values as text in their cells, nothing in the others."""
    order = np.argsort(np.where(np.isfinite(values), values, np.inf), axis=None, kind="stable")[:count]
    chosen = {int(place) for place in order if np.isfinite(values.flat[place])}
    width = values.shape[1]
    return [
        [f"{values[row, head]:.3f}" if row * width + head in chosen else "" for head in range(width)]
        for row in range(len(values))
    ]


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
