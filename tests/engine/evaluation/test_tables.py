"""Tables from hand-made rows: intervals are paired, floors and contradictions are said."""

from __future__ import annotations

import math
from typing import Any

import pytest

from engine.evaluation.items import MAIN
from engine.evaluation.pairings import matched_differences
from engine.evaluation.statistics import stratified
from engine.evaluation.tables import (
    ablation_table,
    direction_table,
    pareto_points,
    policy_table,
    promotion_table,
    rival_differences,
    score_table,
)


def row(
    system: str, index: int, value: float, *, task: str = "niah1_raw", share: float | None = 0.2, **more: Any
) -> dict[str, Any]:
    label = system if share is None else f"{system} {share:.0%}"
    figures = {"nll": 1.0 - value, "exact": bool(value), "top1": value, "kl": 1.0 - value, "agreement": value}
    figures["output_error"] = (1.0 - value) / 2
    return {
        "kind": "item", "task": task, "length": 512, "question": "after", "index": index, "prompt_hash": str(index),
        "system": system, "kv_budget": share, "parameters": {}, "label": label, "full": system == "fullkv",
        "scores": {MAIN: figures | {"choice": None}}, "bytes": 100, "share": share or 1.0, "ms_per_token": 2.0,
        "backend": "", "infeasible": None, "smallest_share": None,
    } | more  # fmt: skip


def items(system: str, values: list[float], **more: Any) -> list[dict[str, Any]]:
    return [row(system, index, value, **more) for index, value in enumerate(values)]


def test_fullkv_comes_first_and_differences_are_paired_with_it() -> None:
    rows = items("h2o", [0, 0, 1, 1]) + items("fullkv", [1, 1, 1, 1], share=None)
    full, h2o = score_table(rows)
    assert full["system"] == "fullkv" and full["score"]["mean"] == 1.0 and full["able"] is True
    assert h2o["score"]["mean"] == 0.5 and h2o["score_minus_full"]["mean"] == -0.5 and h2o["n"] == 4
    assert h2o["nll_minus_full"]["mean"] == 0.5
    assert full["output_error"]["mean"] == 0.0 and h2o["output_error"]["mean"] == 0.25
    # FullKV's NLLs are 0 and H2O's 1, 1, 0, 0: perplexities 1 and e^0.5.
    assert h2o["perplexity_minus_full"]["mean"] == pytest.approx(math.exp(0.5) - 1.0)
    assert h2o["perplexity_minus_full"]["low"] < 0.1 and h2o["perplexity_minus_full"]["high"] > 1.0


def test_a_task_below_the_floor_is_labelled_and_compared_nowhere() -> None:
    rows = items("fullkv", [0.0] * 20, share=None) + items("qevict", [0.0] * 20) + items("h2o", [1.0] * 20)
    assert {line["note"] for line in score_table(rows)} == {"this model cannot do this task"}
    assert rival_differences(rows) == []
    few = items("fullkv", [0.0] * 3, share=None)
    assert score_table(few)[0]["able"] is None and score_table(few)[0]["note"] == ""
    # Five choices: 0.3 is above the floor and below twice chance.
    labels = [row("fullkv", i, 0.0, task="icl_label5", share=None) for i in range(20)]
    for number, entry in enumerate(labels):
        entry["scores"][MAIN]["choice"] = number < 6
    assert score_table(labels)[0]["able"] is False


def test_an_infeasible_cell_names_the_smallest_budget() -> None:
    rows = [*items("fullkv", [1.0], share=None), row("qevict", 0, 0, infeasible="too small", smallest_share=0.08)]
    line = score_table(rows)[1]
    assert (line["n"], line["infeasible"], line["smallest_share"]) == (0, "too small", 0.08)


def test_a_variant_is_compared_with_the_rivals_and_not_mixed_with_the_articles_settings() -> None:
    full = items("fullkv", [1.0] * 12, share=None)
    rows = full + items("qevict", [0.0] * 12) + items("qevict-recent", [1.0] * 12) + items("h2o", [0.0] * 12)
    (plain,), (variant,) = rival_differences(rows), rival_differences(rows, "qevict-recent")
    assert (plain["system"], plain["score_difference"]["mean"]) == ("qevict", 0.0)
    assert (variant["system"], variant["rival"], variant["score_difference"]["mean"]) == ("qevict-recent", "h2o", 1.0)
    assert rival_differences(rows, "qevict-decayed") == []


def test_rivals_are_compared_item_by_item_and_contradictions_are_named() -> None:
    full = items("fullkv", [1.0] * 12, share=None)
    ours, theirs = items("qevict", [1.0] * 10 + [0.0] * 2), items("h2o", [0.0] * 10 + [0.0] * 2)
    (found,) = rival_differences(full + ours + theirs)
    assert found["score_difference"]["mean"] == pytest.approx(10 / 12) and found["verdict_score"] == "holds"
    swapped = [entry | {"system": {"qevict": "h2o", "h2o": "qevict"}[entry["system"]]} for entry in ours + theirs]
    assert rival_differences(full + swapped)[0]["verdict_score"] == "CONTRADICTED"
    books = items("fullkv", [1.0] * 9, share=None, task="book") + items("qevict", [0.5] * 9, task="book")
    (book,) = rival_differences(books + items("h2o", [0.25] * 9, task="book"))
    assert book["kl_difference"]["mean"] == pytest.approx(-0.25) and book["verdict_kl"] == "holds"


def test_rows_without_an_output_error_have_none_in_the_tables() -> None:
    rows = items("fullkv", [1.0] * 9, share=None, task="book") + items("qevict", [0.5] * 9, task="book")
    rows += items("h2o", [0.25] * 9, task="book")
    (whole,) = rival_differences(rows)
    assert whole["error_difference"]["mean"] == pytest.approx(-0.125) and whole["verdict_error"] == "holds"
    for entry in rows:
        del entry["scores"][MAIN]["output_error"]
    assert {line["output_error"] for line in score_table(rows)} == {None}
    (found,) = rival_differences(rows)
    assert found["error_difference"] is None and found["verdict_error"] is None and found["verdict_kl"] == "holds"
    assert pareto_points(score_table(rows), figure="output_error") == []


def test_qevict_is_compared_with_a_quantizer_at_its_bytes() -> None:
    rows = items("fullkv", [1.0] * 8, share=None) + items("kivi-2", [0.0] * 8, share=None)
    rows += items("qevict", [1.0] * 8, share=None, label="qevict at kivi-2's bytes", match_to="kivi-2")
    rows += items("qevict", [0.0] * 8)
    for task_rows, value in (("kivi-2", 0.2), ("qevict", 0.6)):
        match = {"match_to": "kivi-2", "label": "matched"} if task_rows == "qevict" else {}
        rows += items(task_rows, [value] * 8, share=None, task="book", **match)
    for entry in rows:
        entry["share"] = 0.25 if entry["system"] == "kivi-2" else 0.24 if entry.get("match_to") else entry["share"]
    (found,) = matched_differences(rows)
    assert (found["rival"], found["tasks"], found["items"]) == ("kivi-2", 1, 16)
    assert found["share"] == pytest.approx(0.24) and found["other_share"] == pytest.approx(0.25)
    assert found["score_difference"]["mean"] == 1.0 and found["verdict_score"] == "holds"
    assert found["kl_difference"]["mean"] == pytest.approx(-0.4) and found["verdict_kl"] == "holds"
    assert found["error_difference"]["mean"] == pytest.approx(-0.2) and found["verdict_error"] == "holds"
    labels = [line["label"] for line in score_table(rows) if line["task"] == "niah1_raw"]
    assert labels == ["fullkv", "kivi-2", "qevict at kivi-2's bytes", "qevict 20%"]
    assert matched_differences(items("qevict", [1.0] * 8)) == []


def test_a_macro_average_weighs_tasks_alike() -> None:
    assert stratified([[1.0] * 10, [0.0, 0.0]]).mean == 0.5
    with pytest.raises(ValueError, match="at least one"):
        stratified([[1.0], []])


def policies(r3: float, r1: float, index: int) -> dict[str, Any]:
    def summary(fmm: float) -> dict[str, Any]:
        return {
            "fmm": fmm, "fmm_history": fmm, "churn_per_event": 0.1, "churn_per_step": 0.1, "lir": 0.0, "promotions": 1,
            "mass_share_history": {"full": 0.5, "quant": 0.3, "evicted": 0.2},
        }  # fmt: skip

    found = {"promotions": 2, "net_gain": [0.1, 0.3], "wanted": 0.6, "stayed_wanted": 0.3}
    return {
        "kind": "policies", "kv_budget": 0.2, "index": index, "policies": {"R3": summary(r3), "R1": summary(r1)},
        "promotion": found | {"fmm_on_minus_off": -0.01, "full_on_minus_off": 0.02},
    }  # fmt: skip


def test_directions_hold_are_contradicted_or_stay_open() -> None:
    def verdict(pairs: list[tuple[float, float]]) -> str:
        rows = [policies(a, b, i) for i, (a, b) in enumerate(pairs)]
        return next(line["verdict"] for line in direction_table(rows) if line["claim"] == "R3 misses less than R1")

    assert verdict([(0.2, 0.3), (0.1, 0.2), (0.2, 0.4)] * 3) == "holds"
    assert verdict([(0.3, 0.2), (0.2, 0.1), (0.4, 0.2)] * 3) == "CONTRADICTED"
    assert verdict([(0.3, 0.2), (0.1, 0.2)] * 4) == "not settled"
    assert verdict([(0.2, 0.3)] * 7) == "too few items"


def test_policy_and_promotion_tables() -> None:
    rows = [policies(0.2, 0.3, 0), policies(0.4, 0.5, 1)]
    table = {line["policy"]: line for line in policy_table(rows)}
    assert table["R3"]["fmm"]["mean"] == pytest.approx(0.3) and table["R3"]["texts"] == 2
    (promotion,) = promotion_table(rows)
    assert promotion["promotions"] == 4 and promotion["net_gain"]["mean"] == pytest.approx(0.2)
    assert promotion["lift"]["mean"] == pytest.approx(2.0) and promotion["paper_lift"] == 2.34


def test_an_ablation_is_paired_with_the_articles_choice() -> None:
    rows = []
    for value, kl in ((2, 0.2), (4, 0.1)):
        for index in range(6):
            entry = row("qevict", index, 0.0, task="book", parameters={"bits": value})
            entry["scores"][MAIN]["kl"] = kl + index
            rows.append(entry)
    two, four = ablation_table(rows, "bits")
    assert two["verdict"] == "article's choice" and four["verdict"] == "better than the article's choice"
    assert four["minus_article_choice"]["mean"] == pytest.approx(-0.1)
    assert four["output_error"]["mean"] == 0.5 and four["output_error_verdict"] == "no difference settled"
    # The same values at another budget are lines of their own.
    more = [entry | {"kv_budget": 0.1} for entry in rows]
    assert [line["kv_budget"] for line in ablation_table(rows + more, "bits")] == [0.2, 0.2, 0.1, 0.1]
    assert ablation_table(rows + more, "bits")[1] == four


def test_points_of_a_plot_leave_impossible_tasks_out() -> None:
    table = score_table(items("fullkv", [1.0] * 3, share=None, task="book") + items("h2o", [0.5] * 3, task="book"))
    assert [point["system"] for point in pareto_points(table)] == ["fullkv", "h2o"]
    assert pareto_points(table, task="niah1_raw") == []
