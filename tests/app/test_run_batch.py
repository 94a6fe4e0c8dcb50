"""Waiting runs that share the device, with the real engine on a tiny model: the queue's rules hold, nobody disturbs."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from app.events import Bus
from app.run_queue import expected_wait
from app.runs import RunManager, RunRequest
from app.sessions import Sessions
from app.settings import Settings
from engine.config import QEvictConfig
from engine.trace import EndEvent, ErrorEvent, RunMeta, StepEvent, TraceEvent, decode
from engine.trace_board import Board
from tests.app.test_runs import wait_for
from tests.app.tiny_loader import load_tiny

CONFIG = QEvictConfig(kv_budget=0.5, sink_tokens=3, window_size=4, local_tokens=8)
PROMPTS = [
    "A baker counts the loaves of every day and writes them down.",
    "Rain fell on the harbour all night long; in the morning the ropes were stiff.",
    "One, two, three, and a long row of numbers after that.",
    "The old map showed a river where there was none, and a road to the sea.",
]


class Gated:
    """Loads when it is told to, so that several runs wait meanwhile."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.loads: list[str] = []

    def __call__(self, name: str, **given: Any) -> Any:
        self.loads.append(name)
        assert self.gate.wait(30)
        return load_tiny(name, **given)


class House:
    """A manager with its store and bus over the real engine."""

    def __init__(self, folder: Path, **limits: Any) -> None:
        self.settings = Settings(data_dir=folder, **limits)
        self.sessions = Sessions(self.settings.database)
        self.bus = Bus(self.settings.ring_size, self.sessions.events, self.sessions.catch_up)
        self.loader = Gated()
        self.runs = RunManager(self.settings, self.sessions, self.bus, loader=self.loader)

    def start(self, prompt: str, tokens: int = 40, **more: Any) -> str:
        options = {"max_new_tokens": tokens, "reference": False, **more.pop("options", {})}
        return self.runs.start(RunRequest(prompt, **{"config": CONFIG, "options": options, **more}))

    def events(self, session: str) -> list[TraceEvent]:
        assert self.runs.wait(session, 60)
        self.sessions.flush()
        return [decode(row) for row in self.sessions.events(session)]

    def text(self, session: str) -> str:
        return "".join(
            piece for event in self.events(session) if isinstance(event, StepEvent) for piece in event.pieces
        )

    def end(self, session: str) -> EndEvent:
        end = self.events(session)[-1]
        assert isinstance(end, EndEvent)
        return end

    def close(self) -> None:
        self.loader.gate.set()
        self.runs.close()
        self.sessions.close()


def check_whole(events: list[TraceEvent]) -> None:
    assert [event.seq for event in events] == list(range(len(events)))
    meta, end = events[0], events[-1]
    assert isinstance(meta, RunMeta) and isinstance(end, EndEvent)
    board = Board(meta)
    for event in events:
        board.forward(event)
    assert board.seq_len == meta.prompt_tokens + end.summary["num_tokens"]


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    built = House(tmp_path, batch=4)
    yield built
    built.close()


@pytest.fixture(scope="module")
def singles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What each prompt gives when runs take turns."""
    house = House(tmp_path_factory.mktemp("singles"))
    house.loader.gate.set()
    try:
        sessions = {prompt: house.start(prompt) for prompt in PROMPTS}
        assert all(house.end(session).summary["timing"]["batch_rows"] == 1 for session in sessions.values())
        return {prompt: house.text(session) for prompt, session in sessions.items()}
    finally:
        house.close()


def test_runs_that_wait_together_are_decoded_together(house: House, singles: dict[str, str]) -> None:
    sessions = {prompt: house.start(prompt, user=str(number)) for number, prompt in enumerate(PROMPTS)}
    wait_for(lambda: len(house.runs.waiting) == 3)
    house.loader.gate.set()
    for prompt, session in sessions.items():
        assert house.text(session) == singles[prompt]
        check_whole(house.events(session))
        end = house.end(session)
        assert end.why == "length" and end.summary["timing"]["batch_rows"] == 4
        assert house.sessions.get(session).state == "done"
    assert house.loader.loads == ["embedded"] and house.runs.active is None and house.runs.running == []


def test_one_that_is_stopped_leaves_the_others_as_they_were(house: House, singles: dict[str, str]) -> None:
    kept = house.start(PROMPTS[0])
    stopped = house.start(PROMPTS[1], tokens=3000, config=CONFIG.replace(kv_budget=1.0))
    gone = house.start(PROMPTS[2])
    house.runs.stop(gone)
    house.loader.gate.set()
    assert house.text(kept) == singles[PROMPTS[0]]
    assert house.runs.status(stopped).state == "running"
    late = house.start(PROMPTS[3])
    assert house.text(late) == singles[PROMPTS[3]]
    assert house.end(late).summary["timing"]["batch_rows"] == 2
    house.runs.stop(stopped)
    end = house.end(stopped)
    assert end.why == "stop" and 0 < end.summary["num_tokens"] < 3000
    check_whole(house.events(stopped))
    assert house.end(gone).why == "stop" and house.end(gone).summary == {}


def test_each_keeps_its_settings_its_seed_and_its_system(house: House) -> None:
    warm = {"temperature": 1.0, "ignore_eos": True}
    asked: list[dict[str, Any]] = [
        {"options": warm | {"seed": 1}},
        {"options": warm | {"seed": 2}},
        {"config": CONFIG.replace(bits=4, kv_budget=0.6), "policy": "qevict-int4"},
        {"system": "snapkv", "policy": "snapkv"},
    ]
    first = [house.start(PROMPTS[0], **more) for more in asked]
    wait_for(lambda: len(house.runs.waiting) == 3)
    house.loader.gate.set()
    texts = [house.text(session) for session in first]
    assert all(house.end(session).summary["timing"]["batch_rows"] == 4 for session in first)
    again = []
    for more in asked:  # one after the other, so that nothing is shared
        again.append(house.text(house.start(PROMPTS[0], **more)))
    assert texts == again and texts[0] != texts[1]
    metas = [house.events(session)[0] for session in first]
    assert [meta.policy for meta in metas] == ["qevict", "qevict", "qevict-int4", "snapkv"]  # type: ignore[union-attr]


def test_one_that_can_not_begin_ends_alone(house: House, singles: dict[str, str]) -> None:
    good = house.start(PROMPTS[0])
    bad = house.start(PROMPTS[1], config=CONFIG.replace(kv_budget=0.01))
    raised = house.start(PROMPTS[2], config=CONFIG.replace(kv_budget=0.01), raise_budget=True)
    house.loader.gate.set()
    assert house.end(bad).why == "error" and house.end(bad).summary["fault"] == "input"
    assert any(isinstance(event, ErrorEvent) for event in house.events(bad))
    assert house.text(good) == singles[PROMPTS[0]]
    meta = house.events(raised)[0]
    assert isinstance(meta, RunMeta) and any("raised" in notice for notice in meta.notices)


def test_another_model_is_waited_for_and_nobody_goes_before_it(house: House) -> None:
    began: list[str] = []
    begun = house.runs._begun

    def note(run: Any) -> None:
        began.append(run.session)
        begun(run)

    house.runs._begun = note  # type: ignore[method-assign]
    order = [
        house.start(PROMPTS[0], user="a"),
        house.start(PROMPTS[1], user="b"),
        house.start(PROMPTS[2], user="c", model="other"),
        house.start(PROMPTS[3], user="d"),
    ]
    wait_for(lambda: len(house.runs.waiting) == 3)
    assert [house.runs.status(session).ahead for session in order] == [0, 1, 2, 3]
    house.loader.gate.set()
    rows = [house.end(session).summary["timing"]["batch_rows"] for session in order]
    assert rows == [2, 2, 1, 1]
    assert began == order


def test_users_take_turns_in_a_batch_too(tmp_path: Path) -> None:
    house = House(tmp_path, batch=2)
    try:
        mine = [house.start(PROMPTS[0], user="a") for _ in range(3)]
        yours = house.start(PROMPTS[1], user="b")
        wait_for(lambda: len(house.runs.waiting) == 3)
        assert house.runs.waiting == [yours, *mine[1:]]
        house.loader.gate.set()
        assert all(house.end(session).why == "length" for session in [*mine, yours])
        assert house.end(yours).summary["timing"]["batch_rows"] == 2
    finally:
        house.close()


def test_memory_bounds_who_may_join(tmp_path: Path, singles: dict[str, str]) -> None:
    house = House(tmp_path, batch=4, batch_mb=1)
    try:
        long = "A long row of words that go on and on. " * 12
        sessions = [house.start(long, config=CONFIG, tokens=12) for _ in range(2)]
        small = house.start(PROMPTS[0])
        wait_for(lambda: len(house.runs.waiting) == 2)
        house.loader.gate.set()
        rows = [house.end(session).summary["timing"]["batch_rows"] for session in sessions]
        assert rows == [1, 2]  # two long prompts are more than a megabyte; a short one fits beside the second
        assert house.text(small) == singles[PROMPTS[0]]
    finally:
        house.close()


def test_closing_ends_all_of_a_batch_as_interrupted(house: House) -> None:
    whole = CONFIG.replace(kv_budget=1.0)
    sessions = [house.start(prompt, tokens=3000, config=whole) for prompt in PROMPTS[:2]]
    waiting = house.start(PROMPTS[2], model="other")
    house.loader.gate.set()
    wait_for(lambda: len(house.runs.running) == 2, 30)
    house.runs.close()
    for session in [*sessions, waiting]:
        assert house.sessions.get(session).state == "interrupted"


A, B = ("a",), ("b",)


@pytest.mark.parametrize(
    ("active", "waiting", "slots", "wait"),
    [
        ([], [(A, 5.0)], 1, 0.0),
        ([(A, 3.0)], [(A, 5.0)], 1, 3.0),
        ([(A, 3.0)], [(A, 5.0), (A, 5.0)], 1, 8.0),
        ([(A, 3.0)], [(A, 5.0)], 2, 0.0),
        ([(A, 3.0), (A, 7.0)], [(A, 5.0)], 2, 3.0),
        ([(A, 3.0), (A, 7.0)], [(B, 5.0)], 2, 7.0),
        ([(A, 3.0), (A, 7.0)], [(B, 5.0), (A, 1.0)], 2, 12.0),
        ([(A, None)], [(A, 5.0)], 2, None),
        ([(A, 3.0)], [(A, None), (A, 5.0)], 1, None),
        ([(A, 3.0)], [(A, None)], 1, 3.0),
    ],
)
def test_the_wait_that_is_expected(active: Any, waiting: Any, slots: int, wait: float | None) -> None:
    assert expected_wait(active, waiting, slots) == wait
