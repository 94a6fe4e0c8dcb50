"""Classes: codes, first answers, tallies, limits; and their routes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from hypothesis import given
from hypothesis import strategies as st

from app import classroom
from app.api import include_routes
from app.classroom import (
    CODE_LETTERS,
    KEPT_SECONDS,
    LETTERS,
    MOST_CLASSES,
    Classroom,
    ClassroomError,
    NoClassError,
    questions,
)
from app.context import create_context
from app.settings import Settings
from tests.app.fake_engine import FakeEngine, FakeLoader, FakeOptions

QUESTION = "metadata.guess"


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_every_lesson_question_can_be_asked() -> None:
    assert questions()[QUESTION] == (3,)
    assert questions()["predict.guess"] == (3, 3, 3, 3)
    assert len(questions()) >= 11


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 2)), max_size=40))
def test_a_tally_counts_first_answers(given_answers: list[tuple[int, int]]) -> None:
    classes = Classroom()
    code = classes.begin()
    first: dict[int, int] = {}
    for device, pick in given_answers:
        classes.answer(code, QUESTION, str(device), (pick,))
        first.setdefault(device, pick)
    answered, counts = classes.tally(code, QUESTION)
    assert answered == len(first)
    assert counts == [[list(first.values()).count(pick) for pick in range(3)]]


def test_classes_know_nothing_of_each_other() -> None:
    classes = Classroom()
    one, other = classes.begin(), classes.begin()
    classes.answer(one, QUESTION, "a", (0,))
    assert classes.tally(other, QUESTION) == (0, [[0, 0, 0]])
    assert one != other and len(one) == CODE_LETTERS and set(one) <= set(LETTERS)


@pytest.mark.parametrize(
    ("question", "picks"), [("no.such", (0,)), (QUESTION, (3,)), (QUESTION, (-1,)), (QUESTION, (0, 0)), (QUESTION, ())]
)
def test_what_is_no_answer_is_refused(question: str, picks: tuple[int, ...]) -> None:
    classes = Classroom()
    code = classes.begin()
    with pytest.raises(ClassroomError):
        classes.answer(code, question, "a", picks)
    assert classes.tally(code, QUESTION)[0] == 0


def test_a_class_ends_by_itself() -> None:
    clock = Clock()
    classes = Classroom(clock)
    code = classes.begin()
    clock.now = KEPT_SECONDS - 1
    classes.tally(code, QUESTION)
    clock.now = 2 * KEPT_SECONDS - 2
    classes.tally(code, QUESTION)
    clock.now = 3 * KEPT_SECONDS
    with pytest.raises(NoClassError):
        classes.tally(code, QUESTION)


def test_too_many_classes_forget_the_oldest() -> None:
    clock = Clock()
    classes = Classroom(clock)
    codes = []
    for number in range(MOST_CLASSES + 1):
        clock.now = float(number)
        codes.append(classes.begin())
    with pytest.raises(NoClassError):
        classes.tally(codes[0], QUESTION)
    assert classes.tally(codes[1], QUESTION)[0] == 0


def test_a_full_class_takes_no_new_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(classroom, "MOST_DEVICES", 2)
    classes = Classroom()
    code = classes.begin()
    for device in ("a", "b"):
        classes.answer(code, QUESTION, device, (0,))
    with pytest.raises(ClassroomError, match="no more can join"):
        classes.answer(code, QUESTION, "c", (0,))
    classes.answer(code, "predict.guess", "a", (0, 1, 2, 0))
    assert classes.tally(code, "predict.guess") == (1, [[1, 0, 0], [0, 1, 0], [0, 0, 1], [1, 0, 0]])


@pytest.fixture
def client(tmp_path: Path) -> Iterator[TestClient]:
    made = create_context(
        Settings(data_dir=tmp_path), engine=FakeEngine(smallest_share=0.1), loader=FakeLoader(), options=FakeOptions
    )
    app = FastAPI()
    include_routes(app, made)
    with TestClient(app) as client:
        yield client
    made.close()


def test_the_routes(client: TestClient) -> None:
    code = client.post("/qe/class").json()["code"]
    body: dict[str, Any] = {"question": QUESTION, "device": "d", "picks": [1]}
    assert client.post(f"/qe/class/{code}", json=body).json() == {"taken": True}
    assert client.get(f"/qe/class/{code}?question={QUESTION}").json() == {"answered": 1, "counts": [[0, 1, 0]]}
    assert client.get(f"/qe/class/zzzzz?question={QUESTION}").status_code == 404
    assert client.post("/qe/class/zzzzz", json=body).status_code == 404
    for wrong in (
        {"name": "Ada"},
        {"device": ""},
        {"device": "d" * 41},
        {"picks": [True]},
        {"picks": "1"},
        {"question": 3},
    ):
        assert client.post(f"/qe/class/{code}", json=body | wrong).status_code == 422, wrong
    assert client.get(f"/qe/class/{code}?question={QUESTION}").json()["answered"] == 1
