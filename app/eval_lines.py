"""The tables of `qevict eval` as lines for a person. Knows rows; measures nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from app.task_names import task_label
from app.texts import DEFAULT


def heading(task: str, length: int, question: str) -> str:
    """Task, length, and where the question stands."""
    named = task_label(task, DEFAULT)
    if task == "book":
        return f"{named}, {length} tokens of prompt; score: the text's own next token is the likeliest"
    place = "asked after compression" if question == "after" else "asked inside the prompt"
    return f"{named}, {length} tokens, {place}"


def lines(answer: Mapping[str, Any]) -> list[str]:
    """The tables for a person."""
    out = [
        f"{answer['model']}, weights {answer['weights']}, full-precision tokens stored as {answer['kv_dtype']}; "
        f"{answer['cells']} cells, {answer['ran_now']} of them now in {answer['seconds'] / 60:.1f} min"
    ]
    last = None
    for row in answer["scores"]:
        head = (row["task"], row["length"], row["question"])
        if head != last:
            last = head
            note = f"  [{row['note']}]" if row["note"] else ""
            out += ["", heading(*head) + note]
            out.append(
                f"  {'system':<34}{'bytes':>7}{'n':>4}  {'score':<22}{'NLL':<22}{'KL to FullKV':<24}"
                f"{'output error':<22}agreement"
            )
        if not row["n"]:
            least = row["smallest_share"]
            why = row["infeasible"] if least is None else f"infeasible; the smallest share is {least:.1%}"
            out.append(f"  {row['label']:<34}{why}")
            continue
        out.append(
            f"  {row['label']:<34}{row['share']:>7.1%}{row['n']:>4}  {_interval(row['score']):<22}"
            f"{_interval(row['nll']):<22}{_interval(row['kl']):<24}"
            f"{_interval(row.get('output_error')):<22}{_interval(row['agreement'])}"
        )
    for row in answer["answers"]:
        head = (row["task"], row["length"], row["question"])
        if head != last:
            last = head
            note = f"  [{row['note']}]" if row["note"] else ""
            out += ["", heading(*head) + note]
            out.append(f"  {'system':<34}{'bytes':>7}{'n':>4}  {'score':<22}{'less FullKV':<24}truncated, degenerate")
        if not row["n"]:
            out.append(f"  {row['label']:<34}{row['infeasible']}")
            continue
        less = _interval(row["score_minus_full"]) if row["score_minus_full"] else "-"
        out.append(
            f"  {row['label']:<34}{row['share']:>7.1%}{row['n']:>4}  {_interval(row['score']):<22}{less:<24}"
            f"{row['truncated']}, {row['degenerate']}"
        )
    if answer["rivals"]:
        out += [
            "",
            "QEvict less each evicting rival at the same bytes, paired (score: higher is better; KL, error: lower)",
        ]
        for row in answer["rivals"]:
            out.append(f"  {row['kv_budget']:.0%} {row['rival']:<20}{_three(row)}")
    if answer["variants"]:
        out += ["", "Variants of QEvict less each evicting rival at the same bytes, paired"]
        for row in answer["variants"]:
            out.append(f"  {row['kv_budget']:.0%} {row['system']:<16}{row['rival']:<20}{_three(row)}")
    if answer["quantizers"]:
        out += ["", "QEvict at each quantizer's bytes less the quantizer, paired"]
        for row in answer["quantizers"]:
            bytes_ = f"{row['share']:.1%} against {row['other_share']:.1%}"
            out.append(f"  {row['rival']:<10}{bytes_:<22}{_three(row)}")
    if answer["directions"]:
        out += ["", "The article's directions on FullKV traces, paired over texts"]
        for row in answer["directions"]:
            out.append(
                f"  {row['kv_budget']:.0%} {row['verdict']:<13}{row['claim']} ({row['quantity']}: "
                f"{row['lower']} {row['lower_mean']:.5f}, {row['higher']} {row['higher_mean']:.5f}; "
                f"difference {_interval(row['difference'], 5)}, n {row['difference']['n']})"
            )
    for row in answer["promotion"]:
        if row["net_gain"]:
            out.append(
                f"  {row['kv_budget']:.0%} promotions {row['promotions']} in {row['texts']} texts, net gain each "
                f"{_interval(row['net_gain'], 5)} of the row's next attention"
            )
    if answer["ablation"]:
        out += ["", "Ablation, each value against the article's choice, paired"]
        for row in answer["ablation"]:
            mean = "infeasible" if row["mean"] is None else _interval(row["mean"], 4)
            out.append(f"  {row['setting']} {row['value']!s:<12}{row['figure']} {mean:<30}{row['verdict']}")
            if row["output_error"]:
                error = _interval(row["output_error"], 4)
                out.append(f"  {'':<{len(row['setting']) + 13}}output error {error:<30}{row['output_error_verdict']}")
            if row["infeasible"]:
                out.append(f"    {row['infeasible']}")
    if answer["left_out"]:
        out += ["", "Left out"] + [f"  {line}" for line in answer["left_out"]]
    if answer.get("store"):
        out += ["", f"Cells are kept in {answer['store']}; qevict report makes a page of them."]
    return out


def _three(row: Mapping[str, Any]) -> str:
    """Differences of score, KL and output error with their verdicts."""
    parts = [
        f"{name} {_interval(row[f'{key}_difference']):<26}{row[f'verdict_{key}'] or '':<14}"
        for name, key in (("score", "score"), ("KL", "kl"), ("output error", "error"))
    ]
    return "".join(parts).rstrip()


def _interval(value: Mapping[str, Any] | None, digits: int = 3) -> str:
    if value is None:
        return "-"
    ends = "" if value["low"] is None else f" [{value['low']:.{digits}f}, {value['high']:.{digits}f}]"
    return f"{value['mean']:.{digits}f}{ends}"
