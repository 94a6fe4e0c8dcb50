"""The lessons in a real browser, by keyboard alone: forward, back, answered, and taken back exactly. No model runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from presets.lessons import load_lessons
from tests.browser.server import ServerProcess

LIVE = "qeBoards.get('qe-live-board')"
STATE = """() => {
  const board = qeLessons.board;
  const state = board.snapshot();
  delete state.trace;
  delete state.lesson;
  return JSON.stringify([
    state,
    board.trace.meta ? board.trace.steps.length : 0,
    board.ui.lanesCanvas.toDataURL(),
    [...board.host.querySelectorAll(".qe-framed, .qe-mark-lane")].map((node) => node.className),
    [...board.host.querySelectorAll(".qe-mark")].map((node) => [node.textContent, node.style.left, node.style.top]),
  ]);
}"""
"""Everything that a step sets on the board, with the very pixels of its lanes."""
SETTLED = """() => new Promise((done) => {
  const look = () => (qeLessons.board._raf ? requestAnimationFrame(look) : done(true));
  requestAnimationFrame(() => requestAnimationFrame(look));
})"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    command = ("-m", "tests.browser.made_up_server", "8", "40")
    with ServerProcess(tmp_path_factory.mktemp("lessons"), command) as running:
        yield running


@pytest.fixture
def open_lessons(browser: Any, server: ServerProcess) -> Iterator[Callable[..., Any]]:
    """Opens the Lessons tab in a browser that remembers nothing; in the end no error may have been heard."""
    contexts: list[Any] = []
    troubles: list[str] = []

    def opened(**options: Any) -> Any:
        settings = {"viewport": {"width": 1280, "height": 720}, "locale": "en-GB", "reduced_motion": "reduce"} | options
        context = browser.new_context(**settings)
        contexts.append(context)
        page = context.new_page()
        page.on("pageerror", lambda error: troubles.append(str(error)))
        page.on("console", lambda message: troubles.extend([message.text] if message.type == "error" else []))
        page.goto(server.url)
        page.wait_for_function(f"window.qeBoards && {LIVE} && {LIVE}.index >= 0", timeout=60_000)
        page.get_by_role("tab", name="Lessons").click()
        page.wait_for_function("window.qeLessons && qeLessons.at", timeout=60_000)
        return page

    yield opened
    for context in contexts:
        context.close()
    assert troubles == []


def _state(page: Any) -> str:
    page.evaluate(SETTLED)
    found: str = page.evaluate(STATE)
    return found


def _at(page: Any, lesson: int, step: int) -> None:
    page.wait_for_function(f"window.qeLessons && String(qeLessons.at) === '{lesson},{step}'", timeout=30_000)


def _places() -> list[tuple[int, int]]:
    return [(i, j) for i, lesson in enumerate(load_lessons()) for j in range(len(lesson.steps))]


def test_all_lessons_by_keyboard_forward_and_back(open_lessons: Callable[..., Any]) -> None:
    page = open_lessons()
    places = _places()
    forward: dict[tuple[int, int], str] = {}
    for number, place in enumerate(places):
        _at(page, *place)
        forward[place] = _state(page)
        if number + 1 < len(places):
            page.keyboard.press("n" if number % 2 else "PageDown")
    assert len(set(forward.values())) > len(load_lessons())
    for number in range(len(places) - 1, -1, -1):
        _at(page, *places[number])
        assert _state(page) == forward[places[number]], places[number]
        if number:
            page.keyboard.press("b" if number % 2 else "PageUp")


def test_what_a_reader_did_in_a_step_goes_with_it(open_lessons: Callable[..., Any]) -> None:
    page = open_lessons()
    empty = _state_before(page)
    first = _state(page)
    page.keyboard.press("n")
    _at(page, 0, 1)
    second = _state(page)
    for key in ("End", "ArrowLeft", "ArrowUp", "r", "l", "]", "p", "+", "."):
        page.keyboard.press(key)
    assert _state(page) != second
    page.keyboard.press("b")
    _at(page, 0, 0)
    assert _state(page) == first
    page.keyboard.press("n")
    _at(page, 0, 1)
    assert _state(page) == second
    page.evaluate("qeLessons.leave()")
    assert _state(page) == empty


def _state_before(page: Any) -> str:
    """The board as it is when no lesson stands on it."""
    page.evaluate("qeLessons.leave()")
    state = _state(page)
    page.evaluate("qeLessons.go(0, 0)")
    _at(page, 0, 0)
    return state


def test_a_prediction_is_scored_once_and_kept_here(open_lessons: Callable[..., Any], artifacts: Path) -> None:
    page = open_lessons()
    page.evaluate("qeLessons.go(2, 1)")
    _at(page, 2, 1)
    answers = page.evaluate("qeLessons.step.question.answers")
    keys = {"full": "f", "quant": "q", "evicted": "e"}
    wrong = "f" if answers[0] != "full" else "e"
    page.keyboard.press(wrong)
    assert page.evaluate("qeLessons.guesses[0]") != answers[0]
    for answer in answers[1:]:
        page.keyboard.press(keys[answer])
    before = page.evaluate("qeLessons.board.index")
    page.keyboard.press("Enter")
    assert page.evaluate("qeLessons.board.index") == before + 1
    assert f"{len(answers) - 1} of {len(answers)} right" in page.locator(".qe-player").inner_text()
    page.evaluate(SETTLED)
    badges = page.locator("#qe-lesson-board .qe-mark").all_inner_texts()
    assert sorted(text[-1] for text in badges) == sorted(["✗", *"✓" * (len(answers) - 1)])
    page.screenshot(path=str(artifacts / "lesson-predicted-1280.png"))
    page.keyboard.press("b")
    _at(page, 2, 0)
    page.keyboard.press("n")
    _at(page, 2, 1)
    assert page.evaluate("qeLessons.board.index") == before
    assert "Answered before" in page.locator(".qe-player").inner_text()
    page.reload()
    page.wait_for_function(f"window.qeBoards && {LIVE} && {LIVE}.index >= 0", timeout=60_000)
    page.get_by_role("tab", name="Lessons").click()
    _at(page, 2, 1)
    assert f"{len(answers) - 1} of {len(answers)}" in page.locator(".qe-step-score").inner_text()
    page.get_by_role("button", name="Forget my answers").click()
    page.wait_for_function("document.querySelector('.qe-step-score').textContent.includes('stays on this device')")
    assert page.evaluate("Object.keys(JSON.parse(localStorage.getItem('qevict-lessons')).answers).length") == 0


def test_a_choice_by_number(open_lessons: Callable[..., Any]) -> None:
    page = open_lessons()
    page.evaluate("qeLessons.go(6, 0)")
    _at(page, 6, 0)
    right = page.evaluate("qeLessons.step.question.answer")
    page.keyboard.press(str(right + 1))
    assert "Right." in page.locator(".qe-verdict").inner_text()
    page.keyboard.press("1")
    assert "1,640 B" in page.locator(".qe-verdict").inner_text()
    assert page.locator(".qe-step-score").inner_text().startswith("Score on this device: 1 of 1")


def test_keys_belong_to_the_tab_that_is_shown(open_lessons: Callable[..., Any]) -> None:
    page = open_lessons()
    page.get_by_role("tab", name="Live").click()
    page.wait_for_selector("#qe-live-board .qe-lanes")
    page.locator("#qe-live-board .qe").focus()
    page.keyboard.press("Home")
    page.keyboard.press("PageDown")
    page.keyboard.press("n")
    assert page.evaluate("qeLessons.at") == [0, 0]
    assert page.evaluate(f"{LIVE}.index") == 1


def test_another_language_keeps_the_place(open_lessons: Callable[..., Any]) -> None:
    page = open_lessons()
    page.evaluate("qeLessons.go(3, 0)")
    _at(page, 3, 0)
    page.get_by_text("中文", exact=True).click()
    page.wait_for_function("document.querySelector('.qe-player h2').textContent === '揭晓'", timeout=20_000)
    page.evaluate(SETTLED)
    assert page.evaluate("qeLessons.at") == [3, 0]
    assert page.locator("#qe-lesson-board .qe-mark").count() == 4


def test_a_lesson_goes_live(open_lessons: Callable[..., Any]) -> None:
    page = open_lessons()
    page.evaluate("qeLessons.go(7, 0)")
    _at(page, 7, 0)
    page.get_by_role("button", name="Try it live").click()
    page.wait_for_selector("#qe-live-board .qe-lanes", timeout=20_000)
    page.wait_for_function(
        "document.querySelector('#qe-quant_share input[type=number]').value === '0.9'", timeout=20_000
    )


def test_a_class_answers_by_a_link(open_lessons: Callable[..., Any], artifacts: Path) -> None:
    teacher = open_lessons()
    teacher.evaluate("qeLessons.go(6, 0)")
    _at(teacher, 6, 0)
    teacher.get_by_role("button", name="Let a class answer").click()
    teacher.wait_for_selector(".qe-step-class b")
    link = teacher.locator(".qe-step-class b").inner_text()
    for pick in ("1", "2"):
        student = open_lessons(viewport={"width": 390, "height": 800})
        student.goto(link)
        student.wait_for_function("window.qeLessons && qeLessons.at", timeout=60_000)
        student.evaluate("qeLessons.go(6, 0)")
        _at(student, 6, 0)
        student.keyboard.press(pick)
        student.get_by_text("Sent, without a name.").wait_for(timeout=15_000)
    teacher.get_by_text("2 devices have answered").wait_for(timeout=15_000)
    bars = [line.split() for line in teacher.locator(".qe-class-bar").all_inner_texts()]
    assert bars == [["1", "1"], ["2", "1"], ["3", "0"]]
    teacher.screenshot(path=str(artifacts / "lesson-class-1280.png"))
    student.screenshot(path=str(artifacts / "lesson-class-390.png"))
    teacher.get_by_role("button", name="End").click()
    assert teacher.locator(".qe-class-tally").count() == 0


@pytest.mark.parametrize("size", [(1280, 720), (1920, 1080)])
def test_every_step_fits_beside_its_board(
    open_lessons: Callable[..., Any], artifacts: Path, size: tuple[int, int]
) -> None:
    width, height = size
    page = open_lessons(viewport={"width": width, "height": height})
    for lesson, step in _places():
        page.evaluate(f"qeLessons.go({lesson}, {step})")
        _at(page, lesson, step)
        page.evaluate(SETTLED)
        box = page.locator("[data-name='next']").evaluate("(node) => node.getBoundingClientRect().toJSON()")
        lanes = page.locator("#qe-lesson-board .qe-memory").evaluate("(node) => node.getBoundingClientRect().bottom")
        assert box["bottom"] <= height and lanes <= height, (lesson, step)
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        if step == 0:
            page.screenshot(path=str(artifacts / f"lesson-{lesson + 1}-{width}.png"))
