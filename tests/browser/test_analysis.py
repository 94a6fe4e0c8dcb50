"""The Analysis tab in a real browser: figures from this server alone, files that arrive, keys, languages, themes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.app.analysis_samples import ANSWER, DIAGNOSIS
from tests.browser.server import ServerProcess
from tests.browser.test_access import _faults, axe

__all__ = ["axe"]

DRAWN = "document.querySelectorAll('.qe-ana-plot .main-svg').length"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("figures")
    results = folder / "data" / "evaluations"
    results.mkdir(parents=True)
    (results / "quick.json").write_text(json.dumps(ANSWER), "utf-8")
    (results / "text.json").write_text(json.dumps(DIAGNOSIS), "utf-8")
    with ServerProcess(folder, ("-m", "tests.browser.made_up_server", "8", "40")) as running:
        yield running


@pytest.fixture
def open_page(browser: Any, server: ServerProcess) -> Iterator[Callable[..., Any]]:
    """Opens the page; in the end no error may have been heard and no other server asked."""
    contexts: list[Any] = []
    troubles: list[str] = []

    def opened(query: str = "", width: int = 1280, height: int = 720) -> Any:
        context = browser.new_context(viewport={"width": width, "height": height}, locale="en-GB")
        contexts.append(context)
        page = context.new_page()
        asked: list[str] = []
        page.asked = asked
        page.on("pageerror", lambda error: troubles.append(str(error)))
        page.on("console", lambda message: message.type == "error" and troubles.append(message.text))
        page.on("request", lambda request: asked.append(request.url))
        page.goto(server.url + query)
        page.wait_for_function("window.qeBoards && qeBoards.get('qe-live-board')", timeout=90_000)
        return page

    yield opened
    for context in contexts:
        for page in context.pages:
            foreign = [url for url in page.asked if not url.startswith((server.url, "data:", "blob:"))]
            assert foreign == []
        context.close()
    assert troubles == []


def _tab(page: Any, source: str = "file:quick") -> None:
    page.locator("button[role=tab]").nth(4).click()
    page.wait_for_function("window.qeAnalysis && qeAnalysis.ready", timeout=90_000)
    page.evaluate("(source) => qeAnalysis.open(source, 0)", source)
    page.wait_for_function("(source) => qeAnalysis.source === source && qeAnalysis.ready", arg=source, timeout=90_000)
    page.wait_for_function(f"{DRAWN} > 0", timeout=90_000)


def _saved(page: Any, kind: str, card: str) -> bytes:
    with page.expect_download(timeout=90_000) as found:
        page.locator(f"[data-card^='{card}'] button[data-kind={kind}]").first.click()
    assert found.value.suggested_filename.startswith(f"qevict-{card}")
    return Path(found.value.path()).read_bytes()


def test_figures_open_to_numbers_and_come_as_files(open_page: Callable[..., Any], artifacts: Path) -> None:
    page = open_page()
    assert not [url for url in page.asked if "plotly.js" in url or "analysis_view" in url]  # nothing before the tab
    _tab(page)
    page.screenshot(path=str(artifacts / "analysis-1280.png"))
    picture = _saved(page, "png", "pareto")
    assert picture[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = (int.from_bytes(picture[at : at + 4], "big") for at in (16, 20))
    (artifacts / "analysis-pareto.png").write_bytes(picture)
    assert width == 2400 and height > 500 and len(picture) > 20_000
    rows = _saved(page, "csv", "pareto").decode("utf-8-sig").splitlines()
    assert rows[0].startswith("system,budget,share of bytes") and rows[2].startswith("qevict,0.2,0.2,1000,0.2,0.1,0.4")
    fold = page.locator("[data-card^='pareto'] details")
    fold.locator("summary").focus()
    page.keyboard.press("Enter")
    page.wait_for_selector("[data-card^='pareto'] table")
    assert "KL(FullKV" in fold.inner_text() and "engine/evaluation/forcing.py" in fold.inner_text()
    assert page.locator("img[src='x']").count() == 0  # a system's name is text, whatever it says
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_every_card_is_drawn_in_both_languages_and_themes(open_page: Callable[..., Any], artifacts: Path) -> None:
    page = open_page()
    _tab(page, "file:text")
    for place in range(page.locator(".qe-ana-card").count()):
        page.locator(".qe-ana-card").nth(place).scroll_into_view_if_needed()
    page.wait_for_function("[...document.querySelectorAll('.qe-ana-plot')].every((plot) => plot.drawn > 200)")
    page.screenshot(path=str(artifacts / "analysis-light.png"), full_page=True)
    page.click("#qe-theme-button")
    page.wait_for_function("qeAnalysis.look.theme === 'dark' && qeAnalysis.ready", timeout=60_000)
    assert page.evaluate("qeAnalysis.data.cards[0].figure.layout.paper_bgcolor") == "#0E1320"
    page.locator("#qe-language label").nth(1).click()
    page.wait_for_function("qeAnalysis.look.lang === 'zh' && qeAnalysis.ready", timeout=60_000)
    assert "文本" in page.locator(".qe-ana").inner_text()
    # The list of sources is the server's, told again after the switch.
    chinese = "() => /[\u4e00-\u9fff]/.test(document.querySelector('#qe-ana-source input').value)"
    page.wait_for_function(chinese, timeout=15_000)
    page.evaluate("scrollTo(0, 0)")
    page.click("#qe-projector-button")
    page.wait_for_function("qeAnalysis.look.theme === 'light' && qeAnalysis.look.scale > 1.2 && qeAnalysis.ready")
    page.set_viewport_size({"width": 1920, "height": 1080})
    page.wait_for_timeout(800)
    page.screenshot(path=str(artifacts / "analysis-projector-1920.png"))
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_nothing_serious(open_page: Callable[..., Any], axe: str, theme: str) -> None:
    page = open_page(f"?__theme={theme}")
    _tab(page, "file:text")
    page.evaluate(axe)
    for fold in page.locator(".qe-ana details summary").all():
        fold.click()
    page.get_by_text("Diagnose a text", exact=True).first.click()
    page.wait_for_timeout(800)
    assert _faults(page) == []
