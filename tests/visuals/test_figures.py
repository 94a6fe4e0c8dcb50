"""The plotly builders: what they draw, that it is plain JSON, and that themes and words are obeyed."""

from __future__ import annotations

import json
from collections.abc import Callable

import numpy as np
import plotly.graph_objects as go
import pytest

from engine.metrics.churn import churn_series
from engine.metrics.history import count_transitions, read_history
from engine.metrics.lir import ReturnStats
from engine.metrics.memory import memory_series
from engine.metrics.qsa import Agreement, agreement
from engine.trace import LateMetrics, Tier
from tests.engine.metrics.traces import trace_of
from visuals.figures import churn, fmm, lir, memory, qsa
from visuals.palette import PALETTES, THEMES, Theme

L, F, Q, E = Tier.LOCAL, Tier.FULL, Tier.QUANT, Tier.EVICTED
TRACE = trace_of([[[F, L]], [[Q, F, L]], [[F, Q, E, L]]])
HISTORY = read_history(TRACE)
LATE = [
    LateMetrics(1, 0.2, 0.4, 0.5, (0.1, 0.3, 0.2), 0.25, 32),
    LateMetrics(0, 0.1, 0.3, 0.4, (0.2, 0.3, 0.1), None, 32),
    LateMetrics(2, 0.3, 0.5, 0.6, (0.1, 0.3, 0.3), 0.5, 7),
]
STATS = {
    "policy": ReturnStats(3, 4, 2, np.array([3, 5]), np.array([24, 40])),
    "past-mass <oracle>": ReturnStats(3, 5, 0, np.array([], dtype=np.int64), np.array([], dtype=np.int64)),
}
EMPTY_STATS = ReturnStats(3, 0, 0, np.array([], dtype=np.int64), np.array([], dtype=np.int64))


def scores() -> Agreement:
    rng = np.random.default_rng(1)
    reference = rng.random((3, 2, 4, 6)).cumsum(0)
    policy = reference * rng.uniform(0.8, 1.0, reference.shape)
    policy[0] = reference[0]
    members = rng.random((3, 2, 4, 6)) < 0.5
    members[:, 1, 2] = False  # a head without a quantized window
    return agreement(policy, reference, members)


def nothing_agreed() -> Agreement:
    return agreement(np.ones((1, 1, 1, 1)), np.ones((1, 1, 1, 1)), np.zeros((1, 1, 1, 1), dtype=bool))


Builder = Callable[..., go.Figure]
FILLED: dict[str, Builder] = {
    "fmm": lambda **k: fmm.fmm_figure(LATE, scope="both", **k),
    "fmm_comparison": lambda **k: fmm.fmm_comparison_figure({"qevict": LATE, "R2 <b>": LATE[:2]}, **k),
    "mass_share": lambda **k: fmm.mass_share_figure(LATE, **k),
    "churn": lambda **k: churn.churn_figure(LATE, **k),
    "transitions": lambda **k: churn.transition_figure(count_transitions(HISTORY), [0, 1, 2], **k),
    "lir": lambda **k: lir.lir_figure(STATS, **k),
    "time_to_return": lambda **k: lir.time_to_return_figure(STATS, **k),
    "qsa_heatmap": lambda **k: qsa.qsa_heatmap(scores(), **k),
    "qsa_series": lambda **k: qsa.qsa_series_figure(scores(), **k),
    "memory": lambda **k: memory.memory_figure(memory_series(TRACE), kv_dtype="float16", **k),
}
EMPTY: dict[str, Builder] = {
    "fmm": lambda **k: fmm.fmm_figure([], **k),
    "fmm_comparison": lambda **k: fmm.fmm_comparison_figure({"qevict": []}, **k),
    "mass_share": lambda **k: fmm.mass_share_figure([], **k),
    "churn": lambda **k: churn.churn_figure(LATE[1:2], **k),
    "lir": lambda **k: lir.lir_figure({}, **k),
    "time_to_return": lambda **k: lir.time_to_return_figure({"policy": EMPTY_STATS}, **k),
    "qsa_heatmap": lambda **k: qsa.qsa_heatmap(nothing_agreed(), **k),
    "qsa_series": lambda **k: qsa.qsa_series_figure(nothing_agreed(), **k),
    "memory": lambda **k: memory.memory_figure(memory_series([]), **k),
}


@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize("name", FILLED)
def test_a_figure_is_plain_themed_json(name: str, theme: Theme) -> None:
    figure = FILLED[name](theme=theme)
    assert figure.data
    body = json.loads(figure.to_json(), parse_constant=lambda text: pytest.fail(f"{text} in JSON"))
    assert body["layout"]["paper_bgcolor"] == PALETTES[theme].paper
    assert body["layout"]["plot_bgcolor"] == PALETTES[theme].paper
    assert len(json.dumps(body["layout"].get("template", {}))) < 100  # not plotly's default one
    assert body["layout"]["title"]["text"]
    assert body["layout"]["yaxis"]["title"]["text"]


@pytest.mark.parametrize("name", FILLED)
def test_a_builder_is_pure(name: str) -> None:
    assert FILLED[name]().to_json() == FILLED[name]().to_json()


@pytest.mark.parametrize("name", EMPTY)
def test_an_empty_figure_says_so(name: str) -> None:
    figure = EMPTY[name](words={"nothing": "leer"})
    assert not figure.data
    assert [note.text for note in figure.layout.annotations] == ["leer"]


def test_fmm_figure_sorts_events_and_names_its_scope() -> None:
    figure = fmm.fmm_figure(LATE)
    values, fp_only = figure.data
    assert list(values.x) == [0, 1, 2]
    assert list(values.y) == [0.1, 0.2, 0.3]
    assert list(fp_only.y) == [0.4, 0.5, 0.6]
    assert "all positions" in figure.layout.title.text
    assert "H = 32" in figure.layout.title.text
    history = fmm.fmm_figure(LATE, scope="history")
    assert [list(curve.y) for curve in history.data] == [[0.3, 0.4, 0.5]]
    assert "history only" in history.layout.title.text
    assert len(fmm.fmm_figure(LATE, scope="both").data) == 3


def test_a_cut_horizon_is_marked() -> None:
    curve = fmm.fmm_figure(LATE).data[0]
    assert list(curve.marker.symbol) == ["circle", "circle", "circle-open"]
    assert "7 of 32" in curve.customdata[2]
    assert curve.customdata[0] == ""


def test_mass_shares_are_stacked_to_one() -> None:
    figure = fmm.mass_share_figure(LATE)
    assert np.sum([curve.y for curve in figure.data], axis=0) == pytest.approx(np.ones(3))
    assert [curve.fillcolor for curve in figure.data[:3]] == [
        PALETTES["light"].full,
        PALETTES["light"].quant,
        PALETTES["light"].evicted,
    ]


def test_churn_figure_takes_a_trace_or_a_series() -> None:
    assert list(churn.churn_figure(LATE).data[0].x) == [1, 2]
    series = churn.churn_figure(churn_series(HISTORY)).data[0]
    # {0} -> {0, 1} -> {0, 1}
    assert list(series.x) == [1, 2]
    assert list(series.y) == [0.5, 0.0]


def test_transition_figure_counts() -> None:
    figure = churn.transition_figure(count_transitions(HISTORY), [0, 1, 2])
    counted = {bar.name: list(bar.y) for bar in figure.data}
    assert counted["Quantized → Full"] == [0, 0, 1]
    assert counted["Full → Quantized"] == [0, 1, 1]
    assert counted["→ Evicted"] == [0, 0, 1]


def test_lir_figure_shows_counts_and_escapes_names() -> None:
    (bars,) = lir.lir_figure(STATS).data
    assert list(bars.x) == ["policy", "past-mass &lt;oracle&gt;"]
    assert list(bars.y) == [0.5, 0.0]
    assert list(bars.text) == ["2 of 4", "0 of 5"]


def test_time_to_return_marks_the_median() -> None:
    figure = lir.time_to_return_figure(STATS, unit="tokens")
    assert [list(histogram.x) for histogram in figure.data] == [[24, 40]]
    assert figure.layout.shapes[0].x0 == 32.0
    assert figure.layout.annotations[0].text == "median 32"


def test_qsa_heatmap_leaves_heads_without_quant_empty() -> None:
    (heat,) = qsa.qsa_heatmap(scores()).data
    assert np.array(heat.z).shape == (2, 4)
    assert heat.z[1][2] is None
    assert all(value <= 1.0 for row in heat.z for value in row if value is not None)


def test_memory_parts_stack_to_the_persistent_bytes() -> None:
    series = memory_series(TRACE)
    figure = memory.memory_figure(series)
    stacked = [curve for curve in figure.data if curve.stackgroup]
    assert np.sum([curve.y for curve in stacked], axis=0) * 2**20 == pytest.approx(series.persistent)
    assert [curve.name for curve in figure.data[6:]] == ["Budget", "FullKV"]
    assert len(memory.memory_figure(series, show_full_kv=False).data) == 7
    assert "float16" in FILLED["memory"]().layout.title.text


@pytest.mark.parametrize("module", [fmm, churn, lir, qsa, memory])
def test_all_words_can_be_replaced(module: object) -> None:
    builders = {
        fmm: ["fmm", "fmm_comparison", "mass_share"],
        churn: ["churn", "transitions"],
        lir: ["lir", "time_to_return"],
        qsa: ["qsa_heatmap", "qsa_series"],
        memory: ["memory"],
    }[module]  # type: ignore[index]
    words = {key: f"⟦{key}⟧" for key in module.WORDS}  # type: ignore[attr-defined]
    for name in builders:
        figure = FILLED[name](words=words)
        layout = figure.layout
        shown = [layout.title.text, layout.yaxis.title.text]
        assert all(text.startswith("⟦") for text in shown)
