"""The board of a comparison as a Gradio component: an id in, systems on one token axis out.

Its scripts are fetched when there is something to show. Knows the wire to the browser; knows no comparison.
"""

from __future__ import annotations

from functools import cache
from typing import Any, ClassVar

from app.html_board import HtmlBoard, static_address, words_of
from app.settings import ASSETS

NOTHING: dict[str, Any] = {"sid": ""}
SCRIPTS = ("compare_view.js", "compare_draw.js", "compare_free.js", "compare_input.js")
AREAS = ("compare.", "systems.", "view.")
TABLE_ONLY = ("_line", "_loss", "_how")

_ON_LOAD = """
let view = null;
const load = async () => {
  await window.qeBoardFiles;
  await Promise.all(board.files.map((src) => new Promise((onload, onerror) => {
    document.head.appendChild(Object.assign(document.createElement("script"), { src, async: false, onload, onerror }));
  })));
  return window.QEvictCompare.attach(element.querySelector(".qe-host"), board);
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
    return [static_address(f"js/{name}", (ASSETS / "js" / name).read_bytes()) for name in SCRIPTS]


@cache
def compare_texts() -> dict[str, dict[str, str]]:
    """The words of the view, by language and flat key."""
    return words_of(*AREAS, without=TABLE_ONLY)


class CompareView(HtmlBoard):
    """Two to four systems on one token axis, with one legend and one transport.

    The value is {"sid": id of a finished comparison}; an empty id shows nothing.
    """

    SCRIPT = _ON_LOAD
    NOTHING: ClassVar[dict[str, Any]] = NOTHING
    ID = "qe-compare-board"

    @classmethod
    def texts(cls) -> dict[str, dict[str, str]]:
        return compare_texts()

    @classmethod
    def files(cls) -> Any:
        return compare_files()
