"""The Analysis tab without a browser: cards, stored runs, addresses, and what the tab answers."""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gradio as gr
import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from app.analysis_card import VERDICTS, Card, Say, counted, spread
from app.analysis_cards import _ablated
from app.analysis_results import ResultsError
from app.analysis_sources import BUNDLED, MOST_UPLOAD_BYTES, AnalysisSources
from app.analysis_view import analysis_files, analysis_texts
from app.api import include_routes
from app.context import AppContext, create_context
from app.labels import Labels
from app.settings import Settings
from app.tabs.analysis import AnalysisTab
from app.texts import LANGUAGES, all_texts
from engine.trace import encode
from tests.app.analysis_samples import ANSWER, DIAGNOSIS, MEAN, score, write
from tests.app.fake_engine import FakeEngine, FakeLoader, FakeOptions
from tests.visuals.synthetic import NASTY, Plan, synthetic_events
from visuals.figures.pareto import pareto_figure


@pytest.fixture(scope="module")
def context(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AppContext]:
    folder = tmp_path_factory.mktemp("analysis")
    write(folder / "evaluations", "quick.json", ANSWER)
    write(folder / "evaluations", "text.json", DIAGNOSIS)
    made = create_context(Settings(data_dir=folder), engine=FakeEngine(), loader=FakeLoader(), options=FakeOptions)
    yield made
    made.close()


# ---- cards --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lang", LANGUAGES)
def test_every_card_has_words_numbers_and_a_figure(context: AppContext, lang: str) -> None:
    seen: set[str] = set()
    for source in ("file:quick", "file:text", "article", "recorded"):
        found = context.analysis.payload(source, "dark", lang)
        assert found["cards"] and found["title"] and found["facts"]
        assert len({card["id"] for card in found["cards"]}) == len(found["cards"])
        for card in found["cards"]:
            seen.add(card["id"].split("-")[0])
            for part in ("title", "reads", "formula"):
                assert card[part] and "{" not in card[part] and not card[part].startswith("analysis."), card["id"]
            assert (Path(__file__).resolve().parents[2] / card["code"]).is_file()
            assert card["rows"] and all(len(row) == len(card["columns"]) for row in card["rows"])
            assert card["figure"]["data"] or card["figure"]["layout"]["annotations"]
            assert card["figure"]["layout"]["paper_bgcolor"] == "#0E1320"
            assert not any(column.startswith("analysis.") for column in card["columns"])
    names = "pareto rivals directions policies shares promotion ablation steps returns absence heads agreement printed"
    assert seen >= set(f"{names} fmm mass churn regret moves memory".split())


def test_the_same_task_in_two_files_is_told_apart(context: AppContext, tmp_path: Path) -> None:
    sources = AnalysisSources(Settings(data_dir=tmp_path), context.sessions, bundled=tmp_path / "both")

    def titles() -> list[str]:
        return [card["title"] for card in sources.payload("bundled", "light", "en")["cards"] if "pareto" in card["id"]]

    write(tmp_path / "both", "first.json", ANSWER)
    alone = titles()
    assert alone and not any("first" in title for title in alone)
    write(tmp_path / "both", "second.json", ANSWER)
    both = titles()
    assert len(both) == len(set(both)) == 2 * len(alone)
    assert any("· first," in title for title in both) and any("· second," in title for title in both)


def test_bundled_figures_have_one_order_whenever_their_files_were_written(context: AppContext, tmp_path: Path) -> None:
    shutil.copytree(BUNDLED, tmp_path / "both")
    files = sorted((tmp_path / "both").iterdir())
    seen = []
    for order in (files, files[::-1]):
        for age, file in enumerate(order):
            os.utime(file, (1e9 - age, 1e9 - age))
        sources = AnalysisSources(Settings(data_dir=tmp_path), context.sessions, bundled=tmp_path / "both")
        seen.append([card["id"] for card in sources.payload("bundled", "light", "en")["cards"]])
    assert seen[0] == seen[1] and seen[0][0] == "pareto-full-book-1024-after"


def test_names_from_a_file_never_become_markup_in_a_figure(context: AppContext) -> None:
    found = context.analysis.payload("file:quick", "light", "en")
    pareto = next(card for card in found["cards"] if card["id"].startswith("pareto"))
    drawn = json.dumps(pareto["figure"])
    assert "<img" not in drawn and "&lt;img" in drawn
    assert any(NASTY in row for row in pareto["rows"])  # shown as text alone
    assert "n = 20" in pareto["note"]


def test_the_articles_figures_are_named_as_such(context: AppContext) -> None:
    found = context.analysis.payload("article", "light", "en")
    assert "Nothing here was measured" in found["notes"][0]
    for card in found["cards"]:
        assert card["note"] == "As printed in the article; nothing was measured here."
    printed = next(
        card
        for card in context.analysis.payload("file:text", "light", "en")["cards"]
        if card["id"].startswith("printed")
    )
    assert {trace["name"] for trace in printed["figure"]["data"]} == {"measured here", "the article, other set-up"}


def test_what_is_missing_is_said_not_drawn(context: AppContext, tmp_path: Path) -> None:
    bare = {key: value for key, value in DIAGNOSIS.items() if key != "series"}
    sources = AnalysisSources(Settings(data_dir=tmp_path), context.sessions, bundled=tmp_path / "none")
    write(tmp_path / "evaluations", "old.json", bare)
    found = sources.payload("file:old", "light", "en")
    assert not any(card["id"].startswith(("heads", "steps")) for card in found["cards"])
    assert any("qevict diagnose --live" in note for note in found["notes"])
    assert "No measured results came with" in sources.notices("en")[0]
    assert sources.default() == "file:old"


def test_tables_of_another_shape_are_refused(context: AppContext, tmp_path: Path) -> None:
    sources = AnalysisSources(Settings(data_dir=tmp_path), context.sessions, bundled=tmp_path / "none")
    write(tmp_path / "evaluations", "odd.json", {**ANSWER, "scores": [{"task": "book"}]})
    with pytest.raises(ResultsError, match="not as this program writes them"):
        sources.payload("file:odd", "light", "en")
    for name in ("file:../odd", "file:none", "upload:none", "diagnosis:none", "bundled", "nonsense"):
        with pytest.raises(ResultsError, match="not here"):
            sources.payload(name, "light", "en")


def test_bundled_results_come_first_and_are_one_source(context: AppContext, tmp_path: Path) -> None:
    folder = tmp_path / "results"
    write(folder, "quick.json", ANSWER)
    write(folder, "text.json", DIAGNOSIS)
    sources = AnalysisSources(Settings(data_dir=tmp_path), context.sessions, bundled=folder)
    assert sources.default() == "bundled" and sources.notices("en") == []
    assert [value for _, value in sources.choices([], "en")] == ["bundled", "recorded", "article"]
    groups = {card["group"] for card in sources.payload("bundled", "light", "en")["cards"]}
    assert groups == {"quality", "article", "ablations", "diagnostics"}


def test_an_interval_takes_its_own_columns() -> None:
    say = Say("en")
    headings, lines = spread(("system", "value"), [{"system": "a", "value": MEAN}, {"system": "b", "value": None}], say)
    assert headings == ["system", "value", "value, low end", "value, high end", "value, n"]
    assert lines == [["a", 0.2, 0.1, 0.4, 20], ["b", None, None, None, None]]
    assert "n = 1 at each point: no interval" in counted([1, 1], say) and counted([], say) == ""


def test_verdicts_are_told_in_the_page_s_language() -> None:
    from engine.evaluation.ablations import _against_choice
    from engine.evaluation.rows import verdict
    from engine.evaluation.statistics import Estimate

    told = [Estimate(at, at - 0.1, at + 0.1, 20) for at in (1.0, 0.0, -1.0)]
    made = {verdict(one, wanted=1) for one in told} | {_against_choice(one, 1) for one in (*told, None)}
    made |= {verdict(Estimate(1.0, 0.9, 1.1, 2), wanted=1), "article's choice"}
    assert made == set(VERDICTS)
    _, lines = spread(("value", "verdict"), [{"value": "holds", "verdict": "holds"}], Say("zh"))
    assert lines == [["holds", "成立"]]
    _, lines = spread(("verdict",), [{"verdict": "new words"}, {"verdict": None}], Say("zh"))
    assert lines == [["new words"], [None]]


def test_settings_of_one_system_at_one_budget_are_no_curve() -> None:
    full = score("fullkv", 1.0)
    assert _ablated([full, score("qevict", 0.2), score("qevict", 0.2)])
    assert not _ablated([full, score("qevict", 0.2), score("qevict", 0.1)])
    assert not _ablated([full, score("qevict", 0.2), score("h2o", 0.2)])


def test_a_long_table_says_how_much_is_left_out() -> None:
    rows = [{"value": place} for place in range(2005)]
    card = Card("pareto", "quality", lambda theme: pareto_figure([], theme=theme), ("value",), rows, "", {"length": 1})
    found = card.payload("light", Say("en"))
    assert len(found["rows"]) == 2000 and found["more"] == 5


@pytest.mark.parametrize(
    "module", ["fmm", "churn", "lir", "qsa", "memory", "pareto", "intervals", "policies", "regret"]
)
def test_the_figures_english_words_are_the_page_s(module: str) -> None:
    words = importlib.import_module(f"visuals.figures.{module}").WORDS
    assert Say("en").figure(module) == words
    assert set(Say("zh").figure(module)) == set(words)


# ---- stored runs --------------------------------------------------------------------------------------------


def _stored(context: AppContext, **plan: Any) -> str:
    session = context.sessions.create(model="m", policy="qevict", settings={}, title="A run", state="done")
    events = synthetic_events(Plan(rows=4, prompt=400, events=12, full=6, quant=20, **plan))
    context.sessions.append(session, [encode(event, seq) for seq, event in enumerate(events)]).result()
    return session


def test_a_stored_run_is_drawn_from_its_trace(context: AppContext) -> None:
    session = _stored(context, nasty=True)
    found = context.analysis.payload(f"session:{session}", "light", "en")
    cards = {card["id"]: card for card in found["cards"]}
    assert list(cards) == ["fmm", "mass", "churn", "regret", "moves", "returns", "absence", "memory"]
    assert found["title"] == "Run: A run"
    events = {
        event.event_id: event
        for event in synthetic_events(Plan(rows=4, prompt=400, events=12, full=6, quant=20))
        if hasattr(event, "fmm")
    }
    shown = {row[0]: row[2] for row in cards["fmm"]["rows"]}
    assert shown == pytest.approx({key: event.fmm for key, event in events.items()}, rel=1e-3)  # type: ignore[union-attr]
    assert "head by head" in " ".join(found["notes"])


def test_a_run_without_reference_has_churn_and_memory_but_no_missed_mass(context: AppContext) -> None:
    found = context.analysis.payload(f"session:{_stored(context, reference=False)}", "light", "en")
    assert {card["id"] for card in found["cards"]} == {"moves", "returns", "absence", "churn", "memory"}
    assert "no FullKV reference" in found["notes"][0]


def test_a_run_that_never_began_says_so(context: AppContext) -> None:
    session = context.sessions.create(model="m", policy="qevict", settings={}, state="error")
    found = context.analysis.payload(f"session:{session}", "light", "en")
    assert found["cards"] == [] and found["notes"] == ["This run ended before it had anything to show."]


# ---- addresses ----------------------------------------------------------------------------------------------


def test_addresses(context: AppContext) -> None:
    app = FastAPI()
    include_routes(app, context)
    client = TestClient(app)
    answer = client.get("/qe/analysis", params={"source": "article", "theme": "dark", "lang": "zh-CN"})
    assert answer.status_code == 200 and answer.headers["cache-control"] == "private, no-store"
    assert answer.json()["title"] == all_texts("zh")["analysis.source_article"]
    assert client.get("/qe/analysis", params={"source": "file:none"}).status_code == 422
    assert client.get("/qe/analysis", params={"source": "session:none"}).status_code == 404
    assert client.get("/qe/analysis", params={"source": "x" * 300}).status_code == 422
    assert client.get("/qe/analysis", params={"source": "article", "theme": "pink"}).status_code == 422
    script = client.get("/qe/plotly.js")
    assert (
        script.headers["content-type"].startswith("text/javascript") and "immutable" in script.headers["cache-control"]
    )
    assert len(script.content) > 1_000_000 and script.headers["content-encoding"] == "gzip"


def test_the_view_names_local_files_and_its_words_only() -> None:
    assert all(address.startswith("qe/") for address in analysis_files())
    assert {"analysis.png", "analysis.csv_of"} <= set(analysis_texts()["zh"])
    assert not any(key.endswith("_formula") for key in analysis_texts()["en"])


# ---- the tab ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tab(context: AppContext) -> AnalysisTab:
    async def build() -> AnalysisTab:  # inside an event loop: without one Gradio makes one for each listener
        with gr.Blocks():
            made = AnalysisTab(context, Labels(), gr.State("en"))
            with gr.Tab("x") as holder:
                made.build()
            made.wire(holder)
        return made

    return asyncio.run(build())


def test_arriving_shows_the_default_and_keeps_a_choice(tab: AnalysisTab) -> None:
    source, board, banner = tab._arrive(None, (), "en")
    assert board["source"] == source["value"] == "bundled"
    assert "No measured results" not in str(banner)
    _, board, _ = tab._arrive("article", (), "en")
    assert board == {"source": "article"}
    _, board, turn = tab._again("article", (), 3, "en")
    assert board == {"source": "article", "turn": 4} and turn == 4
    source, banner = tab._retell("article", (), "zh")
    assert source["value"] == "article" and source["choices"][-1][0].startswith("仅论文")
    assert "未附带" not in str(banner)
    assert "value" not in tab._retell(None, (), "zh")[0]


def test_only_runs_that_a_visitor_is_shown_are_offered(context: AppContext) -> None:
    session = _stored(context)
    offered = [value for _, value in context.analysis.choices([context.sessions.get(session)], "en")]
    assert f"session:{session}" in offered
    assert not [value for _, value in context.analysis.choices([], "en") if value.startswith("session:")]


def test_an_upload_is_shown_to_its_visitor_or_refused(tab: AnalysisTab, tmp_path: Path) -> None:
    source, board, banner, extra = tab._upload(str(write(tmp_path, "mine.json", ANSWER)), (), "en")
    assert board["source"].startswith("upload:") and banner == ""
    assert source["choices"][0] == ("Your file: mine.json", board["source"]) == extra[0]
    assert tab._context.analysis.payload(board["source"], "light", "en")["title"] == "Your file: mine.json"
    for name, data, said in (
        ("mine.txt", b"x", "qevict eval"),
        ("mine.json", b"{}", "can&#x27;t be drawn"),
        ("mine.json", b" " * (MOST_UPLOAD_BYTES + 1), "at most 512 KB"),
    ):
        refused = tab._upload(str(write(tmp_path, name, data)), (), "en")
        assert said in refused[2] and 'role="alert"' in refused[2]


@pytest.mark.parametrize(
    ("tokens", "budget", "said"),
    [(None, 20, "whole number"), (5, 20, "160 to 2048"), (300, 0, "between 1 and 100"), (300.5, 20, "whole")],
)
def test_a_diagnosis_form_that_cannot_be_used_says_why(tab: AnalysisTab, tokens: Any, budget: Any, said: str) -> None:
    from app.documents import DEFAULT_DOCUMENT

    session, banner, *_ = tab._begin(DEFAULT_DOCUMENT, tokens, budget, "en")
    assert session == "" and said in banner
