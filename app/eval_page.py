"""The standalone HTML page of evaluations and a diagnosis. Knows tables and figures; measures nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from app.eval_lines import heading
from app.task_names import task_label
from app.texts import DEFAULT
from visuals.figures.pareto import ablation_figure, directions_figure, pareto_figure
from visuals.report import Report, Section, render


def page(answer: Mapping[str, Any], diagnosis: Mapping[str, Any] | None) -> str:
    """The standalone page of an evaluation's tables; `diagnosis` is what `qevict diagnose --json` printed."""
    score_columns = (
        ("label", "system"),
        ("share", "share of bytes"),
        ("n", "n"),
        ("score", "score"),
        ("score_minus_full", "score − FullKV"),
        ("nll", "NLL"),
        ("perplexity_minus_full", "perplexity − FullKV"),
        ("kl", "KL to FullKV"),
        ("output_error", "output error"),
        ("agreement", "agreement"),
        ("note", "note"),
    )
    columns: tuple[tuple[str, str], ...]
    sections = []
    if answer["pareto"]:
        sections.append(
            Section(
                "Running text: distance from FullKV against bytes",
                ("Teacher-forced on the text itself, the same tokens for every system. Bars are 95 % intervals.",),
                figure=pareto_figure(answer["pareto"]),
                key="KL(FullKV ‖ system) in nats, mean over tokens, then over texts; bytes are summed tensor sizes at "
                "the end, over FullKV's in the same dtype.",
            )
        )
    if answer["pareto_error"]:
        sections.append(
            Section(
                "Running text: error of attention outputs against bytes",
                ("The same tokens for every system, FullKV's outputs beside. Bars are 95 % intervals.",),
                figure=pareto_figure(answer["pareto_error"], figure="output_error"),
                key="‖o − o_full‖ / ‖o_full‖ in front of each layer's output projection, mean over heads, layers and "
                "tokens, then over texts; errors of lower layers are included.",
            )
        )
    groups: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for row in answer["scores"]:
        groups.setdefault((row["task"], row["length"], row["question"]), []).append(row)
    for (task, length, question), rows in groups.items():
        sections.append(
            Section(
                heading(task, length, question),
                columns=score_columns,
                rows=[
                    row if row["n"] else {**row, "note": f"infeasible; smallest share {row['smallest_share'] or 0:.1%}"}
                    for row in rows
                ],
                key="Intervals: percentile bootstrap over items, 95 %; differences are paired on the same items.",
            )
        )
    if answer["answers"]:
        columns = (
            ("task", "task"),
            ("length", "tokens"),
            ("label", "system"),
            ("share", "share of bytes"),
            ("n", "n"),
            ("score", "score"),
            ("score_minus_full", "score − FullKV"),
            ("truncated", "truncated"),
            ("degenerate", "degenerate"),
            ("note", "note"),
        )
        sections.append(Section("Published benchmarks, answered in free words", (), columns, _named(answer["answers"])))
    if answer["rivals"]:
        columns = (
            ("rival", "rival"),
            ("kv_budget", "budget"),
            ("tasks", "tasks"),
            ("items", "items"),
            ("score_difference", "score, ours − rival"),
            ("verdict_score", "ours scores higher"),
            ("kl_difference", "KL, ours − rival"),
            ("verdict_kl", "ours is nearer to FullKV"),
            ("error_difference", "output error, ours − rival"),
            ("verdict_error", "our outputs are nearer"),
        )
        sections.append(Section("QEvict against each evicting rival", columns=columns, rows=answer["rivals"]))
        if answer["variants"]:
            named = (("system", "variant"), *columns)
            title = "Variants of QEvict against each evicting rival"
            sections.append(Section(title, columns=named, rows=answer["variants"]))
    if answer["quantizers"]:
        columns = (
            ("rival", "quantizer"),
            ("share", "QEvict's bytes"),
            ("other_share", "the quantizer's bytes"),
            ("tasks", "tasks"),
            ("items", "items"),
            ("score_difference", "score, QEvict − quantizer"),
            ("verdict_score", "QEvict scores higher"),
            ("kl_difference", "KL, QEvict − quantizer"),
            ("verdict_kl", "QEvict is nearer to FullKV"),
            ("error_difference", "output error, QEvict − quantizer"),
            ("verdict_error", "QEvict's outputs are nearer"),
        )
        sections.append(Section("QEvict at each quantizer's bytes", columns=columns, rows=answer["quantizers"]))
    if answer["directions"]:
        columns = (
            ("claim", "claim"),
            ("kv_budget", "budget"),
            ("lower", "should be lower"),
            ("lower_mean", "its mean"),
            ("higher", "should be higher"),
            ("higher_mean", "its mean"),
            ("difference", "difference"),
            ("verdict", "verdict"),
        )
        sections.append(
            Section(
                "The article's directions",
                ("Policies on FullKV traces; the feedback of quantization on scores is not in these figures.",),
                columns,
                answer["directions"],
                directions_figure(answer["directions"]),
                "FMM: FullKV's attention of the next 32 tokens that falls on evicted windows, over all of it.",
            )
        )
    if answer["ablation"]:
        columns = (
            ("setting", "setting"),
            ("value", "value"),
            ("task", "task"),
            ("figure", "figure"),
            ("mean", "mean"),
            ("minus_article_choice", "− article's choice"),
            ("verdict", "verdict"),
            ("output_error", "output error"),
            ("output_error_verdict", "output error: verdict"),
            ("infeasible", "infeasible"),
        )
        for setting in dict.fromkeys(row["setting"] for row in answer["ablation"]):
            rows = [row for row in answer["ablation"] if row["setting"] == setting]
            sections.append(Section(f"Ablation: {setting}", (), columns, _named(rows), ablation_figure(rows)))
    if diagnosis is not None:
        columns = (
            ("system", "policy"),
            ("quantity", "figure"),
            ("measured", "measured"),
            ("paper", "article"),
            ("unit", "unit"),
            ("source", "source"),
        )
        for name in ("table14", "table15", "table16", "table18", "figure1"):
            found = diagnosis.get(name)
            if found:
                sections.append(Section(f"{name}: measured and printed", diagnosis["differs"], columns, found))
    facts = [("model", str(answer["model"]))]
    facts += [(name, str(value)) for name, value in answer["machine"].items() if value is not None]
    return render(Report(f"QEvict Lab: {answer['suite']}", facts, sections, answer["left_out"]))


def _named(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Rows whose task has its name for a reader, and its raw one."""
    return [{**row, "task": task_label(str(row["task"]), DEFAULT)} for row in rows]
