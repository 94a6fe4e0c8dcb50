"""Stored comparisons in a real browser: listed, opened, linked, downloaded, deleted; nothing is run for it.

The comparisons were made by a tiny model before the server starts, so that this takes no longer than the page does.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from app.compare_request import CompareRequest
from app.context import create_context
from app.settings import Settings
from tests.app.fake_engine import FakeEngine, FakeOptions
from tests.app.test_compare_tab import Loader
from tests.browser.server import ServerProcess
from tests.browser.test_access import _faults, axe  # noqa: F401 (a fixture)

pytestmark = [pytest.mark.browser, pytest.mark.timeout(900)]
VIEW = "window.qeBoards.get('qe-compare-board')"
TEXT = "A <b>tide</b> table is a short story about the moon, told by the water. " * 5
KIVI = {"residual": 32}
MADE = {
    "taught": CompareRequest(
        TEXT,
        ("qevict", "snapkv", "adakv", "kivi-4"),
        {"share": 0.6},
        max_new_tokens=33,
        parameters={"snapkv": {"window": 8}, "adakv": {"window": 8}, "kivi-4": KIVI},
        title="Tides <i>taught</i>",
        chat=False,
        ignore_eos=True,
    ),
    "free": CompareRequest(
        TEXT,
        ("qevict", "adakv", "streamingllm"),
        {"share": 0.4},
        mode="free",
        max_new_tokens=26,
        parameters={"adakv": {"window": 8}},
        title="Tides free",
        chat=False,
        ignore_eos=True,
    ),
    "two": CompareRequest(
        TEXT, ("fullkv", "qevict"), {"share": 0.5}, max_new_tokens=12, title="Two", chat=False, ignore_eos=True
    ),
}


@dataclass(frozen=True)
class Stored:
    server: ServerProcess
    ids: dict[str, str]


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stored]:
    folder = tmp_path_factory.mktemp("stored")
    context = create_context(
        Settings(data_dir=folder / "data"), engine=FakeEngine(), loader=Loader(), options=FakeOptions
    )
    ids = {}
    for name, request in MADE.items():
        ids[name] = context.compares.start(request)
        assert context.runs.wait(ids[name], 120), name
        assert context.compares.outcome(ids[name]) is not None, context.compares.standing(ids[name]).error
    context.close()
    with ServerProcess(folder) as started:
        yield Stored(started, ids)


@pytest.fixture
def open_page(browser: Any, stored: Stored) -> Iterator[Callable[..., Any]]:
    """Opens the page; the test fails on any error in the console."""
    contexts, troubles = [], []

    def opened(query: str = "", width: int = 1280, height: int = 720) -> Any:
        context = browser.new_context(viewport={"width": width, "height": height})
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda said: troubles.append(said.text) if said.type == "error" else None)
        page.on("pageerror", lambda error: troubles.append(error.stack or str(error)))
        page.goto(stored.server.url + query)
        return page

    yield opened
    for context in contexts:
        context.close()
    assert troubles == []


def _shown(page: Any) -> None:
    page.wait_for_function(f"window.qeBoards && {VIEW} && {VIEW}.data && {VIEW}.axis", timeout=60_000)
    page.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")


def _pictures(page: Any) -> list[str]:
    page.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
    found: list[str] = page.evaluate(f"{VIEW}.lanes.map((lane) => lane.canvas.toDataURL())")
    return found


def test_the_list_opens_one_as_it_was(open_page: Callable[..., Any], stored: Stored) -> None:
    page = open_page()
    page.get_by_role("tab", name="Compare").click()
    page.wait_for_selector(".qe-cmp-list", timeout=30_000)
    rows = page.locator(".qe-cmp-list tbody tr")
    assert rows.count() == 3
    assert "Tides <i>taught</i>" in rows.nth(2).inner_text() and page.locator(".qe-cmp-list i").count() == 0
    assert page.locator("#qe-compare-board .qe-cmp-lane").count() == 0
    rows.nth(2).get_by_role("button", name="Open").click()
    _shown(page)
    assert page.locator(".qe-cmp-lane").count() == 4
    assert "Teacher-forced" in page.locator("#qe-cmp-status").inner_text()
    assert page.locator(".qe-cmp-table tbody tr").count() == 4
    assert page.locator(".qe-cmp-list tr[aria-current]").inner_text().startswith("QEvict, SnapKV, AdaKV, KIVI-4")
    looks = page.evaluate(f"{VIEW}.looks.length")
    last = _pictures(page)
    page.locator("#qe-compare-board .qe").focus()
    page.keyboard.press("Home")
    assert page.evaluate(f"{VIEW}.index") == 0 and looks == 5
    assert all(one != other for one, other in zip(_pictures(page), last, strict=True))
    # A second one takes its place; the first comes back as it was.
    rows.nth(0).get_by_role("button", name="Open").click()
    page.wait_for_function(f"{VIEW}.data.systems.length === 2", timeout=30_000)
    rows.nth(2).get_by_role("button", name="Open").click()
    page.wait_for_function(f"{VIEW}.data.systems.length === 4", timeout=30_000)
    assert _pictures(page) == last


def test_a_tab_that_is_opened_late_has_its_board(open_page: Callable[..., Any], stored: Stored) -> None:
    """What a page does when it is opened reaches the board's place before the board is there."""
    page = open_page()
    page.wait_for_function("window.qeBoards && qeBoards.size > 0", timeout=60_000)
    page.wait_for_timeout(5_000)
    page.get_by_role("tab", name="Compare").click()
    page.wait_for_selector(".qe-cmp-list", timeout=30_000)
    page.locator(".qe-cmp-list tbody tr").nth(2).get_by_role("button", name="Open").click()
    _shown(page)
    assert page.locator(".qe-cmp-lane").count() == 4


def test_the_sink_is_drawn_as_on_the_tier_board(open_page: Callable[..., Any], stored: Stored) -> None:
    page = open_page(f"?c={stored.ids['two']}")
    _shown(page)
    color = """(view) => {
      const canvas = view.lanes[%d].canvas;
      const ratio = canvas.width / view.width;
      const at = [(view.axis.left + view.axis.sinkWidth / 2) * ratio, (view.height - %d) * ratio].map(Math.round);
      const [r, g, b] = canvas.getContext("2d").getImageData(...at, 1, 1).data;
      return `#${[r, g, b].map((part) => part.toString(16).padStart(2, "0")).join("")}`.toUpperCase();
    }"""
    sink = page.evaluate(f"{VIEW}.colors.sink").upper()
    for lane in (0, 1):
        assert page.evaluate(f"({color % (lane, 8)})({VIEW})") == sink
    legend = page.locator("#qe-compare-board .qe-legend")
    assert "Sink first 5 tokens" in " ".join(legend.inner_text().split())
    assert legend.locator(".qe-is-sink").evaluate("(node) => getComputedStyle(node).backgroundColor") == page.evaluate(
        "getComputedStyle(Object.assign(document.body.appendChild(document.createElement('i')),"
        f" {{style: 'background-color: ' + {VIEW}.colors.sink}})).backgroundColor"
    )
    page.locator("#qe-compare-board .qe").focus()
    page.evaluate(f"{VIEW}._point(-1)")
    tip = page.locator("#qe-compare-board .qe-tip").inner_text().replace("\N{NO-BREAK SPACE}", " ")
    assert tip.startswith("Sink") and "FullKV" in tip and "100 % full" in tip


def test_free_lanes_run_to_the_first_difference_and_after(
    open_page: Callable[..., Any], stored: Stored, artifacts: Path
) -> None:
    page = open_page(f"?c={stored.ids['free']}")
    _shown(page)
    assert "Free-running (texts diverge)" in page.locator("#qe-cmp-status").inner_text()
    assert page.locator(".qe-cmp-lane").count() == 3 and page.locator(".qe-cmp-text").count() == 4
    legend = page.locator("#qe-compare-board .qe-legend").inner_text()
    assert "first difference" in legend and "KL per token" not in legend
    found = page.evaluate(f"{VIEW}.data.systems.map((system) => system.first_difference)")
    firsts = [at for at in found if at is not None]
    assert firsts, "the tiny model's texts must diverge for this test to mean anything"
    page.locator("#qe-compare-board .qe").focus()
    page.keyboard.press("Home")
    page.keyboard.press("d")
    assert page.evaluate(f"{VIEW}.looks[{VIEW}.index].t") > page.evaluate(f"{VIEW}.data.prompt_tokens") + min(firsts)
    words = page.evaluate(f"{VIEW}._axisWords({VIEW}.ui.axisCanvas.getContext('2d'), 12)")
    (mark,) = [word for word in words if "mark" in word and word["mark"] is not None]
    at = page.evaluate(f"{VIEW}.axis.token({VIEW}.data.prompt_tokens + {min(firsts)})")
    assert mark["mark"] == pytest.approx(at)
    page.keyboard.press("End")
    said = page.evaluate(f"{VIEW}.lanes.map((lane) => lane.figures.textContent)")
    for first, sentence in zip(found, said, strict=True):
        assert sentence == (
            "the same tokens as FullKV so far" if first is None else f"differs from new token {first + 1} on"
        )
    page.screenshot(path=str(artifacts / "compare-free-1280.png"))


def test_links_files_and_language(open_page: Callable[..., Any], stored: Stored) -> None:
    page = open_page(f"?c={stored.ids['taught']}&lang=zh")
    _shown(page)
    assert "教师强制" in page.locator("#qe-cmp-status").inner_text()
    link = page.locator("a.qe-cmp-link")
    assert link.get_attribute("href") == f"?c={stored.ids['taught']}"
    for kind in ("json", "csv"):
        with page.expect_download() as saved:
            page.locator(f".qe-links a[href*='export.{kind}']").click()
        text = Path(saved.value.path()).read_text("utf-8")
        if kind == "json":
            assert json.loads(text)["board"]["mode"] == "teacher"
        else:
            assert [row["system"] for row in csv.DictReader(io.StringIO(text))] == list(MADE["taught"].systems)
    page.locator("#qe-language").get_by_text("EN").click()
    page.wait_for_function("document.querySelector('.qe-cmp-list').innerText.includes('teacher-forced')")
    assert page.locator(".qe-cmp-lane").count() == 4 and "Lost:" in page.locator(".qe-cmp-table").inner_text()
    gone = open_page("?c=nobody")
    gone.wait_for_function("document.querySelector('#qe-cmp-status')?.innerText.includes('no such comparison')")


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_nothing_serious(
    open_page: Callable[..., Any],
    stored: Stored,
    axe: str,  # noqa: F811
    theme: str,
    artifacts: Path,
) -> None:
    faults = {}
    for name in ("taught", "free"):
        page = open_page(f"?c={stored.ids[name]}&__theme={theme}")
        _shown(page)
        page.wait_for_timeout(400)
        page.evaluate(axe)
        faults[name] = _faults(page)
        page.screenshot(path=str(artifacts / f"compare-{name}-{theme}.png"), full_page=True)
    page.get_by_text("Model and storage", exact=True).click()
    page.locator("button[data-act='ask']").first.click()
    page.wait_for_selector("button[data-act='delete']")
    faults["asked"] = _faults(page)
    assert {place: found for place, found in faults.items() if found} == {}


def test_deleting_asks_first(open_page: Callable[..., Any], stored: Stored) -> None:
    """The last test: it takes one away."""
    page = open_page(f"?c={stored.ids['two']}")
    _shown(page)
    row = page.locator(".qe-cmp-list tr[aria-current]")
    # By what they do: the name "Delete" is found in "Yes, delete" too, which stands there until "Keep it" is heard.
    for act in ("ask", "keep", "ask", "delete"):
        row.locator(f"button[data-act='{act}']").click()
        if act == "keep":
            row.locator("button[data-act='open']").wait_for()
            assert page.locator(".qe-cmp-list tbody tr").count() == 3
    page.wait_for_function("document.querySelectorAll('.qe-cmp-list tbody tr').length === 2", timeout=30_000)
    page.wait_for_function("document.querySelector('#qe-cmp-status').innerText.includes('deleted')")
    page.wait_for_function("document.querySelectorAll('.qe-cmp-lane').length === 0")
    assert page.locator(".qe-cmp-table").count() == 0
