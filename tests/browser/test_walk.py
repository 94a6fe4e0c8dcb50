"""The product as a stranger meets it: a real server process, the embedded model, a real browser."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.browser.server import ServerProcess

BOARD = "qeBoards.get('qe-live-board')"
REPLAY = "qeBoards.get('qe-replay-board')"
PATIENCE = 240_000
"""Milliseconds for what needs the model: a first start may have to prepare its weights."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path_factory.mktemp("walk")) as running:
        yield running


@pytest.fixture
def open_page(browser: Any, server: ServerProcess) -> Iterator[Callable[..., Any]]:
    """Opens the page and waits for its board; in the end no error may have been heard and no other server asked."""
    contexts: list[Any] = []
    troubles: list[str] = []

    def opened(query: str = "", width: int = 1280, height: int = 720) -> Any:
        context = browser.new_context(viewport={"width": width, "height": height}, locale="en-GB")
        contexts.append(context)
        page = context.new_page()
        page.on("pageerror", lambda error: troubles.append(str(error)))
        page.on("console", lambda message: message.type == "error" and troubles.append(message.text))
        page.on("request", lambda request: _is_ours(request.url, server.url) or troubles.append(request.url))
        page.goto(server.url + query)
        page.wait_for_function(f"window.qeBoards && {BOARD} && {BOARD}.index >= 0", timeout=60_000)
        return page

    yield opened
    for context in contexts:
        context.close()
    assert troubles == []


def _is_ours(url: str, server: str) -> bool:
    return url.startswith((server, "data:", "blob:"))


def _picture(page: Any) -> str:
    found: str = page.evaluate(f"{BOARD}.ui.lanesCanvas.toDataURL()")
    return found


def _ask_for(page: Any, tokens: int) -> None:
    page.click("#qe-document input")
    page.get_by_role("option").filter(has_text="house-sitter").click()
    page.get_by_text("Generation", exact=True).click()
    page.fill("#qe-new-tokens input", str(tokens))
    page.keyboard.press("Tab")


def _run(page: Any) -> str:
    page.click("#qe-run")
    page.wait_for_function(f"{BOARD}.source", timeout=60_000)
    session: str = page.evaluate(f"{BOARD}.source.sid")
    return session


def test_walk(open_page: Callable[..., Any], artifacts: Path) -> None:
    page = open_page()
    assert "Recorded run" in page.locator("#qe-live-status").inner_text()
    before = _picture(page)
    page.wait_for_function(f"(was) => {BOARD}.ui.lanesCanvas.toDataURL() !== was", arg=before, timeout=30_000)
    page.screenshot(path=str(artifacts / "first-1280.png"))
    for part in (".qe-lanes", ".qe-memory", ".qe-curves"):
        bottom = page.locator(f"#qe-live-board {part}").evaluate("(node) => node.getBoundingClientRect().bottom")
        assert bottom <= page.locator("#qe-live-board .qe-transport").evaluate(
            "(node) => node.getBoundingClientRect().top"
        ), f"{part} must be in view without scrolling"

    _ask_for(page, 48)
    session = _run(page)
    page.wait_for_selector("#qe-live-board .qe-lanes", state="hidden")  # not the recorded run any more
    page.wait_for_function(f"{BOARD}.trace.steps.length > 1", timeout=PATIENCE)
    first = page.evaluate(f"[{BOARD}.index, {BOARD}.ui.generated.textContent.length]")
    page.wait_for_function(
        f"([at, text]) => {BOARD}.index > at && {BOARD}.ui.generated.textContent.length > text",
        arg=first,
        timeout=PATIENCE,
    )
    page.click("#qe-stop")
    page.wait_for_function(f"{BOARD}.trace.end", timeout=PATIENCE)
    assert page.evaluate(f"{BOARD}.trace.end.why") in ("stop", "length")
    page.wait_for_selector("#qe-result table", timeout=30_000)
    result = page.locator("#qe-result").inner_text()
    for words in ("float16", "measured", "Attention backend", "Form of the weights"):
        assert words in result
    page.set_viewport_size({"width": 1920, "height": 1080})
    page.wait_for_timeout(400)
    page.screenshot(path=str(artifacts / "finished-1920.png"))

    page.get_by_role("tab", name="Replays").click()
    page.locator(f"button[data-sid='{session}']").click()
    page.wait_for_function(f"{REPLAY} && {REPLAY}.index > 0", timeout=30_000)
    last = page.evaluate(f"{REPLAY}.index")
    page.keyboard.press("ArrowLeft")
    page.wait_for_function(f"{REPLAY}.index === {last - 1}")
    page.keyboard.press("Home")
    page.wait_for_function(f"{REPLAY}.index === 0")
    page.locator("#qe-replay-board .qe-slider").fill(str(last))
    page.wait_for_function(f"{REPLAY}.index === {last}")
    page.screenshot(path=str(artifacts / "replay-1920.png"))
    page.get_by_role("button", name="Delete").click()
    page.get_by_role("button", name="Yes, delete").click()
    page.get_by_text("“A note for the house-sitter” is deleted.").wait_for(timeout=30_000)
    assert page.locator(f"button[data-sid='{session}']").count() == 0


def test_two_tabs_and_a_closed_one(open_page: Callable[..., Any], server: ServerProcess, artifacts: Path) -> None:
    """The second run waits for the first; the browser of the first closes, and both are kept."""
    first = open_page()
    _ask_for(first, 24)
    session = _run(first)
    second = open_page()
    _ask_for(second, 8)
    other = _run(second)
    assert other != session
    second.screenshot(path=str(artifacts / "queued-1280.png"))
    first.wait_for_function(f"{BOARD}.trace.meta", timeout=PATIENCE)
    first.context.close()
    second.wait_for_function(f"{BOARD}.trace.end", timeout=PATIENCE)
    assert second.evaluate(f"{BOARD}.trace.meta.session") == other
    second.wait_for_timeout(500)
    assert _states(server, session, other) == ["done", "done"]


def test_an_error_is_said_once(open_page: Callable[..., Any], artifacts: Path) -> None:
    page = open_page()
    page.get_by_text("Model", exact=True).first.click()
    page.fill("#qe-model input", "/no/such/folder")
    page.keyboard.press("Enter")
    page.click("#qe-run")
    page.wait_for_selector("#qe-live-board .qe-message[role=alert]", timeout=60_000)
    page.wait_for_selector("#qe-run:not([disabled])", timeout=60_000)
    page.screenshot(path=str(artifacts / "error-1280.png"))
    shown = page.locator("main, body").first.inner_text()
    assert shown.count("/no/such/folder") == 1
    assert page.locator("#qe-live-board .qe-lanes").is_hidden()


def test_the_key_that_folds_the_panel_is_not_the_boards(open_page: Callable[..., Any]) -> None:
    page = open_page()
    opened = "document.querySelector('.sidebar').classList.contains('open')"
    page.locator("#qe-live-board .qe").focus()
    for key in ("[", "]"):
        page.keyboard.press(key)
        assert page.evaluate(opened)
    page.get_by_text("Generation", exact=True).click()
    page.locator("#qe-new-tokens input").focus()
    page.keyboard.press("s")
    assert page.evaluate(opened)
    page.locator("#qe-live-board .qe").focus()
    page.keyboard.press("s")
    page.wait_for_function(f"!{opened}")
    page.keyboard.press("?")
    assert "run settings" in page.locator("#qe-live-board .qe-sheet").inner_text()


def _states(server: ServerProcess, *sessions: str) -> list[str]:
    found = []
    for session in sessions:
        with urllib.request.urlopen(f"{server.url}qe/s/{session}", timeout=30) as answer:
            found.append(str(json.load(answer)["state"]))
    return found
