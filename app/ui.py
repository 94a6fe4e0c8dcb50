"""The page: header, side panel and tabs in one Gradio Blocks, with the language switch and deep links.

Composition only; each tab lives in `app/tabs`. Nothing happens at import.
"""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, Any

import gradio as gr

from app import page_api
from app.labels import Labels, pick_language
from app.listeners import AT_ONCE
from app.look import page_options
from app.page_link import LinkTarget
from app.tabs import about
from app.tabs.analysis import AnalysisTab
from app.tabs.compare import CompareTab
from app.tabs.lessons import LessonsTab
from app.tabs.live import LiveTab
from app.tabs.replays import ReplaysTab
from app.texts import DEFAULT, LANGUAGES, text

if TYPE_CHECKING:
    from app.context import AppContext

__all__ = ["build_ui", "page_options"]

STORAGE_KEY = "qevict-lab"
STORAGE_SECRET = "qevict-lab-view-settings-hold-no-secret"
"""Fixed, so that a restarted server can still read what the browser kept; only the language is in it."""

LANGUAGE_NAMES = {"en": "EN", "zh": "中文"}


def build_ui(context: AppContext) -> gr.Blocks:
    """The whole page over a server's sessions, runs and bus; pass `page_options()` to `launch` or the mount."""
    labels = Labels()
    demo = gr.Blocks(title=text(DEFAULT, "page.title"), analytics_enabled=False, fill_width=True)
    with demo:
        lang = gr.State(DEFAULT)
        kept = gr.BrowserState({"lang": ""}, storage_key=STORAGE_KEY, secret=STORAGE_SECRET)
        live = LiveTab(context, labels, lang)
        compare = CompareTab(context, labels, lang)
        lessons = LessonsTab()
        replays = ReplaysTab(context, labels, lang)
        analysis = AnalysisTab(context, labels, lang)
        live.build_panel()
        language = _build_header(labels)
        with gr.Tabs(selected="live", elem_classes="qe-tabs", elem_id="qe-tabs") as tabs:
            with _tab(labels, "live"):
                live.build_main()
            with _tab(labels, "compare") as compare_tab:
                compare.build()
            with _tab(labels, "lessons"):
                lessons.build()
            with _tab(labels, "replays") as replays_tab:
                replays.build()
            with _tab(labels, "analysis") as analysis_tab:
                analysis.build()
            with _tab(labels, "about"):
                about.build(labels)
        live.wire()
        compare.wire()
        lessons.wire(tabs, *live.form)
        replays.wire()
        analysis.wire(analysis_tab)
        _wire_page(demo, labels, lang, kept, language, tabs, replays_tab, live, compare, replays, analysis)
        compare_tab.select(
            compare.show,
            [lang, compare.session, compare.linked.component, compare.recent],
            compare.showing,
            **AT_ONCE,
        )
        page_api.publish(context)
    demo.queue(default_concurrency_limit=None, max_size=None)
    return demo


def _tab(labels: Labels, name: str) -> gr.Tab:
    tab = labels.bind(gr.Tab(text(DEFAULT, f"tabs.{name}"), id=name, render_children=True), label=f"tabs.{name}")
    tab.select(None, None, None, js=f"() => window.qePage.tab('{name}')", api_visibility="private")
    return tab


def _build_header(labels: Labels) -> gr.Radio:
    """Title on the left; language, theme, projector mode and text size on the right."""

    def brand(lang: str) -> str:
        return f"<h1>{escape(text(lang, 'page.title'))}</h1><span>{escape(text(lang, 'page.tagline'))}</span>"

    with gr.Row(elem_classes="qe-header"):
        labels.bind_with(
            gr.HTML(brand(DEFAULT), padding=False, elem_classes="qe-brand"), lambda lang: {"value": brand(lang)}
        )
        with gr.Row(elem_classes="qe-tools"):
            # Says its name in both languages at once, so it is left alone by a switch.
            language = gr.Radio(
                [(LANGUAGE_NAMES[name], name) for name in LANGUAGES],
                value=DEFAULT,
                label=text(DEFAULT, "page.language"),
                show_label=False,
                elem_classes="qe-language",
                elem_id="qe-language",
            )
            for name, key in (("theme", "page.dark"), ("projector", "page.projector")):
                button = labels.bind(gr.Button(text(DEFAULT, key), size="sm", elem_id=f"qe-{name}-button"), value=key)
                _acts(button, name)
            for name, sign in (("smaller", "A−"), ("larger", "A+")):
                _acts(gr.Button(sign, size="sm", elem_id=f"qe-{name}-button"), name)
    return language


def _acts(button: gr.Button, name: str) -> None:
    button.click(None, None, None, js=f"() => window.qePage.act('{name}')", api_visibility="private")


def _wire_page(
    demo: gr.Blocks,
    labels: Labels,
    lang: gr.State,
    kept: gr.BrowserState,
    language: gr.Radio,
    tabs: gr.Tabs,
    replays_tab: gr.Tab,
    live: LiveTab,
    compare: CompareTab,
    replays: ReplaysTab,
    analysis: AnalysisTab,
) -> None:
    def arrive(saved: dict[str, Any] | None, request: gr.Request) -> list[Any]:
        query = request.query_params
        chosen = pick_language(query.get("lang"), (saved or {}).get("lang"), request.headers.get("accept-language"))
        session, comparison = query.get("s"), query.get("c")
        shown = "replays" if session else "compare" if comparison else "lessons" if query.get("class") else None
        return [
            chosen,
            chosen,
            gr.Tabs(selected=shown) if shown else gr.skip(),
            LinkTarget.value(session, event=_whole(query.get("r")), row=_whole(query.get("l"))),
            LinkTarget.value(None if session else comparison),
            live.first_board(),
            *live.words(chosen, ""),
            *compare.words(chosen, ""),
            replays.table_html(chosen),
            *labels.updates(chosen),
        ]

    arriving: list[Any] = [
        lang,
        language,
        tabs,
        replays.linked.component,
        compare.linked.component,
        live.board,
        *live.wordy,
        *compare.wordy,
        replays.table,
    ]
    arriving += labels.components
    arrived = demo.load(arrive, [kept], _once(arriving), **AT_ONCE)
    arrived.then(
        None,
        [language],
        None,
        js="(lang) => { window.qePage.language(lang); window.qePage.ready(); }",
        api_visibility="private",
    )

    def switch(chosen: str, running: str, compared: str, opened: str) -> list[Any]:
        return [
            chosen,
            {"lang": chosen},
            *live.words(chosen, running),
            *compare.words(chosen, compared),
            replays.table_html(chosen),
            *replays.words(chosen, opened),
            *labels.updates(chosen),
        ]

    switched = language.input(
        switch,
        [language, live.session, compare.session, replays.session],
        [lang, kept, *live.wordy, *compare.wordy, replays.table, *replays.wordy, *labels.components],
        **AT_ONCE,
    )
    switched.then(None, [language], None, js="(lang) => { window.qePage.language(lang); }", api_visibility="private")
    analysis.wire_language(switched)
    replays_tab.select(replays.table_html, [lang], [replays.table], **AT_ONCE)


def _once(components: list[Any]) -> list[Any]:
    """The same list; refuses a component that stands in it twice, since its second value would win silently."""
    seen: set[int] = set()
    for component in components:
        if id(component) in seen:
            raise ValueError(f"{component!r} must be the output of an event only once.")
        seen.add(id(component))
    return components


def _whole(value: str | None) -> int | None:
    """A whole number from an address, None if it is not one."""
    return int(value) if value and value.isascii() and value.isdigit() and len(value) < 10 else None
