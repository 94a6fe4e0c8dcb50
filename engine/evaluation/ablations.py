"""Ablations: one setting of QEvict over its range, every value paired with the article's choice.

Knows rows as the store keeps them; knows no model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from engine.evaluation.items import MAIN
from engine.evaluation.rows import Row, grouped
from engine.evaluation.statistics import Estimate, estimate, paired
from engine.evaluation.suites import ABLATIONS
from engine.evaluation.tasks import task_info


def ablation_table(rows: Sequence[Row], what: str) -> list[dict[str, Any]]:
    """One setting's values: KL on text or a task's score, and output error, each paired with the article's choice."""
    name, values, chosen = ABLATIONS[what]
    out: list[dict[str, Any]] = []
    for (task, length, question), cells in grouped(rows).items():
        ours = [cell for cell in cells if cell["system"] == "qevict" and not cell.get("match_to")]
        # What was tried at several budgets is not averaged over them.
        for share in sorted({cell["kv_budget"] for cell in ours}, reverse=True) if name else [None]:
            head = {"setting": what, "task": task, "length": length, "question": question, "kv_budget": share}
            tried = [cell for cell in ours if share is None or cell["kv_budget"] == share]
            out += [head | line for line in _values(tried, name, values, chosen, task)]
    return out


def _values(cells: Sequence[Row], name: str, values: Sequence[Any], chosen: Any, task: str) -> list[dict[str, Any]]:
    """One line per value, cells of one task at one budget."""
    figure = "kl" if task == "book" else task_info(task).score
    mains: dict[Any, dict[str, float]] = {}
    errors: dict[Any, dict[str, float]] = {}
    refused: dict[Any, Row] = {}
    for cell in cells:
        value = cell["parameters"].get(name) if name else cell["kv_budget"]
        if cell["infeasible"]:
            refused[value] = cell
            continue
        scores = cell["scores"][MAIN]
        mains.setdefault(value, {})[cell["prompt_hash"]] = float(scores[figure])
        if scores.get("output_error") is not None:
            errors.setdefault(value, {})[cell["prompt_hash"]] = float(scores["output_error"])
    out = []
    for value in values:
        own, error = mains.get(value, {}), errors.get(value, {})
        difference = _over_shared(own, mains.get(chosen, {}))
        error_difference = _over_shared(error, errors.get(chosen, {}))
        first = "article's choice" if value == chosen else ""
        out.append(
            {
                "value": value,
                "figure": figure,
                "mean": estimate(list(own.values())).to_dict() if own else None,
                "minus_article_choice": None if difference is None else difference.to_dict(),
                "verdict": first or _against_choice(difference, -1 if task == "book" else 1),
                "output_error": estimate(list(error.values())).to_dict() if error else None,
                "output_error_minus_article_choice": None if error_difference is None else error_difference.to_dict(),
                "output_error_verdict": first or _against_choice(error_difference, -1),
                "infeasible": refused[value]["infeasible"] if value in refused else None,
                "smallest_share": refused[value]["smallest_share"] if value in refused else None,
            }
        )
    return out


def _over_shared(own: Mapping[str, float], base: Mapping[str, float]) -> Estimate | None:
    """own - base over the items that both have."""
    shared = sorted(set(own) & set(base))
    return paired([own[i] for i in shared], [base[i] for i in shared]) if shared else None


def _against_choice(difference: Estimate | None, wanted: int) -> str:
    if difference is None:
        return "not measured"
    words = {1: "better than the article's choice", -1: "worse than the article's choice"}
    return words.get(difference.sign * wanted, "no difference settled")
