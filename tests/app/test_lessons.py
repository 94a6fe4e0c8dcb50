"""Lessons put together: places and answers are in the traces, words are whole in both languages, figures are read."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from app.api import include_routes
from app.context import create_context
from app.documents import load_documents
from app.lesson_facts import MEASURED_RATIOS, measured, measured_facts, trace_facts
from app.lesson_trace import FOLDER, LessonTrace, load_trace, trace_bytes
from app.lessons import lesson_texts, lessons_payload, place_of, say, step_facts
from app.record_traces import RECORDINGS, kept, token_ids
from app.settings import ASSETS, Settings
from app.tabs.lessons import RUN_FIELDS, lesson_scripts, start_live
from app.tabs.run_panel import PRESET_FIELDS
from app.texts import LANGUAGES
from engine.errors import TraceError
from engine.trace import Progress, ScoreEvent, Tier, decode
from presets.lessons import LessonError, load_lessons
from presets.loader import load_presets
from tests.app.fake_engine import FakeEngine, FakeLoader, FakeOptions
from tests.visuals.synthetic import Plan, synthetic_events

PLACEHOLDER = re.compile(r"\{(\w+)\}")
STEPS = [(lesson, step) for lesson in load_lessons() for step in lesson.steps]
NAMES = [f"{lesson.id}.{step.name}" for lesson, step in STEPS]


def _value(lesson: int, step: str, name: str) -> float:
    found = load_lessons()[lesson - 1]
    chosen = next(one for one in found.steps if one.name == step)
    value = step_facts(found, chosen)[name].value
    assert isinstance(value, (int, float))
    return float(value)


def _told(lang: str, lesson: str, step: str) -> dict[str, Any]:
    found = next(one for one in lessons_payload(lang)["lessons"] if one["id"] == lesson)
    return next(one for one in found["steps"] if one["name"] == step)


# words


def test_both_languages_have_the_same_keys_and_figures() -> None:
    english, chinese = lesson_texts("en"), lesson_texts("zh")
    assert set(english) == set(chinese)
    different = [
        key for key in english if set(PLACEHOLDER.findall(english[key])) != set(PLACEHOLDER.findall(chinese[key]))
    ]
    assert different == []


def test_chinese_is_chinese_with_its_own_punctuation() -> None:
    half = re.compile(r"[\u4e00-\u9fff][,:;?!]|[,;?!][\u4e00-\u9fff]")
    chinese = lesson_texts("zh")
    assert [key for key, words in chinese.items() if half.search(words)] == []
    same = [key for key, words in chinese.items() if words == lesson_texts("en")[key] and len(words.split()) > 3]
    assert same == []


def test_every_text_is_used() -> None:
    keys = {f"{lesson.id}.title" for lesson in load_lessons()}
    for lesson, step in STEPS:
        base = f"{lesson.id}.{step.name}"
        keys.add(base)
        if step.question:
            keys |= {f"{base}_ask", f"{base}_why", *(f"{base}_{choice}" for choice in step.question.choices)}
        keys |= {f"source.{source}" for source in step.sources}
        named = {*(step.table.rows if step.table else ()), *(step.question.choices if step.question else ())}
        keys |= {f"row.{name}" for name in named} | {f"{lesson.id}.row_{name}" for name in named}
        keys |= {f"column.{name}" for name in (step.table.columns if step.table else ())}
    script = "".join((ASSETS / "js" / name).read_text("utf-8") for name in ("lessons.js", "lessons_class.js"))
    said = {f"ui.{word}" for word in re.findall(r'"([a-z_]+)"', script)}
    said |= {"ui.class_sent", "ui.class_not_sent"}
    known = {*keys, *said, "choice.less", "choice.same", "choice.more", "source.unmeasured"}
    assert sorted(set(lesson_texts("en")) - known) == []


@pytest.mark.parametrize("lang", LANGUAGES)
def test_every_step_is_short_and_filled_in(lang: str) -> None:
    for lesson in lessons_payload(lang)["lessons"]:
        for step in lesson["steps"]:
            words = json.dumps(step, ensure_ascii=False)
            assert not PLACEHOLDER.search(step["say"]), step["name"]
            assert "None" not in words
            assert len(re.findall(r"[.。](?:\s|$)|。", step["say"])) <= 3, step["say"]
            assert len(step["say"]) <= 260


NAMES_WITH_DIGITS = re.compile(r"INT2|R[1-4]|FA-2|FlashAttention-2|GSM8K|Qwen2\.5-7B|\{\w+\}")
"""Names of methods, models and figures; a value is none of them."""


@pytest.mark.parametrize("lang", LANGUAGES)
def test_no_value_is_typed(lang: str) -> None:
    """Values are read from a trace, from the article's figures or from measurements; a source may cite its own."""
    rest = {
        key: NAMES_WITH_DIGITS.sub("", words)
        for key, words in lesson_texts(lang).items()
        if not key.startswith(("source.", "ui.", "row.decode_", "row.attention_", "row.prefill_"))
    }
    assert {key: words for key, words in rest.items() if re.search(r"\d", words)} == {}


def test_an_unknown_figure_is_refused() -> None:
    with pytest.raises(LessonError, match="which is no figure"):
        say("en", "why_evict.grow", {})
    with pytest.raises(LessonError, match="must have a text"):
        say("en", "why_evict.nothing")


# places and answers


@pytest.mark.parametrize(("lesson", "step"), STEPS, ids=NAMES)
def test_every_place_is_in_its_trace(lesson: Any, step: Any) -> None:
    trace, place = load_trace(step.trace), place_of(lesson, step)
    assert 0 <= place.event <= trace.last_event
    assert all(trace.tier(place.event, place.row, window) != Tier.EMPTY for window in place.windows)
    assert lesson.document in load_documents()
    assert lesson.preset in load_presets()


def test_the_prediction_is_what_the_trace_did() -> None:
    step = _told("en", "predict", "guess")
    trace = load_trace("first")
    names = [trace.tier(step["event"] + 1, step["row"], mark["window"]).name.lower() for mark in step["marks"]]
    assert step["question"]["answers"] == names
    assert set(names) == {"full", "quant", "evicted"}
    assert step["question"]["event"] == step["event"] + 1


def test_the_reveal_follows_the_prediction_and_its_scores_agree_with_the_tiers() -> None:
    guess, reveal = _told("en", "predict", "guess"), _told("en", "reveal", "scores")
    assert [mark["window"] for mark in guess["marks"]] == [mark["window"] for mark in reveal["marks"]]
    assert (reveal["event"], reveal["row"]) == (guess["event"] + 1, guess["row"])
    order = {"full": 0, "quant": 1, "evicted": 2}
    ranked = sorted(reveal["ranks"], key=lambda line: int(line["rank"].split(" / ")[0]))
    assert [order[line["tier"]] for line in ranked] == sorted(order[line["tier"]] for line in ranked)
    scores = [float(line["score"].removesuffix(" %")) for line in ranked]
    assert scores == sorted(scores, reverse=True)


def test_what_was_regretted_was_evicted_before() -> None:
    lesson, step = next(pair for pair in STEPS if pair[1].name == "gone")
    trace, place = load_trace(step.trace), place_of(lesson, step)
    window = place.windows[0]
    assert trace.tier(place.event, place.row, window) == Tier.EVICTED
    assert trace.missed(place.event, place.row, window) > 0.001
    assert max(mass for late in trace.late.values() if late.steps >= 32 for _, _, mass in late.regret) == trace.missed(
        place.event, place.row, window
    )


def test_what_came_back_was_in_the_low_bit_tier() -> None:
    lesson, step = next(pair for pair in STEPS if pair[0].id == "promotion" and pair[1].name == "back")
    trace, place = load_trace(step.trace), place_of(lesson, step)
    window = place.windows[0]
    assert trace.tier(place.event - 1, place.row, window) == Tier.QUANT
    assert trace.tier(place.event, place.row, window) == Tier.FULL
    since = trace.quantized_since(place.event, place.row, window)
    assert all(trace.tier(at, place.row, window) == Tier.QUANT for at in range(since, place.event))


def test_answers_are_indices_of_choices() -> None:
    for lang in LANGUAGES:
        for lesson in lessons_payload(lang)["lessons"]:
            for step in lesson["steps"]:
                question = step.get("question")
                if question and question["kind"] == "choice":
                    assert 0 <= question["answer"] < len(question["choices"])
                    assert len(set(question["choices"])) == len(question["choices"]) >= 2


def test_the_words_claim_only_what_the_traces_hold() -> None:
    """Where a sentence says more than its figures, the figures must bear it out."""
    fmm = {name: _value(6, "compare", f"{name}_fmm") for name in ("tokens", "q_0", "first", "coarse")}
    assert fmm["q_0"] >= fmm["tokens"], "windows alone are no gain here"
    assert fmm["first"] < fmm["tokens"], "the INT2 tier is"
    assert fmm["first"] < fmm["coarse"] < fmm["tokens"], "the article's order"
    paper = {name: _value(6, "paper", f"paper_{name}_fmm") for name in ("r1", "r3", "r4")}
    assert paper["r3"] < paper["r4"] < paper["r1"]
    assert _value(6, "figures", "tokens_events") > 5 * _value(6, "figures", "first_events")
    assert _value(7, "which", "coarse_window_ratio") < _value(7, "which", "first_window_ratio")
    assert _value(7, "coarse", "coarse_metadata_share") < _value(7, "coarse", "first_metadata_share")
    by_q = [_value(8, "compare", f"{name}_fmm") for name in ("q_0", "q_30", "first", "q_90")]
    assert by_q == sorted(by_q, reverse=True), "FMM favours INT2"
    assert abs(_value(9, "off", "first_fmm") - _value(9, "off", "one_way_fmm")) < 0.005, "can hardly change it"
    assert _value(10, "table4", "sdpa_qevict_tpot") < _value(10, "table4", "sdpa_full_tpot")
    assert _value(10, "guess", "fa2_qevict_peak") < _value(10, "guess", "fa2_full_peak")
    for model in ("llama", "mistral", "qwen"):
        evict, ours, kivi = (_value(11, "figures", f"{n}_{model}") for n in ("layer_defensive", "qevict", "kivi"))
        assert evict < ours < kivi
    assert _value(11, "short", "full_qwen") > _value(11, "short", "kivi_qwen")


def test_sizes_are_those_of_the_tensors() -> None:
    facts = trace_facts(load_trace("first"))
    assert facts["full_window"].value == 6152
    assert facts["quant_window"].value == 1640
    assert facts["quant_window"].say("en") == "1,640 B"


# traces


def test_all_traces_are_there_and_small() -> None:
    used = {step.trace for _, step in STEPS} | {name for lesson in load_lessons() for name in lesson.traces}
    assert used == {recording.name for recording in RECORDINGS}
    assert sum(path.stat().st_size for path in FOLDER.glob("*.gz")) <= 400_000


def test_compared_runs_read_the_same_tokens() -> None:
    first = token_ids(load_trace("first").events)
    for recording in RECORDINGS:
        trace = load_trace(recording.name)
        assert token_ids(trace.events) == first
        assert trace.meta.pieces == load_trace("first").meta.pieces
        assert trace.meta.reference == "fullkv-teacher"
        assert [event.seq for event in trace.events] == list(range(len(trace.events)))


def test_a_lean_recording_leaves_out_scores_and_progress() -> None:
    events = [Progress("prefill", 1, 2), *synthetic_events(Plan(prompt=400, events=6))]
    lean = next(recording for recording in RECORDINGS if recording.lean)
    whole = next(recording for recording in RECORDINGS if not recording.lean)
    assert any(isinstance(event, ScoreEvent) for event in kept(events, whole))
    assert not [event for event in kept(events, lean) if isinstance(event, (ScoreEvent, Progress))]


def test_a_trace_without_a_place_says_so() -> None:
    lines = (trace_bytes("q-0") or b"").splitlines()
    trace = LessonTrace("made-up", [decode(line) for line in lines])
    with pytest.raises(TraceError, match="no place 'promotion'"):
        trace.find("promotion")
    with pytest.raises(TraceError, match="missing"):
        load_trace("nowhere")


def test_traces_end_with_their_summary() -> None:
    for path in sorted(FOLDER.glob("*.gz")):
        last = gzip.decompress(path.read_bytes()).splitlines()[-1]
        assert json.loads(last)["k"] == "end"


# measurements of this project


def test_what_is_not_measured_is_said(tmp_path: Path) -> None:
    facts = measured_facts(measured(tmp_path / "none.json"))
    assert {facts[name].say("en") for name in MEASURED_RATIOS} == {"not measured"}
    told = {"decode_ratio_2048": 0.5, "machine": "a laptop", "date": "2026-01-01", "attention_ratio_8192": "fast"}
    (tmp_path / "some.json").write_text(json.dumps(told), encoding="utf-8")
    facts = measured_facts(measured(tmp_path / "some.json"))
    assert facts["decode_ratio_2048"].say("en") == "0.50 ×"
    assert facts["attention_ratio_8192"].value is None
    assert facts["machine"].say("en") == "a laptop"


# page and routes


@pytest.fixture
def client(tmp_path: Path) -> Iterator[TestClient]:
    made = create_context(
        Settings(data_dir=tmp_path), engine=FakeEngine(smallest_share=0.1), loader=FakeLoader(), options=FakeOptions
    )
    app = FastAPI()
    include_routes(app, made)
    with TestClient(app) as client:
        yield client
    made.close()


def test_the_routes(client: TestClient) -> None:
    answer = client.get("/qe/lessons?lang=zh-CN")
    assert answer.status_code == 200
    assert answer.json() == json.loads(json.dumps(lessons_payload("zh")))
    assert client.get("/qe/lessons?lang=fr").json()["lang"] == "en"
    trace = client.get("/qe/traces/first")
    assert trace.status_code == 200 and trace.content == trace_bytes("first")
    for name in ("none", "..%2Ffirst", "First"):
        assert client.get(f"/qe/traces/{name}").status_code in (404, 422)
    for address in lesson_scripts():
        assert client.get(f"/{address}").status_code == 200


def test_a_lesson_fills_the_form() -> None:
    class Event:
        lesson = "q_slider"

    filled = start_live(Event())  # type: ignore[arg-type]
    preset = load_presets()["q-90"].config
    assert filled[1:3] == ["bakery-order-book", "q-90"]
    assert filled[3 + PRESET_FIELDS.index("quant_share")] == preset.quant_share
    assert filled[3 + len(PRESET_FIELDS) : 3 + len(PRESET_FIELDS) + len(RUN_FIELDS)] == list(RUN_FIELDS.values())
    assert len(filled) == 3 + len(PRESET_FIELDS) + len(RUN_FIELDS) + 4
    for lesson in load_lessons():
        Event.lesson = lesson.id
        assert start_live(Event())[1:3] == [lesson.document, lesson.preset]  # type: ignore[arg-type]
    Event.lesson = "none"
    assert start_live(Event())[2] == load_lessons()[0].preset  # type: ignore[arg-type]
