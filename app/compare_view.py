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
from app.tier_view import LANGUAGES
from visuals.replay import lean_script

NOTHING: dict[str, Any] = {"sid": ""}
SCRIPTS = ("compare_view.js", "compare_draw.js", "compare_input.js")
AREAS = ("compare.", "systems.", "view.")
TABLE_ONLY = ("_line", "_loss", "_how")

_ON_LOAD = """
let view = null;
const load = async () => {
  await window.qeBoardFiles;
  await Promise.all(props.files.map((src) => new Promise((onload, onerror) => {
    document.head.appendChild(Object.assign(document.createElement("script"), { src, async: false, onload, onerror }));
  })));
  return window.QEvictCompare.attach(element.querySelector(".qe-host"), props);
};
const show = async () => {
  const sid = (props.value || {}).sid || "";
  if (sid) view = view || load();
  if (view) (await view).open(sid);
};
watch("value", show);
show();
"""
"""The board's own files are asked for by the Live tab; the rest of this is `QEvictCompare.attach`."""


@cache
def compare_files() -> list[str]:
    """Addresses of this view's scripts; they change with the content."""

    def address(name: str) -> str:
        return f"qe/static/{name}?v={hashlib.sha256((ASSETS / name).read_bytes()).hexdigest()[:12]}"

    return [address(f"js/{name}") for name in SCRIPTS]


@cache
def compare_texts() -> dict[str, dict[str, str]]:
    """The words of the view, by language and flat key."""

    def shown(key: str) -> bool:
        return key.startswith(AREAS) and not key.endswith(TABLE_ONLY)

    return {lang: {key: words for key, words in all_texts(lang).items() if shown(key)} for lang in LANGUAGES}


class CompareView(gr.HTML):
    """Two to four systems on one token axis, with one legend and one transport.

    The value is {"sid": id of a finished comparison}; an empty id shows nothing.
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
