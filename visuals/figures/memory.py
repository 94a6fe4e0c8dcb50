"""Persistent KV bytes over a run, by what they hold, under the budget and FullKV's line.

Takes `engine.metrics.memory.MemorySeries`; computes only units.
"""

from __future__ import annotations

from typing import Final

import plotly.graph_objects as go

from engine.metrics.memory import MemorySeries
from visuals.figures.theme import Words, blank, note_if_empty, say
from visuals.palette import PALETTES, Theme, blend

WORDS: Final[dict[str, str]] = {
    "memory_title": "Persistent KV memory, {kv_dtype}",
    "memory_title_plain": "Persistent KV memory",
    "tokens": "tokens",
    "memory_axis": "MiB",
    "sink": "Sink",
    "local": "Local",
    "full": "Full",
    "codes": "Codes",
    "metadata": "Scales, index",
    "shadow": "Shadows",
    "budget": "Budget",
    "full_kv": "FullKV",
    "nothing": "nothing to show yet",
}

MIB: Final = 2**20


def memory_figure(
    series: MemorySeries,
    *,
    kv_dtype: str = "",
    show_full_kv: bool = True,
    theme: Theme = "light",
    words: Words | None = None,
) -> go.Figure:
    """Bytes by part, stacked, over the run's length in tokens.

    Args:
        kv_dtype: what Full windows are stored in; named in the title, since shares mean nothing without it.
        show_full_kv: FullKV's line stretches the axis; without it the parts are easier to read.
    """
    colors = PALETTES[theme]
    key = "memory_title" if kv_dtype else "memory_title_plain"
    title = say(words, WORDS, key, kv_dtype=kv_dtype) if kv_dtype else say(words, WORDS, key)
    figure = blank(title, say(words, WORDS, "tokens"), say(words, WORDS, "memory_axis"), theme)
    figure.update_yaxes(rangemode="tozero")
    figure.update_layout(hovermode="x unified")
    x = series.seq_lens.tolist()
    parts = (
        ("sink", colors.sink, ""),
        ("local", colors.local, ""),
        ("full", colors.full, ""),
        ("codes", colors.quant, ""),
        ("metadata", colors.quant, "."),
        ("shadow", blend(colors.quant, colors.paper, 0.45), "/"),
    )
    for name, color, hatch in parts if x else ():
        figure.add_scatter(
            x=x,
            y=(series.parts[name] / MIB).tolist(),
            name=say(words, WORDS, name),
            mode="lines",
            line={"width": 1, "color": color, "shape": "hv"},
            stackgroup="bytes",
            fillcolor=color,
            fillpattern={"shape": hatch, "fgcolor": colors.paper, "bgcolor": color, "size": 6},
            hovertemplate="%{y:.3f} MiB",
        )
    lines = [("budget", series.budget, colors.alarm, "dash")]
    if show_full_kv:
        lines.append(("full_kv", series.full_kv, colors.ink, "dot"))
    for name, values, color, dash in lines if x else []:
        figure.add_scatter(
            x=x,
            y=(values / MIB).tolist(),
            name=say(words, WORDS, name),
            mode="lines",
            line={"width": 2, "color": color, "dash": dash},
            hovertemplate="%{y:.3f} MiB",
        )
    return note_if_empty(figure, theme, say(words, WORDS, "nothing"))
