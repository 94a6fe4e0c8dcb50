"""The Compare tab in a real browser, with the real engine and the embedded model: four systems on one short text."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.browser.server import ServerProcess

pytestmark = [pytest.mark.browser, pytest.mark.timeout(1800)]
VIEW = "window.qeBoards.get('qe-compare-board')"
PATIENCE = 240_000
NEW_TOKENS = 33


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path_factory.mktemp("compare")) as started:
        yield started


@pytest.fixture
def open_tab(browser: Any, server: ServerProcess) -> Iterator[Callable[..., Any]]:
    """Opens the Compare tab; the test fails on any error in the console and on requests to other servers."""
    contexts, troubles = [], []

    def opened(query: str = "", **options: Any) -> Any:
        context = browser.new_context(viewport={"width": 1280, "height": 720}, **options)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda said: troubles.append(said.text) if said.type == "error" else None)
        page.on("pageerror", lambda error: troubles.append(error.stack or str(error)))
        page.on("request", lambda sent: troubles.append(sent.url) if not _is_ours(sent.url, server.url) else None)
        page.goto(server.url + query)
        page.get_by_role("tab", name="Compare").click()
        page.wait_for_selector("#qe-cmp-systems", state="visible", timeout=60_000)
        return page

    yield opened
    for context in contexts:
        context.close()
    assert troubles == []


def _is_ours(url: str, server: str) -> bool:
    return url.startswith((server, "data:", "blob:"))


def _ask_for(page: Any, tokens: int, budget: int = 50) -> None:
    page.click("#qe-cmp-document input")
    page.get_by_role("option").filter(has_text="house-sitter").click()
    for field, value in (("budget", str(budget)), ("tokens", str(tokens))):
        page.fill(f"#qe-cmp-{field} input", value)
        page.keyboard.press("Tab")


def _compare(page: Any) -> None:
    page.click("#qe-cmp-run")
    page.wait_for_selector("#qe-cmp-stop:not([disabled])", timeout=60_000)
    page.wait_for_selector("#qe-cmp-run:not([disabled])", timeout=PATIENCE)


def _pictures(page: Any) -> list[str]:
    """What the lanes show, once they are drawn."""
    page.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
    found: list[str] = page.evaluate(f"{VIEW}.lanes.map((lane) => lane.canvas.toDataURL())")
    return found


def test_four_systems_on_one_axis(open_tab: Callable[..., Any], artifacts: Path) -> None:
    page = open_tab()
    assert page.locator("#qe-compare-board .qe-host").inner_text() == ""
    _ask_for(page, NEW_TOKENS)
    _compare(page)
    page.wait_for_function(f"window.qeBoards && {VIEW} && {VIEW}.axis", timeout=60_000)
    assert "Teacher-forced" in page.locator("#qe-cmp-status").inner_text()
    assert page.locator(".qe-cmp-lane").count() == 4
    for part in (".qe-cmp-lanes", ".qe-cmp-axis"):
        bottom = page.locator(part).evaluate("(node) => node.getBoundingClientRect().bottom")
        top = page.locator("#qe-compare-board .qe-transport").evaluate("(node) => node.getBoundingClientRect().top")
        assert bottom <= top + 1, f"{part} must be in view without scrolling"
    looks = page.evaluate(f"{VIEW}.looks.length")
    assert looks == 1 + (NEW_TOKENS - 1) // 8
    last = _pictures(page)
    assert len(set(last)) == 4
    page.screenshot(path=str(artifacts / "compare-1280.png"))

    page.locator("#qe-compare-board .qe").focus()
    for keys, index in (("ArrowLeft", looks - 2), ("Home", 0), ("ArrowRight", 1), ("End", looks - 1)):
        page.keyboard.press(keys)
        assert page.evaluate(f"{VIEW}.index") == index
    assert _pictures(page) == last
    page.keyboard.press("Home")
    first = _pictures(page)
    assert all(one != other for one, other in zip(first, last, strict=True))
    page.keyboard.press("ArrowUp")
    assert page.evaluate(f"{VIEW}.layer") == page.evaluate(f"{VIEW}.data.layers") - 1
    assert _pictures(page)[0] != first[0]
    page.keyboard.press("ArrowDown")
    page.keyboard.press("End")
    page.keyboard.press("n")
    assert page.evaluate(f"{VIEW}.zoom") is not None
    page.hover(".qe-cmp-lane canvas >> nth=1", position={"x": 700, "y": 60})
    tip = page.locator("#qe-compare-board .qe-tip")
    assert all(name in tip.inner_text() for name in ("QEvict", "SnapKV", "StreamingLLM", "KIVI-2"))
    page.keyboard.press("0")
    assert page.evaluate(f"{VIEW}.zoom") is None
    page.keyboard.press("Space")
    page.wait_for_function(f"{VIEW}.playing && {VIEW}.index > 0", timeout=20_000)
    page.wait_for_function(f"!{VIEW}.playing", timeout=30_000)
    assert page.evaluate(f"{VIEW}.index") == looks - 1

    table = page.locator(".qe-cmp-table").inner_text()
    for words in ("KV bytes", "FMM", "Churn", "KL", "Agreement", "ms per token", "recoverable", "lossy", "Lost:"):
        assert words in table
    assert page.locator(".qe-cmp-how dt").count() == page.locator(".qe-cmp-table thead th").count() - 1
    page.set_viewport_size({"width": 1920, "height": 1080})
    page.wait_for_timeout(400)
    page.screenshot(path=str(artifacts / "compare-1920.png"))
    page.click("#qe-theme-button")
    page.wait_for_timeout(400)
    page.screenshot(path=str(artifacts / "compare-1920-dark.png"))
    page.locator("#qe-language").get_by_text("中文").click()
    page.wait_for_function("document.querySelector('.qe-cmp-table').innerText.includes('可恢复')", timeout=30_000)
    page.wait_for_function(f"{VIEW}.lanes[0].figures.textContent.includes('一致')", timeout=30_000)

    page.click("button[data-name='kivi-2']")
    page.wait_for_selector("button[data-name='']", timeout=PATIENCE)
    assert "KIVI-2" in page.locator("#qe-cmp-status").inner_text()
    page.wait_for_function(f"{VIEW}.data !== null", timeout=60_000)  # the board fetches the frames by itself
    shares = page.evaluate(f"{VIEW}.data.systems.map((system) => system.share)")
    assert 0.75 * shares[3] < shares[0] <= 1.02 * shares[3]


def test_each_on_its_own_and_what_is_refused(open_tab: Callable[..., Any], artifacts: Path) -> None:
    page = open_tab("?__theme=dark")
    _ask_for(page, 12)
    for _ in range(2):
        page.locator("#qe-cmp-systems .token-remove").nth(1).click()
    page.click("#qe-cmp-mode input")
    page.get_by_role("option", name="free-running").click()
    _compare(page)
    page.wait_for_selector(".qe-cmp-texts", timeout=60_000)
    assert page.locator(".qe-cmp-text").count() == 3
    page.wait_for_function(f"{VIEW} && {VIEW}.axis", timeout=60_000)
    assert page.locator("#qe-compare-board .qe-cmp-lane").count() == 2
    assert "Free-running (texts diverge)" in page.locator("#qe-cmp-status").inner_text()
    assert "First difference" in page.locator(".qe-cmp-table").inner_text()
    page.screenshot(path=str(artifacts / "compare-free-dark.png"))

    page.fill("#qe-cmp-budget input", "1")
    page.keyboard.press("Tab")
    _compare(page)
    said = page.locator("#qe-cmp-banner [role=alert]").inner_text()
    assert "qevict" in said and "smallest feasible" in said
    page.locator("#qe-cmp-systems .remove-all").click()
    page.click("#qe-cmp-run")
    page.wait_for_function(
        "document.querySelector('#qe-cmp-banner').innerText.includes('at least two')", timeout=30_000
    )
    page.screenshot(path=str(artifacts / "compare-refused-dark.png"))


SHORT = "The harbour master counts the boats every morning and writes the number on a slate by the door. " * 2


def _choose(page: Any, *labels: str) -> None:
    page.locator("#qe-cmp-systems .remove-all").click()
    for label in labels:
        page.fill("#qe-cmp-systems input", label)  # by the keyboard: the open list lies over the field
        page.get_by_role("option", name=label, exact=True).click()
        page.locator("#qe-cmp-systems .token").filter(has_text=label).wait_for()
    page.keyboard.press("Escape")


def test_qevict_gets_a_quantizers_bytes_in_one_click(open_tab: Callable[..., Any]) -> None:
    page = open_tab()
    _ask_for(page, 10)
    _choose(page, "QEvict", "KIVI-2", "KIVI-4")
    _compare(page)
    for place, (name, label) in enumerate((("kivi-2", "KIVI-2"), ("kivi-4", "KIVI-4")), 1):
        page.click(f"button[data-act='match'][data-name='{name}']")
        page.wait_for_function(
            "(words) => document.querySelector('#qe-cmp-status').innerText.includes(words)",
            arg=f"QEvict has the bytes of {label} here.",
            timeout=PATIENCE,
        )
        page.wait_for_selector("button[data-act='match'][data-name='']", timeout=30_000)
        page.wait_for_function(f"{VIEW}.data !== null && {VIEW}.axis", timeout=60_000)
        shares = page.evaluate(f"{VIEW}.data.systems.map((system) => system.share)")
        assert 0.75 * shares[place] < shares[0] <= 1.02 * shares[place]
        row = page.locator(".qe-cmp-list tr[aria-current]")
        assert f"bytes of {label}" in row.inner_text()
    assert page.locator(".qe-cmp-list tbody tr").count() >= 3


def test_a_match_that_cannot_be_names_what_can(open_tab: Callable[..., Any], artifacts: Path) -> None:
    page = open_tab()
    page.click("#qe-cmp-document input")
    page.get_by_role("option").filter(has_text="own text").click()
    page.fill("#qe-cmp-own-text textarea", SHORT)
    for field, value in (("budget", "90"), ("tokens", "4")):
        page.fill(f"#qe-cmp-{field} input", value)
        page.keyboard.press("Tab")
    _choose(page, "QEvict", "KVQuant nuq2")
    _compare(page)
    page.wait_for_selector(".qe-cmp-table", timeout=60_000)
    shown = page.locator(".qe-cmp-table").inner_text()
    page.click("button[data-act='match']")
    page.wait_for_selector("#qe-cmp-banner [role=alert]", timeout=PATIENCE)
    said = page.locator("#qe-cmp-banner [role=alert]").inner_text()
    assert "the bytes of kvquant-nuq2 are too small for qevict" in said
    assert re.search(r"the smallest feasible for all is \d+\.\d\d% of FullKV \([\d,]+ bytes\)", said)
    # What was compared before is shown again: nothing is lost by asking.
    assert page.locator(".qe-cmp-table").inner_text() == shown
    page.wait_for_function(f"{VIEW}.data && {VIEW}.data.systems.length === 2", timeout=60_000)
    page.screenshot(path=str(artifacts / "compare-match-refused.png"))


def test_it_can_be_stopped(open_tab: Callable[..., Any]) -> None:
    page = open_tab()
    _ask_for(page, 150, budget=90)
    page.click("#qe-cmp-run")
    page.wait_for_function("document.querySelector('#qe-cmp-status').innerText.includes('Comparing')", timeout=PATIENCE)
    page.click("#qe-cmp-stop")
    page.wait_for_selector(".qe-cmp-table", timeout=PATIENCE)
    assert "Stopped after" in page.locator("#qe-cmp-status").inner_text()
    page.wait_for_function(f"{VIEW} && {VIEW}.axis", timeout=60_000)
