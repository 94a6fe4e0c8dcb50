"""Glossary popovers in a real browser: by keyboard from a lesson, from the board, and the list."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from presets.glossary import load_terms
from tests.browser.server import ServerProcess

LIVE = "qeBoards.get('qe-live-board')"
POP = ".qe-pop"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    command = ("-m", "tests.browser.made_up_server", "8", "40")
    with ServerProcess(tmp_path_factory.mktemp("glossary"), command) as running:
        yield running


@pytest.fixture
def open_page(browser: Any, server: ServerProcess) -> Iterator[Callable[..., Any]]:
    """Opens the page at a size and in a theme; in the end no error may have been heard."""
    contexts: list[Any] = []
    troubles: list[str] = []

    def opened(query: str = "", width: int = 1280, height: int = 720) -> Any:
        context = browser.new_context(
            viewport={"width": width, "height": height}, locale="en-GB", reduced_motion="reduce"
        )
        contexts.append(context)
        page = context.new_page()
        page.on("pageerror", lambda error: troubles.append(str(error)))
        page.on("console", lambda message: troubles.extend([message.text] if message.type == "error" else []))
        page.goto(f"{server.url}{query}")
        page.wait_for_function(f"window.qeBoards && {LIVE} && {LIVE}.index >= 0", timeout=60_000)
        return page

    yield opened
    for context in contexts:
        context.close()
    assert troubles == []


def _lessons(page: Any) -> None:
    page.locator("[role=tab]").nth(2).click()
    page.wait_for_function("window.qeLessons && qeLessons.at", timeout=60_000)


def _inside(page: Any) -> bool:
    found: bool = page.evaluate(
        f"(() => {{ const at = document.querySelector('{POP}').getBoundingClientRect();"
        "return at.left >= 0 && at.top >= 0 && at.right <= innerWidth && at.bottom <= innerHeight; })()"
    )
    return found


@pytest.mark.parametrize("key", ["Enter", " "])
def test_a_term_of_a_lesson_by_keyboard(open_page: Callable[..., Any], key: str) -> None:
    page = open_page()
    _lessons(page)
    term = page.locator(".qe-step-say [data-term]").first
    term.focus()
    page.keyboard.press(key)
    page.wait_for_selector(POP, timeout=15_000)
    assert page.locator(POP).get_attribute("role") == "dialog"
    assert page.evaluate("document.activeElement.classList.contains('qe-pop')")
    assert term.get_attribute("aria-expanded") == "true"
    words = page.locator(POP).inner_text()
    assert "KV cache" in words and "engine/budget.py: KVShape.full_kv_bytes" in words
    assert page.locator(f"{POP} .qe-formula sub").count() > 2
    assert _inside(page)
    # The page behind does not move while the dialog has the focus.
    for other in ("n", "PageDown", "ArrowRight"):
        page.keyboard.press(other)
    assert page.evaluate("qeLessons.at") == [0, 0]
    assert page.evaluate("qeLessons.board.index") == 0
    page.keyboard.press("Escape")
    assert page.locator(POP).count() == 0
    assert page.evaluate("document.activeElement.dataset.term") == "kv_cache"
    page.keyboard.press("n")
    page.wait_for_function("String(qeLessons.at) === '0,1'")


def test_tab_walks_through_the_dialog_and_back(open_page: Callable[..., Any]) -> None:
    page = open_page()
    _lessons(page)
    page.locator(".qe-step-say [data-term]").first.press("Enter")
    page.wait_for_selector(POP)
    focused = "document.activeElement.textContent"
    page.keyboard.press("Tab")
    assert page.evaluate(focused) == "Close"
    page.keyboard.press("Tab")
    assert page.evaluate(focused) == "All terms"
    page.keyboard.press("Tab")
    assert page.locator(POP).count() == 0
    assert page.evaluate("document.activeElement.dataset.term") == "kv_cache"


def test_terms_of_the_board(open_page: Callable[..., Any], artifacts: Path) -> None:
    page = open_page()
    index = page.evaluate(f"{LIVE}.index")
    for name in ("sink", "local", "full", "quant", "evicted", "fmm", "churn", "budget", "persistent", "metadata"):
        page.locator(f"#qe-live-board [data-term='{name}']").first.press(" ")
        page.wait_for_selector(POP)
        assert _inside(page), name
        if name == "fmm":
            page.screenshot(path=str(artifacts / "glossary-fmm-1280.png"))
        page.keyboard.press("Escape")
        assert page.evaluate("document.activeElement.dataset.term") == name
    assert page.evaluate(f"{LIVE}.index") == index, "the space bar belonged to the term"
    page.locator("#qe-live-board [data-term='churn']").click()
    page.wait_for_selector(POP)
    page.mouse.click(5, 5)
    assert page.locator(POP).count() == 0


def test_in_chinese_and_after_a_switch(open_page: Callable[..., Any], artifacts: Path) -> None:
    page = open_page("?__theme=dark", 1920, 1080)
    page.locator("#qe-live-board [data-term='fmm']").click()
    page.wait_for_selector(POP)
    page.screenshot(path=str(artifacts / "glossary-dark-1920.png"))
    page.get_by_text("中文", exact=True).click()
    page.wait_for_function("document.documentElement.lang.startsWith('zh')", timeout=20_000)
    assert page.locator(POP).count() == 0
    page.locator("#qe-live-board [data-term='fmm']").click()
    page.wait_for_selector(POP)
    assert "未来缺失质量" in page.locator(POP).inner_text()


@pytest.mark.parametrize("size", [(1280, 720), (1920, 1080)])
def test_the_list_of_all_terms(open_page: Callable[..., Any], size: tuple[int, int], artifacts: Path) -> None:
    page = open_page("", *size)
    page.locator("#qe-live-board [data-term='churn']").press("Enter")
    page.wait_for_selector(POP)
    page.get_by_role("button", name="All terms").click()
    page.wait_for_function("document.activeElement.closest('#qe-glossary')", timeout=15_000)
    assert page.locator("#qe-glossary dt").count() == len(load_terms())
    # Nothing is wider than its column: formulas break or fit.
    wide = page.evaluate(
        "[...document.querySelectorAll('.qe-gloss')].filter((node) => node.scrollWidth > node.clientWidth + 1)"
        ".map((node) => node.id)"
    )
    assert wide == []
    assert page.evaluate("document.documentElement.scrollWidth") <= size[0]
    page.screenshot(path=str(artifacts / f"glossary-{size[0]}.png"))
