"""Lessons as data: the eleven are there and whole, and a file that is not right is refused with its key."""

from __future__ import annotations

from pathlib import Path

import pytest

from presets.lessons import (
    DONE,
    PARTS,
    LessonError,
    TraceShape,
    check_place,
    load_lesson,
    load_lessons,
)

STEP = '[[steps]]\nname = "one"\ntrace = "first"\n'
HEAD = 'order = 1\ndocument = "d"\npreset = "p"\n'


def _lesson(folder: Path, text: str) -> Path:
    path = folder / "made_up.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_eleven_lessons_in_order() -> None:
    lessons = load_lessons()
    assert [lesson.order for lesson in lessons] == list(range(1, 12))
    assert all(2 <= len(lesson.steps) <= 6 for lesson in lessons)


def test_every_lesson_asks_something() -> None:
    asking = [lesson.id for lesson in load_lessons() if any(step.question for step in lesson.steps)]
    assert asking == [lesson.id for lesson in load_lessons()]


def test_a_lesson_holds_no_words() -> None:
    for lesson in load_lessons():
        body = lesson.path.read_text(encoding="utf-8")
        assert body.isascii(), lesson.id
        assert not [line for line in body.splitlines() if line.count(" ") > 30 and "[" not in line], lesson.id


def test_a_small_lesson_is_read(tmp_path: Path) -> None:
    lesson = load_lesson(_lesson(tmp_path, HEAD + STEP + 'event = 3\nrow = 2\nwindows = [4]\nparts = ["memory"]\n'))
    step = lesson.steps[0]
    assert (lesson.id, step.event, step.row, step.windows, step.parts) == ("made_up", 3, 2, (4,), ("memory",))
    assert step.done == "seen" and step.done in DONE and step.parts[0] in PARTS


@pytest.mark.parametrize(
    ("text", "named"),
    [
        (HEAD + 'colour = "red"\n' + STEP, "colour is an unknown key"),
        (HEAD + STEP + 'colour = "red"\n', r"steps\[0\].colour is an unknown key"),
        (HEAD + STEP + "[steps.table]\nrows = []\ncolumns = []\nwidth = 3\n", "table.width is an unknown key"),
        (HEAD + STEP + '[steps.question]\nkind = "riddle"\n', "question.kind must be one of"),
        (HEAD + STEP + '[steps.question]\nkind = "predict"\nanswer = "full"\n', "question.answer is an unknown key"),
        (HEAD + STEP + '[steps.question]\nkind = "text"\nchoices = ["a"]\nanswer = "b"\n', "one of the choices"),
        (HEAD + STEP + '[steps.question]\nkind = "least"\nchoices = ["a"]\n', "question.fact must be there"),
        (HEAD + STEP + 'at = "nowhere"\n', "at must be one of"),
        (HEAD + STEP + 'at = "start"\nrow = 3\n', "at must be left out"),
        (HEAD + STEP + 'parts = ["roof"]\n', "parts must be of"),
        (HEAD + STEP + 'done = "answered"\n', "without a question"),
        (HEAD + STEP + "event = true\n", "event must be a whole number"),
        (HEAD + STEP + 'windows = ["4"]\n', "windows must be a list of whole numbers"),
        (HEAD + STEP + STEP, "different names"),
        (HEAD, "at least one step"),
        ('document = "d"\npreset = "p"\n' + STEP, "order must be a whole number"),
        (HEAD + '[figures]\nx = { value = 1.0, unit = "yards" }\n' + STEP, "figures.x.unit must be one of"),
        ("order = ", "must be TOML"),
    ],
)
def test_what_is_refused(tmp_path: Path, text: str, named: str) -> None:
    with pytest.raises(LessonError, match=named):
        load_lesson(_lesson(tmp_path, text))


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LessonError, match="readable"):
        load_lesson(tmp_path / "none.toml")


@pytest.mark.parametrize(
    ("event", "row", "windows", "key"),
    [(26, 0, (), "event"), (-1, 0, (), "event"), (0, 30, (), "row"), (0, 0, (5, 163), "windows")],
)
def test_a_place_beyond_the_trace_is_refused(
    tmp_path: Path, event: int, row: int, windows: tuple[int, ...], key: str
) -> None:
    lesson = load_lesson(_lesson(tmp_path, HEAD + STEP))
    shape = TraceShape(last_event=25, rows=30, windows=163)
    check_place(lesson, lesson.steps[0], 25, 29, (162,), shape)
    with pytest.raises(LessonError, match=f"steps.one.{key} must be in"):
        check_place(lesson, lesson.steps[0], event, row, windows, shape)
