"""The figures of the Analysis tab: intervals with their n, the article's figures apart, and a code beside colour."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from engine.metrics.lir import ReturnStats
from engine.trace import LateMetrics
from visuals.figures.intervals import interval_figure
from visuals.figures.lir import time_to_return_figure
from visuals.figures.pareto import pareto_figure
from visuals.figures.policies import policy_styles, shares_figure, steps_figure
from visuals.figures.qsa import agreement_figure, heat_figure
from visuals.figures.regret import most_regretted, regret_figure
from visuals.palette import PALETTES, THEMES, Theme


def point(label: str, value: float | None, **more: Any) -> dict[str, Any]:
    low, high = (None, None) if value is None else (value - 1, value + 2)
    return {"label": label, "value": value, "low": low, "high": high, "n": 20, "kind": "", "paper": None, **more}


@pytest.mark.parametrize("theme", THEMES)
def test_points_stand_with_interval_n_and_the_articles_figure(theme: Theme) -> None:
    points = [
        point("R3 <b>", 3.0, paper=46.0),
        point("R4", None, paper=47.0, n=None),
        point("R1", 5.0, low=None, high=None),
    ]
    figure = interval_figure(points, title="t", axis="x", theme=theme, words={"count": "N={n}"})
    measured, article = figure.data
    assert list(measured.y) == ["R3 &lt;b&gt; · N=20", "R1 · N=20"]
    assert list(measured.error_x.array) == [2.0, None] and list(measured.error_x.arrayminus) == [1.0, None]
    assert list(article.x) == [46.0, 47.0] and article.marker.symbol == "diamond-open"
    assert measured.marker.symbol != article.marker.symbol
    assert list(figure.layout.yaxis.categoryarray)[::-1][0].startswith("R3")
    assert figure.layout.paper_bgcolor == PALETTES[theme].paper
    json.loads(figure.to_json(), parse_constant=lambda text: pytest.fail(f"{text} in JSON"))


def test_verdicts_differ_by_symbol_and_differences_have_a_zero() -> None:
    kinds = ("holds", "CONTRADICTED", "not settled", "too few items")
    figure = interval_figure([point(kind, 1.0, kind=kind) for kind in kinds], title="t", axis="x", zero=True)
    assert len({trace.marker.symbol for trace in figure.data}) == 4
    assert [shape.x0 for shape in figure.layout.shapes] == [0.0]
    assert not interval_figure([], title="t", axis="x").data


def test_every_policys_curve_has_its_own_look_and_cut_horizons_are_hollow() -> None:
    run = {"tokens": [10, 18], "all": [0.1, 0.2], "history": [0.3, 0.4], "steps": [32, 8]}
    figure = steps_figure({"R3": run, "R1": run, "none": {"tokens": [], "all": [], "history": [], "steps": []}})
    assert [trace.name for trace in figure.data] == ["R3", "R1"]
    assert list(figure.data[0].marker.symbol) == ["circle", "circle-open"]
    assert list(steps_figure({"R3": run}, scope="history").data[0].y) == [0.3, 0.4]
    styles = policy_styles(PALETTES["light"])
    assert len({(dash, marker) for _, dash, marker in styles}) == len(styles)


def test_shares_are_stacked_hatched_and_written_out() -> None:
    rows = [
        {"label": "R3", "full": 0.2, "quant": 0.42, "evicted": 0.38},
        {"label": "R2", "full": 0.3, "quant": None, "evicted": 0.65},
    ]
    figure = shares_figure(rows)
    assert [list(bar.x) for bar in figure.data] == [[0.2, 0.3], [0.42, None], [0.38, 0.65]]
    assert len({bar.marker.pattern.shape for bar in figure.data}) == 3
    assert [note.text for note in figure.layout.annotations] == ["20%", "42%", "38%", "30%", "65%"]
    assert figure.layout.annotations[1].x == pytest.approx(0.41)


def test_regret_adds_up_over_events_and_rows() -> None:
    late = [
        LateMetrics(0, 0.1, 0.1, 0.1, (0, 0, 0), None, 32, [(0, 5, 0.2), (1, 5, 0.1), (0, 7, 0.05)]),
        LateMetrics(1, 0.1, 0.1, 0.1, (0, 0, 0), None, 32, [(0, 5, 0.1)]),
    ]
    worst = most_regretted(late, rows=2)
    assert [(one.window, one.rows, one.events) for one in worst] == [(5, 2, 2), (7, 1, 1)]
    assert worst[0].mass == pytest.approx(0.2)
    assert list(regret_figure(worst, 2).data[0].x) == pytest.approx([0.2, 0.025])
    assert not regret_figure([], 2).data


def test_heads_write_their_lowest_cells() -> None:
    values = np.array([[0.99, 0.5, np.nan], [0.97, 0.98, 0.96], [0.95, 0.94, 0.93]])
    (heat,) = heat_figure(values).data
    written = [text for row in heat.text for text in row if text]
    assert written == ["0.500", "0.960", "0.950", "0.940", "0.930"]
    assert heat.z[0][2] is None
    assert not heat_figure(np.full((2, 2), np.nan)).data
    series = agreement_figure([0, 1], {"qsa": np.array([1.0, 0.9]), "ratio": np.array([np.nan, np.nan])})
    assert len(series.data) == 1


def test_absences_of_several_policies_share_bins_and_differ_by_hatching() -> None:
    def stats(*events: int) -> ReturnStats:
        return ReturnStats(3, 9, len(events), np.array(events), np.array(events) * 8)

    figure = time_to_return_figure({"R3": stats(3, 4), "oracle": stats(3, 90)})
    assert figure.data[0].xbins == figure.data[1].xbins and figure.data[0].xbins.size >= 2
    assert figure.data[0].marker.pattern.shape != figure.data[1].marker.pattern.shape
    assert [note.text.split(":")[0] for note in figure.layout.annotations] == ["R3", "oracle"]


def test_qevict_keeps_its_colour_wherever_it_stands() -> None:
    points = [
        {"label": name, "system": name, "share": 0.1 * at, "value": 1.0, "low": None, "high": None, "n": 1}
        for at, name in enumerate(("fullkv", "h2o", "qevict"), 1)
    ]
    colours = {trace.name: trace.marker.color for trace in pareto_figure(points).data}
    assert colours["qevict"] == PALETTES["light"].quant
    assert PALETTES["light"].quant not in (colours["fullkv"], colours["h2o"])
