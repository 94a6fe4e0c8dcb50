"""Runs: one at a time on the device, first come first served, followed through the event bus.

`start` returns at once; a worker thread asks the engine for events and sends each of them on. Knows the engine's
event iterator, the bus and the store; knows no web page, and imports torch only in its worker.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from app.events import Bus
from app.loaded_models import LoadedModels, Loader
from app.run_output import RunOutput
from app.run_request import RunRequest, check
from app.sessions import Sessions, new_session_id
from app.settings import Settings
from app.store_file import StoreError
from app.texts import text
from engine.errors import BudgetError, EngineError, OutOfMemoryError
from engine.trace import EndEvent, ErrorEvent, Progress, RunMeta, TraceEvent

__all__ = ["Engine", "QueueFullError", "RunManager", "RunRequest", "RunStatus"]

log = logging.getLogger("qevict.runs")

Engine = Callable[..., Iterator[TraceEvent]]
"""(loaded, prompt, config, options, *, session, watched_row, should_stop, policy) -> events"""

STOP_SECONDS = 5.0
"""How long the engine may take to sum up a run that was stopped, before it is cut off."""

OUT_OF_MEMORY = (
    "the device ran out of memory: take a shorter prompt, fewer new tokens, a smaller model, "
    "or switch the FullKV reference off."
)


class QueueFullError(EngineError, RuntimeError):
    """Too many runs are waiting."""


@dataclass(frozen=True, slots=True)
class RunStatus:
    """Where a run stands: "queued", "loading", "running" or "ended"; `ahead` runs come before a queued one."""

    state: str
    ahead: int = 0
    stage: str = ""
    done: int = 0
    total: int = 0


@dataclass(eq=False, slots=True)
class _Run:
    session: str
    request: RunRequest
    output: RunOutput
    row: int
    notices: list[str]
    run_id: str = field(default_factory=lambda: secrets.token_hex(4))
    state: str = "queued"
    stage: Progress | None = None
    stop_why: str = ""
    stopped_at: float = 0.0
    done: threading.Event = field(default_factory=threading.Event)

    def watched_row(self) -> int:
        return self.row

    def should_stop(self) -> bool:
        return bool(self.stop_why)

    def stop(self, why: str) -> None:
        """Asks for the end; being shut down goes before a person's wish, which may take its time."""
        if not self.stop_why or why == "interrupted":
            self.stop_why = why
            self.stopped_at = time.monotonic()

    def must_cut(self) -> bool:
        """Whether the engine's own end can't be waited for."""
        if not self.stop_why:
            return False
        return self.stop_why == "interrupted" or time.monotonic() - self.stopped_at > STOP_SECONDS


class RunManager:
    """Starts, stops and queues runs. Safe from any thread.

    Args:
        engine: what makes the events; None = `engine.generate.generate`, imported by the first run.
        loader: what loads a model; None = `engine.models.load_model`.
        options: what builds the engine's options from their names; None = `engine.generate.RunOptions`.
    """

    def __init__(
        self,
        settings: Settings,
        sessions: Sessions,
        bus: Bus,
        *,
        engine: Engine | None = None,
        loader: Loader | None = None,
        options: Callable[..., Any] | None = None,
    ) -> None:
        self.settings = settings
        self.models = LoadedModels(settings.max_loaded_models, loader, settings.allowed_models)
        self._sessions = sessions
        self._bus = bus
        self._engine = engine
        self._options = options
        self._changed = threading.Condition()
        self._queue: deque[_Run] = deque()
        self._runs: dict[str, _Run] = {}
        self._active: _Run | None = None
        self._entering = 0
        self._closing = False
        self._thread: threading.Thread | None = None

    def start(self, request: RunRequest) -> str:
        """Checks the request, puts it in the queue and returns its session id.

        Raises:
            EngineError: the request can't work here; `QueueFullError`: too many are waiting.
        """
        check(request, self.settings)
        with self._changed:
            if self._closing:
                raise QueueFullError("the server is shutting down.")
            runs = len(self._queue) + self._entering + (self._active is not None)
            if runs > self.settings.queue_length:
                raise QueueFullError(f"{runs - 1} runs are waiting already: try again later.")
            self._entering += 1
        try:
            run = self._enter(request)
        finally:
            with self._changed:
                self._entering -= 1
        with self._changed:
            self._runs[run.session] = run
            self._queue.append(run)
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="qevict-runs", daemon=True)
                self._thread.start()
            self._changed.notify_all()
        self._announce()
        return run.session

    def stop(self, session: str, why: str = "stop") -> bool:
        """Ends a run between two tokens, or takes it out of the queue; False if it is not running."""
        with self._changed:
            run = self._runs.get(session)
            if run is None:
                return False
            run.stop(why)
            waiting = run in self._queue
            if waiting:
                self._queue.remove(run)
        if waiting:
            self._end(run, EndEvent(run.stop_why, {}))
            self._announce()
        return True

    def watch(self, session: str, row: int) -> bool:
        """Chooses the board row whose scores a run sends at every event; False if it is not running."""
        run = self._runs.get(session)
        if run is None or row < 0:
            return False
        run.row = row
        return True

    def status(self, session: str) -> RunStatus:
        """Where a run stands; "ended" for everything that this process does not run."""
        with self._changed:
            run = self._runs.get(session)
            if run is None:
                return RunStatus("ended")
            ahead = self._queue.index(run) + (self._active is not None) if run in self._queue else 0
            stage = run.stage
        if stage is None:
            return RunStatus(run.state, ahead)
        return RunStatus(run.state, ahead, stage.stage, stage.done, stage.total)

    @property
    def active(self) -> str | None:
        """Session that has the device now."""
        run = self._active
        return None if run is None else run.session

    @property
    def waiting(self) -> list[str]:
        """Sessions in the queue, the next one first."""
        with self._changed:
            return [run.session for run in self._queue]

    def wait(self, session: str, timeout: float | None = None) -> bool:
        """Returns True when a run has ended and is stored, False after `timeout` seconds."""
        run = self._runs.get(session)
        return True if run is None else run.done.wait(timeout)

    def close(self, timeout: float = 10.0) -> None:
        """Ends all runs as "interrupted"; no new one is taken."""
        with self._changed:
            self._closing = True
            sessions = [run.session for run in self._queue]
            if self._active is not None:
                sessions.append(self._active.session)
            self._changed.notify_all()
        for session in sessions:
            self.stop(session, "interrupted")
        if self._thread is not None:
            self._thread.join(timeout)

    def _enter(self, request: RunRequest) -> _Run:
        session = new_session_id()
        notices: list[str] = []
        stored = True
        try:
            self._sessions.create(
                model=request.model,
                policy=request.policy,
                settings=request.record(),
                title=request.session_title,
                session=session,
                state="queued",
            )
        except StoreError as error:
            stored = False
            notices.append(f"{error} The run goes on and can be followed, but it is not kept.")
        output = RunOutput(
            session,
            self._bus.open(session),
            self._sessions,
            stored=stored,
            wait_seconds=self.settings.store_wait_seconds + 1.0,
        )
        return _Run(session, request, output, request.watched_row, notices)

    def _announce(self) -> None:
        """Tells everybody in the queue how many come before them."""
        with self._changed:
            ahead = int(self._active is not None)
            places = [(run, ahead + index) for index, run in enumerate(self._queue)]
        for run, place in places:
            if place:
                run.output.progress(Progress("queue", 0, place))

    def _work(self) -> None:
        while True:
            with self._changed:
                while not self._queue and not self._closing:
                    self._changed.wait()
                if not self._queue:
                    return
                run = self._active = self._queue.popleft()
            self._announce()
            try:
                self._run(run)
            finally:
                with self._changed:
                    self._active = None

    def _run(self, run: _Run) -> None:
        log.info("run %s begins (session %s, model %s)", run.run_id, run.session, run.request.model)
        if run.output.stored:
            self._sessions.update(run.session, state="running")
        try:
            end = self._drive(run)
        except EngineError as error:
            if isinstance(error, OutOfMemoryError):
                self.models.clear()
            log.warning("run %s: %s", run.run_id, error)
            end = self._failed(run, str(error))
        except Exception as error:
            if _is_out_of_memory(error):
                self.models.clear()
                log.warning("run %s: out of memory", run.run_id, exc_info=True)
                end = self._failed(run, OUT_OF_MEMORY)
            else:
                log.exception("run %s failed", run.run_id)
                end = self._failed(run, text(run.request.lang, "error.unexpected", run_id=run.run_id))
        self._end(run, end)
        log.info("run %s ends: %s, %d tokens", run.run_id, end.why, run.output.tally.num_tokens)

    def _drive(self, run: _Run) -> EndEvent:
        """Sends all events of a run but the last, which it returns."""
        request = run.request
        run.state = "loading"

        def loading(progress: Progress) -> None:
            run.stage = progress
            run.output.progress(progress)

        loaded = self.models.get(request.model, request.device, request.dtype, loading)
        run.stage = None
        if run.stop_why:
            return EndEvent(run.stop_why, {})
        run.state = "running"
        limit = self.settings.max_run_seconds
        deadline = time.monotonic() + limit if limit else float("inf")
        first, events = self._begin(run, loaded)
        event: TraceEvent | None = first
        try:
            while event is not None:
                if isinstance(event, EndEvent):
                    return replace(event, why=run.stop_why) if event.why == "stop" and run.stop_why else event
                if isinstance(event, RunMeta):
                    event = replace(event, session=run.session, notices=[*run.notices, *event.notices])
                run.stage = event if isinstance(event, Progress) else None
                run.output.emit(event)
                if run.must_cut():
                    return EndEvent(run.stop_why, run.output.tally.summary())
                if time.monotonic() > deadline and not run.stop_why:
                    run.output.emit(ErrorEvent(f"a run may take {limit} seconds here: it was stopped.", run.run_id))
                    run.stop("stop")
                event = next(events, None)
        finally:
            close = getattr(events, "close", None)
            if close is not None:
                close()
        raise RuntimeError("the engine's events ended without an end event")

    def _begin(self, run: _Run, loaded: Any) -> tuple[TraceEvent | None, Iterator[TraceEvent]]:
        """The first event and the rest; raises a budget that is too small, if that was asked for."""
        request = run.request
        engine, options = self._engine_and_options(request)
        config = request.config
        for attempt in range(3):
            events = engine(
                loaded,
                request.prompt,
                config,
                options,
                session=run.session,
                watched_row=run.watched_row,
                should_stop=run.should_stop,
                policy=request.policy,
            )
            try:
                return next(events, None), events
            except BudgetError as error:
                if not request.raise_budget or attempt == 2 or not 0.0 < error.smallest_share <= 1.0:
                    raise
                asked = config.kv_budget
                config = config.replace(kv_budget=error.smallest_share, kv_budget_bytes=None)
                run.notices[:] = [
                    *run.notices,
                    text(
                        request.lang,
                        "notice.budget_raised",
                        asked=f"{asked:.1%}" if request.config.kv_budget_bytes is None else "?",
                        used=f"{config.kv_budget:.2%}",
                    ),
                ]
        raise RuntimeError("unreachable")

    def _engine_and_options(self, request: RunRequest) -> tuple[Engine, Any]:
        engine, build = self._engine, self._options
        if engine is None or build is None:
            from engine.generate import RunOptions, generate

            engine, build = engine or generate, build or RunOptions
        return engine, build(**request.option_values)

    def _failed(self, run: _Run, sentence: str) -> EndEvent:
        run.output.emit(ErrorEvent(sentence, run.run_id))
        return EndEvent("error", {**run.output.tally.summary(), "error": sentence})

    def _end(self, run: _Run, end: EndEvent) -> None:
        try:
            stored = run.output.end(end)
        except Exception:
            log.exception("run %s: its end could not be written", run.run_id)
            stored = False
        run.state = "ended"
        self._bus.retire(run.session, stored=stored)
        with self._changed:
            self._runs.pop(run.session, None)
            if self._active is run:
                self._active = None
        run.done.set()


def _is_out_of_memory(error: Exception) -> bool:
    if isinstance(error, MemoryError) or any(kind.__name__ == "OutOfMemoryError" for kind in type(error).__mro__):
        return True
    words = str(error).lower()
    return isinstance(error, RuntimeError) and ("can't allocate memory" in words or "not enough memory" in words)
