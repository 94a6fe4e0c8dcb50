"""The tier board as a Gradio component: a small value in, the board of assets/js out.

The value says what to show, never the data itself: the browser follows the run's own stream or fetches the
recorded trace. Knows the wire to the browser; knows no run, no session, no model.
"""

from __future__ import annotations

from functools import cache
from typing import Any, ClassVar

from app.html_board import HtmlBoard, static_address, words_of
from visuals.replay import ASSETS, STYLES, page_script

LATER = ("js/tier_sheet.js", "js/tier_tip.js", "js/tier_notes.js", "js/tier_follow.js")
"""The sheet of keys, the story of a window, notes, and following a presenter: nothing that the first paint needs."""
IDLE: dict[str, Any] = {"mode": "idle", "sid": "", "base": "qe"}

_ON_LOAD = """
const host = element.querySelector(".qe-host");
const files = board.files;
const add = (tag, attributes) => new Promise((done, failed) => {
  const node = document.createElement(tag);
  node.onload = done;
  node.onerror = () => failed(new Error(attributes.src || attributes.href));
  Object.assign(node, attributes);
  document.head.appendChild(node);
});
const load = async () => {
  await Promise.all([
    ...files.styles.map((href) => add("link", { rel: "stylesheet", href })),
    ...files.scripts.map((src) => add("script", { async: false, src })),
  ]);
};
const later = () => (window.qeLater =
  window.qeLater || Promise.all(files.later.map((src) => add("script", { async: false, src }))));
const words = () => board.texts[document.documentElement.lang.slice(0, 2)] || board.texts.en;
const start = async () => {
  await (window.qeBoardFiles = window.qeBoardFiles || load());
  const boards = (window.qeBoards = window.qeBoards || new Map());
  const name = board.id;
  if (boards.has(name)) boards.get(name).destroy();
  const scale = parseFloat(getComputedStyle(document.documentElement).getPropertyValue("--qe-scale")) || 1;
  const projector = document.body.classList.contains("qe-projector");
  const view = new window.QEvictView(host, { texts: words(), scale, projector, later });
  boards.set(name, view);
  host.addEventListener("pointerenter", () => later().catch(() => {}), { once: true });
  new MutationObserver(() => view.destroyed || view.setTexts(words()))
    .observe(document.documentElement, { attributes: true, attributeFilter: ["lang"] });
  let shown = "";
  const place = (value) => {
    if (value.l !== undefined && value.l !== null) view.setRow(value.l);
    if (value.r !== undefined && value.r !== null) view.seekEvent(value.r);
  };
  const show = async () => {
    const value = props.value || {};
    const wish = JSON.stringify(value);
    if (wish === shown || view.destroyed) return;
    shown = wish;
    if (value.mode === "live" && value.sid) {
      view.follow(value.base || "qe", value.sid);
      place(value);
    } else if (value.mode === "replay" && value.src) {
      let lines = "";
      try {
        const answer = await fetch(value.src);
        if (!answer.ok) throw new Error(String(answer.status));
        lines = await answer.text();
      } catch (error) {
        if (wish === shown) view.fail(error.message);
        return;
      }
      if (wish !== shown || view.destroyed) return;
      view.load(lines);
      const plays = value.play === undefined ? !value.sid : value.play;
      if (!plays && (value.r === undefined || value.r === null)) view.seek(Infinity);
      place(value);
      if (plays && !matchMedia("(prefers-reduced-motion: reduce)").matches) view.play();
    } else if (value.mode === "idle") {
      view.load("");
    }
    if (value.sid) later().then(() => wish === shown && view.join(value.base || "qe", value.sid));
  };
  watch("value", show);
  await show();
};
start().catch((error) => { host.textContent = String(error.message || error); });
"""


@cache
def board_files() -> dict[str, list[str]]:
    """Addresses of the board's styles, of its one script, and of what is fetched with the first stored run."""
    # The page brings its own words, so that the English ones of the scripts need not travel.
    script = page_script(with_texts=False).encode()
    styles = [(f"css/{name}", (ASSETS / "css" / name).read_bytes()) for name in STYLES]
    return {
        "styles": [static_address(name, data) for name, data in styles],
        "scripts": [static_address("js/board.js", script)],
        "later": [static_address(name, (ASSETS / name).read_bytes()) for name in LATER],
    }


@cache
def board_texts() -> dict[str, dict[str, str]]:
    """The words of the board, by language and flat key."""
    return words_of("view.")


class TierView(HtmlBoard):
    """Lanes of one row, atlas of all rows, memory, curves, text and transport of one run.

    The value is a dict, or its JSON:
        mode: "idle", "live" (follows session `sid` under `base`), or "replay" (fetches NDJSON from `src`).
        r, l: routing event and board row to start at, if any.
        play: whether a replay starts by itself; without it, a replay that has no `sid` does.
    """

    SCRIPT = _ON_LOAD
    NOTHING: ClassVar[dict[str, Any]] = IDLE
    ID = "qe-board"

    @classmethod
    def texts(cls) -> dict[str, dict[str, str]]:
        return board_texts()

    @classmethod
    def files(cls) -> Any:
        return board_files()
