"""Runs: one at a time on the device, or a few of one model together, users in turn, followed through the event bus.

`start` returns at once; a worker thread asks the engine for events and sends each of them on. Knows queue, bus and
store; knows no web page, and imports torch only in its worker.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextvars import copy_context
from dataclasses import replace
from typing import Any

from app.events import Bus
from app.loaded_models import LoadedModels, Loader
from app.metrics import Metrics
from app.run_batch import BatchDrive
from app.run_driver import Driver, Engine, Feed, say
from app.run_output import RunOutput
from app.run_queue import FairQueue, Limits, QueueFullError, RunTimes, expected_wait
from app.run_request import RunRequest, check
from app.run_state import Run, RunStatus
from app.sessions import Sessions, new_session_id
from app.settings import Settings
from app.store_file import StoreError
from app.texts import text
from app.visitors import Visitor
from engine.errors import EngineError, OutOfMemoryError
from engine.trace import EndEvent, ErrorEvent, Progress

__all__ = ["Engine", "QueueFullError", "RunManager", "RunRequest", "RunStatus"]

log = logging.getLogger("qevict.runs")

OUT_OF_MEMORY = (
    "the device ran out of memory: take a shorter prompt, fewer new tokens, a smaller model, "
    "or switch the FullKV reference off."
)


class RunManager:
    """Starts, stops and queues runs. Safe from any thread.

    Args:
        engine: what makes the events; None = `engine.generate.generate`, imported by the first run.
        loader: what loads a model; None = `engine.models.load_model`.
        options: what builds the engine's options from their names; None = `engine.generate.RunOptions`.
        visitor: who asks for what is being done now.
        demand: raises where the current visitor may not change what belongs to this user.
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
        visitor: Callable[[], Visitor | None] = lambda: None,
        demand: Callable[[str], None] = lambda user: None,
    ) -> None:
        self.settings = settings
        self.metrics = Metrics()
        self.models = LoadedModels(settings.max_loaded_models, loader, settings.allowed_models)
        self._sessions = sessions
        self._bus = bus
        self._driver = Driver(settings, self.models, engine, options)
        self._visitor = visitor
        self._demand = demand
        self._limits = Limits(settings)
        self._times = RunTimes()
        self._changed = threading.Condition()
        self._queue: FairQueue[Run] = FairQueue()
        self._runs: dict[str, Run] = {}
        self._active: list[Run] = []
        self._entering: list[RunRequest] = []
        self._closing = False
        self._thread: threading.Thread | None = None

    def start(self, request: RunRequest) -> str:
        """Checks the request, puts it in the queue and returns its session id.

        Raises:
            EngineError: the request can't work here; `QueueFullError`: too many are waiting.
        """
        visitor = self._visitor()
        if visitor is not None and not request.user:
            request = replace(request, user=visitor.user, address=visitor.address)
        check(request, self.settings)
        with self._changed:
            if self._closing:
                raise QueueFullError("the server is shutting down.")
            present = [run.request for run in self._runs.values()] + self._entering
            try:
                self._limits.admit(request.user, request.address, ((one.user, one.address) for one in present))
            except QueueFullError:
                self.metrics.count("qevict_refused_total", why="limit")
                raise
            self._entering.append(request)
        try:
            run = self._enter(request)
        finally:
            with self._changed:
                self._entering = [one for one in self._entering if one is not request]
        with self._changed:
            self._runs[run.session] = run
            self._queue.add(run, request.user)
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="qevict-runs", daemon=True)
                self._thread.start()
                if self.settings.abandon_seconds:
                    threading.Thread(target=self._watch, name="qevict-abandoned", daemon=True).start()
            self._changed.notify_all()
        self._announce()
        return run.session

    def stop(self, session: str, why: str = "stop") -> bool:
        """Ends a run between two tokens, or takes it out of the queue; False if it is not running.

        Raises:
            ForbiddenError: it is somebody else's.
        """
        run = self._runs.get(session)
        if run is None:
            return False
        self._demand(run.request.user)
        self._stop(run, why)
        return True

    def _stop(self, run: Run, why: str, said: str = "") -> None:
        with self._changed:
            run.said = run.said or said
            run.stop(why)
            waiting = run in self._queue
            if waiting:
                self._queue.remove(run)
        if waiting:
            say(run)
            self._end(run, EndEvent(run.stop_why, {}))
            self._announce()

    def watch(self, session: str, row: int) -> bool:
        """Chooses the board row whose scores a run sends at every event; False if it is not running."""
        run = self._runs.get(session)
        if run is None or row < 0:
            return False
        self._demand(run.request.user)
        run.row = row
        return True

    def status(self, session: str) -> RunStatus:
        """Where a run stands; "ended" for everything that this process does not run."""
        with self._changed:
            run = self._runs.get(session)
            if run is None:
                return RunStatus("ended")
            run.seen = time.monotonic()
            ahead, wait = self._place(run)
            stage = run.stage
        if stage is None:
            return RunStatus(run.state, ahead, wait)
        return RunStatus(run.state, ahead, wait, stage.stage, stage.done, stage.total)

    def _place(self, run: Run) -> tuple[int, float | None]:
        """(runs before a queued one, seconds that they will take); call with the lock."""
        if run not in self._queue:
            return 0, None
        order = self._queue.order()
        before = order[: order.index(run)]
        now = time.monotonic()
        active = []
        for one in self._active:
            expected = self._times.expect(one.tokens)
            gone = now - one.began if one.began else 0.0
            active.append((one.group, None if expected is None else max(0.0, expected - gone)))
        waiting = [(one.group, self._times.expect(one.tokens)) for one in [*before, run]]
        slots = self.settings.batch if self._driver.can_batch else 1
        wait = expected_wait(active, waiting, slots)
        return len(before) + len(active), None if wait is None else round(wait, 1)

    @property
    def keeps_documents(self) -> bool:
        """Whether a second question about a document need not read it again."""
        return self._driver.keeps_documents

    @property
    def active(self) -> str | None:
        """Session that has had the device longest of those that have it now."""
        with self._changed:
            return self._active[0].session if self._active else None

    @property
    def running(self) -> list[str]:
        """All sessions that have the device now."""
        with self._changed:
            return [run.session for run in self._active]

    @property
    def waiting(self) -> list[str]:
        """Sessions in the queue, the next one first."""
        with self._changed:
            return [run.session for run in self._queue.order()]

    def wait(self, session: str, timeout: float | None = None) -> bool:
        """Returns True when a run has ended and is stored, False after `timeout` seconds."""
        run = self._runs.get(session)
        return True if run is None else run.done.wait(timeout)

    def close(self, timeout: float = 10.0) -> None:
        """Ends all runs as "interrupted"; no new one is taken."""
        with self._changed:
            self._closing = True
            runs = [*self._queue.order(), *self._active]
            self._changed.notify_all()
        for run in runs:
            self._stop(run, "interrupted")
        if self._thread is not None:
            self._thread.join(timeout)

    def _enter(self, request: RunRequest) -> Run:
        session = new_session_id()
        notices: list[str] = []
        stored = request.job is None
        try:
            if stored:
                self._sessions.create(
                    model=request.model,
                    policy=request.policy,
                    settings=request.record(),
                    title=request.session_title,
                    session=session,
                    state="queued",
                    user=request.user,
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
        return Run(session, request, output, request.watched_row, notices, context=copy_context())

    def _announce(self) -> None:
        """Tells everybody in the queue how many come before them."""
        with self._changed:
            ahead = len(self._active)
            places = [(run, ahead + index) for index, run in enumerate(self._queue.order())]
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
                run = self._enter_device()
            self._begun(run)
            if self._driver.can_batch and run.request.job is None:
                BatchDrive(self._driver, self.settings, self).drive(run)
            else:
                self._run(run)

    def _enter_device(self) -> Run:
        """Makes the next waiting run an active one; call with the lock."""
        run = self._queue.pop()
        self._active.append(run)
        run.began = time.monotonic()
        return run

    def _begun(self, run: Run) -> None:
        extra = {"run": run.run_id, "session": run.session}
        log.info("run %s begins (session %s, model %s)", run.run_id, run.session, run.request.model, extra=extra)
        self.metrics.observe("qevict_wait_seconds", run.began - run.entered)
        self._announce()
        if run.output.stored:
            self._sessions.update(run.session, state="running")

    # the queue as a batch sees it

    def beside(self, run: Run) -> Run | None:
        """The next run, if it may share the device with `run`; it stays in the queue."""
        with self._changed:
            order = self._queue.order()
            if self._closing or not order or order[0].group != run.group:
                return None
            return order[0]

    def take_out(self, run: Run) -> bool:
        """Makes the next run an active one; False if it waits no more, or not as the next."""
        with self._changed:
            order = self._queue.order()
            if self._closing or not order or order[0] is not run:
                return False
            self._enter_device()
        self._begun(run)
        return True

    def ended(self, run: Run, how: EndEvent | Exception) -> None:
        """Sends an active run's end."""
        end = how if isinstance(how, EndEvent) else self._fault(run, how)
        self._end(run, end)
        tokens = run.output.tally.num_tokens
        seconds = time.monotonic() - run.began
        if end.why in ("eos", "length") and run.request.job is None:
            self._times.add(seconds, run.tokens)
        self.metrics.count("qevict_tokens_total", tokens)
        self.metrics.observe("qevict_run_seconds", seconds)
        extra = {"run": run.run_id, "session": run.session}
        log.info("run %s ends: %s, %d tokens", run.run_id, end.why, tokens, extra=extra)
        if self._active:
            self._announce()

    def _watch(self) -> None:
        """Stops runs that nobody looks at."""
        limit = self.settings.abandon_seconds
        while True:
            with self._changed:
                if self._closing:
                    return
                self._changed.wait(min(1.0, limit / 4))
                runs = list(self._runs.values())
            now = time.monotonic()
            for run in runs:
                channel = self._bus.channel(run.session)
                if channel is not None and channel.followers:
                    run.seen = now
                elif now - run.seen > limit and not run.stop_why:
                    log.info("run %s: abandoned (session %s)", run.run_id, run.session, extra={"run": run.run_id})
                    self._stop(run, "stop", f"nobody looked at this run for {limit} seconds: it was stopped.")

    def _run(self, run: Run) -> None:
        """Drives a run that has the device alone."""
        how: EndEvent | Exception
        try:
            how = self._drive(run)
        except Exception as error:
            how = error
        self.ended(run, how)

    def _drive(self, run: Run) -> EndEvent:
        """Sends all events of a run but the last, which it returns."""
        loaded = self._driver.load(run)
        if run.stop_why:
            return EndEvent(run.stop_why, {})
        feed = Feed(run, self.settings.max_run_seconds)
        events = self._driver.events(run, loaded)
        try:
            for event in events:
                end = feed.take(event)
                if end is not None:
                    return end
        finally:
            events.close()
        raise RuntimeError("the engine's events ended without an end event")

    def _fault(self, run: Run, error: Exception) -> EndEvent:
        """Says what went wrong, and returns the run's end."""
        extra = {"run": run.run_id, "session": run.session}
        if isinstance(error, OutOfMemoryError) or _is_out_of_memory(error):
            self._driver.forget()
            log.warning("run %s: out of memory", run.run_id, exc_info=error, extra=extra)
            return self._failed(run, str(error) if isinstance(error, EngineError) else OUT_OF_MEMORY, "memory")
        if isinstance(error, EngineError):
            log.warning("run %s: %s", run.run_id, error, extra=extra)
            return self._failed(run, str(error), "input")
        log.error("run %s failed", run.run_id, exc_info=error, extra=extra)
        return self._failed(run, text(run.request.lang, "error.unexpected", run_id=run.run_id), "internal")

    def _failed(self, run: Run, sentence: str, fault: str) -> EndEvent:
        run.output.emit(ErrorEvent(sentence, run.run_id))
        return EndEvent("error", {**run.output.tally.summary(), "error": sentence, "fault": fault})

    def _end(self, run: Run, end: EndEvent) -> None:
        try:
            stored = run.output.end(end)
        except Exception:
            log.exception("run %s: its end could not be written", run.run_id, extra={"run": run.run_id})
            stored = False
        self.metrics.count("qevict_runs_total", why=end.why)
        run.state = "ended"
        self._bus.retire(run.session, stored=stored)
        with self._changed:
            self._runs.pop(run.session, None)
            self._active = [one for one in self._active if one is not run]
        run.done.set()


def _is_out_of_memory(error: Exception) -> bool:
    if isinstance(error, MemoryError) or any(kind.__name__ == "OutOfMemoryError" for kind in type(error).__mro__):
        return True
    words = str(error).lower()
    return isinstance(error, RuntimeError) and ("can't allocate memory" in words or "not enough memory" in words)
