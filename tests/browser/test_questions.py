"""Two questions about one document, in a real browser with the embedded model: the second does not read it again."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from app.documents import get_document
from tests.browser.server import ServerProcess

BOARD = "qeBoards.get('qe-live-board')"
PATIENCE = 240_000
"""Milliseconds for what needs the model: a first start may have to prepare its weights."""
SAMPLE = "house-note"
FIELD, HINT, STATUS = "#qe-question input, #qe-question textarea", "#qe-question-hint", "#qe-live-status"
TOKENS = 6


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path_factory.mktemp("questions")) as running:
        yield running


def _ask(page: Any, server: ServerProcess, question: str, *, by_key: bool = False) -> tuple[dict[str, Any], str]:
    """(the stored session, what the status line says in the end)."""
    before = page.evaluate(f"{BOARD}.source && {BOARD}.source.sid")
    page.fill(FIELD, question)
    if by_key:
        page.press(FIELD, "Enter")
    else:
        page.click("#qe-run")
    page.wait_for_function(f"(was) => {BOARD}.source && {BOARD}.source.sid !== was", arg=before, timeout=60_000)
    page.wait_for_function(f"{BOARD}.trace.end", timeout=PATIENCE)
    page.wait_for_selector("#qe-run:not([disabled])", timeout=60_000)
    session = page.evaluate(f"{BOARD}.source.sid")
    with urllib.request.urlopen(f"{server.url}qe/s/{session}", timeout=30) as answer:
        return json.load(answer), str(page.locator(STATUS).inner_text())


def test_a_second_question_starts_from_the_kept_document(browser: Any, server: ServerProcess, artifacts: Path) -> None:
    troubles: list[str] = []
    page = browser.new_context(viewport={"width": 1280, "height": 720}, locale="en-GB").new_page()
    page.on("pageerror", lambda error: troubles.append(str(error)))
    page.on("console", lambda message: message.type == "error" and troubles.append(message.text))
    page.goto(server.url)
    page.wait_for_function(f"window.qeBoards && {BOARD} && {BOARD}.index >= 0", timeout=60_000)
    page.click("#qe-document input")
    page.get_by_role("option").filter(has_text="house-sitter").click()
    page.get_by_text("Generation", exact=True).click()
    page.fill("#qe-new-tokens input", str(TOKENS))
    page.keyboard.press("Tab")
    reference = page.get_by_label("FullKV reference")
    assert reference.is_checked() and page.locator(HINT).is_hidden()

    first, said = _ask(page, server, "Where is the spare key?", by_key=True)
    assert page.locator(HINT).is_visible() and not reference.is_checked()
    timing = first["summary"]["timing"]
    document = timing["document_tokens"]
    assert not timing["prefix_used"] and 100 < document < timing["prompt_tokens"]
    assert f"Document read: {document} tokens, first token after" in said
    assert first["settings"]["prompt"] == "Where is the spare key?"
    assert first["settings"]["document"] == get_document(SAMPLE).body
    assert first["title"] == "Where is the spare key? · A note for the house-sitter"

    second, said = _ask(page, server, "Who wrote this note?")
    timing = second["summary"]["timing"]
    assert timing["prefix_used"] and timing["document_tokens"] == document
    assert f"{document} tokens not read again, first token after" in said
    result = page.locator("#qe-result").inner_text()
    assert f"{document} tokens, used again" in result and f"of which {document} came from the kept document" in result
    page.screenshot(path=str(artifacts / "second-question-1280.png"))

    reference.check()
    third, said = _ask(page, server, "Who wrote it?")
    assert reference.is_checked() and third["summary"]["metrics"] and not third["summary"]["timing"]["prefix_used"]
    assert "for the FullKV reference" in said and "not read again" not in said
    reference.uncheck()
    page.fill(FIELD, "")
    page.wait_for_selector(HINT, state="hidden")
    page.wait_for_function("(box) => box.checked", arg=reference.element_handle())

    page.fill(FIELD, "Why?")
    page.wait_for_function("(box) => !box.checked", arg=reference.element_handle())
    page.get_by_role("tab", name="Lessons").click()
    page.get_by_role("button", name="Try it live").click()
    page.wait_for_selector(f"{STATUS} p", state="visible", timeout=30_000)
    page.wait_for_function("(field) => field.value === ''", arg=page.locator(FIELD).element_handle())
    page.wait_for_function("(box) => box.checked", arg=reference.element_handle())

    page.get_by_role("tab", name="Replays").click()
    page.locator(f"button[data-sid='{second['id']}']").click()
    page.locator("#qe-opened .qe-opened strong").get_by_text("Who wrote this note? · A note").wait_for(timeout=30_000)
    page.context.close()
    assert troubles == []
