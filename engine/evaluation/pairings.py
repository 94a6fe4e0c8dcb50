"""QEvict beside each system that has an operating point of its own, at that system's bytes.

Paired over items, as in the tables of `engine.evaluation.tables`. Knows rows as the store keeps them; knows no model.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from engine.evaluation.items import MAIN
from engine.evaluation.rows import Row, verdict
from engine.evaluation.statistics import Estimate, estimate, stratified
from engine.evaluation.tables import score_table
from engine.evaluation.tasks import task_info


def matched_differences(rows: Iterable[Row]) -> list[dict[str, Any]]:
    """One row per matched system: QEvict less it, in score over tasks that FullKV can do, KL and output error on text.

    `share` and `other_share` are the measured bytes of both over FullKV's, means over the paired items.
    """
    cells = [row for row in rows if row["kind"] == "item"]
    able = {(row["task"], row["length"], row["question"]) for row in score_table(cells) if row["able"]}
    found = []
    for other in sorted({cell["match_to"] for cell in cells if cell.get("match_to")}):
        pairs = _pairs(cells, other)
        if not pairs:
            continue
        per_task: dict[tuple[Any, ...], list[float]] = defaultdict(list)
        for ours, theirs in pairs:
            key = (ours["task"], ours["length"], ours["question"])
            if key in able:
                per_task[key] += _difference(ours, theirs, task_info(ours["task"]).score)
        books = [pair for pair in pairs if pair[0]["task"] == "book"]
        figures: dict[str, tuple[Estimate | None, int]] = {
            "score": (stratified(list(per_task.values())) if per_task else None, 1),
            "kl": (_estimate(books, "kl"), -1),
            "error": (_estimate(books, "output_error"), -1),
        }
        line: dict[str, Any] = {
            "rival": other,
            "share": sum(ours["share"] for ours, _ in pairs) / len(pairs),
            "other_share": sum(theirs["share"] for _, theirs in pairs) / len(pairs),
            "tasks": len(per_task),
            "items": len(pairs),
        }
        for name, (value, wanted) in figures.items():
            line[f"{name}_difference"] = None if value is None else value.to_dict()
            line[f"verdict_{name}"] = None if value is None else verdict(value, wanted=wanted)
        found.append(line)
    return found


def _pairs(cells: Iterable[Row], other: str) -> list[tuple[Row, Row]]:
    """(QEvict at the other's bytes, the other) on the same item."""
    ours: dict[tuple[Any, ...], Row] = {}
    theirs: dict[tuple[Any, ...], Row] = {}
    for cell in cells:
        if cell["infeasible"] or cell["parameters"]:
            continue
        key = (cell["task"], cell["length"], cell["question"], cell["prompt_hash"])
        if cell.get("match_to") == other:
            ours[key] = cell
        elif cell["system"] == other and not cell.get("match_to"):
            theirs[key] = cell
    return [(ours[key], theirs[key]) for key in sorted(set(ours) & set(theirs))]


def _difference(ours: Row, theirs: Row, figure: str) -> list[float]:
    """One difference, or none where a side lacks the figure."""
    first, second = ours["scores"][MAIN].get(figure), theirs["scores"][MAIN].get(figure)
    return [] if first is None or second is None else [float(first) - float(second)]


def _estimate(pairs: Iterable[tuple[Mapping[str, Any], Mapping[str, Any]]], figure: str) -> Estimate | None:
    values = [value for ours, theirs in pairs for value in _difference(ours, theirs, figure)]
    return estimate(values) if values else None
