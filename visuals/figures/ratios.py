"""Bars of speed ratios, as `qevict bench` measured them.

Takes benchmark rows, gives a figure; knows no engine and no server.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import plotly.graph_objects as go

KEYS = {
    "attention": "ratio_to_stock_sdpa",
    "decode": "ratio_to_dynamic",
    "routing": "routing_share",
    "prefill": "cost_against_dynamic",
}


def ratio_figure(kind: str, rows: Sequence[dict[str, Any]], *, title: str = "") -> go.Figure:
    """Grouped bars, one group for each row and one bar for each system; the dashed line is the stock system.

    Args:
        kind: "attention", "decode", "routing", "prefill" or "table4".
        rows: what the benchmark yielded.
    """
    figure = go.Figure()
    labels = [_label(row) for row in rows]
    if kind == "table4":
        systems = list(dict.fromkeys(str(row["system"]) for row in rows))
        for system in systems:
            chosen = [row for row in rows if row["system"] == system]
            speeds = [row["speed_against_full"] for row in chosen]
            figure.add_bar(name=system, x=[_label(row) for row in chosen], y=speeds)
    else:
        key = KEYS[kind]
        systems = list(dict.fromkeys(name for row in rows for name in row[key]))
        for system in systems:
            figure.add_bar(name=system, x=labels, y=[row[key].get(system) for row in rows])
    if kind != "routing":
        figure.add_hline(y=1.0, line_dash="dash")
    figure.update_layout(barmode="group", title=title or kind, template="none", yaxis_title=KEYS.get(kind, "speed"))
    return figure


def _label(row: dict[str, Any]) -> str:
    place = row.get("context") or f"{row.get('prompt_tokens')}+{row.get('new_tokens')}"
    parts = [str(row.get("shape") or row.get("model")), f"{place}", f"b{row.get('batch', 1)}"]
    if "kv_budget" in row and "system" not in row:
        parts.append(f"{row['kv_budget']:.0%}")
    return " ".join(parts)
