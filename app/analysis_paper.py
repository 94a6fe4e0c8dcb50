"""The article's own figures as cards: printed values alone, always named as such.

Knows `engine.evaluation.paper`; there is nothing measured here.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from app.analysis_card import TABLES, Card, Say
from app.analysis_cards import paper_shares
from engine.evaluation.paper import PUBLISHED, SETUP, Published
from visuals.figures.intervals import interval_figure
from visuals.figures.policies import shares_figure

SETS: tuple[tuple[str, str, str, tuple[str, ...]], ...] = (
    ("Table 14", "fmm", "percent", ("fmm",)),
    ("Table 14", "churn", "share", ("churn",)),
    ("Table 15", "qsa", "share", ()),
    ("Table 16", "lir", "percent", ("lir",)),
    ("Table 18", "promotion", "percent", ("fmm", "lir")),
    ("Table 11", "score", "score", ("average",)),
    ("Table 12", "score", "score", ("average",)),
    ("Table 13", "score", "score", ("average",)),
    ("Table 2", "score", "score", ()),
    ("Table 3", "score", "score", ("macro average",)),
    ("Figure 3", "score", "score", ()),
)
"""(table, what its values are, unit, quantities, or none for all): what is drawn on one axis."""


def paper_facts() -> list[tuple[str, str]]:
    """(key of a label, value) of the article's set-up."""
    return [
        ("model", ", ".join(SETUP["models"])),
        ("policy", f"Ω {SETUP['window_size']}, q {SETUP['quant_share']:g}, INT{SETUP['bits']}"),
        ("machine", str(SETUP["hardware"])),
        ("versions", str(SETUP["software"])),
    ]


def paper_cards(say: Say) -> list[Card]:
    """One card for each table that is drawn."""
    shares = paper_shares(say)
    cards = [
        Card(
            "shares",
            "article",
            partial(shares_figure, shares, words=say.figure("policies")),
            ("label", "full", "quant", "evicted"),
            shares,
            "engine/evaluation/paper.py",
            {"budget": say("article")},
            say("only_printed"),
            part="printed",
        )
    ]
    for table, what, unit, quantities in SETS:
        rows = [
            entry for entry in PUBLISHED if entry.table == table and (not quantities or entry.quantity in quantities)
        ]
        if rows:
            cards.append(_card(table, what, unit, rows, say))
    return cards


def _card(table: str, what: str, unit: str, rows: list[Published], say: Say) -> Card:
    name = say(TABLES[table])
    several = {
        key: len({getattr(entry, key) for entry in rows}) > 1 for key in ("system", "quantity", "model", "condition")
    }
    points: list[dict[str, Any]] = [
        {
            "label": ", ".join(getattr(entry, key) for key, shown in several.items() if shown and getattr(entry, key))
            or entry.system,
            "value": None,
            "low": None,
            "high": None,
            "n": None,
            "paper": entry.value,
        }
        for entry in rows
    ]
    shown = say(f"quantity_{what}")
    return Card(
        "printed",
        "article",
        partial(
            interval_figure,
            points,
            title=say("printed_title", table=name, what=shown),
            axis=say(f"unit_{unit}"),
            words=say.figure("intervals"),
        ),
        ("system", "quantity", "paper", "unit", "model", "condition", "how"),
        [
            {
                "system": entry.system,
                "quantity": entry.quantity,
                "paper": entry.value,
                "unit": entry.unit,
                "model": entry.model,
                "condition": entry.condition,
                "how": entry.how,
            }
            for entry in rows
        ],
        "engine/evaluation/paper.py",
        {"table": name, "what": shown},
        say("only_printed"),
        f"{table.replace(' ', '-')}-{what}",
    )
