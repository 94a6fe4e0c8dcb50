"""A GPU that is lent by the second: a made-up `spaces` that pickles what crosses and runs it in another process."""

from __future__ import annotations

import itertools
import multiprocessing
import pickle
import sys
import types
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import pytest

from app import zero_gpu
from app.events import Bus
from app.runs import RunManager, RunRequest
from app.sessions import Sessions
from app.settings import Settings
from app.zero_gpu import VARIABLE, GpuJob, LentGpuError, Trouble, ZeroGpu
from engine.config import QEvictConfig
from engine.errors import BudgetError, EngineError, PromptError
from engine.trace import EndEvent, ErrorEvent, RunMeta, StepEvent, TraceEvent, decode
from engine.trace_board import Board
from tests.app.test_runs import wait_for
from tests.app.tiny_loader import load_tiny

CONFIG = QEvictConfig(kv_budget=0.5, sink_tokens=3, window_size=4, local_tokens=8)
visitor: ContextVar[str] = ContextVar("visitor", default="nobody")


class GradioError(Exception):
    """As the platform's package raises it."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


GradioError.__module__ = "gradio.exceptions"


class FakeSpaces(types.ModuleType):
    """Decorates as the platform's package does: a forked process, pickled values, a duration by the arguments."""

    def __init__(self) -> None:
        super().__init__("spaces")
        self.lent: list[tuple[str, int, GpuJob]] = []
        self.decorated: list[str] = []
        self.refusal = ""

    def GPU(self, *, duration: Callable[..., int]) -> Callable[..., Any]:
        def decorate(function: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
            self.decorated.append(function.__name__)

            def lent(job: GpuJob) -> Iterator[Any]:
                self.lent.append((visitor.get(), duration(job), job))
                if self.refusal:
                    raise GradioError(self.refusal)
                yield from _forked(function, pickle.dumps(job))

            return lent

        return decorate


def _forked(function: Callable[..., Iterator[Any]], job: bytes) -> Iterator[Any]:
    fork = multiprocessing.get_context("fork")
    reader, writer = fork.Pipe(duplex=False)

    def work() -> None:
        for event in function(pickle.loads(job)):
            writer.send_bytes(pickle.dumps(event))
        writer.send_bytes(b"")

    process = fork.Process(target=work, daemon=True)
    process.start()
    try:
        while True:
            data = reader.recv_bytes()
            if not data:
                return
            yield pickle.loads(data)
    finally:
        process.join(30)
        assert process.exitcode == 0


class House:
    """A manager on such hardware."""

    def __init__(self, folder: Path) -> None:
        self.settings = Settings(data_dir=folder, gpu_seconds=60)
        self.sessions = Sessions(self.settings.database)
        self.bus = Bus(self.settings.ring_size, self.sessions.events, self.sessions.catch_up)
        self.runs = RunManager(self.settings, self.sessions, self.bus, loader=_no_model_here)

    def start(self, **more: Any) -> str:
        asked = {"prompt": "A baker counts loaves.", "config": CONFIG, "options": {"max_new_tokens": 24}, **more}
        return self.runs.start(RunRequest(**asked))

    def events(self, session: str) -> list[TraceEvent]:
        assert self.runs.wait(session, 60)
        return [decode(row) for row in self.sessions.events(session)]

    def close(self) -> None:
        self.runs.close()
        self.sessions.close()


def _no_model_here(name: str, **_: Any) -> Any:
    pytest.fail(f"{name} is loaded where the GPU is, not here")


@pytest.fixture
def spaces(monkeypatch: pytest.MonkeyPatch) -> FakeSpaces:
    fake = FakeSpaces()
    fake.__spec__ = types.SimpleNamespace(name="spaces")  # type: ignore[assignment]
    monkeypatch.setitem(sys.modules, "spaces", fake)
    monkeypatch.setenv(VARIABLE, "true")
    monkeypatch.setattr("engine.models.load_model", load_tiny)
    load_tiny("embedded")
    return fake


@pytest.fixture
def house(spaces: FakeSpaces, tmp_path: Path) -> Iterator[House]:
    built = House(tmp_path)
    yield built
    built.close()


def test_other_hardware_asks_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "spaces", FakeSpaces())
    assert ZeroGpu.present(60, {}) is None and ZeroGpu.present(60, {VARIABLE: "false"}) is None
    monkeypatch.delitem(sys.modules, "spaces")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert ZeroGpu.present(60, {VARIABLE: "true"}) is None


def test_our_function_is_decorated_at_the_start_and_its_events_stream_through(house: House, spaces: FakeSpaces) -> None:
    assert spaces.decorated == ["gpu_events"]
    token = visitor.set("ann")
    session = house.start(policy="qevict-int4")
    visitor.reset(token)
    events = house.events(session)
    assert [event.seq for event in events] == list(range(len(events)))
    meta, end = events[0], events[-1]
    assert isinstance(meta, RunMeta) and isinstance(end, EndEvent)
    assert (meta.session, meta.policy, meta.reference, end.why) == (session, "qevict-int4", "fullkv-teacher", "length")
    board = Board(meta)
    for event in events:
        board.forward(event)
    assert board.seq_len == meta.prompt_tokens + 24
    # Asked for in the context of who pressed Run, for as long as the setting says.
    assert [(who, seconds) for who, seconds, _ in spaces.lent] == [("ann", 60)]
    assert not Path(spaces.lent[0][2].signal).exists()


def test_conversations_and_rivals_go_there_too(house: House, spaces: FakeSpaces) -> None:
    talk = (("system", "Be brief."), ("user", "Count to ten."))
    sessions = [house.start(messages=talk), house.start(system="snapkv", policy="snapkv")]
    metas = [house.events(session)[0] for session in sessions]
    assert [meta.policy for meta in metas] == ["qevict", "snapkv"]  # type: ignore[union-attr]
    assert "Be brief." in "".join(metas[0].pieces)  # type: ignore[union-attr]
    assert len(spaces.lent) == 2


def test_a_stop_reaches_the_other_process(house: House) -> None:
    session = house.start(config=CONFIG.replace(kv_budget=1.0), options={"max_new_tokens": 3000, "reference": False})
    wait_for(lambda: len(house.bus.channel(session).read(0, 1024)[1]) > 4, 30)  # type: ignore[union-attr]
    house.runs.stop(session)
    end = house.events(session)[-1]
    assert isinstance(end, EndEvent) and end.why == "stop"
    assert 0 < end.summary["num_tokens"] < 3000 and end.summary["kv"]["share"] > 0


def test_a_run_ends_by_itself_before_its_time_is_over(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = itertools.count()  # a second goes by whenever somebody looks at the clock
    monkeypatch.setattr(zero_gpu, "time", types.SimpleNamespace(monotonic=lambda: float(next(seconds))))
    options = {"max_new_tokens": 4000, "reference": False, "ignore_eos": True}
    session = house.start(config=CONFIG.replace(kv_budget=1.0), options=options)
    events = house.events(session)
    end = events[-1]
    assert isinstance(end, EndEvent) and end.why == "stop" and 0 < end.summary["num_tokens"] < 60
    assert any(isinstance(event, StepEvent) for event in events)


def test_the_engines_errors_come_back_as_they_are(house: House, spaces: FakeSpaces) -> None:
    session = house.start(config=CONFIG.replace(kv_budget=0.01))
    end = house.events(session)[-1]
    assert isinstance(end, EndEvent) and end.why == "error" and end.summary["fault"] == "input"
    raised = house.events(house.start(config=CONFIG.replace(kv_budget=0.01), raise_budget=True))
    assert isinstance(raised[0], RunMeta) and any("raised" in notice for notice in raised[0].notices)
    assert isinstance(raised[-1], EndEvent) and raised[-1].why == "length"
    assert len(spaces.lent) == 3


def test_a_quota_that_is_used_up_is_said_in_a_sentence(house: House, spaces: FakeSpaces) -> None:
    spaces.refusal = "You have exceeded your GPU quota."
    events = house.events(house.start())
    assert isinstance(events[0], ErrorEvent)
    assert events[0].message == "the platform did not lend its GPU: You have exceeded your GPU quota."
    spaces.refusal = ""
    assert house.events(house.start())[-1].why == "length"  # type: ignore[union-attr]


@pytest.mark.parametrize("kind", ["PromptError", "LentGpuError", "os", "EngineError"])
def test_any_error_between_processes_is_an_error_of_the_engine(kind: str) -> None:
    error = Trouble(kind, "said").error()
    assert isinstance(error, EngineError) and str(error) == "said"
    assert isinstance(error, PromptError) == (kind == "PromptError")


def test_a_budget_error_keeps_the_smallest_budget() -> None:
    error = Trouble("BudgetError", "said", 7, 0.5).error()
    assert isinstance(error, BudgetError) and (error.smallest_bytes, error.smallest_share) == (7, 0.5)
    assert issubclass(LentGpuError, EngineError)
