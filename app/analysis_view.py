"""The figures of a source as a Gradio component: a source in, cards with plotly figures out.

Its scripts, plotly among them, are fetched when there is something to show. Knows how they get there; knows no source.
"""

from __future__ import annotations

from functools import cache
from typing import Any, ClassVar

from app.html_board import HtmlBoard, static_address, words_of
from app.settings import ASSETS

NOTHING: dict[str, Any] = {"source": ""}
SCRIPT = "analysis_view.js"
PLOTLY = "qe/plotly.js"
"""Where plotly's own script is, see `app.analysis_api`."""
WORDS = (
    "loading",
    "failed",
    "nothing",
    "open",
    "formula",
    "code",
    "numbers",
    "more",
    "png",
    "png_of",
    "csv",
    "csv_of",
    "setup",
    "jump",
)

_ON_LOAD = """
let view = null;
const file = (src) => new Promise((onload, onerror) => {
  document.head.appendChild(Object.assign(document.createElement("script"), { src, async: false, onload, onerror }));
});
const load = async () => {
  await file(board.files[0]);
  return window.QEvictAnalysis.attach(element.querySelector(".qe-host"), board);
};
const show = async () => {
  const value = props.value || {};
  if (value.source) view = view || load();
  if (view) (await view).open(value.source || "", value.turn || 0);
};
watch("value", show);
show();
"""


@cache
def analysis_files() -> list[str]:
    """Addresses of this view's script and of plotly; the first changes with its content."""
    from plotly import __version__

    return [static_address(f"js/{SCRIPT}", (ASSETS / "js" / SCRIPT).read_bytes()), f"{PLOTLY}?v={__version__}"]


@cache
def analysis_texts() -> dict[str, dict[str, str]]:
    """The words of the view, by language and flat key."""
    keys = tuple(f"analysis.{word}" for word in WORDS)
    return {
        lang: {key: words for key, words in found.items() if key in keys} for lang, found in words_of(*keys).items()
    }


class AnalysisView(HtmlBoard):
    """Cards of a source. The value is {"source": see `app.analysis_sources`}; an empty one shows nothing.

    A "turn" beside it makes the same source be fetched again.
    """

    SCRIPT = _ON_LOAD
    NOTHING: ClassVar[dict[str, Any]] = NOTHING
    ID = "qe-analysis-board"

    @classmethod
    def texts(cls) -> dict[str, dict[str, str]]:
        return analysis_texts()

    @classmethod
    def files(cls) -> Any:
        return analysis_files()
