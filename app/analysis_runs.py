"""Diagnoses on the server: in the same queue as ordinary runs, one at a time on the device, stoppable.

A diagnosis is a run whose events are made here: progress while it goes on, an end. What it found stays in memory,
for the few that were last. Knows runs and the engine's diagnosis; knows no page.
"""

from __future__ import annotations

import json
import queue
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from app.events import head
from app.run_request import RunRequest
from engine.config import QEvictConfig
from engine.errors import EngineError, PromptError
from engine.trace import EndEvent, Progress, TraceEvent

if TYPE_CHECKING:
    from app.events import Bus
    from app.runs import RunManager

KEPT = 8
"""Diagnoses that are kept; one takes some 40 KB."""
LONG = 1 << 20
STAGES = ("reference", "simulating", "live")
LIVE = ("R3",)
"""Policies that are run in the real cache: it is for the agreement of scores, which the article gives of R3."""
Diagnose = Callable[..., dict[str, Any]]


@dataclass(frozen=True, slots=True)
class DiagnosisRequest:
    """What to diagnose: the first `tokens` of `prompt`, the last `steps` of them fed one by one, under `config`."""

    prompt: str
    title: str
    config: QEvictConfig
    tokens: int
    steps: int
    model: str = "embedded"
    lang: str = "en"


@dataclass(frozen=True, slots=True)
class DiagnosisStanding:
    """Where a diagnosis stands: "queued", "loading", "running" or "ended", with `error` why it failed."""

    state: str
    ahead: int = 0
    stage: str = ""
    done: int = 0
    total: int = 0
    error: str = ""


class _Stopped(EngineError, RuntimeError):
    """Somebody stopped the diagnosis between two of its steps."""


class AnalysisRuns:
    """Starts diagnoses and keeps what they found. Safe from any thread.

    Args:
        runs: the server's queue.
        bus: says why one failed.
        diagnose: what measures; None = `engine.evaluation.diagnose.diagnose`, imported by the first diagnosis.
    """

    def __init__(self, runs: RunManager, bus: Bus, diagnose: Diagnose | None = None) -> None:
        self._runs = runs
        self._bus = bus
        self._diagnose = diagnose
        self._lock = threading.Lock()
        self._found: OrderedDict[str, dict[str, Any]] = OrderedDict()

    def start(self, request: DiagnosisRequest) -> str:
        """Puts a diagnosis in the queue and returns its id.

        Raises:
            EngineError: see `RunManager.start`.
        """
        return self._runs.start(
            RunRequest(
                prompt=request.prompt,
                model=request.model,
                options={"max_new_tokens": request.steps},
                title=request.title,
                lang=request.lang,
                policy="diagnose",
                job=lambda *given, **named: self._events(request, *given, **named),
            )
        )

    def stop(self, session: str) -> bool:
        """Ends a diagnosis between two of its steps. False if it isn't on."""
        return self._runs.stop(session)

    def standing(self, session: str) -> DiagnosisStanding:
        """Where it stands now."""
        now = self._runs.status(session)
        error = self._error(session) if now.state == "ended" and self.found(session) is None else ""
        return DiagnosisStanding(now.state, now.ahead, now.stage, now.done, now.total, error)

    def found(self, session: str) -> dict[str, Any] | None:
        """What it found; None while it goes on, where it failed, and once it is forgotten."""
        with self._lock:
            return self._found.get(session)

    def _events(
        self, request: DiagnosisRequest, loaded: Any, *_: Any, session: str, should_stop: Callable[[], bool], **__: Any
    ) -> Iterator[TraceEvent]:
        """The events of one diagnosis, as the queue's worker asks for them.

        It reports by calling back, and an iterator can't yield from there: it works in a thread of its own.
        """
        ids = [int(token) for token in loaded.tokenizer(request.prompt, verbose=False)["input_ids"]]
        if len(ids) < request.tokens:
            raise PromptError(f"the text has {len(ids)} tokens and {request.tokens} were asked for: take fewer.")
        said: queue.SimpleQueue[Progress | Mapping[str, Any] | BaseException] = queue.SimpleQueue()

        def tell(stage: str, done: int, total: int) -> None:
            if should_stop():
                raise _Stopped("stopped.")
            said.put(Progress(stage, done, total))
            if stage == "reference" and done >= total:
                said.put(Progress("simulating", 0, 1))

        def work() -> None:
            try:
                said.put(self._measure(request, loaded, ids[: request.tokens], tell))
            except BaseException as error:
                said.put(error)

        threading.Thread(target=work, name="diagnosis", daemon=True).start()
        while True:
            event = said.get()
            if isinstance(event, Progress):
                yield event
            elif isinstance(event, _Stopped):
                yield EndEvent("stop", {})
                return
            elif isinstance(event, BaseException):
                raise event
            else:
                break
        with self._lock:
            self._found[session] = dict(event)
            while len(self._found) > KEPT:
                self._found.popitem(last=False)
        yield EndEvent("length", {"num_tokens": request.steps})

    def _measure(
        self, request: DiagnosisRequest, loaded: Any, ids: list[int], tell: Callable[[str, int, int], None]
    ) -> dict[str, Any]:
        from engine.evaluation.diagnose import DiagnoseOptions, diagnose

        options = DiagnoseOptions(steps=request.steps, live=True, live_policies=LIVE)
        return (self._diagnose or diagnose)(loaded, ids, request.config, options, progress=tell)

    def _error(self, session: str) -> str:
        channel = self._bus.channel(session)
        if channel is None:
            return ""
        said = [body for body in channel.read(0, LONG)[1] if head(body)[0] == "err"]
        return str(json.loads(said[-1])["msg"]) if said else ""
