"""The run manager over a made-up engine: queue, stop, errors, storing."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from app.events import Bus
from app.run_request import OPTIONS
from app.runs import QueueFullError, RunManager, RunRequest
from app.sessions import Sessions
from app.settings import Settings
from engine.config import QEvictConfig
from engine.errors import BudgetError, ConfigError, ModelNotFoundError, OutOfMemoryError, PromptError
from engine.trace import EndEvent, ErrorEvent, RunMeta, StepEvent, TraceEvent, decode
from engine.trace_board import Board
from tests.app.fake_engine import FakeEngine, FakeLoader, FakeOptions


class House:
    """A manager with its store and bus; everything made up but them."""

    def __init__(self, folder: Path, engine: FakeEngine, loader: FakeLoader, **limits: Any) -> None:
        self.settings = Settings(data_dir=folder, **limits)
        self.sessions = Sessions(self.settings.database, wait_seconds=0.3)
        self.bus = Bus(self.settings.ring_size, self.sessions.events, self.sessions.catch_up)
        self.engine = engine
        self.loader = loader
        self.runs = RunManager(
            self.settings, self.sessions, self.bus, engine=engine, loader=loader, options=FakeOptions
        )

    def trace(self, session: str) -> list[TraceEvent]:
        return [decode(row) for row in self.sessions.events(session)]

    def close(self) -> None:
        if self.engine.gate is not None:
            self.engine.gate.set()
        if self.loader.gate is not None:
            self.loader.gate.set()
        self.runs.close()
        self.sessions.close()


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    built = House(tmp_path, FakeEngine(), FakeLoader())
    yield built
    built.close()


def wait_for(condition: Any, seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            pytest.fail("what was waited for did not happen")
        time.sleep(0.005)


def test_a_run_is_stored_whole_and_in_order(house: House) -> None:
    session = house.runs.start(RunRequest("tell me a story", options={"max_new_tokens": 64}))
    assert house.runs.wait(session, 20)
    events = house.trace(session)
    assert [event.seq for event in events] == list(range(len(events)))
    assert isinstance(events[0], RunMeta) and events[0].session == session
    end = events[-1]
    assert isinstance(end, EndEvent) and end.why == "length"
    tokens = [number for event in events if isinstance(event, StepEvent) for number in event.ids]
    assert tokens == list(range(64))
    board = Board(events[0])
    for event in events:
        board.forward(event)
    assert board.seq_len == 85 + 64
    info = house.sessions.get(session)
    assert (info.state, info.num_events, info.model) == ("done", len(events), "embedded")
    assert info.settings["prompt"] == "tell me a story"
    assert info.summary["num_tokens"] == 64
    assert info.versions == {"engine": "test"}


def test_a_token_is_never_sent_after_the_routing_event_that_follows_it(house: House) -> None:
    session = house.runs.start(RunRequest("x"))
    assert house.runs.wait(session, 20)
    length = 0
    for event in house.trace(session):
        reached = getattr(event, "seq_len", length)
        assert reached >= length
        length = reached


@pytest.mark.parametrize(
    ("request_", "error"),
    [
        (RunRequest(""), PromptError),
        (RunRequest(" \n\t"), PromptError),
        (RunRequest("x" * 101), PromptError),
        (RunRequest("\ud800"), PromptError),
        (RunRequest("x", model=""), ModelNotFoundError),
        (RunRequest("x", model="other/model"), ModelNotFoundError),
        (RunRequest("x", options={"max_new_tokens": 999}), ConfigError),
        (RunRequest("x", options={"max_new_tokens": True}), ConfigError),
        (RunRequest("x", options={"temperature": float("nan")}), ConfigError),
        (RunRequest("x", options={"top_k": 3}), ConfigError),
        (RunRequest("x", watched_row=-1), ConfigError),
    ],
)
def test_what_cannot_work_is_refused_before_anything_happens(
    tmp_path: Path, request_: RunRequest, error: type[Exception]
) -> None:
    limits: dict[str, Any] = {"max_prompt_chars": 100, "max_new_tokens": 128, "allowed_models": ("embedded",)}
    house = House(tmp_path, FakeEngine(), FakeLoader(), **limits)
    with pytest.raises(error):
        house.runs.start(request_)
    assert house.sessions.list() == []
    assert house.engine.started == []
    house.close()


def test_stop_before_the_first_token_while_the_model_loads(tmp_path: Path) -> None:
    house = House(tmp_path, FakeEngine(), FakeLoader(gate=threading.Event()))
    session = house.runs.start(RunRequest("x"))
    wait_for(lambda: house.runs.status(session).state == "loading")
    assert house.runs.stop(session)
    assert house.loader.gate is not None
    house.loader.gate.set()
    assert house.runs.wait(session, 10)
    assert house.engine.started == []
    assert house.sessions.get(session).state == "stopped"
    assert [type(event) for event in house.trace(session)] == [EndEvent]
    house.close()


@pytest.mark.parametrize("deaf", [False, True])
def test_stop_acts_between_two_tokens_and_keeps_what_there_is(
    tmp_path: Path, deaf: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.run_state.STOP_SECONDS", 0.1)
    house = House(tmp_path, FakeEngine(delay=0.005, deaf=deaf), FakeLoader())
    session = house.runs.start(RunRequest("x", options={"max_new_tokens": 4000}))
    wait_for(lambda: len([e for e in house.trace(session) if isinstance(e, StepEvent)]) > 3)
    assert house.runs.stop(session)
    assert house.runs.wait(session, 10)
    assert house.engine.closed == 1
    events = house.trace(session)
    end = events[-1]
    assert isinstance(end, EndEvent) and end.why == "stop"
    tokens = sum(len(event.ids) for event in events if isinstance(event, StepEvent))
    assert end.summary["num_tokens"] == tokens
    if deaf:
        assert end.summary["kv"]["peak_persistent_bytes"] == 1860
    else:
        assert end.summary["engine"]
    assert house.sessions.get(session).state == "stopped"
    assert not house.runs.stop(session)
    house.close()


def test_runs_queue_first_come_first_served_one_at_a_time(tmp_path: Path) -> None:
    house = House(tmp_path, FakeEngine(gate=threading.Event()), FakeLoader())
    sessions = [house.runs.start(RunRequest(f"p{number}", options={"max_new_tokens": 8})) for number in range(4)]
    wait_for(lambda: house.runs.active == sessions[0])
    assert house.runs.waiting == sessions[1:]
    assert [house.runs.status(session).ahead for session in sessions] == [0, 1, 2, 3]
    assert house.sessions.get(sessions[2]).state == "queued"
    assert house.runs.stop(sessions[2])
    assert house.runs.wait(sessions[2], 10)
    assert house.sessions.get(sessions[2]).state == "stopped"
    assert house.runs.status(sessions[3]).ahead == 2
    assert house.engine.gate is not None
    house.engine.gate.set()
    for session in sessions:
        assert house.runs.wait(session, 20)
    assert house.engine.started == ["p0", "p1", "p3"]
    assert house.engine.most_running == 1
    assert house.loader.loads == ["embedded"]
    house.close()


def test_a_full_queue_says_so(tmp_path: Path) -> None:
    house = House(tmp_path, FakeEngine(gate=threading.Event()), FakeLoader(), queue_length=1)
    house.runs.start(RunRequest("a", options={"max_new_tokens": 8}))
    house.runs.start(RunRequest("b", options={"max_new_tokens": 8}))
    with pytest.raises(QueueFullError, match="waiting"):
        house.runs.start(RunRequest("c"))
    house.close()


def test_a_budget_too_small_is_refused_or_raised_and_said(tmp_path: Path) -> None:
    house = House(tmp_path, FakeEngine(smallest_share=0.34), FakeLoader())
    refused = house.runs.start(RunRequest("x", config=QEvictConfig(kv_budget=0.05)))
    raised = house.runs.start(RunRequest("x", config=QEvictConfig(kv_budget=0.05), raise_budget=True))
    assert house.runs.wait(refused, 10) and house.runs.wait(raised, 10)
    error, end = house.trace(refused)
    assert isinstance(error, ErrorEvent) and "kv_budget must be at least 0.34" in error.message
    assert isinstance(end, EndEvent) and end.why == "error"
    meta = house.trace(raised)[0]
    assert isinstance(meta, RunMeta) and meta.kv_budget == 0.34
    assert len(meta.notices) == 1 and "5.0%" in meta.notices[0] and "34.00%" in meta.notices[0]
    house.close()


def test_a_budget_that_can_never_hold_is_an_error(tmp_path: Path) -> None:
    house = House(tmp_path, FakeEngine(smallest_share=1.5), FakeLoader())
    session = house.runs.start(RunRequest("x", raise_budget=True))
    assert house.runs.wait(session, 10)
    assert house.sessions.get(session).state == "error"
    house.close()


@pytest.mark.parametrize(
    ("error", "shown"),
    [
        (RuntimeError("secret path /etc/x"), None),
        (MemoryError(), "out of memory"),
        (type("OutOfMemoryError", (RuntimeError,), {})("CUDA"), "out of memory"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), "out of memory"),
        (OutOfMemoryError("the device ran out: do this."), "the device ran out: do this."),
        (BudgetError("too small.", smallest_bytes=1, smallest_share=0.5), "too small."),
    ],
)
def test_an_error_is_one_sentence_and_the_next_run_works(tmp_path: Path, error: Exception, shown: str | None) -> None:
    engine = FakeEngine(fail_after=20, error=error)
    house = House(tmp_path, engine, FakeLoader())
    session = house.runs.start(RunRequest("x"))
    assert house.runs.wait(session, 10)
    *before, message, end = house.trace(session)
    assert isinstance(message, ErrorEvent) and isinstance(end, EndEvent)
    assert end.why == "error" and end.summary["num_tokens"] == 20
    assert sum(len(event.ids) for event in before if isinstance(event, StepEvent)) == 20
    if shown is None:
        assert "secret" not in message.message and message.run_id in message.message
    else:
        assert shown in message.message
    engine.fail_after = None
    again = house.runs.start(RunRequest("x"))
    assert house.runs.wait(again, 10)
    assert house.sessions.get(again).state == "done"
    house.close()


def test_a_model_that_cannot_be_loaded(tmp_path: Path) -> None:
    house = House(tmp_path, FakeEngine(), FakeLoader(error=ModelNotFoundError("no such model.")))
    session = house.runs.start(RunRequest("x", model="nobody/nothing"))
    assert house.runs.wait(session, 10)
    message = house.trace(session)[0]
    assert isinstance(message, ErrorEvent) and message.message == "no such model."
    house.close()


def test_a_run_is_stopped_at_the_time_limit(tmp_path: Path) -> None:
    house = House(tmp_path, FakeEngine(delay=0.01), FakeLoader(), max_run_seconds=1)
    session = house.runs.start(RunRequest("x", options={"max_new_tokens": 4000}))
    assert house.runs.wait(session, 20)
    *events, end = house.trace(session)
    (message,) = [event for event in events if isinstance(event, ErrorEvent)]
    assert "1 seconds" in message.message
    assert isinstance(end, EndEvent) and end.why == "stop"
    house.close()


def test_the_watched_row_can_be_changed_while_running(tmp_path: Path) -> None:
    house = House(tmp_path, FakeEngine(delay=0.002), FakeLoader())
    session = house.runs.start(RunRequest("x", options={"max_new_tokens": 800}, watched_row=1))
    wait_for(lambda: 1 in house.engine.rows_watched)
    assert house.runs.watch(session, 3)
    wait_for(lambda: 3 in house.engine.rows_watched)
    house.runs.stop(session)
    assert house.runs.wait(session, 10)
    assert not house.runs.watch(session, 0)
    house.close()


def test_few_models_stay_loaded(tmp_path: Path) -> None:
    house = House(tmp_path, FakeEngine(), FakeLoader(), max_loaded_models=2)
    for model in ("a", "b", "a", "c", "a", "b"):
        session = house.runs.start(RunRequest("x", model=model, options={"max_new_tokens": 1}))
        assert house.runs.wait(session, 10)
    assert house.loader.loads == ["a", "b", "c", "b"]
    house.close()


def test_closing_ends_everything_as_interrupted(tmp_path: Path) -> None:
    house = House(tmp_path, FakeEngine(delay=0.005), FakeLoader())
    first = house.runs.start(RunRequest("x", options={"max_new_tokens": 4000}))
    second = house.runs.start(RunRequest("y"))
    wait_for(lambda: house.engine.running == 1)
    house.runs.close()
    assert [house.sessions.get(session).state for session in (first, second)] == ["interrupted", "interrupted"]
    with pytest.raises(QueueFullError):
        house.runs.start(RunRequest("z"))
    house.close()


def test_a_run_goes_on_and_says_so_where_nothing_can_be_stored(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    house = House(blocked / "inside", FakeEngine(), FakeLoader())
    session = house.runs.start(RunRequest("x"))
    assert house.runs.wait(session, 20)
    channel = house.bus.channel(session)
    assert channel is not None
    events = [decode(body) for body in channel.read(0, 10_000)[1]]
    assert isinstance(events[0], RunMeta) and "can't be stored" in events[0].notices[0]
    assert isinstance(events[-1], EndEvent) and events[-1].why == "length"
    house.close()


def test_the_options_are_those_of_the_engine() -> None:
    generate = pytest.importorskip("engine.generate")
    assert set(OPTIONS) == {field.name for field in __import__("dataclasses").fields(generate.RunOptions)}
