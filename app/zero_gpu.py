"""A GPU that the platform lends by the second (ZeroGPU): one run at a time in a process of its own.

The platform's package `spaces` decorates one generator function. What that function takes and yields is pickled
between this process and a forked one that has the GPU, so it gets plain values and loads its own model; a file
tells it to stop. Without the package, or on other hardware, nothing here does anything. Knows requests and the
engine's events; knows no queue.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app.messages_prompt import document_of, render
from engine import errors
from engine.errors import BudgetError, EngineError
from engine.trace import TraceEvent

if TYPE_CHECKING:
    from app.run_state import Run
    from engine.config import QEvictConfig

VARIABLE = "SPACES_ZERO_GPU"
"""Set by the platform on such hardware."""
SPARE_SECONDS = 5.0
"""A run stops by itself so long before its time is over, to send its summary."""


class LentGpuError(EngineError, RuntimeError):
    """The platform did not lend its GPU, or took it back: the quota is used up, or the time was over."""


@dataclass(frozen=True, slots=True)
class GpuJob:
    """One run as plain values.

    Attributes:
        options: of `RunOptions`, by name. messages: a conversation that stands in for the prompt.
        signal: file that says {"stop": bool, "row": int}.
        seconds: how long the GPU is asked for.
    """

    model: str
    dtype: str
    prompt: str
    document: str
    messages: tuple[tuple[str, str], ...]
    system: str
    policy: str
    config: Mapping[str, Any]
    options: Mapping[str, Any]
    session: str
    signal: str
    seconds: int


@dataclass(frozen=True, slots=True)
class Trouble:
    """An engine's error on its way between processes."""

    kind: str
    sentence: str
    smallest_bytes: int = 0
    smallest_share: float = 0.0

    def error(self) -> EngineError:
        """The error again."""
        if self.kind == "BudgetError":
            return BudgetError(self.sentence, smallest_bytes=self.smallest_bytes, smallest_share=self.smallest_share)
        kind = getattr(errors, self.kind, EngineError)
        error: EngineError = kind(self.sentence) if issubclass(kind, EngineError) else EngineError(self.sentence)
        return error


_here: dict[tuple[str, str], Any] = {}
"""Models of the process that has the GPU; it lives on for a while after a run."""


def gpu_events(job: GpuJob) -> Iterator[TraceEvent | Trouble]:
    """The run's events, made where the GPU is."""
    import torch

    torch.set_num_threads(1)  # threads of the process that this one was forked from are not here
    until = time.monotonic() + max(1.0, job.seconds - SPARE_SECONDS)
    signal = _Signal(Path(job.signal))
    try:
        loaded = _loaded(job)
        yield from _engine_events(job, loaded, signal, until)
    except BudgetError as error:
        yield Trouble("BudgetError", str(error), error.smallest_bytes, error.smallest_share)
    except EngineError as error:
        yield Trouble(type(error).__name__, str(error))


def _loaded(job: GpuJob) -> Any:
    from engine.models import load_model

    key = (job.model, job.dtype)
    if key not in _here:
        _here.clear()
        _here[key] = load_model(job.model, device="auto", dtype=job.dtype)
    return _here[key]


def _engine_events(job: GpuJob, loaded: Any, signal: _Signal, until: float) -> Iterator[TraceEvent]:
    from engine.config import QEvictConfig
    from engine.generate import RunOptions, generate
    from engine.generate_rival import generate_rival

    values = dict(job.options)
    prompt, document = job.prompt, job.document
    if job.messages:
        values["chat"] = False
        prompt = render(loaded, job.messages)
        document, prompt = document_of(prompt, document) if document else ("", prompt)
    config, options = QEvictConfig.from_mapping(job.config), RunOptions(**values)

    def should_stop() -> bool:
        return time.monotonic() > until or signal.stop

    shared: dict[str, Any] = {"session": job.session, "watched_row": lambda: signal.row, "should_stop": should_stop}
    if job.system:
        yield from generate_rival(loaded, prompt, config, options, system=job.system, **shared)
    else:
        yield from generate(loaded, prompt, config, options, policy=job.policy, document=document, **shared)


@dataclass(slots=True)
class _Signal:
    """What a run is told from outside: whether to stop, which board row to watch."""

    path: Path
    _said: tuple[bool, int] = (False, 0)

    def _read(self) -> tuple[bool, int]:
        try:
            told = json.loads(self.path.read_text())
            return bool(told["stop"]), int(told["row"])
        except (OSError, ValueError, KeyError):
            return self._said

    @property
    def stop(self) -> bool:
        return self._read()[0]

    @property
    def row(self) -> int:
        return self._read()[1]

    def say(self, stop: bool, row: int) -> None:
        """Writes it, whole or not at all."""
        if (stop, row) == self._said:
            return
        self._said = (stop, row)
        part = self.path.with_suffix(".part")
        part.write_text(json.dumps({"stop": stop, "row": row}))
        os.replace(part, self.path)


class ZeroGpu:
    """The platform's loan: `events` runs a run on it.

    Args:
        function: `gpu_events`, decorated. seconds: longest that one run may hold the GPU.
    """

    def __init__(self, function: Callable[[GpuJob], Iterator[Any]], seconds: int) -> None:
        self._function = function
        self._seconds = seconds

    @classmethod
    def present(cls, seconds: int, env: Mapping[str, str] | None = None) -> ZeroGpu | None:
        """The loan, if this is such hardware and the package is there; must come before the page is launched."""
        env = os.environ if env is None else env
        if env.get(VARIABLE, "").lower() not in ("1", "t", "true") or importlib.util.find_spec("spaces") is None:
            return None
        spaces: Any = importlib.import_module("spaces")
        return cls(spaces.GPU(duration=_seconds)(gpu_events), seconds)

    def events(self, run: Run, config: QEvictConfig) -> Iterator[TraceEvent]:
        """The run's events.

        The GPU is asked for in the context of the visitor's own request: whose time it costs is read from there.

        Raises:
            LentGpuError: the GPU was not lent. EngineError: what the engine says.
        """
        request = run.request
        with tempfile.TemporaryDirectory(prefix="qevict-") as folder:
            signal = _Signal(Path(folder) / "signal")
            job = GpuJob(
                model=request.model,
                dtype=request.dtype,
                prompt=request.prompt,
                document=request.document,
                messages=request.messages,
                system=request.system,
                policy=request.policy,
                config=config.to_dict(),
                options=request.option_values,
                session=run.session,
                signal=str(signal.path),
                seconds=self._seconds,
            )
            events: Iterator[Any] = run.context.run(self._function, job)
            try:
                while True:
                    signal.say(run.should_stop(), run.row)
                    event = run.context.run(_next, events)
                    if event is None:
                        return
                    if isinstance(event, Trouble):
                        raise event.error()
                    yield event
            finally:
                signal.say(True, run.row)
                close = getattr(events, "close", None)
                if close is not None:
                    run.context.run(close)


def _seconds(job: GpuJob) -> int:
    return job.seconds


def _next(events: Iterator[Any]) -> Any:
    try:
        return next(events, None)
    except EngineError:
        raise
    except Exception as error:
        # The platform says its refusals (quota, no GPU free, time over) as errors of the page.
        if type(error).__module__.startswith("gradio"):
            said = str(getattr(error, "message", error))[:300]
            raise LentGpuError(f"the platform did not lend its GPU: {said}") from error
        raise
