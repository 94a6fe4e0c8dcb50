"""Two browsers on one session: the teacher's position, layer, pointer and notes reach the class, and no more."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.browser.server import ServerProcess

EVENTS = 24
BOARD = "qeBoards.get('qe-replay-board')"
PLACE = f"[{BOARD}.trace.steps[{BOARD}.index].r, {BOARD}.row, {BOARD}.cursor]"
START = (
    "fetch('qe/runs', {method: 'POST', headers: {'Content-Type': 'application/json'}, body: '{\"prompt\": \"x\"}'})"
    ".then((answer) => answer.json()).then((answer) => answer.sid)"
)
ENDED = "fetch('qe/s/{sid}/status').then((answer) => answer.json()).then((run) => run.state === 'ended')"
NASTY = "<img src=x onerror=alert(1)> 看这里"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    command = ("-m", "tests.browser.made_up_server", str(EVENTS), "40")
    with ServerProcess(tmp_path_factory.mktemp("follow"), command) as running:
        yield running


@pytest.fixture
def pages(browser: Any, server: ServerProcess) -> Iterator[tuple[Any, Any, str]]:
    """(teacher's page, pupil's page, session), both at the session's link; each a browser of its own."""
    contexts = [browser.new_context(viewport={"width": 1280, "height": 720}) for _ in range(2)]
    troubles: list[str] = []
    made = []
    for context in contexts:
        page = context.new_page()
        page.on("pageerror", lambda error: troubles.append(str(error)))
        page.on("console", lambda message: message.type == "error" and troubles.append(message.text))
        made.append(page)
    teacher, pupil = made
    teacher.goto(server.url)
    sid = teacher.evaluate(START)
    teacher.wait_for_function(ENDED.replace("{sid}", sid), timeout=60_000)
    for page in made:
        page.goto(f"{server.url}?s={sid}")
        page.wait_for_function(f"window.qeBoards && {BOARD} && {BOARD}.room && {BOARD}.index > 0", timeout=60_000)
    yield teacher, pupil, sid
    for context in contexts:
        context.close()
    # A page that is left while Gradio still listens to its queue makes Gradio log the end of that stream.
    assert [said for said in troubles if "AbortError" not in said and "Connection errored out" not in said] == []


def part(page: Any, selector: str) -> Any:
    """What is on the replay's board: the page has others."""
    return page.locator("#qe-replay-board").locator(selector)


def meet(teacher: Any, pupil: Any) -> None:
    """Waits until the pupil's board stands where the teacher's does."""
    here = teacher.evaluate(PLACE)
    pupil.wait_for_function(
        f"String({PLACE}) === '{','.join('' if x is None else str(x) for x in here)}'", timeout=15_000
    )


def present(teacher: Any, pupil: Any) -> None:
    teacher.keyboard.press("b")
    teacher.wait_for_function(f"{BOARD}.presenting")
    pupil.wait_for_function(f"{BOARD}.followed && {BOARD}.followed.on", timeout=15_000)


def test_a_class_follows_looks_around_and_comes_back(pages: tuple[Any, Any, str]) -> None:
    teacher, pupil, _ = pages
    present(teacher, pupil)
    for keys in (("Home",), ("ArrowRight", "ArrowUp"), ("PageDown", ".", "."), ("End",), ("ArrowLeft", "Escape")):
        for key in keys:
            teacher.keyboard.press(key)
        meet(teacher, pupil)
    teacher.wait_for_function(f"{BOARD}.presenting.followers >= 1")
    assert "Presenting to" in part(teacher, ".qe-transport").inner_text()
    assert pupil.get_by_role("button", name="Following the presenter").get_attribute("aria-pressed") == "true"
    assert pupil.get_by_role("button", name="Present", exact=True).count() == 0

    pupil.keyboard.press("Home")  # looks around alone
    pupil.wait_for_function(f"{BOARD}.followed.paused")
    teacher.keyboard.press("ArrowLeft")
    pupil.wait_for_timeout(600)
    assert pupil.evaluate(f"{BOARD}.index") == 0
    pupil.get_by_role("button", name="Rejoin the presenter").click()
    meet(teacher, pupil)
    pupil.keyboard.press("ArrowUp")
    pupil.wait_for_function(f"{BOARD}.followed.paused")
    pupil.keyboard.press("j")
    meet(teacher, pupil)

    teacher.keyboard.press("]")
    teacher.keyboard.press("Home")
    teacher.keyboard.press("Space")  # a replay that plays is followed event by event
    teacher.wait_for_function(f"{BOARD}.index > 3", timeout=20_000)
    teacher.keyboard.press("Space")
    meet(teacher, pupil)
    assert pupil.evaluate(f"{BOARD}.followed.paused") is False

    teacher.goto("about:blank")  # the presenter leaves
    pupil.wait_for_function(f"!{BOARD}.followed.on", timeout=15_000)
    assert pupil.get_by_role("button", name="Following the presenter").count() == 0


def test_a_page_keeps_one_stream(pages: tuple[Any, Any, str]) -> None:
    teacher, pupil, sid = pages
    asked: list[tuple[str, str]] = []
    pupil.on("request", lambda request: "/events" in request.url and asked.append((request.frame.url, request.url)))
    present(teacher, pupil)
    other = teacher.evaluate(START)
    pupil.goto(pupil.url.replace(sid, other))
    pupil.wait_for_function(f"window.qeBoards && {BOARD} && {BOARD}.room && {BOARD}.trace.end", timeout=60_000)
    pupil.wait_for_timeout(500)
    assert pupil.evaluate(f"Boolean({BOARD}.stream) + Boolean({BOARD}._followStream)") == 1
    asked = [stream for page, stream in asked if other in page]
    assert asked and all(other in stream for stream in asked)


def test_notes_are_written_by_keyboard_and_reach_the_class(pages: tuple[Any, Any, str], tmp_path: Path) -> None:
    teacher, pupil, sid = pages
    present(teacher, pupil)
    teacher.keyboard.press("Home")
    for key in (".", ".", ".", "m"):
        teacher.keyboard.press(key)
    teacher.keyboard.type(f"{NASTY} m b j ?")
    assert teacher.evaluate(f"{BOARD}.index") == 0 and part(teacher, ".qe-sheet:not(.qe-notes)").count() == 0
    teacher.keyboard.press("Enter")
    teacher.wait_for_function(f"{BOARD}.notes.length === 1")
    teacher.keyboard.press("Escape")
    teacher.keyboard.press("ArrowRight")
    teacher.keyboard.press("m")
    teacher.keyboard.type("about the event")
    teacher.keyboard.press("Enter")
    pupil.wait_for_function(f"{BOARD}.notes.length === 2", timeout=15_000)
    meet(teacher, pupil)
    for page in (teacher, pupil):
        page.wait_for_function("document.querySelectorAll('.qe-note-line .qe-pin').length === 2")
        shapes = page.evaluate(
            "[...document.querySelectorAll('.qe-note-line .qe-pin')].map((n) => [n.textContent, n.className])"
        )
        assert [number for number, _ in shapes] == ["1", "2"]
        assert "qe-pin-window" in shapes[0][1] and "qe-pin-event" in shapes[1][1]
        assert part(page, ".qe-note-strip .qe-pin").count() == part(page, ".qe-note-pins .qe-pin").count() == 1
        assert "about the event" in part(page, ".qe-note-caption").inner_text()
        assert NASTY in part(page, "table.qe-hidden.qe-note-part").text_content()
        assert part(page, "img").count() == 0
    number = teacher.evaluate(f"{BOARD}.notes[0].windows[0]")
    middle = f"{BOARD}.axis.x({number}) + {BOARD}.axis.width({number}) / 2"
    assert (
        abs(teacher.evaluate(f"parseFloat(document.querySelector('.qe-note-strip .qe-pin').style.left) - ({middle})"))
        < 1
    )

    teacher.keyboard.press("n")
    panel = part(teacher, ".qe-notes")
    panel.get_by_role("button", name="Edit 2").click()
    teacher.keyboard.press("Control+A")
    teacher.keyboard.type("other words")
    panel.get_by_role("button", name="Save").click()
    pupil.wait_for_function(f"{BOARD}.notes.some((note) => note.text === 'other words')", timeout=15_000)
    panel.wait_for(state="hidden")
    teacher.keyboard.press("n")
    panel.get_by_role("button", name="Delete 1").click()
    pupil.wait_for_function(f"{BOARD}.notes.length === 1", timeout=15_000)
    panel.get_by_role("button", name="Undo delete").click()
    pupil.wait_for_function(f"{BOARD}.notes.length === 2", timeout=15_000)
    panel.get_by_role("button", name="Show on the board").click()
    pupil.wait_for_function("document.querySelectorAll('.qe-pin:not(span)').length === 0", timeout=15_000)
    panel.get_by_role("button", name="Show on the board").click()
    teacher.keyboard.press("Escape")
    assert panel.is_hidden()
    teacher.keyboard.press("?")
    keys = part(teacher, ".qe-sheet:not(.qe-notes)").inner_text()
    assert all(f"\n{key}\n" in f"\n{keys}\n" for key in ("M", "N", "U", "B", "J"))

    found = teacher.evaluate(f"fetch('qe/s/{sid}/export.html').then((answer) => answer.text())")
    replay = teacher.context.new_page()
    file = tmp_path / "replay.html"
    file.write_text(found, "utf-8")
    replay.goto(file.as_uri())
    replay.wait_for_selector(".qe-note-line .qe-pin")
    assert replay.locator(".qe-note-line .qe-pin").all_inner_texts() == ["1", "2"]
    replay.keyboard.press("n")
    listed = replay.locator(".qe-notes").inner_text()
    assert NASTY in listed and "other words" in listed and "Edit" not in listed
    assert replay.locator(".qe img").count() == 0
    replay.close()


def test_a_note_is_written_by_mouse(pages: tuple[Any, Any, str]) -> None:
    teacher, _, _ = pages
    at = teacher.evaluate(f"({{x: {BOARD}.axis.x(120) + 1, y: 30}})")
    teacher.locator("#qe-replay-board .qe-lanes canvas").dblclick(position=at)
    teacher.keyboard.type("seen")
    part(teacher, ".qe-notes").get_by_role("button", name="Save").click()
    teacher.wait_for_function(f"{BOARD}.notes.length === 1")
    assert teacher.evaluate(f"[{BOARD}.notes[0].windows, {BOARD}.notes[0].row === {BOARD}.row]") == [[120], True]
    part(teacher, ".qe-note-line .qe-pin").click()
    assert part(teacher, ".qe-notes").is_visible()


def test_lessons_are_followed_by_a_class(browser: Any, server: ServerProcess) -> None:
    contexts = [browser.new_context(viewport={"width": 1280, "height": 720}) for _ in range(2)]
    teacher, pupil = (context.new_page() for context in contexts)
    ready = "window.qeLessons && qeLessons.at && qeLessons.board.room"
    try:
        teacher.goto(server.url)
        teacher.get_by_role("tab", name="Lessons").click()
        teacher.wait_for_function("window.qeLessons && qeLessons.at", timeout=60_000)
        teacher.locator("[data-name=class]").click()
        teacher.wait_for_function(ready, timeout=20_000)
        code = teacher.evaluate("qeLessons.class.code")
        pupil.goto(f"{server.url}?class={code}")
        pupil.wait_for_function(ready, timeout=60_000)
        teacher.locator("#qe-lesson-board").get_by_role("button", name="Present", exact=True).click()
        pupil.wait_for_function("qeLessons.board.followed.on", timeout=15_000)
        for lesson, step in ((1, 0), (2, 1), (8, 0)):
            teacher.evaluate("(place) => qeLessons.go(...place)", [lesson, step])
            place = "[String(qeLessons.at), qeLessons.board.index, qeLessons.board.row]"
            teacher.wait_for_function(f"String(qeLessons.at) === '{lesson},{step}'")
            teacher.evaluate("qeLessons.board.pause()")
            here = teacher.evaluate(place)
            pupil.wait_for_function("(here) => String(" + place + ") === String(here)", arg=here, timeout=15_000)
        assert pupil.evaluate("qeLessons.board.followed.paused") is False
        pupil.evaluate("qeLessons.next()")
        pupil.wait_for_function("qeLessons.board.followed.paused")
    finally:
        for context in contexts:
            context.close()
