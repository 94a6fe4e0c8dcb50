"""The figures that result files allow: quality against bytes, the article's directions, ablations.

Every figure is drawn from rows that `qevict eval` made; none is filled in. Knows tables; measures nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from html import escape
from typing import Any

from app.analysis_card import Card, Say, counted
from app.analysis_results import Results
from app.compare_lines import system_label
from app.task_names import task_label
from visuals.figures.intervals import interval_figure
from visuals.figures.pareto import ablation_figure, pareto_figure
from visuals.figures.policies import shares_figure

Row = Mapping[str, Any]

MOST_TASKS = 12
POINT_COLUMNS = ("system", "budget", "share", "bytes")


def result_cards(results: Results, say: Say) -> list[Card]:
    """All cards of the tables; a table without rows gives none.

    Raises:
        KeyError, TypeError, ValueError: a row is not as the tables' own functions make it.
    """
    tables = results.tables
    return [
        *_quality(tables["scores"], say),
        *_differences("rivals", tables["rivals"], "rival", say),
        *_differences("matched", tables["quantizers"], "rival", say),
        *_directions(tables["directions"], say),
        *_policies(tables["policies"], say),
        *_promotion(tables["promotion"], say),
        *_ablations(tables["ablation"], say),
    ]


# ---- quality against bytes --------------------------------------------------------------------------------


def _quality(scores: Sequence[Row], say: Say) -> list[Card]:
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in scores:
        groups.setdefault((row["task"], row["length"], row["question"], row.get("file")), []).append(row)
    told = Counter((task, length, question) for task, length, question, _ in groups)
    cards: list[Card] = []
    # What compares most comes first, whichever file it is in.
    for (task, length, question, file), rows in sorted(groups.items(), key=lambda group: -_systems(group[1])):
        done = [row for row in rows if row["n"] and row.get("note", "") == ""]
        if _systems(done) < 2 or _ablated(done):
            continue  # an ablation of one system, or a task that this model can't do
        part = f"{file}-{task}-{length}-{question}"
        values = {"task": task_label(str(task), say.lang), "length": length}
        if told[task, length, question] > 1:
            values["task"] += f" · {file}"  # the same task in two files
        if task == "book":
            cards.append(_points("pareto", "kl", rows, part, values, say))
            if any(row.get("output_error") for row in done):
                cards.append(_points("error", "output_error", rows, part, values, say))
        elif len(cards) < MOST_TASKS:
            asked = say("after" if question == "after" else "inside")
            values |= {"asked": asked, "score": done[0]["score_name"]}
            cards.append(_points("task", "score", rows, part, values, say))
    return cards


def _systems(rows: Sequence[Row]) -> int:
    return len({row["system"] for row in rows})


def _ablated(rows: Sequence[Row]) -> bool:
    """Whether all but FullKV is one system under other settings at one budget: a curve of them would say nothing."""
    others = [(row["system"], row["kv_budget"]) for row in rows if row["system"] != "fullkv"]
    return len({system for system, _ in others}) == 1 and len(set(others)) < len(others)


def _points(name: str, figure: str, rows: Sequence[Row], part: str, values: Row, say: Say) -> Card:
    done = [row for row in rows if row["n"] and row.get(figure) is not None]
    points = [
        {
            "label": escape(system_label(str(row["label"]), say.lang)),
            "system": escape(str(row["system"])),
            "name": escape(system_label(str(row["system"]), say.lang)),
            "share": float(row["share"]),
            "value": float(row[figure]["mean"]),
            "low": row[figure]["low"],
            "high": row[figure]["high"],
            "n": int(row["n"]),
        }
        for row in done
    ]
    second = "score_minus_full" if figure == "score" else "nll_minus_full"
    lines = [
        {
            "system": row["label"],
            "budget": row["kv_budget"],
            "share": row.get("share"),
            "bytes": row.get("bytes"),
            "value": row.get(figure),
            second: row.get(second),
            "note": row.get("note") or row.get("infeasible") or "",
        }
        for row in rows
    ]
    return Card(
        name,
        "quality",
        partial(pareto_figure, points, figure=figure, words=say.figure("pareto")),
        (*POINT_COLUMNS, "value", second, "note"),
        lines,
        "engine/evaluation/forcing.py",
        values,
        counted([point["n"] for point in points], say),
        part,
    )


def _differences(name: str, rows: Sequence[Row], key: str, say: Say) -> list[Card]:
    """Paired differences of QEvict less others: KL on running text, the macro score, the error of outputs."""
    kinds = (("kl", "kl_difference", "verdict_kl"), ("score", "score_difference", "verdict_score"))
    cards = []
    for kind, figure, verdict in (*kinds, ("error", "error_difference", "verdict_error")):
        known = [row for row in rows if row.get(figure)]
        if not known:
            continue
        points = [
            {
                "label": f"{system_label(str(row[key]), say.lang)}{_at(row)}",
                "value": row[figure]["mean"],
                "low": row[figure]["low"],
                "high": row[figure]["high"],
                "n": row[figure]["n"],
                "kind": row[verdict],
            }
            for row in known
        ]
        columns = ("rival", "budget", "difference", "verdict")
        lines = [
            {
                "rival": row[key],
                "budget": row.get("kv_budget", row.get("share")),
                "difference": row[figure],
                "verdict": row[verdict],
            }
            for row in known
        ]
        cards.append(
            Card(
                name,
                "quality",
                partial(
                    interval_figure,
                    points,
                    title=say(f"{name}_title", figure=say(f"figure_{kind}")),
                    axis=say(f"difference_{kind}"),
                    zero=True,
                    words=say.figure("intervals"),
                ),
                columns,
                lines,
                "engine/evaluation/pairings.py" if name == "matched" else "engine/evaluation/tables.py",
                {"figure": say(f"figure_{kind}")},
                counted([point["n"] for point in points], say),
                kind,
            )
        )
    return cards


def _at(row: Row) -> str:
    share = row.get("kv_budget", row.get("share"))
    return "" if share is None else f", {share:.0%}"


# ---- the article's directions -----------------------------------------------------------------------------


def _directions(rows: Sequence[Row], say: Say) -> list[Card]:
    """One card for missed mass and one for churn: their differences are of other sizes."""
    cards = []
    for quantity in dict.fromkeys(str(row["quantity"]) for row in rows):
        mine = [row for row in rows if row["quantity"] == quantity]
        points = [
            {
                "label": f"{row['lower']} − {row['higher']}, {row['kv_budget']:.0%}",
                "value": row["difference"]["mean"],
                "low": row["difference"]["low"],
                "high": row["difference"]["high"],
                "n": row["difference"]["n"],
                "kind": row["verdict"],
            }
            for row in mine
        ]
        shown = say("quantity_churn" if quantity.startswith("churn") else "quantity_fmm")
        lines = [{**row, "budget": row["kv_budget"]} for row in mine]
        cards.append(
            Card(
                "directions",
                "article",
                partial(
                    interval_figure,
                    points,
                    title=say("directions_title", quantity=shown),
                    axis=say("directions_axis"),
                    zero=True,
                    words=say.figure("intervals"),
                ),
                ("claim", "budget", "lower_mean", "higher_mean", "difference", "verdict"),
                lines,
                "engine/evaluation/tables.py",
                {"quantity": shown},
                counted([point["n"] for point in points], say),
                quantity,
            )
        )
    return cards


POLICIES = ("R1", "R2", "R3", "R4", "R3 FP-tier-only", "INT4", "promotion off", "random", "oracle future-H")


def _policies(rows: Sequence[Row], say: Say) -> list[Card]:
    """Missed mass and tiers' shares of each policy, at each budget, the article's figure beside it."""
    from engine.evaluation import paper

    cards = []
    for share in sorted({float(row["kv_budget"]) for row in rows}, reverse=True):
        mine = [row for row in rows if row["kv_budget"] == share and row.get("fmm")]
        if not mine:
            continue
        budget = f"{share:.0%}"
        points = [
            {
                "label": row["policy"],
                "value": row["fmm"]["mean"],
                "low": row["fmm"]["low"],
                "high": row["fmm"]["high"],
                "n": row["fmm"]["n"],
                "paper": _share_of(paper.published("Table 14", str(row["policy"]), "fmm")),
            }
            for row in mine
        ]
        lines = [
            {**row, "fmm_paper": point["paper"], "churn": row.get("churn_per_event")}
            for row, point in zip(mine, points, strict=True)
        ]
        cards.append(
            Card(
                "policies",
                "article",
                partial(
                    interval_figure,
                    points,
                    title=say("policies_title", budget=budget),
                    axis=say("policies_axis"),
                    tickformat=".0%",
                    words=say.figure("intervals"),
                ),
                ("policy", "fmm", "fmm_paper", "fmm_history", "churn", "churn_per_step", "lir", "promotions"),
                lines,
                "engine/metrics/mass.py",
                {"budget": budget},
                counted([point["n"] for point in points], say),
                budget.rstrip("%"),
            )
        )
        shares = [
            {"label": f"{row['policy']} · {say('measured')}", **row["mass_share_history"]}
            for row in mine
            if row.get("mass_share_history") and row["policy"] in POLICIES
        ]
        if shares:
            cards.append(_shares(shares, budget, counted([row["texts"] for row in mine], say), say))
    return cards


def _shares(measured: Sequence[Row], budget: str, note: str, say: Say) -> Card:
    rows = [*measured, *paper_shares(say)]
    return Card(
        "shares",
        "article",
        partial(shares_figure, rows, words=say.figure("policies")),
        ("label", "full", "quant", "evicted"),
        rows,
        "engine/metrics/mass.py",
        {"budget": budget},
        note,
        budget.rstrip("%"),
    )


def paper_shares(say: Say) -> list[dict[str, Any]]:
    """Figure 1's shares as printed, labelled as the article's."""
    from engine.evaluation import paper

    return [
        {
            "label": f"{system} · {say('article')}",
            **{tier: _share_of(paper.published("Figure 1", system, tier)) for tier in ("full", "quant", "evicted")},
        }
        for system in ("R2", "R3")
    ]


def _share_of(percent: float | None) -> float | None:
    return None if percent is None else percent / 100.0


def _promotion(rows: Sequence[Row], say: Say) -> list[Card]:
    known = [row for row in rows if row.get("fmm_on_minus_off")]
    if not known:
        return []
    points = [
        {
            "label": f"{say('promotion_fmm')}, {row['kv_budget']:.0%}",
            "value": row["fmm_on_minus_off"]["mean"],
            "low": row["fmm_on_minus_off"]["low"],
            "high": row["fmm_on_minus_off"]["high"],
            "n": row["fmm_on_minus_off"]["n"],
        }
        for row in known
    ]
    points += [
        {
            "label": f"{say('promotion_gain')}, {row['kv_budget']:.0%}",
            "value": row["net_gain"]["mean"],
            "low": row["net_gain"]["low"],
            "high": row["net_gain"]["high"],
            "n": row["net_gain"]["n"],
        }
        for row in known
        if row.get("net_gain")
    ]
    return [
        Card(
            "promotion",
            "article",
            partial(
                interval_figure,
                points,
                title=say("promotion_title"),
                axis=say("promotion_axis"),
                zero=True,
                words=say.figure("intervals"),
            ),
            ("budget", "texts", "promotions", "net_gain", "fmm_on_minus_off", "lift", "paper_lift"),
            [{**row, "budget": row["kv_budget"]} for row in known],
            "engine/evaluation/promotion.py",
            {},
            counted([point["n"] for point in points], say),
        )
    ]


# ---- ablations --------------------------------------------------------------------------------------------


def _ablations(rows: Sequence[Row], say: Say) -> list[Card]:
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["setting"], row["task"], row["length"], row.get("file")), []).append(row)
    cards = []
    for (setting, task, length, file), mine in groups.items():
        known = [row for row in mine if row.get("mean")]
        if len(known) < 2:
            continue
        drawn = [{**row, "setting": escape(str(setting))} for row in mine]
        values = {"setting": setting, "task": task_label(str(task), say.lang), "length": length}
        part = f"{file}-{setting}-{task}"
        columns = ("value", "mean", "minus_article_choice", "verdict", "output_error", "infeasible")
        cards.append(
            Card(
                "ablation",
                "ablations",
                partial(ablation_figure, drawn, words=say.figure("pareto")),
                columns,
                [{**row, "value": str(row["value"])} for row in mine],
                "engine/evaluation/tables.py",
                values,
                counted([row["mean"]["n"] for row in known], say),
                part,
            )
        )
    return cards
