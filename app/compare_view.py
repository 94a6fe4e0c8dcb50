"""The board of a comparison as a Gradio component: an id in, systems on one token axis out.

Its scripts are fetched when there is something to show. Knows the wire to the browser; knows no comparison.
"""

from __future__ import annotations

import hashlib
import json
from functools import cache
from typing import Any

import gradio as gr

from app.settings import ASSETS
from app.texts import all_texts
from app.tier_view import LANGUAGES, board_files
from visuals.replay import lean_script

NOTHING: dict[str, Any] = {"sid": "", "base": "qe"}
SCRIPTS = ("compare_view.js", "compare_draw.js", "compare_input.js")
AREAS = ("compare.", "systems.", "view.")

_ON_LOAD = """
const host = element.querySelector(".qe-host");
const files = props.files;
const add = (tag, attributes) => new Promise((done, failed) => {
  const node = document.createElement(tag);
  node.onload = done;
  node.onerror = () => failed(new Error(attributes.src || attributes.href));
  Object.assign(node, attributes);
  document.head.appendChild(node);
});
const all = async (list) => {
  await Promise.all([
    ...list.styles.map((href) => add("link", { rel: "stylesheet", href })),
    ...list.scripts.map((src) => add("script", { async: false, src })),
  ]);
};
const words = () => props.texts[document.documentElement.lang.slice(0, 2)] || props.texts.en;
const make = async () => {
  await (window.qeBoardFiles = window.qeBoardFiles || all(files.board));
  await (window.qeCompareFiles = window.qeCompareFiles || all(files.own));
  const boards = (window.qeBoards = window.qeBoards || new Map());
  if (boards.has(props.board)) boards.get(props.board).destroy();
  const scale = parseFloat(getComputedStyle(document.documentElement).getPropertyValue("--qe-scale")) || 1;
  const projector = document.body.classList.contains("qe-projector");
  const view = new window.QEvictCompare(host, { texts: words(), scale, projector });
  boards.set(props.board, view);
  new MutationObserver(() => view.destroyed || view.setTexts(words()))
    .observe(document.documentElement, { attributes: true, attributeFilter: ["lang"] });
  return view;
};
let view = null;
let shown = "";
const show = async () => {
  const value = props.value || {};
  if ((value.sid || "") === shown) return;
  shown = value.sid || "";
  if (!shown) {
    if (view) (await view).load(null);
    return;
  }
  view = view || make();
  const wish = shown;
  try {
    const answer = await fetch((value.base || "qe") + "/compare/" + encodeURIComponent(wish));
    if (!answer.ok) throw new Error((await answer.json()).detail || String(answer.status));
    const data = await answer.json();
    if (wish === shown) (await view).load(data);
  } catch (error) {
    if (wish === shown) (await view).fail(error.message);
  }
};
watch("value", show);
show().catch((error) => { host.textContent = String(error.message || error); });
"""


@cache
def compare_files() -> dict[str, dict[str, list[str]]]:
    """Addresses of scripts and styles, the board's and this view's own; they change with the content."""

    def address(name: str) -> str:
        return f"qe/static/{name}?v={hashlib.sha256((ASSETS / name).read_bytes()).hexdigest()[:12]}"

    own = {"styles": [], "scripts": [address(f"js/{name}") for name in SCRIPTS]}
    return {"board": board_files(), "own": own}


@cache
def compare_texts() -> dict[str, dict[str, str]]:
    """The words of the view, by language and flat key."""
    return {lang: {key: words for key, words in all_texts(lang).items() if key.startswith(AREAS)} for lang in LANGUAGES}


class CompareView(gr.HTML):
    """Two to four systems on one token axis, with one legend and one transport.

    The value is {"sid": id of a finished comparison, "base": "qe"}; an empty id shows nothing.
    """

    def __init__(
        self,
        value: dict[str, Any] | str | None = None,
        *,
        elem_id: str = "qe-compare-board",
        elem_classes: list[str] | str | None = None,
        visible: bool = True,
        render: bool = True,
        key: int | str | None = None,
    ) -> None:
        super().__init__(
            value=value if value is not None else dict(NOTHING),
            html_template='<div class="qe-host"></div>',
            js_on_load=lean_script(_ON_LOAD),
            apply_default_css=False,
            elem_id=elem_id,
            elem_classes=elem_classes,
            visible=visible,
            render=render,
            key=key,
            padding=False,
            texts=compare_texts(),
            files=compare_files(),
            board=elem_id,
        )

    def preprocess(self, payload: Any) -> dict[str, Any]:  # type: ignore[override]
        """The value as a dict; anything else is nothing."""
        return payload if isinstance(payload, dict) else dict(NOTHING)

    def postprocess(self, value: dict[str, Any] | str | None) -> dict[str, Any]:  # type: ignore[override]
        """A dict as it is, JSON read, None nothing."""
        if isinstance(value, str):
            value = json.loads(value) if value.strip() else None
        return dict(value) if isinstance(value, dict) else dict(NOTHING)

    def api_info(self) -> dict[str, Any]:
        return {"type": "object"}

    def example_payload(self) -> dict[str, Any]:
        return dict(NOTHING)

    def example_value(self) -> dict[str, Any]:
        return dict(NOTHING)
