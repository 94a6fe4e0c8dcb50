"""The Pareto figure, the other evaluation figures, and the standalone page."""

from __future__ import annotations

from typing import Any

import pytest

from visuals.figures.pareto import ablation_figure, directions_figure, front, pareto_figure
from visuals.report import Report, Section, number, render


def point(system: str, share: float, value: float, **more: Any) -> dict[str, Any]:
    plain = {"label": f"{system} {share}", "system": system, "share": share, "value": value, "n": 3}
    return {**plain, "low": value - 0.01, "high": value + 0.02, **more}


def test_the_front_holds_what_nothing_beats() -> None:
    points = [point("a", 0.2, 0.5), point("b", 0.1, 0.6), point("c", 0.2, 0.7), point("d", 0.4, 0.1)]
    assert front(points) == [1, 0, 3]
    assert front(points, lower_is_better=False) == [1, 2]


def test_a_pareto_figure_has_one_trace_per_system_and_its_intervals() -> None:
    figure = pareto_figure([point("a", 0.2, 0.5), point("a", 0.1, 0.6), point("b", 0.3, 0.4, low=None, high=None)])
    assert [trace.name for trace in figure.data] == ["a", "b", "Pareto front"]
    assert list(figure.data[0].x) == [10.0, 20.0]
    assert list(figure.data[0].error_y.array) == pytest.approx([0.02, 0.02])
    assert list(figure.data[1].error_y.array) == [0.0]
    assert not pareto_figure([]).data and pareto_figure([]).layout.annotations


def test_ablation_and_direction_figures() -> None:
    mean = {"mean": 0.2, "low": 0.1, "high": 0.4}
    rows = [{"setting": "q", "figure": "kl", "value": v, "mean": mean if v != 0.9 else None} for v in (0.1, 0.7, 0.9)]
    assert list(ablation_figure(rows).data[0].x) == ["0.1", "0.7"]
    claims = [
        {"claim": f"claim {verdict}", "kv_budget": 0.2, "verdict": verdict, "difference": mean}
        for verdict in ("holds", "CONTRADICTED", "not settled")
    ]
    assert [trace.name for trace in directions_figure(claims).data] == ["holds", "CONTRADICTED", "not settled"]


def test_the_page_stands_alone_and_escapes_what_it_shows() -> None:
    rows = [{"a": "<script>alert(1)</script>", "b": {"mean": 0.5, "low": 0.4, "high": 0.6}, "c": "CONTRADICTED"}]
    section = Section("Title <b>", ("text",), (("a", "A"), ("b", "B"), ("c", "C")), rows, pareto_figure([]), "how")
    page = render(Report("Report", [("model", "tiny & small")], [section], ["speed"]))
    assert "<script>alert" not in page and "&lt;script&gt;alert(1)" in page and "tiny &amp; small" in page
    assert "0.500 [0.400, 0.600]" in page and "class='bad'>CONTRADICTED" in page and "speed" in page
    head = page[: page.index("</style>")]
    assert "http://" not in head and "https://" not in head and 'src="http' not in page and "<link" not in page
    plain = render(Report("No figures", sections=[Section("t")]))
    assert len(plain) < 5000


@pytest.mark.parametrize(
    ("value", "shown"),
    [(None, "–"), (True, "yes"), (0.0, "0.000"), (0.00012, "0.00012"), (3, "3"), ({"mean": 1.0, "low": None}, "1.000")],
)
def test_numbers(value: object, shown: str) -> None:
    assert number(value) == shown


def test_a_legend_of_many_systems_does_not_take_the_plots_room() -> None:
    def height(systems: int) -> int | None:
        points = [
            {"label": f"s{i}", "system": f"s{i}", "share": 0.2, "value": 0.1 * i, "low": None, "high": None, "n": 20}
            for i in range(systems)
        ]
        found: int | None = pareto_figure(points).layout.height
        return found

    assert height(3) is None
    six, sixteen = height(6), height(16)
    assert six is not None and sixteen is not None and sixteen - six == 5 * 21
