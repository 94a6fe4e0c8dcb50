"""Comparisons on the server: in the same queue as ordinary runs, one at a time on the device, stoppable.

A comparison is a run whose events are made here: progress while it goes on, an end. What it found goes to the store
of comparisons; the few that were last also stay in memory. Knows runs, the store and the engine's comparison; knows
no page.
"""

from __future__ import annotations

import gzip
import json
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from app.compare_record import Outcome, from_record, request_record, to_record
from app.compare_request import CompareRequest, sharper
from app.compare_wire import to_wire
from app.engine_import import import_engine
from app.events import head
from app.run_request import RunRequest
from app.store_file import StoreError
from engine.errors import BudgetError, EngineError
from engine.trace import EndEvent, Progress, TraceEvent

if TYPE_CHECKING:
    from app.comparisons import Comparisons
    from app.events import Bus
    from app.runs import RunManager
    from app.visitors import Visitor

__all__ = ["CompareRuns", "CompareStanding", "Outcome"]

log = logging.getLogger("qevict.comparisons")

KEPT = 8
"""Comparisons whose results stay in memory; with their frames one takes a few megabytes."""
LONG = 1 << 20
Compare = Callable[..., Iterator[Any]]
"""(loaded, prompt, systems, options, *, should_stop) -> Progress, CompareStep ..., CompareResult"""


@dataclass(frozen=True, slots=True)
class CompareStanding:
    """Where a comparison stands: "queued", "loading", "running" or "ended", with `error` why it failed.

    `stage` is one of loading, "prefill", "decode" (all systems side by side) or "free" (one after the other).
    """

    state: str
    ahead: int = 0
    stage: str = ""
    done: int = 0
    total: int = 0
    error: str = ""


class CompareRuns:
    """Starts comparisons and keeps what they found. Safe from any thread.

    Args:
        runs: the server's queue.
        bus: says why one failed.
        compare: what makes the steps; None = `engine.compare.iter_compare`, imported by the first comparison.
        store: where they are kept; None = in memory alone.
        visitor: who asks for what is being done now.
    """

    def __init__(
        self,
        runs: RunManager,
        bus: Bus,
        compare: Compare | None = None,
        *,
        store: Comparisons | None = None,
        visitor: Callable[[], Visitor | None] = lambda: None,
    ) -> None:
        self._runs = runs
        self._bus = bus
        self._compare = compare
        self._store = store
        self._visitor = visitor
        self._lock = threading.Lock()
        self._outcomes: OrderedDict[str, Outcome] = OrderedDict()

    def start(self, request: CompareRequest) -> str:
        """Puts a comparison in the queue and returns its id.

        Raises:
            EngineError: see `CompareRequest.check` and `RunManager.start`.
        """
        request.check()
        visitor = self._visitor()
        user = "" if visitor is None else visitor.user
        return self._runs.start(
            RunRequest(
                prompt=request.prompt,
                model=request.model,
                options={"max_new_tokens": request.max_new_tokens},
                title=request.title,
                device=request.device,
                dtype=request.dtype,
                lang=request.lang,
                policy="compare",
                job=lambda *given, **named: self._events(request, user, *given, **named),
            )
        )

    def stop(self, session: str) -> bool:
        """Ends a comparison between two tokens; what was compared until then is its result. False if it isn't on."""
        return self._runs.stop(session)

    def standing(self, session: str) -> CompareStanding:
        """Where it stands now."""
        now = self._runs.status(session)
        error = self._error(session) if now.state == "ended" and self.outcome(session) is None else ""
        return CompareStanding(now.state, now.ahead, now.stage, now.done, now.total, error)

    def outcome(self, session: str) -> Outcome | None:
        """What it found, from memory or from the store; None while it goes on, where it failed, once it is deleted."""
        with self._lock:
            known = self._outcomes.get(session)
        if known is not None and not known.kept:
            return known
        store = self._store
        try:
            if store is None:
                return known
            if not store.holds(session):
                with self._lock:
                    self._outcomes.pop(session, None)
                return None
            if known is not None:
                return known
            record = store.record(session)
            if record is None:
                return None
            outcome = from_record(store.get(session).request, record)
        except EngineError as error:
            log.warning("comparison %s: %s", session, error)
            return known
        self._remember(session, outcome)
        return outcome

    def board(self, session: str) -> bytes | None:
        """Its board as the browser gets it, gzipped JSON; None where there is no outcome."""
        outcome = self.outcome(session)
        if outcome is None:
            return None
        if outcome.kept and self._store is not None:
            return self._store.board(session)
        return _packed(outcome)

    def _events(
        self,
        request: CompareRequest,
        user: str,
        loaded: Any,
        *_: Any,
        session: str,
        should_stop: Callable[[], bool],
        **__: Any,
    ) -> Iterator[TraceEvent]:
        """The events of one comparison, as the queue's worker asks for them."""
        options = request.options()
        agrees: list[list[bool]] = [[] for _ in request.systems]
        kept = self._begin(session, request, user)

        def finish(result: Any, state: str) -> None:
            outcome = Outcome(request, result, agrees, loaded.label, loaded.device, loaded.dtype, kept=kept)
            self._finish(session, outcome, state)

        steps = self._engine()(loaded, request.prompt, request.choices(), options, should_stop=should_stop)
        try:
            yield Progress("prefill", 0, 1)
            while True:
                event = next(steps)
                if isinstance(event, Progress):
                    yield replace(event, stage="free") if event.stage == "decode" else event
                elif hasattr(event, "agrees"):
                    _note(agrees, event)
                    yield Progress("decode", event.step + 1, max(event.step + 1, options.max_new_tokens - 1))
                else:
                    break
        except GeneratorExit:
            # The server ends, and its wish to stop has reached `should_stop`: one more step, then there is a result.
            last = _last(steps, agrees)
            if last is not None:
                finish(last, "interrupted")
            elif kept:
                self._tell(lambda store: store.cut(session))
            raise
        except BaseException as error:
            if kept:
                self._tell(lambda store: store.drop(session))
            if isinstance(error, BudgetError):
                raise sharper(error, request, loaded) from error
            raise
        finish(event, "stopped" if event.stopped else "done")
        yield EndEvent("stop" if event.stopped else "length", {"text": event.text, "num_tokens": len(event.token_ids)})

    def _begin(self, session: str, request: CompareRequest, user: str) -> bool:
        """Stores what is asked; False where there is no store, or one that refuses: the comparison goes on."""
        if self._store is None:
            return False
        record = request_record(request)
        return self._tell(lambda store: store.begin(session, record, user=user))

    def _finish(self, session: str, outcome: Outcome, state: str) -> None:
        if outcome.kept:
            record, board = to_record(outcome), _packed(outcome)
            outcome.kept = self._tell(lambda store: store.finish(session, state, record, board))
        self._remember(session, outcome)

    def _tell(self, say: Callable[[Comparisons], None]) -> bool:
        """Hands something to the store; False, and a line in the log, where it can't be written."""
        if self._store is None:
            return False
        try:
            say(self._store)
        except StoreError as error:
            log.error("%s", error)
            return False
        return True

    def _remember(self, session: str, outcome: Outcome) -> None:
        with self._lock:
            self._outcomes[session] = outcome
            while len(self._outcomes) > KEPT:
                self._outcomes.popitem(last=False)

    def _engine(self) -> Compare:
        if self._compare is None:
            import_engine()
            from engine.compare import iter_compare

            self._compare = iter_compare
        return self._compare

    def _error(self, session: str) -> str:
        channel = self._bus.channel(session)
        if channel is None:
            return ""
        said = [body for body in channel.read(0, LONG)[1] if head(body)[0] == "err"]
        return str(json.loads(said[-1])["msg"]) if said else ""


def _note(agrees: list[list[bool]], step: Any) -> None:
    for known, agreed in zip(agrees, step.agrees, strict=True):
        known.append(bool(agreed))


def _last(steps: Iterator[Any], agrees: list[list[bool]]) -> Any:
    """The result of a comparison that was told to stop; None where it has none."""
    try:
        for event in steps:
            if hasattr(event, "agrees"):
                _note(agrees, event)
            elif not isinstance(event, Progress):
                return event
    except EngineError as error:
        log.warning("a comparison that was cut off has no result: %s", error)
    return None


def _packed(outcome: Outcome) -> bytes:
    return gzip.compress(json.dumps(to_wire(outcome), ensure_ascii=False, separators=(",", ":")).encode(), 4)
