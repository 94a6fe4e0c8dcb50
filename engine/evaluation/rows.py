"""Rows as the store keeps them: grouping, and the verdict on a difference. Knows no model and no table."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from engine.evaluation.statistics import Estimate

FEWEST = 8
"""With fewer items there is no verdict: neither on a claim, nor that a model cannot do a task."""

Row = Mapping[str, Any]


def verdict(difference: Estimate, *, wanted: int) -> str:
    """What the interval says of a claim whose difference should have the sign `wanted`."""
    if difference.n < FEWEST:
        # A bootstrap of so few items is too narrow to carry a verdict.
        return "too few items"
    return {wanted: "holds", -wanted: "CONTRADICTED", 0: "not settled"}[difference.sign]


def grouped(rows: Iterable[Row], kind: str = "item") -> dict[tuple[str, int, str], list[Row]]:
    """Rows of one kind by task, length and place of the question."""
    out: dict[tuple[str, int, str], list[Row]] = defaultdict(list)
    for row in rows:
        if row["kind"] == kind:
            out[row["task"], row["length"], row["question"]].append(row)
    return dict(out)


def by_system(cells: Iterable[Row]) -> dict[str, list[Row]]:
    """Rows by their system's label."""
    out: dict[str, list[Row]] = defaultdict(list)
    for cell in cells:
        out[cell["label"]].append(cell)
    return dict(out)
