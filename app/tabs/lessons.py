"""The Lessons tab: one step of a lesson beside a board that stands where the step says.

The lessons run in the browser, from recorded runs, with no model; this only lays the two parts out and starts a
lesson's run on the Live tab when somebody asks for it.
"""

from __future__ import annotations

import hashlib
from functools import cache
from typing import Any

import gradio as gr

from app.lessons import find_lesson
from app.listeners import AT_ONCE
from app.settings import ASSETS
from app.tabs.run_panel import PRESET_FIELDS, fill_preset, show_document
from app.tier_view import TierView
from presets.lessons import load_lessons
from visuals.replay import lean_script

SCRIPTS = ("js/lessons.js", "js/tier_lesson.js", "js/lessons_class.js")
BOARD = "qe-lesson-board"
RUN_FIELDS = {
    "new_tokens": 200,
    "temperature": 0.8,
    "seed": 1,
    "ignore_eos": True,
    "reference": True,
    "question": "",
}
"""How the bundled runs were generated, by the form's fields: the document alone, measured against FullKV."""

_ON_LOAD = """
new IntersectionObserver((seen, watch) => {
  if (!seen.pop().isIntersecting) return;
  watch.disconnect();
  const onload = () => window.qeStartLessons(element, props, (lesson) => trigger("select", { lesson }));
  document.head.append(Object.assign(document.createElement("script"), { src: props.src[0], onload }));
}).observe(element);
"""
"""Nothing of the lessons is fetched before their tab is on the screen."""


class LessonsTab:
    """Builds the tab and wires its one button that needs the server."""

    def build(self) -> None:
        """Lays the tab out inside the current Blocks context."""
        with gr.Row(elem_classes="qe-lessons"):
            self.player = gr.HTML(
                html_template='<div class="qe-player"></div>',
                js_on_load=lean_script(_ON_LOAD),
                apply_default_css=False,
                elem_id="qe-lesson",
                padding=False,
                src=lesson_scripts(),
                board=BOARD,
            )
            self.board = TierView(elem_id=BOARD)

    def wire(self, tabs: gr.Tabs, fields: dict[str, Any], reader: list[Any]) -> None:
        """Lets a lesson fill the run form: `fields` by name, `reader` what shows a chosen document."""
        names = ["document", "preset", *PRESET_FIELDS, *RUN_FIELDS]
        self.player.select(
            start_live,
            None,
            [tabs, *[fields[name] for name in names], *reader],
            **AT_ONCE,
        )


def start_live(event: gr.EventData) -> list[Any]:
    """The Live tab with its form as the lesson has it; nothing starts until somebody presses Run."""
    lesson = find_lesson(str(event.lesson))
    if lesson is None:
        lesson = load_lessons()[0]
    return [
        gr.Tabs(selected="live"),
        lesson.document,
        lesson.preset,
        *fill_preset(lesson.preset),
        *RUN_FIELDS.values(),
        *show_document(lesson.document),
    ]


@cache
def lesson_scripts() -> list[str]:
    """Addresses of the scripts that come with the first lesson; they change with the content."""
    return [f"qe/static/{name}?v={hashlib.sha256((ASSETS / name).read_bytes()).hexdigest()[:12]}" for name in SCRIPTS]
