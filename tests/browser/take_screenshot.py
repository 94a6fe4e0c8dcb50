"""Takes the README's picture: a real server, the embedded model, a run to its end, one lively event of it.

    python -m tests.browser.take_screenshot [FILE] [NEW_TOKENS]

The picture is 1600 pixels wide and reduced to 256 colours, so that it stays small.
"""

from __future__ import annotations

import io
import shutil
import sys
import tempfile
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright

from tests.browser.conftest import FLAGS, NAMES
from tests.browser.server import ROOT, ServerProcess

BOARD = "qeBoards.get('qe-live-board')"
LIVELY = """(view) => {
  view.setRow(view.trace.liveliestRow() ?? view.row);
  const counts = view.trace.steps.map((step) => view.trace.rowMoves(step.index, view.row)
    .filter((move) => move.from === 3 && move.to === 2).length * 100 + step.index);
  view.seek(counts.indexOf(Math.max(...counts)));
}"""
"""Chooses the row with most promotions, and of its events the last one that has the most."""


def main(target: Path, tokens: int) -> None:
    """Writes the picture to `target`."""
    browser_path = next(path for name in NAMES if (path := shutil.which(name)))
    with tempfile.TemporaryDirectory() as folder, ServerProcess(Path(folder)) as server, sync_playwright() as tools:
        browser = tools.chromium.launch(executable_path=browser_path, args=FLAGS, headless=True)
        page = browser.new_page(viewport={"width": 1600, "height": 1050})
        page.goto(server.url)
        page.wait_for_function(f"window.qeBoards && {BOARD} && {BOARD}.index >= 0", timeout=60_000)
        page.get_by_text("Generation", exact=True).click()
        page.fill("#qe-new-tokens input", str(tokens))
        page.keyboard.press("Tab")
        page.get_by_text("Generation", exact=True).click()
        page.click("#qe-run")
        page.wait_for_function(f"{BOARD}.source && {BOARD}.trace.end", timeout=1_800_000)
        page.wait_for_timeout(1500)
        page.evaluate(f"({LIVELY})({BOARD})")
        page.evaluate("document.activeElement.blur(); scrollTo(0, 0)")
        page.mouse.move(2, 1040)
        page.wait_for_timeout(1500)
        shot = page.screenshot()
        browser.close()
    image = Image.open(io.BytesIO(shot)).convert("RGB").quantize(256, dither=Image.Dither.NONE)
    target.parent.mkdir(parents=True, exist_ok=True)
    image.save(target, optimize=True)
    print(f"{target}: {image.width} x {image.height}, {target.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main(
        Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "assets/images/live.png",
        int(sys.argv[2]) if len(sys.argv) > 2 else 160,
    )
