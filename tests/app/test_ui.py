"""The page's parts without a browser: words, tables, watch, and the Blocks that they make up."""

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

from app.context import AppContext, create_context
from app.labels import Labels, pick_language
from app.look import head, page_options
from app.messages import error_html, notices_html, standing_sentence
from app.model_loading import load_sentences
from app.run_watch import RunWatch, Standing
from app.sessions import SessionInfo
from app.settings import Settings
from app.tabs import about
from app.tabs.replays import links_html, sessions_html
from app.texts import LANGUAGES, all_texts, text
from app.ui import _once, _whole, build_ui
from engine.config import QEvictConfig
from engine.errors import ModelNotFoundError
from tests.app.fake_engine import FakeEngine, FakeLoader, FakeOptions
from tests.app.filled_form import filled_form
from visuals.replay import page_script

ROOT = Path(__file__).resolve().parents[2]
PUBLIC = {"run_session", "stop_session", "list_sessions", "get_session", "export_session"}


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
    request = filled_form(kv_budget=0.05, new_tokens=40).request()
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
