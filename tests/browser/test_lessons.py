"""The lessons in a real browser, by keyboard alone: forward, back, answered, and taken back exactly. No model runs."""

from __future__ import annotations

import json
import re
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

    def opened(*, storage: dict[str, Any] | None = None, **options: Any) -> Any:
        settings = {"viewport": {"width": 1280, "height": 720}, "locale": "en-GB", "reduced_motion": "reduce"} | options
        context = browser.new_context(**settings)
        contexts.append(context)
        for name, value in (storage or {}).items():
            context.add_init_script(f"localStorage.setItem({name!r}, {json.dumps(json.dumps(value))})")
        page = context.new_page()
        page.on("pageerror", lambda error: troubles.append(str(error)))
        page.on("console", lambda message: troubles.extend([message.text] if message.type == "error" else []))
        page.goto(server.url)
        page.wait_for_function(f"window.qeBoards && {LIVE} && {LIVE}.index >= 0", timeout=60_000)
        page.get_by_role("tab", name=re.compile("^(Lessons|课程)$")).click()
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
    page.evaluate("async () => { await qeLessons.board.options.later(); }")  # what keys start is there from now on
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
    teacher.get_by_role("button", name="Scan to answer").press("Enter")
    code = teacher.locator("dialog.qe-scan img")
    teacher.wait_for_function("document.querySelector('dialog.qe-scan img').naturalWidth > 0")
    assert code.get_attribute("alt") == link == teacher.locator("dialog.qe-scan b").inner_text()
    teacher.keyboard.press("n")
    assert teacher.evaluate("qeLessons.at") == [6, 0]
    teacher.screenshot(path=str(artifacts / "lesson-scan-1280.png"))
    teacher.keyboard.press("Escape")
    teacher.wait_for_selector("dialog", state="detached")  # a dialog says that it was closed a moment later
    assert teacher.evaluate("document.activeElement.dataset.name") == "class-scan"
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


HIDDEN = """() => {
  const foot = document.querySelector(".qe-step-foot").getBoundingClientRect().top;
  const bar = qeLessons.board.ui.transport.getBoundingClientRect();
  const whole = (node, end) => {
    const at = node.getBoundingClientRect();
    return at.top >= -1 && at.bottom <= end + 1;
  };
  const out = [...document.querySelectorAll(".qe-step > *, .qe-ask > *")].filter((node) => !whole(node, foot));
  const framed = [...document.querySelectorAll(".qe-framed")].filter((node) => node.offsetParent);
  return [
    ...out.map((node) => node.className || node.tagName),
    ...(framed.length && !framed.some((node) => whole(node, bar.top)) ? ["frame: " + framed[0].className] : []),
    ...[...document.querySelectorAll(".qe-step td, .qe-step th, .qe-step p, .qe-step button")]
      .filter((node) => node.scrollWidth > node.clientWidth + 1 && getComputedStyle(node).display !== "inline")
      .map((node) => "too wide: " + node.textContent),
    ...(document.documentElement.scrollWidth > innerWidth ? ["the page"] : []),
  ];
}"""
"""What of a step lies under the panel's foot or outside the window: words, choices, explanation, the framed part."""
VIEWS = [
    ("light-en", 1280, 720),
    ("light-en", 1920, 1080),
    ("projector-en", 1280, 720),
    ("projector-en", 1920, 1080),
    ("projector-zh", 1280, 720),
    ("dark-zh", 1920, 1080),
]


def _view(open_lessons: Callable[..., Any], view: str, width: int, height: int) -> Any:
    """The Lessons tab with a theme and language, told as a returning reader's browser would."""
    mode, lang = view.split("-")
    state = {"theme": "dark" if mode == "dark" else "light", "projector": mode == "projector", "scale": 1}
    return open_lessons(
        viewport={"width": width, "height": height},
        locale="zh-CN" if lang == "zh" else "en-GB",
        storage={"qevict-view": state},
    )


@pytest.mark.parametrize(("view", "width", "height"), VIEWS)
def test_every_step_fits_before_and_after_its_answer(
    open_lessons: Callable[..., Any], artifacts: Path, view: str, width: int, height: int
) -> None:
    page = _view(open_lessons, view, width, height)
    hidden: dict[tuple[int, int, str], list[str]] = {}
    for lesson, step in _places():
        page.evaluate(f"qeLessons.go({lesson}, {step})")
        _at(page, lesson, step)
        page.evaluate(SETTLED)
        hidden[lesson, step, ""] = page.evaluate(HIDDEN)
        if step == 0:
            page.screenshot(path=str(artifacts / f"lesson-{lesson + 1}-{view}-{width}.png"))
        kind = page.evaluate("(qeLessons.step.question || {}).kind")
        if kind is None:
            continue
        # A wrong answer is said at most length.
        page.evaluate(
            "qeLessons.choose(qeLessons.step.question.answer ? 0 : 1)"
            if kind == "choice"
            else "qeLessons.step.marks.forEach((_, i) => qeLessons.guess(i, 'full')), qeLessons.reveal()"
        )
        page.evaluate(SETTLED)
        hidden[lesson, step, "answered"] = page.evaluate(HIDDEN)
    assert {place: found for place, found in hidden.items() if found} == {}


def test_print_is_large_in_projector_mode(open_lessons: Callable[..., Any]) -> None:
    """At 1,080 lines no letter of a lesson is smaller than 18 pixels."""
    page = _view(open_lessons, "projector-en", 1920, 1080)
    small = """() => {
      const out = new Set();
      const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
      const range = document.createRange();
      while (walk.nextNode()) {
        const node = walk.currentNode, { parentElement: parent } = node;
        if (!node.data.trim() || !parent.offsetParent) continue;
        range.selectNodeContents(node);
        const { width, height } = range.getBoundingClientRect();
        if (width > 3 && height > 3 && parseFloat(getComputedStyle(parent).fontSize) < 18) out.add(node.data);
      }
      return [...out];
    }"""
    for place in ([0, 0], [2, 1], [3, 1], [5, 4], [9, 3]):
        page.evaluate("(place) => qeLessons.go(...place)", place)
        _at(page, *place)
        page.evaluate(SETTLED)
        assert page.evaluate(small) == [], place


def test_a_frame_below_the_window_is_brought_into_view_and_back(open_lessons: Callable[..., Any]) -> None:
    page = open_lessons()
    page.evaluate("qeLessons.go(4, 2)")
    _at(page, 4, 2)
    page.evaluate(SETTLED)
    assert page.evaluate("scrollY") > 100
    page.keyboard.press("b")
    _at(page, 4, 1)
    page.evaluate(SETTLED)
    assert page.evaluate("scrollY") == 0
