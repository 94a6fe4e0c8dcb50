"""One standalone HTML page of figures and tables: opens from disk, fetches nothing, prints well.

Takes plain rows and plotly figures; all words from outside are escaped. Knows no engine and no server.
"""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

from visuals.figures.theme import FONT
from visuals.palette import PALETTES

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Section:
    """One part of the page.

    Attributes:
        title: heading. text: sentences below it. columns: (key, heading) of the table. rows: the table.
        figure: drawn above the table. key: how its figures are computed, shown folded.
    """

    title: str
    text: Sequence[str] = ()
    columns: Sequence[tuple[str, str]] = ()
    rows: Sequence[Row] = ()
    figure: go.Figure | None = None
    key: str = ""


@dataclass(frozen=True, slots=True)
class Report:
    """The whole page. `facts` are the set-up's lines: machine, model, texts, versions."""

    title: str
    facts: Sequence[tuple[str, str]] = ()
    sections: Sequence[Section] = field(default_factory=tuple)
    left_out: Sequence[str] = ()


def render(report: Report) -> str:
    """The page as one string."""
    colors = PALETTES["light"]
    figures = any(section.figure is not None for section in report.sections)
    script = f"<script>{get_plotlyjs()}</script>" if figures else ""
    style = (
        f"body{{font-family:{FONT};color:{colors.ink};background:{colors.paper};max-width:76rem;margin:2rem auto;"
        "padding:0 1rem;line-height:1.45}"
        "table{border-collapse:collapse;margin:1rem 0;font-variant-numeric:tabular-nums}"
        f"th,td{{border-bottom:1px solid {colors.line};padding:.3rem .7rem;text-align:right;vertical-align:top}}"
        f"th:first-child,td:first-child{{text-align:left}}th{{background:{colors.panel}}}"
        f".wide{{overflow-x:auto}}.bad{{color:{colors.alarm};font-weight:600}}.muted{{color:{colors.muted}}}"
        "details{margin:.5rem 0}dt{font-weight:600}dd{margin:0 0 .3rem 0}@media print{details{display:block}}"
    )
    body = [f"<h1>{_safe(report.title)}</h1>"]
    if report.facts:
        pairs = "".join(f"<dt>{_safe(name)}</dt><dd>{_safe(value)}</dd>" for name, value in report.facts)
        body.append(f"<dl>{pairs}</dl>")
    for number, section in enumerate(report.sections):
        body.append(_section(section, number))
    if report.left_out:
        lines = "".join(f"<li>{_safe(line)}</li>" for line in report.left_out)
        body.append(f"<h2>What was left out</h2><ul>{lines}</ul>")
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{_safe(report.title)}</title><style>{style}</style>{script}</head><body>{''.join(body)}</body></html>"
    )


def _section(section: Section, number: int) -> str:
    parts = [f"<section><h2>{_safe(section.title)}</h2>"]
    parts += [f"<p>{_safe(line)}</p>" for line in section.text]
    if section.figure is not None:
        parts.append(
            section.figure.to_html(
                full_html=False, include_plotlyjs=False, div_id=f"figure-{number}", config={"responsive": True}
            )
        )
    if section.rows:
        head = "".join(f"<th scope='col'>{_safe(title)}</th>" for _, title in section.columns)
        lines = "".join(
            "<tr>" + "".join(_cell(row.get(key)) for key, _ in section.columns) + "</tr>" for row in section.rows
        )
        parts.append(f"<div class='wide'><table><thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table></div>")
    if section.key:
        parts.append(
            f"<details><summary>How it is computed</summary><p class='muted'>{_safe(section.key)}</p></details>"
        )
    parts.append("</section>")
    return "".join(parts)


def _cell(value: Any) -> str:
    text = number(value)
    bad = isinstance(value, str) and (value == "CONTRADICTED" or value.startswith("this model cannot"))
    return f"<td class='bad'>{_safe(text)}</td>" if bad else f"<td>{_safe(text)}</td>"


def number(value: Any) -> str:
    """A value for a table: an interval as "mean [low, high]", None as a dash."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Mapping) and "mean" in value:
        ends = "" if value.get("low") is None else f" [{_short(value['low'])}, {_short(value['high'])}]"
        return f"{_short(value['mean'])}{ends}"
    if isinstance(value, float):
        return _short(value)
    return str(value)


def _short(value: float) -> str:
    return f"{value:.3f}" if abs(value) >= 0.01 or value == 0 else f"{value:.2g}"


def _safe(text: str) -> str:
    return html.escape(text, quote=True)
