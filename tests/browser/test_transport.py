"""The transport by key and by hand: play, pause, speed, loops, pause at promotions, seek; and its sheet of keys."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.visuals.synthetic import Plan, synthetic_rows
from visuals.replay import to_html

EVENTS = 200
KEYS = [
    "←",
    "→",
    "PgUp",
    "PgDn",
    "↑",
    "↓",
    "Home",
    "End",
    "Space",
    "[",
    "]",
    "L",
    "P",
    ",",
    ".",
    "+",
    "-",
    "0",
    "R",
    "Esc",
    "?",
]


@pytest.fixture(scope="module")
def replay(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("transport") / "replay.html"
    plan = Plan(rows=30, prompt=1000, events=EVENTS, full=20, quant=60, local=32)
    file.write_text(to_html(synthetic_rows(plan), "t", {}, "en"), "utf-8")
    return file.as_uri()


@pytest.fixture
def page(browser: Any, replay: str) -> Iterator[Any]:
    troubles: list[str] = []
    # The page's policy forbids the polling by eval that waits for a function.
    made = browser.new_page(viewport={"width": 1280, "height": 720}, bypass_csp=True)
    made.on("pageerror", lambda error: troubles.append(str(error)))
    made.goto(replay)
    made.wait_for_function("window.qeView && qeView.index === 0 && qeView.axis")
    yield made
    made.close()
    assert troubles == []


def test_play_pause_and_speed(page: Any) -> None:
    page.keyboard.press("Space")
    page.wait_for_function("qeView.playing && qeView.index >= 1")
    page.keyboard.press("Space")
    held = page.evaluate("qeView.index")
    page.wait_for_timeout(1200)
    assert page.evaluate("[qeView.index, Boolean(qeView.playing)]") == [held, False]
    for key, speeds in (("[", [0.5, 0.25, 0.25]), ("]", [0.5, 1, 2, 4, 4])):
        for speed in speeds:
            page.keyboard.press(key)
            assert page.evaluate("qeView.speed") == speed
    assert page.locator(".qe-speed").input_value() == "4"
    page.get_by_role("button", name="Play").click()
    page.wait_for_function(f"qeView.index >= {held + 3}")
    page.keyboard.press("ArrowLeft")  # a step ends the playing
    assert page.evaluate("Boolean(qeView.playing)") is False
    page.locator(".qe-speed").select_option("0.25")
    assert page.evaluate("qeView.speed") == 0.25


def test_a_range_is_looped(page: Any) -> None:
    page.evaluate("qeView.seek(10)")
    page.keyboard.press("L")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("L")
    assert page.evaluate("qeView.loop") == [10, 12]
    assert page.get_by_role("button", name="Loop 10 to 12").get_attribute("aria-pressed") == "true"
    page.evaluate(
        "() => { window.seen = []; qeView.host.addEventListener('qe-event', (e) => seen.push(e.detail.index)) }"
    )
    page.evaluate("qeView.play(4)")
    page.wait_for_function("window.seen.length >= 8")
    page.keyboard.press("Space")
    seen = page.evaluate("seen")
    assert set(seen) == {10, 11, 12}
    assert all(after == (10 if before == 12 else before + 1) for before, after in pairwise(seen))
    page.keyboard.press("L")
    assert page.evaluate("qeView.loop") is None


def test_it_pauses_at_every_promotion_of_the_layer(page: Any) -> None:
    promoted = page.evaluate(
        "qeView.trace.steps.map((_, i) => i).filter((i) => i > 0 &&"
        " qeView.trace.rowMoves(i, qeView.row).some((move) => move.from === 3 && move.to === 2))"
    )
    assert len(promoted) >= 2
    page.evaluate(f"qeView.seek({promoted[0] - 1})")
    page.keyboard.press("p")
    for at in promoted[:2]:
        page.evaluate("qeView.play(4)")
        page.wait_for_function(f"!qeView.playing && qeView.index === {at}", timeout=60_000)


def test_seek_by_slider_and_how_long_any_event_takes(page: Any, capsys: pytest.CaptureFixture[str]) -> None:
    page.locator(".qe-slider").evaluate("(node) => { node.value = '150'; node.dispatchEvent(new Event('input')) }")
    assert page.evaluate("[qeView.index, qeView.trace.board.eventId]") == [150, 150]
    took = page.evaluate(
        "() => { const took = []; for (let i = 0; i <= 200; i++) { const to = (i * 89) % 201;"
        " const from = performance.now(); qeView.seek(to); qeView._frame(performance.now());"
        " took.push([performance.now() - from, qeView.trace.board.eventId === to]) } return took }"
    )
    assert len(took) == EVENTS + 1 and all(right for _, right in took)
    times = sorted(ms for ms, _ in took)
    with capsys.disabled():
        told = f"median {times[100]:.1f} ms, p95 {times[190]:.1f} ms, longest {times[-1]:.1f} ms"
        print(f"\n  seek to each of {EVENTS} events, with its redraw: {told}")


def test_the_sheet_tells_every_key(page: Any) -> None:
    page.keyboard.press("?")
    shown = page.locator(".qe-sheet kbd").all_inner_texts()
    assert set(KEYS) <= set(shown)
    assert page.evaluate("document.activeElement.closest('.qe-sheet') !== null")
    page.keyboard.press("?")
    assert page.locator(".qe-sheet").count() == 0


def test_many_layers_and_windows_stay_usable(browser: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = Plan(rows=32, prompt=4096 * 8 - 400, events=12, full=200, quant=800, local=64)
    (tmp_path / "r.html").write_text(to_html(synthetic_rows(plan), "t", {}, "en"), "utf-8")
    page = browser.new_page(viewport={"width": 1920, "height": 1080}, bypass_csp=True)
    try:
        page.goto((tmp_path / "r.html").as_uri())
        page.wait_for_function("window.qeView && qeView.axis && qeView.axis.thin")
        took: Callable[[str], float] = lambda act: page.evaluate(  # noqa: E731
            f"() => {{ const from = performance.now(); {act}; qeView._frame(performance.now());"
            " return performance.now() - from }"
        )
        figures = {
            "step": took("qeView.step(1)"),
            "seek": took("qeView.seek(9)"),
            "zoom": took("qeView._zoomTo([1000, 1100])"),
            "layer": took("qeView.setRow(5)"),
        }
        page.wait_for_function("!qeView.axis.thin")
        brush = page.locator(".qe-brush")
        box = brush.bounding_box()
        page.mouse.dblclick(box["x"] + box["width"] * 0.8, box["y"] + 5)
        assert page.evaluate("qeView.zoom") is None
        page.mouse.move(box["x"] + box["width"] * 0.25, box["y"] + 5)
        page.mouse.down()
        page.mouse.move(box["x"] + box["width"] * 0.5, box["y"] + 5)
        page.mouse.up()
        first, last = page.evaluate("qeView.zoom")
        assert first == pytest.approx(4096 / 4, rel=0.05) and last == pytest.approx(4096 / 2, rel=0.05)
        with capsys.disabled():
            told = ", ".join(f"{name} {ms:.0f} ms" for name, ms in figures.items())
            print(f"\n  32 layers x 4,096 windows: {told}")
    finally:
        page.close()
