"""Comparisons on the server and what the Compare tab makes of them: queue, wire, table, form; no browser."""

from __future__ import annotations

import base64
import json
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fastapi import FastAPI
from fastapi.testclient import TestClient

from app.api import include_routes
from app.compare_form import CompareForm
from app.compare_lines import FIGURES, system_label, system_line, system_loss, value_of
from app.compare_request import DEFAULT_SYSTEMS, CompareRequest
from app.compare_runs import KEPT, CompareRuns, Outcome
from app.compare_table import comparison_html, first_word, shared_length
from app.compare_view import CompareView, compare_files, compare_texts
from app.compare_wire import to_wire
from app.context import AppContext, create_context
from app.documents import DEFAULT_DOCUMENT
from app.forms import OWN_TEXT, FormError
from app.run_request import RunRequest
from app.settings import ASSETS, Settings
from app.texts import LANGUAGES, all_texts, text
from engine.baselines import registry
from engine.baselines.base import Context, Resident, Staged
from engine.baselines.kept import keep, top_mask
from engine.baselines.observation import Observer
from engine.compare import iter_compare
from engine.errors import ConfigError
from engine.trace import Progress
from presets.loader import load_presets
from tests.app.fake_engine import FakeEngine, FakeLoader, FakeOptions
from tests.tiny import tiny_loaded

torch.set_num_threads(1)
PROMPT = "A <b>tide</b> table is a short story about the moon. " * 6
REQUEST = CompareRequest(
    PROMPT,
    ("qevict", "snapkv", "kivi-4"),
    {"share": 0.6},
    max_new_tokens=20,
    parameters={"snapkv": {"window": 8}, "kivi-4": {"residual": 32}},
    chat=False,
    ignore_eos=True,
)
WAIT = 120.0


class Loader(FakeLoader):
    """A tiny model for whatever is asked for."""

    def __call__(self, name: str, **options: Any) -> Any:
        super().__call__(name, **options)
        return tiny_loaded(head_dim=32)


def _make(folder: Path, **parts: Any) -> AppContext:
    options = {"engine": FakeEngine(), "loader": Loader(), "options": FakeOptions} | parts
    return create_context(Settings(data_dir=folder), **options)


@pytest.fixture(scope="module")
def context(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AppContext]:
    made = _make(tmp_path_factory.mktemp("compare"))
    yield made
    made.close()


def _outcome(context: AppContext, request: CompareRequest) -> Outcome:
    session = context.compares.start(request)
    assert context.runs.wait(session, WAIT)
    outcome = context.compares.outcome(session)
    assert outcome is not None, context.compares.standing(session).error
    return outcome


@pytest.fixture(scope="module")
def taught(context: AppContext) -> Outcome:
    return _outcome(context, REQUEST)


@pytest.fixture(scope="module")
def free(context: AppContext) -> Outcome:
    return _outcome(context, replace(REQUEST, mode="free", budget={"share": 0.3}))


# queue


def test_a_comparison_is_what_the_engine_says(taught: Outcome) -> None:
    events = list(iter_compare(tiny_loaded(head_dim=32), PROMPT, REQUEST.choices(), REQUEST.options()))
    expected: Any = events[-1]
    assert taught.result.token_ids == expected.token_ids
    for system, want, agrees in zip(taught.result.systems, expected.systems, taught.agrees, strict=True):
        assert system.kl_steps == pytest.approx(want.kl_steps, abs=1e-6)
        assert sum(agrees) / len(agrees) == want.agreement


def test_it_waits_for_a_run_and_a_run_waits_for_it(tmp_path: Path) -> None:
    gate, reached, halt = threading.Event(), threading.Event(), threading.Event()
    engine = FakeEngine(gate=gate)

    def slow(*given: Any, **named: Any) -> Iterator[Any]:
        assert engine.running == 0
        for event in iter_compare(*given, **named):
            reached.set()
            halt.wait(30)
            yield event

    context = _make(tmp_path, engine=engine)
    compares = CompareRuns(context.runs, context.bus, slow)
    try:
        first = context.runs.start(RunRequest("first", options={"max_new_tokens": 4}))
        compared = compares.start(REQUEST)
        last = context.runs.start(RunRequest("last", options={"max_new_tokens": 4}))
        assert compares.standing(compared).state == "queued" and compares.standing(compared).ahead == 1
        gate.set()
        assert reached.wait(WAIT)
        assert context.runs.status(last).state == "queued"
        assert engine.started == ["first"]
        assert compares.standing(compared).state == "running"
        halt.set()
        assert context.runs.wait(last, WAIT) and context.runs.wait(first, WAIT)
        assert engine.started == ["first", "last"]
        assert compares.outcome(compared) is not None
        context.sessions.flush()
        assert {info.id for info in context.sessions.list()} == {first, last}  # a comparison is no session
    finally:
        gate.set()
        halt.set()
        context.close()


def test_a_stopped_one_shows_what_it_has(tmp_path: Path) -> None:
    context = _make(tmp_path)
    sessions: list[str] = []

    def stopping(*given: Any, **named: Any) -> Iterator[Any]:
        for event in iter_compare(*given, **named):
            yield event
            if getattr(event, "step", -1) == 8:
                context.compares.stop(sessions[0])

    compares = CompareRuns(context.runs, context.bus, stopping)
    try:
        sessions.append(compares.start(replace(REQUEST, max_new_tokens=400)))
        assert context.runs.wait(sessions[0], WAIT)
        outcome = compares.outcome(sessions[0])
        assert outcome is not None and outcome.result.stopped
        assert len(outcome.result.systems[0].kl_steps) == 9
        assert "qe-cmp-table" in comparison_html(outcome, "en")
        assert not compares.stop(sessions[0])
    finally:
        context.close()


def test_one_stopped_before_its_first_token_has_a_table_too(tmp_path: Path) -> None:
    context = _make(tmp_path)
    try:
        events = iter_compare(
            tiny_loaded(head_dim=32), PROMPT, REQUEST.choices(), REQUEST.options(), should_stop=lambda: True
        )
        result: Any = [event for event in events if not isinstance(event, Progress)][-1]
        outcome = Outcome(REQUEST, result, [[] for _ in REQUEST.systems], "tiny", "cpu", "float32")
        assert "qe-cmp-table" in comparison_html(outcome, "en")
        assert json.dumps(to_wire(outcome))
    finally:
        context.close()


def test_why_it_failed_is_one_sentence(context: AppContext) -> None:
    session = context.compares.start(replace(REQUEST, budget={"share": 0.01}))
    assert context.runs.wait(session, WAIT)
    now = context.compares.standing(session)
    assert now.state == "ended" and context.compares.outcome(session) is None
    assert "qevict" in now.error and "smallest feasible for all is" in now.error


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"systems": ("qevict",)}, "2 to 4"),
        ({"systems": ("qevict", "nobody")}, "unknown system 'nobody'"),
        ({"prompt": " "}, "empty"),
        ({"budget": {"share": 2.0}}, "share"),
        ({"match_to": "nobody"}, "unknown system 'nobody'"),
        ({"mode": "guess"}, "mode"),
    ],
)
def test_what_cannot_work_is_refused_at_once(context: AppContext, changes: dict[str, Any], said: str) -> None:
    with pytest.raises((ConfigError, ValueError), match=re.escape(said)):
        context.compares.start(replace(REQUEST, **changes))


def test_only_the_last_ones_are_kept(tmp_path: Path, taught: Outcome) -> None:
    def at_once(*_: Any, **__: Any) -> Iterator[Any]:
        yield taught.result

    context = _make(tmp_path)
    compares = CompareRuns(context.runs, context.bus, at_once)
    try:
        sessions = []
        for _ in range(KEPT + 2):
            sessions.append(compares.start(REQUEST))
            assert context.runs.wait(sessions[-1], WAIT)
        assert [compares.outcome(session) is None for session in sessions] == [True, True] + [False] * KEPT
    finally:
        context.close()


# wire


def _unpacked(system: dict[str, Any]) -> list[tuple[np.ndarray, np.ndarray]]:
    """Frames as the browser makes them."""
    out: list[tuple[np.ndarray, np.ndarray]] = []
    for frame in system["frames"]:
        now = [
            np.frombuffer(base64.b64decode(frame[name]), np.uint8).reshape(system["rows"], frame["w"]).copy()
            for name in ("f", "q")
        ]
        if out:
            for part, before in zip(now, out[-1], strict=True):
                width = min(before.shape[1], part.shape[1])
                part[:, :width] ^= before[:, :width]
        out.append((now[0], now[1]))
    return out


def test_frames_come_back_as_they_were(taught: Outcome) -> None:
    wire = json.loads(json.dumps(to_wire(taught)))
    assert wire["layers"] == 2 and wire["new_tokens"] == 20
    assert len(wire["pieces"]) == wire["prompt_tokens"] + 20
    for sent, system in zip(wire["systems"], taught.result.systems, strict=True):
        frames = _unpacked(sent)
        assert len(frames) == len(system.frames) > 2
        for (full, quant), frame in zip(frames, system.frames, strict=True):
            times = sent["rows"] // frame.full.shape[0]
            assert (full == frame.full.repeat(times, axis=0)).all()
            assert (quant == frame.quant.repeat(times, axis=0)).all()
        assert len(sent["agrees"]) == len(sent["kl"]) == 19


def test_many_heads_are_sent_as_their_mean(taught: Outcome, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.compare_wire.LARGEST", 0)
    wire = to_wire(taught)
    snap = taught.result.systems[1]
    full, _ = _unpacked(wire["systems"][1])[0]
    assert {system["rows"] for system in wire["systems"]} == {2}
    want = snap.frames[0].full.reshape(2, -1, full.shape[1]).mean(1)
    assert np.abs(full - want).max() <= 0.5


def test_the_browser_fetches_it(context: AppContext) -> None:
    session = context.compares.start(replace(REQUEST, max_new_tokens=9))
    assert context.runs.wait(session, WAIT)
    app = FastAPI()
    include_routes(app, context)
    client = TestClient(app)
    answer = client.get(f"/qe/compare/{session}")
    assert answer.status_code == 200 and answer.headers["content-encoding"] == "gzip"
    assert [system["name"] for system in answer.json()["systems"]] == list(REQUEST.systems)
    plain = client.get(f"/qe/compare/{session}", headers={"accept-encoding": "identity"})
    assert "content-encoding" not in plain.headers and plain.json() == answer.json()
    assert client.get("/qe/compare/nobody").status_code == 404
    assert len(compare_files()) == 4
    for address in compare_files():
        assert client.get("/" + address).status_code == 200, address


# table


@pytest.mark.parametrize("lang", LANGUAGES)
def test_the_table_holds_every_figure_and_says_how(taught: Outcome, lang: str) -> None:
    html = comparison_html(taught, lang)
    for system in taught.result.systems:
        assert system_label(system.name, lang) in html
        assert f"{value_of(system, 'kl'):.4f}" in html
        assert f"{system.bytes / 1e6:.2f} MB" in html
    for name in FIGURES:
        if any(value_of(system, name) is not None for system in taught.result.systems):
            assert f"<dt>{text(lang, f'compare.{name}')}</dt><dd>" in html
    assert text(lang, "compare.keeps_recoverable") in html and text(lang, "compare.keeps_lossy") in html
    assert html.count('data-act="match"') == 1 and 'data-name="kivi-4"' in html
    assert text(lang, "compare.simulated") not in html


def test_simulated_storage_wears_its_badge_wherever_its_bytes_are(taught: Outcome) -> None:
    result = replace(
        taught.result, systems=[replace(system, storage="simulated") for system in taught.result.systems[:1]]
    )
    outcome = replace(taught, result=result, agrees=taught.agrees[:1])
    assert comparison_html(outcome, "en").count("qe-simulated") == 3  # name, bytes, share
    assert to_wire(outcome)["systems"][0]["simulated"] is True


def test_matched_bytes_can_be_given_back(context: AppContext) -> None:
    matched = _outcome(context, replace(REQUEST, match_to="kivi-4", max_new_tokens=9))
    assert 'data-name=""' in comparison_html(matched, "en")
    qevict, _, kivi = matched.result.systems
    assert 0.7 * kivi.bytes < qevict.bytes < 1.1 * kivi.bytes


def test_free_texts_mark_what_differs_and_escape_it(free: Outcome) -> None:
    html = comparison_html(free, "en")
    assert html.count('class="qe-cmp-text"') == 1 + len(free.result.systems)
    assert "<mark>" in html or all(system.first_difference is None for system in free.result.systems)
    wicked = replace(free.result, text="same <script>", systems=[replace(free.result.systems[0])])
    wicked.systems[0].text, wicked.systems[0].first_difference = "same <img src=x> rest", 1
    shown = comparison_html(replace(free, result=wicked), "en")
    assert "<script>" not in shown and "<img" not in shown
    assert "same &lt;</span>" in shown and "<mark>img</mark> src=x&gt; rest" in shown


def test_where_texts_part() -> None:
    assert shared_length("the cat sat", "the car sat") == 4
    assert shared_length("the cat", "the cat") == 7
    assert shared_length("", "x") == 0
    assert first_word(" one two") == (" one", " two")
    assert first_word("") == ("", "")
    assert first_word("月亮") == ("月", "亮")


# words and form


def test_every_system_is_described_in_every_language() -> None:
    for lang in LANGUAGES:
        for name in registry.names():
            assert system_label(name, lang) != name or name.isupper(), (lang, name)
            assert system_line(name, lang) and system_loss(name, lang), (lang, name)
    known = {info.label for info in registry.systems()}
    told = {key for key in all_texts("en") if key.startswith("systems.")}
    assert told == {key + end for key in known for end in ("", "_line", "_loss")}


def test_a_system_without_texts_is_shown_by_its_name() -> None:
    assert system_label("brand-new", "en") == "brand-new" and system_line("brand-new", "zh") == ""
    assert set(DEFAULT_SYSTEMS) <= set(registry.names())


def test_the_view_knows_its_words_and_is_idle_by_itself() -> None:
    words = compare_texts()["zh"]
    assert words["compare.label"] != compare_texts()["en"]["compare.label"]
    assert words["systems.qevict"] == "QEvict" and "systems.qevict_line" not in words
    used = set()
    for script in ASSETS.glob("js/compare_*.js"):
        used |= set(re.findall(r'"((?:compare|view)\.[a-z_]+)"', script.read_text("utf-8")))
    assert used - set(words) == set()
    view = CompareView()
    assert view.postprocess(None) == {"sid": ""}
    assert view.postprocess('{"sid": "x"}') == {"sid": "x"}


def _form(**changes: Any) -> CompareForm:
    values = {
        "document": DEFAULT_DOCUMENT,
        "own_text": "",
        "systems": ["qevict", "snapkv"],
        "mode": "teacher",
        "budget": 20,
        "unit": "share",
        "new_tokens": 32,
        "model": "embedded",
        "device": "auto",
        "kv_dtype": "float16",
        "ignore_eos": True,
    }
    return CompareForm(values | changes, lang="en", presets=load_presets(), settings=Settings(max_new_tokens=512))


def test_the_form_is_a_comparison() -> None:
    request = _form().comparison()
    assert (request.systems, dict(request.budget)) == (("qevict", "snapkv"), {"share": 0.2})
    assert dict(_form(unit="tokens", budget=300).comparison().budget) == {"tokens": 300}
    assert dict(_form(unit="bytes", budget=1500).comparison("kivi-2").budget) == {"total_bytes": 1_500_000}
    request.check()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"systems": []}, "at least two"),
        ({"systems": ["qevict"]}, "at least two"),
        ({"systems": ["a", "b", "c", "d", "e"]}, "Leave 1 out"),
        ({"budget": None}, "Budget must be a number"),
        ({"budget": 0}, "Budget must be between"),
        ({"unit": "pounds"}, "no choice"),
        ({"new_tokens": 10_000}, "between 1 and 512"),
        ({"document": OWN_TEXT, "own_text": " "}, "The text is empty"),
    ],
)
def test_the_form_refuses_in_one_sentence(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(FormError, match=re.escape(said)):
        _form(**changes).comparison()


@dataclass(frozen=True, kw_only=True)
class ValueKV(Observer):
    """The example of the README: the prompt tokens whose values are largest."""

    name, label = "valuekv", "systems.valuekv"

    def compress(self, staged: list[Staged], context: Context) -> list[Resident]:
        kept = self.kept(context.shape, context.columns, context.run)
        valid, room = context.valid(), context.run.planned_new_tokens
        sizes = [part.value.float().norm(dim=-1).masked_fill(~valid[:, None], -torch.inf) for part in staged]
        return [
            keep(part, top_mask(size, kept), valid, room=room, dtype=context.dtype)
            for part, size in zip(staged, sizes, strict=True)
        ]


def test_a_new_system_is_a_class_and_a_line(context: AppContext, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_SYSTEMS", (*registry._SYSTEMS, ("valuekv", ValueKV, {})))
    outcome = _outcome(context, replace(REQUEST, systems=("valuekv", "snapkv"), max_new_tokens=9))
    own, snap = outcome.result.systems
    assert own.bytes == own.expected_bytes == snap.bytes
    assert own.fmm is not None and 0.0 < own.fmm < 1.0
    assert "<strong>valuekv</strong>" in comparison_html(outcome, "en")
