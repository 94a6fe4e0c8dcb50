"""A replay saved as a page: opened from a file with no network, it plays, and asks for nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from app.lesson_trace import trace_bytes
from app.texts import all_texts
from tests.visuals.synthetic import Plan, synthetic_rows
from visuals.replay import PAGE_LIMIT, to_html


def _open(browser: Any, path: Path, page_text: str) -> Any:
    path.write_text(page_text, encoding="utf-8")
    context = browser.new_context(viewport={"width": 1280, "height": 720}, offline=True, reduced_motion="reduce")
    page = context.new_page()
    page.troubles = []
    page.on("pageerror", lambda error: page.troubles.append(str(error)))
    page.on("console", lambda message: page.troubles.extend([message.text] if message.type == "error" else []))
    page.on("request", lambda request: request.url.startswith("file:") or page.troubles.append(request.url))
    page.goto(path.as_uri())
    page.wait_for_function("window.qeView && qeView.index >= 0", timeout=30_000)
    return page


def test_a_recorded_run_from_a_file(browser: Any, tmp_path: Path, artifacts: Path) -> None:
    rows = (trace_bytes("first") or b"").splitlines()
    text = to_html(rows, "A bakery's order book", all_texts("en"), "en")
    assert len(text.encode()) <= PAGE_LIMIT
    page = _open(browser, tmp_path / "replay.html", text)
    page.locator("#qe-replay").focus()
    page.keyboard.press("ArrowRight")
    page.wait_for_function("qeView.index === 1")
    page.keyboard.press("End")
    page.wait_for_function("qeView.index === qeView.trace.steps.length - 1")
    # Terms are plain words here: there is no glossary to open.
    assert page.locator("#qe-replay [role=button][data-term]").count() == 0
    page.screenshot(path=str(artifacts / "offline-replay-1280.png"))
    assert page.troubles == []
    page.context.close()


def test_two_hundred_events_from_a_file(browser: Any, tmp_path: Path) -> None:
    text = to_html(synthetic_rows(Plan(events=200, prompt=2496, quant=150, full=40)), "Two hundred", {}, "en")
    assert len(text.encode()) <= PAGE_LIMIT
    page = _open(browser, tmp_path / "long.html", text)
    page.wait_for_function("qeView.trace.steps.length >= 200")
    page.evaluate("qeView.seek(150)")
    page.wait_for_function("qeView.index === 150")
    assert page.troubles == []
    page.context.close()
