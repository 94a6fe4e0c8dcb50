"""The page's parts without a browser: form, words, tables, watch, and the Blocks that they make up."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import gradio as gr
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.context import AppContext, create_context
from app.documents import DEFAULT_DOCUMENT, DocumentError, get_document, load_documents
from app.forms import FILE_LIMIT_KB, OWN_FILE, OWN_TEXT, FormError, RunForm
from app.labels import Labels, pick_language
from app.look import head, page_options
from app.messages import error_html, notice_sentences, notices_html, standing_sentence
from app.model_loading import load_sentences
from app.result_table import format_bytes, format_share, result_html, rows
from app.run_watch import RunWatch, Standing
from app.sessions import SessionInfo
from app.settings import Settings
from app.tabs import about
from app.tabs.replays import links_html, sessions_html
from app.tabs.run_panel import PRESET_FIELDS, fill_preset
from app.texts import LANGUAGES, all_texts, text
from app.ui import _once, _whole, build_ui
from engine.config import QEvictConfig
from engine.errors import ConfigError, ModelNotFoundError
from presets.loader import load_presets
from tests.app.fake_engine import FakeEngine, FakeLoader, FakeOptions
from visuals.replay import page_script

ROOT = Path(__file__).resolve().parents[2]
PUBLIC = {"run_session", "stop_session", "list_sessions", "get_session", "export_session"}


def _values(**changes: Any) -> dict[str, Any]:
    values = {
        "document": DEFAULT_DOCUMENT,
        "question": "",
        "own_text": "",
        "file": None,
        "preset": "paper-20",
        "kv_budget": 0.2,
        "quant_share": 0.7,
        "bits": 2,
        "window_size": 8,
        "sink_tokens": 5,
        "local_tokens": "",
        "promotion": True,
        "backend": "auto",
        "new_tokens": 64,
        "temperature": 0,
        "seed": 0,
        "reference": True,
        "ignore_eos": False,
        "model": "embedded",
        "device": "auto",
    }
    return values | changes


def _form(lang: str = "en", **changes: Any) -> RunForm:
    return RunForm(_values(**changes), lang=lang, presets=load_presets(), settings=Settings(max_new_tokens=512))


@pytest.fixture
def context(tmp_path: Path) -> Iterator[AppContext]:
    made = create_context(
        Settings(data_dir=tmp_path),
        engine=FakeEngine(smallest_share=0.1),
        loader=FakeLoader(),
        options=FakeOptions,
    )
    yield made
    made.close()


def _page(context: AppContext) -> gr.Blocks:
    """The page, built inside an event loop: without one Gradio makes a loop for each listener and closes none."""

    async def build() -> gr.Blocks:
        return build_ui(context)

    return asyncio.run(build())


# the form


def test_a_plain_form_is_a_request() -> None:
    request = _form().request()
    assert request.prompt == get_document(DEFAULT_DOCUMENT).text
    assert request.config == load_presets()["paper-20"].config.replace(planned_new_tokens=64)
    assert _form().options()["max_new_tokens"] == 64
    assert request.raise_budget


def test_fields_are_laid_over_the_preset() -> None:
    config = _form(kv_budget=0.4, quant_share=0.1, bits=4, local_tokens="64", promotion=False).config()
    assert (config.kv_budget, config.quant_share, config.bits) == (0.4, 0.1, 4)
    assert (config.local_tokens, config.promotion) == (64, False)
    assert config.kv_dtype == load_presets()["paper-20"].config.kv_dtype


@pytest.mark.parametrize("lang", LANGUAGES)
@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"document": OWN_TEXT, "own_text": "  \n"}, "error.prompt_empty"),
        ({"document": OWN_FILE}, "error.file_missing"),
        ({"model": " "}, "model.empty"),
    ],
)
def test_what_is_missing_is_said_in_the_readers_language(lang: str, changes: dict[str, Any], key: str) -> None:
    with pytest.raises(FormError) as caught:
        _form(lang, **changes).request()
    assert str(caught.value) == text(lang, key)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"kv_budget": 0}, "kv_budget"),
        ({"kv_budget": 1.5}, "kv_budget"),
        ({"quant_share": -0.1}, "quant_share"),
        ({"new_tokens": 513}, "new_tokens"),
        ({"new_tokens": None}, "new_tokens"),
        ({"new_tokens": 2.5}, "new_tokens"),
        ({"seed": "seven"}, "seed"),
        ({"temperature": float("nan")}, "temperature"),
        ({"local_tokens": "12"}, "local_tokens"),
        ({"window_size": 7}, "window_size"),
        ({"bits": 3}, "bits"),
    ],
)
def test_a_bad_number_names_its_field(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(FormError) as caught:
        _form(**changes).request()
    assert text("en", f"form.{field}") in str(caught.value)
    assert "{" not in str(caught.value)


def test_the_engine_refuses_what_does_not_go_together() -> None:
    with pytest.raises(ConfigError):
        _form(window_size=1, quant_share=0.7).request()


@given(budget=st.floats(0.001, 1.0), share=st.floats(0.0, 1.0))
def test_every_share_in_range_is_taken(budget: float, share: float) -> None:
    config = _form(kv_budget=budget, quant_share=share).config()
    assert (config.kv_budget, config.quant_share) == (budget, share)


def test_files_are_read_with_their_limits(tmp_path: Path) -> None:
    good, large, binary = tmp_path / "a.txt", tmp_path / "b.txt", tmp_path / "c.txt"
    good.write_bytes(b"\xef\xbb\xbfhello \xe4\xbd\xa0")
    large.write_text("x" * (FILE_LIMIT_KB * 1024 + 1))
    binary.write_bytes(b"\xff\xfe\x00\x01")
    assert _form(document=OWN_FILE, file=str(good)).prompt() == ("hello \u4f60", "a.txt")
    with pytest.raises(FormError, match=str(FILE_LIMIT_KB)):
        _form(document=OWN_FILE, file=str(large)).prompt()
    with pytest.raises(FormError, match="UTF-8"):
        _form(document=OWN_FILE, file=str(binary)).prompt()


def test_every_preset_fills_the_form_and_comes_back() -> None:
    for name, preset in load_presets().items():
        filled = dict(zip(PRESET_FIELDS, fill_preset(name), strict=True))
        config = _form(preset=name, **filled).config()
        assert config == preset.config.replace(planned_new_tokens=64, routing_interval=None), name


# documents


def test_documents_state_a_fact_and_end_with_a_question() -> None:
    documents = load_documents()
    assert DEFAULT_DOCUMENT in documents
    english = [document for document in documents.values() if document.language == "en"]
    assert [document.tokens for document in english] == sorted(document.tokens for document in english)
    for document in documents.values():
        last = document.text.splitlines()[-1]
        assert last.startswith("Question:" if document.language == "en" else "\u95ee\u9898")
        assert document.tokens / 3 < len(document.text) < document.tokens * 5
        assert all(document.title(lang) and document.hint(lang) for lang in LANGUAGES)


def test_an_unknown_document_is_refused() -> None:
    with pytest.raises(DocumentError, match="nothing"):
        get_document("nothing")


# words


@pytest.mark.parametrize(
    ("wishes", "chosen"),
    [
        (("zh", "en"), "zh"),
        ((None, "", "zh-CN,zh;q=0.9,en;q=0.8"), "zh"),
        ((None, None, "fr-FR,fr;q=0.9,zh;q=0.8"), "en"),
        (("xx", "zh"), "zh"),
        ((None,), "en"),
    ],
)
def test_the_first_known_wish_wins(wishes: tuple[str | None, ...], chosen: str) -> None:
    assert pick_language(*wishes) == chosen


def test_labels_follow_the_language() -> None:
    labels = Labels()
    button = labels.bind(gr.Button("x", render=False), value="form.run")
    assert labels.components == [button]
    assert [labels.updates(lang)[0]["value"] for lang in LANGUAGES] == [text(lang, "form.run") for lang in LANGUAGES]


def test_messages_escape_what_they_are_told() -> None:
    for html in (error_html("<b>&"), notices_html(["<b>&"])):
        assert "<b>" not in html
        assert "&lt;b&gt;&amp;" in html
    assert notices_html([]) == ""


@pytest.mark.parametrize("lang", LANGUAGES)
def test_every_standing_is_a_whole_sentence(lang: str) -> None:
    standings = [
        Standing("queued", ahead=2),
        Standing("queued"),
        Standing("loading", stage="load", done=1, total=3),
        Standing("loading"),
        Standing("running"),
        Standing("running", planned=9),
        Standing("running", planned=9, tokens=3),
        Standing("running", planned=9, tokens=3, rate=2.0),
        *(
            Standing("ended", why=why, tokens=tokens)
            for why in ("eos", "length", "stop", "interrupted", "error")
            for tokens in (0, 3)
        ),
    ]
    known = set(all_texts(lang))
    for standing in standings:
        sentence = standing_sentence(standing, lang)
        assert sentence not in known
        assert sentence
        assert "{" not in sentence
    assert len({standing_sentence(standing, lang) for standing in standings}) > 10


# the result

SUMMARY: dict[str, Any] = {
    "settings": {"weights": "int4", "dtype": "float32", "device": "cpu"},
    "backend": "<i>sdpa</i>",
    "kv": {
        "total_bytes": 5962740,
        "peak_persistent_bytes": 5954160,
        "full_kv_bytes": 26173440,
        "share": 0.2275,
        "kv_dtype": "float16",
        "prefill_peak_bytes": 50888880,
        "scoring_bytes": 0,
    },
    "metrics": {
        "fmm": 0.115,
        "fmm_history": 0.45,
        "fmm_fp_only": 0.23,
        "churn": 0.0045,
        "mass_share": {"full": 0.1, "quant": 0.2, "evicted": 0.3},
    },
    "routing": {"events": 6, "promotions": 1, "demotions": 2, "evictions": 3},
    "timing": {"prompt_tokens": 12, "ttft_ms": 8760.0, "tpot_ms": 149.0, "tokens_per_s": 6.7, "reference_share": 0.06},
}


@pytest.mark.parametrize("lang", LANGUAGES)
def test_a_result_names_its_dtype_and_escapes(lang: str) -> None:
    html = result_html(SUMMARY, lang)
    assert html.count("MB (float16)") == 3
    assert "int4" in html
    assert "6.0 %" in html
    assert "&lt;i&gt;sdpa&lt;/i&gt;" in html
    assert "<i>" not in html
    assert text(lang, "result.fmm") in html
    assert "5.95 MB" in html
    assert "{" not in html


def test_without_a_reference_nothing_is_made_up() -> None:
    html = result_html(SUMMARY | {"metrics": None}, "en")
    assert text("en", "result.reference_off") in html
    assert text("en", "result.churn") not in html
    assert text("en", "result.reference_none_how") in html


@pytest.mark.parametrize("lang", LANGUAGES)
def test_every_figure_says_where_it_comes_from(lang: str) -> None:
    origins = {"en": ("measured", "set:", "computed"), "zh": ("实测", "设定", "计算")}[lang]
    for summary in (SUMMARY, SUMMARY | {"metrics": None}):
        for name, value, how in rows(summary, lang):
            assert how.startswith(origins) or how == text(lang, "result.reference_off"), name
            assert value


@pytest.mark.parametrize("lang", LANGUAGES)
def test_notices_are_sentences_in_the_readers_language(lang: str) -> None:
    said = notice_sentences(["no_full_history", "new_tokens_capped", "already a sentence."], lang)
    assert said == [
        text(lang, "notice.no_full_history"),
        text(lang, "notice.new_tokens_capped"),
        "already a sentence.",
    ]


@pytest.mark.parametrize("summary", [{}, {"kv": None}, {"kv": {"share": None}, "metrics": {"churn": None}}])
def test_an_incomplete_summary_breaks_nothing(summary: dict[str, Any]) -> None:
    assert "None" not in result_html(summary, "en")


@given(st.integers(0, 10**14))
def test_bytes_have_at_most_three_digits_and_a_unit(count: int) -> None:
    number, unit = format_bytes(count, "en").split(" ")
    size = float(number) * {"B": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9}[unit]
    assert abs(size - count) <= max(1.0, 0.006 * count)
    assert unit == "GB" or float(number) < 1000


def test_small_shares_keep_a_digit() -> None:
    assert format_share(0.2) == "20.0 %"
    assert format_share(0.0042) == "0.42 %"


# replays


def _info(**changes: Any) -> SessionInfo:
    values: dict[str, Any] = {
        "id": "abc_-1",
        "created": 0.0,
        "model": "m<i>",
        "policy": "qevict",
        "title": "<script>alert(1)</script>",
        "state": "done",
        "num_events": 3,
        "settings": {"config": {"kv_budget": 0.2}},
        "summary": {"num_tokens": 7},
    }
    return SessionInfo(**(values | changes))


def test_titles_and_models_are_escaped() -> None:
    html = sessions_html([_info()], "en")
    assert "<script>" not in html
    assert "m<i>" not in html
    assert 'data-sid="abc_-1"' in html
    assert "20.0 %" in html


def test_odd_settings_break_no_table() -> None:
    for settings in ({}, {"config": None}, {"config": {"kv_budget": "x"}}):
        assert "abc_-1" in sessions_html([_info(settings=settings, summary={})], "en")
    assert text("zh", "replays.none") in sessions_html([], "zh")


def test_links_stay_on_this_server() -> None:
    html = links_html("a b/..", "en")
    assert "a%20b%2F.." in html
    assert "http" not in html


# watching a run


def _ended(watch: RunWatch) -> Standing:
    for _ in range(2000):
        now = watch.poll()
        if now.state == "ended":
            return now
        time.sleep(0.005)
    raise TimeoutError("the run did not end")


def test_a_watch_hears_notices_tokens_and_the_end(context: AppContext) -> None:
    request = _form(kv_budget=0.05, new_tokens=40).request()
    session = context.runs.start(request)
    now = _ended(RunWatch(session, context.runs, context.bus, context.sessions))
    assert (now.why, now.tokens, now.planned) == ("length", 40, 40)
    assert len(now.notices) == 1
    assert "10.00%" in now.notices[0]
    late = _ended(RunWatch(session, context.runs, context.bus, context.sessions))
    assert (late.why, late.tokens) == ("length", 40)


def test_a_watch_on_nothing_ends() -> None:
    made = create_context(Settings(data_dir=Path("does-not-matter")), engine=FakeEngine(), loader=FakeLoader())

    class Empty:
        def events(self, *_: object) -> Iterator[bytes]:
            return iter(())

    watch = RunWatch("nothing", made.runs, made.bus, Empty())  # type: ignore[arg-type]
    assert watch.poll().why == "interrupted"


def test_loading_tells_how_it_went(context: AppContext) -> None:
    said = list(load_sentences(context.runs.models, " ", "auto", "en"))
    assert said == [(text("en", "model.empty"), True, True)]
    context.runs.models._loader = FakeLoader(error=ModelNotFoundError("no such model."))
    assert list(load_sentences(context.runs.models, "x", "auto", "en"))[-1] == ("no such model.", True, True)


# the whole page


def test_only_five_endpoints_are_public(context: AppContext) -> None:
    demo = _page(context)
    functions = list(demo.fns.values())
    public = {function.api_name for function in functions if function.api_visibility == "public"}
    assert public == PUBLIC
    assert len(functions) > 15


def test_endpoints_run_list_and_export(context: AppContext) -> None:
    fns: dict[str, Any] = {str(function.api_name): function.fn for function in _page(context).fns.values()}
    session = fns["run_session"]("hello", max_new_tokens=16, settings={"kv_budget": 0.3})["sid"]
    assert context.runs.wait(session, 20)
    assert fns["stop_session"](session) is False
    assert [row["sid"] for row in fns["list_sessions"]()] == [session]
    found = fns["get_session"](session)
    assert (found["state"], found["status"]) == ("done", "ended")
    assert found["settings"]["config"]["kv_budget"] == 0.3
    assert fns["export_session"](session, "csv")["url"].endswith(f"{session}/export.csv")
    for bad in (
        lambda: fns["run_session"](""),
        lambda: fns["run_session"]("x", settings={"no_such": 1}),
        lambda: fns["get_session"]("nothing"),
        lambda: fns["export_session"](session, "exe"),
    ):
        with pytest.raises(gr.Error):
            bad()


def test_every_bound_word_has_both_languages(context: AppContext) -> None:
    demo = _page(context)
    config = demo.get_config_file()
    shown = [component["props"].get("label") for component in config["components"]]
    keys = set(all_texts("en"))
    assert [label for label in shown if isinstance(label, str) and label in keys] == []


def test_the_page_asks_no_other_server(context: AppContext) -> None:
    options = page_options()
    assert options["theme"]._stylesheets == []
    assert "http://" not in head()
    assert "https://" not in head()
    assert _page(context).analytics_enabled is False


def _without_words(script: str) -> str:
    """A component's lines without the words and addresses that a board's begin with: those are no script."""
    begin = "const board="
    return script[json.JSONDecoder().raw_decode(script, len(begin))[1] :] if script.startswith(begin) else script


def test_all_our_script_is_light(context: AppContext) -> None:
    """Board, page script and the components' own lines together: at most 80 KB before any compression."""
    config = _page(context).get_config_file()
    loads = {
        _without_words(part["props"]["js_on_load"]) for part in config["components"] if part["props"].get("js_on_load")
    }
    lines = [str(listener.get("js") or "") for listener in config["dependencies"]]
    scripts = [page_script(with_texts=False), *re.findall(r"(?s)<script>(.*?)</script>", head()), *loads, *lines]
    assert len(scripts) > 5
    assert sum(len(script.encode()) for script in scripts) <= 80_000


def test_an_output_is_named_once() -> None:
    first, second = object(), object()
    assert _once([first, second]) == [first, second]
    with pytest.raises(ValueError, match="once"):
        _once([first, second, first])


@pytest.mark.parametrize(("given", "number"), [("7", 7), ("", None), (None, None), ("-1", None), ("x", None)])
def test_numbers_in_links(given: str | None, number: int | None) -> None:
    assert _whole(given) == number


# about


@pytest.mark.parametrize("lang", LANGUAGES)
def test_the_picture_is_well_formed_and_described(lang: str) -> None:
    root = ElementTree.fromstring(about.picture(lang))
    names = [node.tag.split("}")[-1] for node in root.iter()]
    assert "title" in names
    assert "desc" in names
    words = "".join(root.itertext())
    for key in ("picture_promote", "picture_evict", "picture_full"):
        assert text(lang, f"about.{key}") in words
    assert "about." not in about.about_html(lang)


def test_the_lead_states_the_default_window() -> None:
    assert str(QEvictConfig().window_size) in about.about_html("en")


def test_only_what_goes_on_takes_the_queue(context: AppContext) -> None:
    """An answer over the queue's stream can be lost while the stream is closing, see `app.listeners`."""
    listeners = [one for one in _page(context).get_config_file()["dependencies"] if one["backend_fn"]]
    private = [one for one in listeners if one["api_visibility"] == "private"]
    assert len(private) > 20
    waiting = [one["id"] for one in private if one["queue"] is not False and not one["types"]["generator"]]
    assert waiting == []


def test_no_listener_waits_for_a_states_change(context: AppContext) -> None:
    """Gradio tells the page of a changed state over its queue alone, so such a listener would never be called."""
    config = _page(context).get_config_file()
    states = {one["id"] for one in config["components"] if one["type"] in ("state", "browserstate")}
    assert len(states) > 5
    assert [one["id"] for one in config["dependencies"] for target, _ in one["targets"] if target in states] == []
