"""From finished cells to tables: one row per task and system, with intervals, and verdicts on the article's claims.

Everything is paired: a difference of two systems is taken over the items that both have. Knows rows as the store
keeps them; knows no model.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from engine.evaluation import paper
from engine.evaluation.ablations import ablation_table as ablation_table
from engine.evaluation.items import MAIN
from engine.evaluation.rows import FEWEST, Row, by_system, grouped, verdict
from engine.evaluation.statistics import Estimate, estimate, paired, paired_ratio, perplexity_difference, stratified
from engine.evaluation.tasks import task_info

FLOOR = 0.10
"""A task counts as impossible for a model whose full cache scores below this, or below twice chance."""
RIVALS = ("streamingllm", "snapkv", "adakv", "criticalkv", "critical-adakv", "defensivekv", "layer-defensivekv", "h2o")
"""Systems that evict and never recover."""
VARIANTS = ("qevict-recent", "qevict-decayed")
"""QEvict with settings of this project, beside the article's."""


def score_table(rows: Iterable[Row]) -> list[dict[str, Any]]:
    """One row per task, length, place of the question, and system; FullKV first in each task.

    `score` is the task's own figure; those that end in `_minus_full` are paired with FullKV over items. `output_error`
    is None where a model's attention outputs cannot be read.
    """
    out: list[dict[str, Any]] = []
    for (task, length, question), cells in grouped(rows).items():
        systems = by_system(cells)
        full = next((entry for entry in systems.values() if entry[0]["full"]), None)
        info = task_info(task)
        limit = max(2 * info.chance, FLOOR)
        able: bool | None = None
        if full is not None and task != "book":
            reached, values = _values(full, info.score, MAIN, None)
            able = True if reached >= limit else None if len(values) < FEWEST else False
        for label, entries in sorted(systems.items(), key=_place):
            done = [entry for entry in entries if entry["infeasible"] is None]
            first = entries[0]
            line: dict[str, Any] = {
                "task": task,
                "length": length,
                "question": question,
                "label": label,
                "system": first["system"],
                "kv_budget": first["kv_budget"],
                "match_to": first.get("match_to"),
                "parameters": first["parameters"],
                "n": len(done),
                "infeasible": next((entry["infeasible"] for entry in entries if entry["infeasible"]), None),
                "smallest_share": max((entry["smallest_share"] or 0.0 for entry in entries), default=0.0) or None,
                "able": able,
                "note": "" if able in (None, True) else "this model cannot do this task",
            }
            if done:
                line |= _figures(done, full, info.score)
            out.append(line)
    return out


def _figures(done: Sequence[Row], full: Sequence[Row] | None, score: str) -> dict[str, Any]:
    """Means and intervals of one system's items."""
    spans = sorted({name for entry in done for name in entry["scores"]} - {MAIN})
    figures: dict[str, Any] = {
        "score_name": score,
        "score": _estimate(done, score),
        "nll": _estimate(done, "nll"),
        "kl": _estimate(done, "kl"),
        "agreement": _estimate(done, "agreement"),
        "output_error": _estimate(done, "output_error"),
        "output_error_layers": _layers(done),
        "perplexity": math.exp(min(50.0, _mean(done, "nll"))),
        "share": sum(entry["share"] for entry in done) / len(done),
        "bytes": round(sum(entry["bytes"] for entry in done) / len(done)),
        "ms_per_token": _median([entry["ms_per_token"] for entry in done if entry["ms_per_token"] is not None]),
        "backend": done[0]["backend"],
        "other_spans": {
            name: estimate([float(entry["scores"][name][score]) for entry in done]).to_dict() for name in spans
        },
    }
    if full is not None:
        figures["score_minus_full"] = _paired(done, full, score)
        figures["nll_minus_full"] = _paired(done, full, "nll")
        figures["perplexity_minus_full"] = _paired(done, full, "nll", perplexity_difference)
    return figures


def answer_table(rows: Iterable[Row]) -> list[dict[str, Any]]:
    """Published benchmarks: one row per task and system, FullKV first; a floor as in `score_table`, chance 0."""
    out: list[dict[str, Any]] = []
    for (task, length, question), cells in grouped(rows, "answer").items():
        systems = by_system(cells)
        full = next((entry for entry in systems.values() if entry[0]["full"]), None)
        reached = [entry["figures"]["score"] for entry in full or [] if entry["infeasible"] is None]
        able = None if len(reached) < FEWEST else sum(reached) / len(reached) >= FLOOR
        theirs = {entry["prompt_hash"]: entry["figures"]["score"] for entry in full or [] if not entry["infeasible"]}
        for label, entries in sorted(systems.items(), key=_place):
            done = [entry for entry in entries if entry["infeasible"] is None]
            line: dict[str, Any] = {
                "task": task,
                "length": length,
                "question": question,
                "label": label,
                "system": entries[0]["system"],
                "kv_budget": entries[0]["kv_budget"],
                "n": len(done),
                "infeasible": next((entry["infeasible"] for entry in entries if entry["infeasible"]), None),
                "able": able,
                "note": "this model cannot do this task" if able is False else "",
            }
            if done:
                shared = [entry for entry in done if entry["prompt_hash"] in theirs]
                ours = [entry["figures"]["score"] for entry in shared]
                line |= {
                    "metric": done[0]["metric"],
                    "score": estimate([entry["figures"]["score"] for entry in done]).to_dict(),
                    "score_minus_full": paired(ours, [theirs[entry["prompt_hash"]] for entry in shared]).to_dict()
                    if shared
                    else None,
                    "share": sum(entry["share"] for entry in done) / len(done),
                    "truncated": sum(entry["truncated"] for entry in done),
                    "degenerate": sum(entry["degenerate"] for entry in done),
                    "figures": {
                        name: sum(entry["figures"][name] for entry in done) / len(done) for name in done[0]["figures"]
                    },
                }
            out.append(line)
    return out


def pareto_points(table: Sequence[Row], *, figure: str = "kl", task: str = "book") -> list[dict[str, Any]]:
    """Share of bytes against one figure, for a plot: (label, system, share, value, low, high)."""
    return [
        {
            "label": row["label"],
            "system": row["system"],
            "share": row["share"],
            "value": row[figure]["mean"],
            "low": row[figure]["low"],
            "high": row[figure]["high"],
            "n": row["n"],
        }
        for row in table
        if row["task"] == task and row["n"] and row["note"] == "" and row[figure] is not None
    ]


def rival_differences(rows: Iterable[Row], system: str = "qevict") -> list[dict[str, Any]]:
    """QEvict, or a variant, against each evicting rival at the same budget: scores over all tasks that FullKV can do,
    and on text KL and output error.

    The macro difference is the mean over tasks of paired differences; items are resampled within their task.
    """
    groups = grouped(rows)
    found: list[dict[str, Any]] = []
    shares = sorted({row["kv_budget"] for cells in groups.values() for row in cells if row["kv_budget"]}, reverse=True)
    able = {(row["task"], row["length"], row["question"]) for row in score_table(_flat(groups)) if row["able"]}
    for share in shares:
        for rival in RIVALS:
            per_task: list[list[float]] = []
            for key, cells in groups.items():
                if key not in able:
                    continue
                differences = _differences(cells, share, (system, rival), task_info(key[0]).score)
                if differences:
                    per_task.append(differences)
            books = [cell for key, cells in groups.items() if key[0] == "book" for cell in cells]
            nearer, errors = (_differences(books, share, (system, rival), figure) for figure in ("kl", "output_error"))
            if not per_task and not nearer:
                continue
            macro = stratified(per_task) if per_task else None
            kl = estimate(nearer) if nearer else None
            error = estimate(errors) if errors else None
            found.append(
                {
                    "kv_budget": share,
                    "system": system,
                    "rival": rival,
                    "tasks": len(per_task),
                    "items": sum(len(values) for values in per_task),
                    "score_difference": None if macro is None else macro.to_dict(),
                    "kl_difference": None if kl is None else kl.to_dict(),
                    "verdict_score": None if macro is None else verdict(macro, wanted=1),
                    "verdict_kl": None if kl is None else verdict(kl, wanted=-1),
                    "error_difference": None if error is None else error.to_dict(),
                    "verdict_error": None if error is None else verdict(error, wanted=-1),
                }
            )
    return found


def direction_table(rows: Iterable[Row]) -> list[dict[str, Any]]:
    """The article's claims over texts, at each budget: paired differences and verdicts."""
    cells: dict[float, list[Row]] = defaultdict(list)
    for row in rows:
        if row["kind"] == "policies":
            cells[row["kv_budget"]].append(row)
    out = []
    for share in sorted(cells, reverse=True):
        for sentence, low, high, quantity in paper.CLAIMS:
            pairs = [
                (row["policies"][low][quantity], row["policies"][high][quantity])
                for row in cells[share]
                if low in row["policies"] and high in row["policies"]
            ]
            pairs = [(a, b) for a, b in pairs if a is not None and b is not None]
            if not pairs:
                continue
            firsts, seconds = [a for a, _ in pairs], [b for _, b in pairs]
            difference = paired(firsts, seconds)
            out.append(
                {
                    "kv_budget": share,
                    "claim": sentence,
                    "quantity": quantity,
                    "lower": low,
                    "higher": high,
                    "lower_mean": sum(firsts) / len(firsts),
                    "higher_mean": sum(seconds) / len(seconds),
                    "difference": difference.to_dict(),
                    "verdict": verdict(difference, wanted=-1),
                }
            )
    return out


def policy_table(rows: Iterable[Row]) -> list[dict[str, Any]]:
    """Means of every simulated policy over texts, at each budget."""
    values: dict[tuple[float, str], list[Row]] = defaultdict(list)
    for row in rows:
        if row["kind"] == "policies":
            for name, summary in row["policies"].items():
                values[row["kv_budget"], name].append(summary)
    names = ("fmm", "fmm_history", "churn_per_event", "churn_per_step", "lir", "promotions")
    out = []
    for (share, name), summaries in sorted(values.items(), key=lambda item: -item[0][0]):
        line: dict[str, Any] = {"kv_budget": share, "policy": name, "texts": len(summaries)}
        for quantity in names:
            known = [float(summary[quantity]) for summary in summaries if summary[quantity] is not None]
            line[quantity] = estimate(known).to_dict() if known else None
        shares = [summary["mass_share_history"] for summary in summaries if summary["mass_share_history"]]
        line["mass_share_history"] = (
            {tier: sum(s[tier] for s in shares) / len(shares) for tier in ("full", "quant", "evicted")}
            if shares
            else None
        )
        out.append(line)
    return out


def promotion_table(rows: Iterable[Row]) -> list[dict[str, Any]]:
    """The paired promotion experiment over texts, at each budget."""
    cells: dict[float, list[Row]] = defaultdict(list)
    for row in rows:
        if row["kind"] == "policies" and row["promotion"] is not None:
            cells[row["kv_budget"]].append(row["promotion"])
    out = []
    for share in sorted(cells, reverse=True):
        found = cells[share]
        with_any = [entry for entry in found if entry["net_gain"]]
        fmm = [entry["fmm_on_minus_off"] for entry in found if entry["fmm_on_minus_off"] is not None]
        gains = [sum(entry["net_gain"]) / len(entry["net_gain"]) for entry in with_any]
        lift: Estimate | None = None
        if any(entry["stayed_wanted"] > 0 for entry in with_any):
            lift = paired_ratio([e["wanted"] for e in with_any], [e["stayed_wanted"] for e in with_any])
        out.append(
            {
                "kv_budget": share,
                "texts": len(found),
                "promotions": sum(entry["promotions"] for entry in found),
                "net_gain": estimate(gains).to_dict() if gains else None,
                "fmm_on_minus_off": estimate(fmm).to_dict() if fmm else None,
                "lift": None if lift is None else lift.to_dict(),
                "paper_lift": paper.FOLLOW_UP["promotion_lift"],
            }
        )
    return out


def _flat(groups: Mapping[Any, Sequence[Row]]) -> list[Row]:
    return [row for cells in groups.values() for row in cells]


def _place(item: tuple[str, Sequence[Row]]) -> tuple[bool, str, float, str]:
    """FullKV first, then by system, large budgets first; what is matched to a system stands beside it."""
    label, (first, *_) = item
    return not first["full"], first.get("match_to") or first["system"], -(first["kv_budget"] or 0.0), label


def _values(cells: Sequence[Row], figure: str, span: str, default: float | None) -> tuple[float, list[float]]:
    found = [cell["scores"][span].get(figure) for cell in cells if cell["infeasible"] is None]
    values = [float(value) for value in found if value is not None]
    return (sum(values) / len(values) if values else (default or 0.0)), values


def _mean(cells: Sequence[Row], figure: str) -> float:
    return _values(cells, figure, MAIN, None)[0]


def _estimate(cells: Sequence[Row], figure: str) -> dict[str, Any] | None:
    values = _values(cells, figure, MAIN, None)[1]
    return estimate(values).to_dict() if values else None


def _layers(cells: Sequence[Row]) -> list[float]:
    """Mean output error of each layer over items."""
    found = [cell["output_error_layers"] for cell in cells if cell.get("output_error_layers")]
    return [sum(layer) / len(found) for layer in zip(*found, strict=True)]


def _paired(
    cells: Sequence[Row], full: Sequence[Row], figure: str, difference: Callable[..., Estimate] = paired
) -> dict[str, Any] | None:
    theirs = {cell["prompt_hash"]: float(cell["scores"][MAIN][figure]) for cell in full if cell["infeasible"] is None}
    shared = [cell for cell in cells if cell["prompt_hash"] in theirs]
    if not shared:
        return None
    ours = [float(cell["scores"][MAIN][figure]) for cell in shared]
    return difference(ours, [theirs[cell["prompt_hash"]] for cell in shared]).to_dict()


def _differences(cells: Iterable[Row], share: float, pair: tuple[str, str], figure: str) -> list[float]:
    """Per item: the first system's figure less the second's at the same budget."""
    values: dict[str, dict[str, float]] = {name: {} for name in pair}
    for cell in cells:
        if (
            cell["system"] in values
            and cell["kv_budget"] == share
            and not cell["parameters"]
            and not cell["infeasible"]
            and cell["scores"][MAIN].get(figure) is not None
        ):
            values[cell["system"]][cell["prompt_hash"]] = float(cell["scores"][MAIN][figure])
    ours, theirs = (values[name] for name in pair)
    return [ours[item] - theirs[item] for item in sorted(set(ours) & set(theirs))]


def _median(values: list[float]) -> float | None:
    return sorted(values)[len(values) // 2] if values else None
