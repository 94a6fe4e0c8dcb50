"""The Analysis tab without a browser: files read and refused, sources, cards, addresses, diagnoses in the queue."""

from __future__ import annotations

import asyncio
import gzip
import importlib
import json
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gradio as gr
import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from app.analysis_card import VERDICTS, Card, Say, counted, spread
from app.analysis_cards import _ablated
from app.analysis_results import MOST_BYTES, ResultCache, ResultsError, ablations_in, parse, read_results, result_files
from app.analysis_runs import AnalysisRuns, DiagnosisRequest
from app.analysis_sources import BUNDLED, MOST_UPLOAD_BYTES, AnalysisSources
from app.analysis_view import analysis_files, analysis_texts
from app.api import include_routes
from app.context import AppContext, create_context
from app.labels import Labels
from app.settings import Settings
from app.tabs.analysis import AnalysisTab
from app.texts import LANGUAGES, all_texts
from engine.config import QEvictConfig
from engine.trace import encode
from tests.app.fake_engine import FakeEngine, FakeLoader, FakeOptions
from tests.visuals.synthetic import NASTY, Plan, synthetic_events
from visuals.figures.pareto import pareto_figure

MEAN = {"mean": 0.2, "low": 0.1, "high": 0.4, "n": 20}


def score(system: str, share: float, **more: Any) -> dict[str, Any]:
    line = {"task": "book", "length": 768, "question": "after", "label": system, "system": system, "kv_budget": share}
    line |= {"parameters": {}, "n": 20, "infeasible": None, "note": "", "score_name": "top1", "share": share}
    return line | {"bytes": 1000, "score": MEAN, "kl": MEAN, "nll_minus_full": MEAN, "score_minus_full": None, **more}


ANSWER: dict[str, Any] = {
    "suite": "quick",
    "model": "tiny <b>model</b>",
    "weights": "float32",
    "kv_dtype": "float16",
    "machine": {"processor": "abacus", "cores": 2, "isa": None, "torch": "0"},
    "left_out": ["speed"],
    "scores": [
        score("fullkv", 1.0),
        score("qevict", 0.2),
        score(NASTY, 0.1),
        score("kivi-2", 0.3, n=0, infeasible="no"),
    ],
    "rivals": [
        {
            "kv_budget": 0.2,
            "rival": "h2o",
            "kl_difference": MEAN,
            "verdict_kl": "not settled",
            "score_difference": None,
            "verdict_score": None,
        }
    ],
    "directions": [
        {
            "kv_budget": 0.2,
            "claim": "R3 misses less than R1",
            "quantity": "fmm",
            "lower": "R3",
            "higher": "R1",
            "lower_mean": 0.1,
            "higher_mean": 0.2,
            "difference": {"mean": -0.1, "low": -0.2, "high": -0.05, "n": 20},
            "verdict": "holds",
        }
    ],
    "policies": [
        {
            "kv_budget": 0.2,
            "policy": "R3",
            "texts": 20,
            **dict.fromkeys(("fmm", "fmm_history", "churn_per_event", "churn_per_step", "lir", "promotions"), MEAN),
            "mass_share_history": {"full": 0.2, "quant": 0.4, "evicted": 0.4},
        }
    ],
    "promotion": [
        {
            "kv_budget": 0.2,
            "texts": 20,
            "promotions": 3,
            "net_gain": MEAN,
            "fmm_on_minus_off": MEAN,
            "lift": None,
            "paper_lift": 2.34,
        }
    ],
    "ablation": [
        {
            "setting": "q",
            "value": v,
            "task": "book",
            "length": 768,
            "question": "after",
            "figure": "kl",
            "mean": MEAN,
            "minus_article_choice": MEAN,
            "verdict": "not measured",
            "infeasible": None,
        }
        for v in (0.5, 0.7)
    ],
}  # fmt: skip
EMPTY_RETURNS = {"min_events": 3, "eligible": 5, "rescued": 2, "events": {"3": 2}, "tokens": {"24": 2}}
DIAGNOSIS: dict[str, Any] = {
    "setup": {
        "model": "tiny",
        "weights": "float32",
        "kv_dtype": "float16",
        "prompt_tokens": 90,
        "steps": 6,
        "horizon": 4,
        "config": {"kv_budget": 0.2},
    },
    "differs": ["model: tiny"],
    "table14": [
        {"system": "R3", "quantity": "fmm", "measured": 12.0, "paper": 46.38, "unit": "%", "source": source}
        for source in ("trace", "live")
    ],
    "table15": None,
    "figure1": [
        {"system": "R3", "quantity": q, "measured": 30.0, "paper": 20.0, "unit": "%", "source": "trace"}
        for q in ("full", "quant", "evicted")
    ],
    "series": {
        "fmm": {"R3": {"tokens": [90, 98], "all": [0.1, 0.2], "history": [0.3, 0.4], "steps": [4, 2]}},
        "returns": {"R3": EMPTY_RETURNS},
        "agreement": {
            "R3": {
                "events": [0, 1],
                "by_head": {form: [[0.9, None], [0.8, 0.7]] for form in ("cumulative", "interval")},
                "qsa": {"cumulative": [1.0, 0.9], "interval": [None, 0.9]},
                "ratio": {"cumulative": [1.0, 0.9], "interval": [None, 0.9]},
            }
        },
    },
}  # fmt: skip


def _write(folder: Path, name: str, content: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    return path


@pytest.fixture(scope="module")
def context(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AppContext]:
    folder = tmp_path_factory.mktemp("analysis")
    _write(folder / "evaluations", "quick.json", ANSWER)
    _write(folder / "evaluations", "text.json", DIAGNOSIS)
    made = create_context(Settings(data_dir=folder), engine=FakeEngine(), loader=FakeLoader(), options=FakeOptions)
    yield made
    made.close()


# ---- files --------------------------------------------------------------------------------------------------


def test_an_answer_and_a_diagnosis_are_read_with_where_they_come_from(tmp_path: Path) -> None:
    paths = [
        _write(tmp_path, "quick.json", ANSWER),
        _write(tmp_path, "text.json.gz", gzip.compress(json.dumps(DIAGNOSIS).encode())),
    ]
    results = read_results(paths)
    assert results.problems == [] and not results.empty
    assert ("machine", "abacus, 2 cores") in results.facts and ("model", "tiny <b>model</b>") in results.facts
    assert {row["file"] for row in results.tables["scores"]} == {"quick"}
    assert results.left_out == ["speed"] and [stem for stem, _ in results.diagnoses] == ["text"]
    assert list(result_files(tmp_path)) == ["text", "quick"] or set(result_files(tmp_path)) == {"text", "quick"}
    assert result_files(tmp_path / "nowhere") == {}


def test_a_store_that_is_being_written_is_read_and_left_alone(tmp_path: Path) -> None:
    policy = dict.fromkeys(("fmm_history", "churn_per_event", "churn_per_step", "lir"), 0.1)
    policy |= {"promotions": 1, "mass_share_history": None}
    row = {
        "key": "a",
        "kind": "policies",
        "kv_budget": 0.2,
        "model": "m",
        "prompt_tokens": 64,
        "versions": {"torch": "0"},
        "promotion": None,
        "policies": {"R1": {**policy, "fmm": 0.3}, "R3": {**policy, "fmm": 0.2}},
    }
    data = json.dumps(row).encode() + b"\n" + b'{"key": "b", "ki'
    path = _write(tmp_path, "directions.jsonl", data)
    results = read_results([path])
    assert results.problems == []
    assert results.tables["directions"][0]["claim"] == "R3 misses less than R1"
    assert ("cells", "directions: 1") in results.facts
    assert path.read_bytes() == data


@pytest.mark.parametrize(
    ("name", "data", "why"),
    [
        ("a.json", b"[1, 2]", "neither"),
        ("a.json", b'{"suite": 1, "scores": [NaN]}', "NaN is no number"),
        ("a.json", b"[" * 100_000, "not valid JSON"),
        ("a.json", b"\xff\xfe", "not valid JSON"),
        ("a.jsonl", b'{"key": "a"}\n', "line 1, is no row"),
        ("a.jsonl", b"nonsense\n", "line 1, is not valid JSON"),
        ("a.jsonl", b'{"key": "a", "kind": "item"}', "no finished row"),
        ("a.json.gz", b"\x1f\x8bnot really", "can't be unpacked"),
    ],
)  # fmt: skip
def test_what_is_no_result_file_is_refused_with_one_sentence(name: str, data: bytes, why: str) -> None:
    with pytest.raises(ResultsError, match=why):
        parse(name, data)


def test_a_file_that_unpacks_without_end_is_stopped() -> None:
    bomb = gzip.compress(b" " * (MOST_BYTES + 10))
    assert len(bomb) < 100_000
    with pytest.raises(ResultsError, match="too long"):
        parse("bomb.json.gz", bomb)


def test_texts_from_a_file_are_cut() -> None:
    _, answer = parse("a.json", json.dumps({**ANSWER, "model": "x" * 10_000}).encode())
    assert len(answer["model"]) == 400


def test_an_ablation_is_known_by_what_varies() -> None:
    def row(value: float) -> dict[str, Any]:
        return {"kind": "item", "system": "qevict", "parameters": {"quant_share": value}}

    assert ablations_in("anything", [row(0.5), row(0.7)]) == ["q"]
    assert ablations_in("anything", [row(0.7)]) == []
    assert ablations_in("ablation-budget", [row(0.7)]) == ["budget"]


def test_files_are_read_again_only_when_they_change(tmp_path: Path) -> None:
    cache, path = ResultCache(), _write(tmp_path, "quick.json", ANSWER)
    first = cache.read([path])
    assert cache.read([path]) is first
    _write(tmp_path, "quick.json", {**ANSWER, "model": "another model"})
    assert ("model", "another model") in cache.read([path]).facts


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

    _write(tmp_path / "both", "first.json", ANSWER)
    alone = titles()
    assert alone and not any("first" in title for title in alone)
    _write(tmp_path / "both", "second.json", ANSWER)
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
    _write(tmp_path / "evaluations", "old.json", bare)
    found = sources.payload("file:old", "light", "en")
    assert not any(card["id"].startswith(("heads", "steps")) for card in found["cards"])
    assert any("qevict diagnose --live" in note for note in found["notes"])
    assert "No measured results came with" in sources.notices("en")[0]
    assert sources.default() == "file:old"


def test_tables_of_another_shape_are_refused(context: AppContext, tmp_path: Path) -> None:
    sources = AnalysisSources(Settings(data_dir=tmp_path), context.sessions, bundled=tmp_path / "none")
    _write(tmp_path / "evaluations", "odd.json", {**ANSWER, "scores": [{"task": "book"}]})
    with pytest.raises(ResultsError, match="not as this program writes them"):
        sources.payload("file:odd", "light", "en")
    for name in ("file:../odd", "file:none", "upload:none", "diagnosis:none", "bundled", "nonsense"):
        with pytest.raises(ResultsError, match="not here"):
            sources.payload(name, "light", "en")


def test_bundled_results_come_first_and_are_one_source(context: AppContext, tmp_path: Path) -> None:
    folder = tmp_path / "results"
    _write(folder, "quick.json", ANSWER)
    _write(folder, "text.json", DIAGNOSIS)
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
    source, board, banner, extra = tab._upload(str(_write(tmp_path, "mine.json", ANSWER)), (), "en")
    assert board["source"].startswith("upload:") and banner == ""
    assert source["choices"][0] == ("Your file: mine.json", board["source"]) == extra[0]
    assert tab._context.analysis.payload(board["source"], "light", "en")["title"] == "Your file: mine.json"
    for name, data, said in (
        ("mine.txt", b"x", "qevict eval"),
        ("mine.json", b"{}", "can&#x27;t be drawn"),
        ("mine.json", b" " * (MOST_UPLOAD_BYTES + 1), "at most 512 KB"),
    ):
        refused = tab._upload(str(_write(tmp_path, name, data)), (), "en")
        assert said in refused[2] and 'role="alert"' in refused[2]


@pytest.mark.parametrize(
    ("tokens", "budget", "said"),
    [(None, 20, "whole number"), (5, 20, "160 to 2048"), (300, 0, "between 1 and 100"), (300.5, 20, "whole")],
)
def test_a_diagnosis_form_that_cannot_be_used_says_why(tab: AnalysisTab, tokens: Any, budget: Any, said: str) -> None:
    from app.documents import DEFAULT_DOCUMENT

    session, banner, *_ = tab._begin(DEFAULT_DOCUMENT, tokens, budget, "en")
    assert session == "" and said in banner


# ---- diagnoses in the queue ---------------------------------------------------------------------------------


class _Words:
    def __call__(self, text: str, verbose: bool = True) -> dict[str, list[int]]:
        return {"input_ids": list(range(len(text.split())))}


class _Loader(FakeLoader):
    def __call__(self, name: str, **options: Any) -> Any:
        return SimpleNamespace(name=super().__call__(name, **options), tokenizer=_Words())


def _context_with(tmp_path: Path, diagnose: Any) -> tuple[AppContext, AnalysisRuns]:
    made = create_context(Settings(data_dir=tmp_path), engine=FakeEngine(), loader=_Loader(), options=FakeOptions)
    return made, AnalysisRuns(made.runs, made.bus, diagnose)


def _request(tokens: int = 20) -> DiagnosisRequest:
    return DiagnosisRequest("word " * 30, "a text", QEvictConfig(), tokens, 6)


def test_a_diagnosis_goes_through_the_queue_and_is_kept(tmp_path: Path) -> None:
    asked: list[Any] = []

    def diagnose(loaded: Any, ids: list[int], config: QEvictConfig, options: Any, *, progress: Any) -> dict[str, Any]:
        asked.append((len(ids), options.steps, options.live_policies))
        progress("reference", 1, 1)
        progress("live", 0, 1)
        return DIAGNOSIS

    made, runs = _context_with(tmp_path, diagnose)
    try:
        session = runs.start(_request())
        assert made.runs.wait(session, 30.0)
        assert asked == [(20, 6, ("R3",))]
        assert runs.found(session) == DIAGNOSIS and runs.standing(session).state == "ended"
        sources = AnalysisSources(Settings(data_dir=tmp_path), made.sessions, diagnosis=runs.found)
        assert sources.payload(f"diagnosis:{session}", "light", "en")["title"] == "Diagnosis made here"
        assert made.sessions.list() == []  # a diagnosis is no session
        long = runs.start(_request(tokens=500))
        made.runs.wait(long, 30.0)
        assert "30 tokens and 500 were asked for" in runs.standing(long).error
    finally:
        made.close()


def test_a_diagnosis_can_be_stopped_and_a_failed_one_says_why(tmp_path: Path) -> None:
    def endless(*_: Any, progress: Any) -> dict[str, Any]:
        while True:
            progress("reference", 1, 9)
            time.sleep(0.02)

    made, runs = _context_with(tmp_path, endless)
    try:
        session = runs.start(_request())
        until = time.monotonic() + 60
        while runs.standing(session).stage != "reference" and time.monotonic() < until:
            time.sleep(0.02)
        assert runs.stop(session)
        assert made.runs.wait(session, 30.0)
        assert runs.found(session) is None and runs.standing(session).error == ""

        def broken(*_: Any, progress: Any) -> dict[str, Any]:
            raise ResultsError("it broke.")

        runs._diagnose = broken
        failed = runs.start(_request())
        assert made.runs.wait(failed, 30.0)
        assert runs.standing(failed).error == "it broke."
    finally:
        made.close()


def test_the_tab_follows_a_diagnosis_to_its_figures(tmp_path: Path) -> None:
    made, runs = _context_with(tmp_path, lambda *_, progress: DIAGNOSIS)
    try:
        object.__setattr__(made, "diagnoses", runs)
        session = runs.start(_request())

        async def last() -> list[Any]:
            with gr.Blocks():
                tab = AnalysisTab(made, Labels(), gr.State("en"))
            found: list[Any] = []
            async for update in tab._follow(session, (), "en"):
                found = update
            return found

        _, status, source, board, extra, run, stop = asyncio.run(last())
        assert board == {"source": f"diagnosis:{session}"} and extra[0][1] == board["source"] == source["value"]
        assert "Diagnosed" in status and run["interactive"] and not stop["interactive"]
    finally:
        made.close()
