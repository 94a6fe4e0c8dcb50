"""One figure of the Analysis tab, with all that it opens to: its reading, formula, code and numbers.

Knows texts and plotly figures; knows no source of numbers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import plotly.graph_objects as go

from app.texts import all_texts, text
from visuals.figures.theme import Words
from visuals.palette import Theme

MOST_LINES = 2000
"""Lines of a table that are sent; a figure of more says so."""


TABLES = {
    "Table 2": "table_2",
    "Table 3": "table_3",
    "Table 11": "table_11",
    "Table 12": "table_12",
    "Table 13": "table_13",
    "Table 14": "table_14",
    "Table 15": "table_15",
    "Table 16": "table_16",
    "Table 18": "table_18",
    "Figure 3": "picture_3",
}
"""The article's tables and the texts that name them."""

VERDICTS = {
    "holds": "verdict_holds",
    "CONTRADICTED": "verdict_contradicted",
    "not settled": "verdict_not_settled",
    "too few items": "verdict_few",
    "not measured": "verdict_not_measured",
    "article's choice": "verdict_chosen",
    "better than the article's choice": "verdict_better",
    "worse than the article's choice": "verdict_worse",
    "no difference settled": "verdict_no_difference",
}
"""What evaluations say of a difference, and the texts that say it."""


@dataclass(frozen=True, slots=True)
class Say:
    """The words of one language, for cards and for the figures in them."""

    lang: str

    def __call__(self, key: str, **values: object) -> str:
        """A text of the tab's own area."""
        return text(self.lang, f"analysis.{key}", **values)

    def verdict(self, words: str) -> str:
        """An evaluation's verdict in this language; one of a later release keeps its own words."""
        return self(VERDICTS[words]) if words in VERDICTS else words

    def figure(self, module: str) -> Words:
        """The words of one module of `visuals.figures`, by its own keys."""
        prefix = f"figures.{module}_"
        return {
            key.removeprefix(prefix): words for key, words in all_texts(self.lang).items() if key.startswith(prefix)
        }


@dataclass(frozen=True, slots=True)
class Card:
    """A figure.

    Attributes:
        name: "pareto", …: its texts are `analysis.<name>_title`, `_reads` and `_formula`.
        group: the heading below which it stands: "quality", "article", "ablations", "diagnostics" or "run".
        build: makes the figure, given `theme`.
        columns: keys of the table's columns, in order; headings are `analysis.column_<key>`.
        rows: the numbers, one mapping a line; an interval is {"mean", "low", "high", "n"}.
        code: the file that computes the quantity.
        values: put into title, reading and formula. note: a sentence on this very figure, such as its n.
        part: tells cards of one name apart, in files' names and addresses.
    """

    name: str
    group: str
    build: Callable[..., go.Figure]
    columns: Sequence[str]
    rows: Sequence[Mapping[str, Any]]
    code: str
    values: Mapping[str, Any] = field(default_factory=dict)
    note: str = ""
    part: str = ""

    def payload(self, theme: Theme, say: Say) -> dict[str, Any]:
        """What the browser draws, as plain JSON values; all texts are plain text."""
        figure = json.loads(self.build(theme=theme).to_json())
        columns, lines = spread(self.columns, self.rows[:MOST_LINES], say)
        return {
            "id": f"{self.name}-{self.part}" if self.part else self.name,
            "group": self.group,
            "title": say(f"{self.name}_title", **self.values),
            "reads": say(f"{self.name}_reads", **self.values),
            "note": self.note,
            "formula": say(f"{self.name}_formula", **self.values),
            "code": self.code,
            "figure": {"data": figure["data"], "layout": figure["layout"]},
            "columns": columns,
            "rows": lines,
            "more": max(0, len(self.rows) - MOST_LINES),
        }


def spread(
    columns: Sequence[str], rows: Sequence[Mapping[str, Any]], say: Say
) -> tuple[list[str], list[list[str | float | int | None]]]:
    """Headings and cells; an interval takes three columns, and n a fourth where the table has none of its own."""
    wide = {key for key in columns if any(isinstance(row.get(key), Mapping) for row in rows)}
    own = "n" in columns
    headings: list[str] = []
    for key in columns:
        name = say(f"column_{key}")
        headings.append(name)
        if key in wide:
            headings += [say("low", name=name), say("high", name=name)] + ([] if own else [say("count", name=name)])
    lines = []
    for row in rows:
        line: list[str | float | int | None] = []
        for key in columns:
            value = row.get(key)
            if key == "verdict" and isinstance(value, str):
                line.append(say.verdict(value))
            elif key not in wide:
                line.append(_cell(value, say))
            else:
                parts = value if isinstance(value, Mapping) else {}
                line += [_cell(parts.get(part), say) for part in ("mean", "low", "high", *(() if own else ("n",)))]
        lines.append(line)
    return headings, lines


def _cell(value: Any, say: Say) -> str | float | int | None:
    if isinstance(value, bool):
        return say("yes") if value else say("no")
    if value is None or isinstance(value, (int, float, str)):
        return value
    return str(value)


def counted(counts: Sequence[int | None], say: Say) -> str:
    """A sentence on how many items stand behind each point, from their numbers."""
    known = sorted({count for count in counts if count is not None})
    if not known:
        return ""
    if known[-1] < 2:
        return say("single")
    shown = f"{known[0]}" if len(known) == 1 else f"{known[0]} – {known[-1]}"
    return say("intervals", n=shown)
