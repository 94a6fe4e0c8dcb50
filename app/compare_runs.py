"""Comparisons on the server: in the same queue as ordinary runs, one at a time on the device, stoppable.

A comparison is a run whose events are made here: progress while it goes on, an end. What it found stays in memory,
for the few that were last. Knows runs and the engine's comparison; knows no page.
"""

from __future__ import annotations

import json
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from app.compare_request import CompareRequest, sharper
from app.events import head
from app.run_request import RunRequest
from engine.errors import BudgetError
from engine.trace import EndEvent, Progress, TraceEvent

if TYPE_CHECKING:
    from app.events import Bus
    from app.runs import RunManager
    from engine.compare import CompareResult

KEPT = 8
"""Comparisons whose results are kept; with their frames one takes a few megabytes."""
LONG = 1 << 20
Compare = Callable[..., Iterator[Any]]
"""(loaded, prompt, systems, options, *, should_stop) -> Progress, CompareStep ..., CompareResult"""


@dataclass(slots=True)
class Outcome:
    """What a comparison found, with what it was asked.

    Attributes:
        agrees: for each system, whether its likeliest token was FullKV's, step by step.
        model, device, dtype: what it ran on.
        ended: seconds since the epoch.
    """

    request: CompareRequest
    result: CompareResult
    agrees: list[list[bool]]
    model: str
    device: str
    dtype: str
    ended: float = field(default_factory=time.time)


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
    """

    def __init__(self, runs: RunManager, bus: Bus, compare: Compare | None = None) -> None:
        self._runs = runs
        self._bus = bus
        self._compare = compare
        self._lock = threading.Lock()
        self._outcomes: OrderedDict[str, Outcome] = OrderedDict()

    def start(self, request: CompareRequest) -> str:
        """Puts a comparison in the queue and returns its id.

        Raises:
            EngineError: see `CompareRequest.check` and `RunManager.start`.
        """
        request.check()
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
                job=lambda *given, **named: self._events(request, *given, **named),
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
        """What it found; None while it goes on, where it failed, and once it is forgotten."""
        with self._lock:
            return self._outcomes.get(session)

    def _events(
        self,
        request: CompareRequest,
        loaded: Any,
        *_: Any,
        session: str,
        should_stop: Callable[[], bool],
        **__: Any,
    ) -> Iterator[TraceEvent]:
        """The events of one comparison, as the queue's worker asks for them."""
        options = request.options()
        agrees: list[list[bool]] = [[] for _ in request.systems]
        steps = self._engine()(loaded, request.prompt, request.choices(), options, should_stop=should_stop)
        yield Progress("prefill", 0, 1)
        while True:
            try:
                event = next(steps)
            except BudgetError as error:
                raise sharper(error, request, loaded) from error
            if isinstance(event, Progress):
                yield replace(event, stage="free") if event.stage == "decode" else event
            elif hasattr(event, "agrees"):
                for known, agreed in zip(agrees, event.agrees, strict=True):
                    known.append(bool(agreed))
                yield Progress("decode", event.step + 1, max(event.step + 1, options.max_new_tokens - 1))
            else:
                break
        outcome = Outcome(request, event, agrees, loaded.label, loaded.device, loaded.dtype)
        with self._lock:
            self._outcomes[session] = outcome
            while len(self._outcomes) > KEPT:
                self._outcomes.popitem(last=False)
        yield EndEvent("stop" if event.stopped else "length", {"text": event.text, "num_tokens": len(event.token_ids)})

    def _engine(self) -> Compare:
        if self._compare is None:
            from engine.compare import iter_compare

            self._compare = iter_compare
        return self._compare

    def _error(self, session: str) -> str:
        channel = self._bus.channel(session)
        if channel is None:
            return ""
        said = [body for body in channel.read(0, LONG)[1] if head(body)[0] == "err"]
        return str(json.loads(said[-1])["msg"]) if said else ""
