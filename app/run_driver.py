"""What one run needs of the engine: its model, its events, its way out; and each event on its way to followers.

Knows the engine's event iterator, loaded models and kept documents; knows no queue and no store.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

from app.budget_reach import within_reach
from app.loaded_models import LoadedModels
from app.messages_prompt import document_of, render
from app.run_state import Run
from app.settings import Settings
from app.texts import text
from app.zero_gpu import ZeroGpu
from engine.trace import EndEvent, ErrorEvent, Progress, RunMeta, TraceEvent

if TYPE_CHECKING:
    from app.prefixes import Prefixes
    from engine.config import QEvictConfig
    from engine.generate_batch import Row

Engine = Callable[..., Iterator[TraceEvent]]
"""(loaded, prompt, config, options, *, session, watched_row, should_stop, policy) -> events"""

Made = TypeVar("Made")


@dataclass(frozen=True, slots=True)
class Asked:
    """A request once its model is loaded: what the engine is called with."""

    prompt: str
    document: str
    options: Mapping[str, Any]


class Driver:
    """Gets runs under way. For the queue's worker thread.

    Args:
        engine: what makes the events; None = `engine.generate.generate`, imported by the first run.
        options: what builds the engine's options from their names; None = `engine.generate.RunOptions`.
    """

    def __init__(
        self,
        settings: Settings,
        models: LoadedModels,
        engine: Engine | None = None,
        options: Callable[..., Any] | None = None,
    ) -> None:
        self._settings = settings
        self._models = models
        self._engine = engine
        self._options = options
        self._prefixes: Prefixes | None = None
        self._zero = ZeroGpu.present(settings.gpu_seconds)

    @property
    def can_batch(self) -> bool:
        """Whether runs may share forwards here: only those of our own engine, on a device of our own."""
        return self._settings.batch > 1 and self._engine is None and self._zero is None

    @property
    def keeps_documents(self) -> bool:
        """Whether a document that was read is kept here for the next question about it."""
        return self._settings.prefix_mb > 0 and self._engine is None and self._zero is None

    def load(self, run: Run) -> Any:
        """The run's model; None where another process loads it.

        Raises:
            EngineError: what the loader says.
        """
        request = run.request
        run.state = "loading"
        if self._zero is not None and request.job is None:
            return None  # the model is loaded where the GPU is

        def loading(progress: Progress) -> None:
            run.stage = progress
            run.output.progress(progress)

        # What is no ordinary run stays with the CPU where the GPU is lent by the second.
        device = request.device if self._zero is None else "cpu"
        loaded = self._models.get(request.model, device, request.dtype, loading)
        run.stage = None
        return loaded

    def events(self, run: Run, loaded: Any) -> Generator[TraceEvent, None, None]:
        """The run's events, begun; a budget that is too small is raised, if that was asked for.

        Raises:
            EngineError: the run can't begin.
        """
        run.state = "running"
        begin = self._begins(run, loaded)

        def first_of(config: QEvictConfig) -> tuple[TraceEvent | None, Iterator[TraceEvent]]:
            events = begin(config)
            return next(events, None), events

        first, rest = _with_budget(run, first_of)
        return _joined(first, rest)

    def _begins(self, run: Run, loaded: Any) -> Callable[[QEvictConfig], Iterator[TraceEvent]]:
        request, zero = run.request, self._zero
        if zero is not None and request.job is None:
            return lambda config: zero.events(run, config)
        asked = self._asked(run, loaded)
        engine, options, named = request.job or self._engine_of(run), self._options_of(asked), self._named(run, asked)
        return lambda config: engine(
            loaded,
            asked.prompt,
            config,
            options,
            session=run.session,
            watched_row=run.watched_row,
            should_stop=run.should_stop,
            **named,
        )

    def row(self, run: Run, loaded: Any) -> Row:
        """The run as a row of a batch.

        Raises:
            EngineError: the run can't begin.
        """
        from engine.generate_batch import make_row
        from engine.generate_rival import RivalRun

        request, asked = run.request, self._asked(run, loaded)
        options = self._options_of(asked)
        if request.system:
            return _with_budget(
                run,
                lambda config: RivalRun(
                    loaded, asked.prompt, config, options, system=request.system, session=run.session
                ),
            )
        named = self._named(run, asked)
        return _with_budget(
            run, lambda config: make_row(loaded, asked.prompt, config, options, session=run.session, **named)
        )

    def forget(self) -> None:
        """Gives back what is kept between runs: the device ran out of memory."""
        self._models.clear()
        if self._prefixes is not None:
            self._prefixes.keep_only(self._models.has)

    def _asked(self, run: Run, loaded: Any) -> Asked:
        request = run.request
        values = request.option_values
        prompt, document = request.prompt, request.document
        if request.messages:
            values["chat"] = False
            prompt = render(loaded, request.messages)
            if document:
                document, prompt = document_of(prompt, document)
        return Asked(prompt, document, values)

    def _engine_of(self, run: Run) -> Engine:
        if self._engine is not None:
            return self._engine
        if run.request.system:
            from engine.generate_rival import generate_rival

            return generate_rival
        from engine.generate import generate

        return generate

    def _options_of(self, asked: Asked) -> Any:
        build = self._options
        if build is None:
            from engine.generate import RunOptions

            build = RunOptions
        return build(**asked.options)

    def _named(self, run: Run, asked: Asked) -> dict[str, Any]:
        request = run.request
        if request.system:
            return {"system": request.system}
        named: dict[str, Any] = {"policy": request.policy}
        if asked.document:
            named |= {"document": asked.document, "prefixes": self._shelf(run)}
        return named

    def _shelf(self, run: Run) -> Any:
        if not self.keeps_documents:
            return None
        if self._prefixes is None:
            from app.prefixes import Prefixes

            self._prefixes = Prefixes(self._settings.prefix_mb, private=not self._settings.list_sessions)
        self._prefixes.keep_only(self._models.has)
        request = run.request
        return self._prefixes.shelf((request.model, request.device, request.dtype), request.user)


class Feed:
    """One run's events on their way to followers and store, with the limits that end it early.

    Args:
        limit: seconds that it may take; 0 = any number.
    """

    def __init__(self, run: Run, limit: int) -> None:
        self.run = run
        self._limit = limit
        self._deadline = time.monotonic() + limit if limit else float("inf")

    def take(self, event: TraceEvent) -> EndEvent | None:
        """Sends an event on; returns the run's last one, unsent, when that has come or must not be waited for."""
        run = self.run
        if isinstance(event, EndEvent):
            return replace(event, why=run.stop_why) if event.why == "stop" and run.stop_why else event
        if isinstance(event, RunMeta):
            event = replace(event, session=run.session, notices=[*run.notices, *event.notices])
        run.stage = event if isinstance(event, Progress) else None
        run.output.emit(event)
        say(run)
        if run.must_cut():
            return EndEvent(run.stop_why, run.output.tally.summary())
        if time.monotonic() > self._deadline and not run.stop_why:
            run.said = f"a run may take {self._limit} seconds here: it was stopped."
            say(run)
            run.stop("stop")
        return None


def say(run: Run) -> None:
    """Tells the trace why a run was stopped."""
    said, run.said = run.said, ""
    if said:
        run.output.emit(ErrorEvent(said, run.run_id))


def _joined(first: TraceEvent | None, rest: Iterator[TraceEvent]) -> Generator[TraceEvent, None, None]:
    """`first` and what follows; closes the rest with itself."""
    try:
        if first is not None:
            yield first
            yield from rest
    finally:
        close = getattr(rest, "close", None)
        if close is not None:
            close()


def _with_budget(run: Run, make: Callable[[QEvictConfig], Made]) -> Made:
    """What `make` makes of the run's settings; raises a budget that is too small, if that was asked for."""
    request = run.request
    config = request.config
    if not request.raise_budget:
        return make(config)
    made, used = within_reach(make, config)
    if used is not config:
        asked = f"{config.kv_budget:.1%}" if config.kv_budget_bytes is None else "?"
        run.notices[:] = [
            *run.notices,
            text(request.lang, "notice.budget_raised", asked=asked, used=f"{used.kv_budget:.2%}"),
        ]
    return made
