"""`qevict run`: one run in the terminal, its text as it comes, its figures at the end.

Knows the engine's events and the session store; knows no page and no queue.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import sys
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from types import FrameType
from typing import Any

from tqdm import tqdm

from app.budget_reach import within_reach
from app.cli import INTERRUPTED, OK, WRONG_INPUT, CommandError, plain, say
from app.run_request import RunRequest, check
from app.sessions import Sessions, new_session_id
from app.settings import Settings
from app.store_file import StoreError
from engine.config import QEvictConfig
from engine.errors import EngineError, PromptError, TraceError
from engine.trace import EndEvent, ErrorEvent, Progress, RunMeta, StepEvent, TraceEvent, encode
from presets.loader import load_preset

CACHE_FLAGS = (
    "kv_budget",
    "kv_budget_bytes",
    "quant_share",
    "bits",
    "window_size",
    "sink_tokens",
    "local_tokens",
    "kv_dtype",
    "promotion",
    "score_scope",
    "ranker",
    "backend",
)
OPTION_FLAGS = (
    "max_new_tokens",
    "temperature",
    "top_p",
    "seed",
    "reference",
    "prefill_chunk",
    "chat",
    "ignore_eos",
)
NOTICES = {
    "new_tokens_capped": "fewer new tokens than asked for: the model has no more positions.",
    "no_full_history": "the budget leaves no full-precision window: all history is quantized or evicted.",
}
"""What the engine's notices mean; a sentence of the app's own is shown as it is."""
STATES = {"eos": "done", "length": "done", "stop": "stopped", "interrupted": "interrupted", "error": "error"}


def run(arguments: argparse.Namespace) -> int:
    """Runs what the arguments ask for and returns the exit code.

    Raises:
        EngineError: wrong settings, prompt or model; nothing has been stored then.
    """
    request = request_of(arguments)
    document = read_text(arguments.document) if arguments.document else ""
    settings = Settings.from_env()
    check(request, settings)
    from engine.generate import RunOptions, generate
    from engine.models import load_model

    with LoadBar() as bar:
        loaded = load_model(
            request.model,
            device=request.device,
            dtype=request.dtype,
            weights=arguments.weights,
            progress=bar.show,
        )
    session = new_session_id() if arguments.save else ""
    record = _Record(Sessions(settings.database), session, request) if arguments.save else None
    options = RunOptions(**options_of(arguments))
    try:
        with _stop_on_ctrl_c() as stopped:

            def begin(config: QEvictConfig) -> Iterator[TraceEvent]:
                events = generate(
                    loaded,
                    request.prompt,
                    config,
                    options,
                    session=session,
                    should_stop=stopped,
                    document=document,
                )
                return chain([next(events)], events)

            asked = request.config
            if arguments.kv_budget is not None or arguments.kv_budget_bytes is not None:
                events = begin(asked)
            else:
                events, used = within_reach(begin, asked)
                if used is not asked:
                    say(
                        f"a budget of {asked.kv_budget:.0%} cannot hold sink, recent and one window here: "
                        f"raised to {used.kv_budget:.2%}."
                    )
            return follow(events, as_json=arguments.json, max_new_tokens=options.max_new_tokens, record=record)
    except EngineError as error:
        if record is not None:
            record.fail(str(error))
        raise
    finally:
        if record is not None:
            record.close()


def request_of(arguments: argparse.Namespace) -> RunRequest:
    """The run that the arguments describe: the preset's settings with the given flags on top.

    Raises:
        EngineError: no such preset, a value out of range, or not exactly one prompt.
    """
    preset = load_preset(arguments.preset)
    flags = {name: getattr(arguments, name) for name in CACHE_FLAGS}
    changes = {name: value for name, value in flags.items() if value is not None}
    changes["planned_new_tokens"] = max(0, arguments.max_new_tokens)
    return RunRequest(
        prompt=_prompt(arguments),
        model=arguments.model,
        config=preset.config.replace(**changes),
        options=options_of(arguments),
        preset=preset.name,
        device=arguments.device,
        dtype=arguments.dtype,
    )


def options_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """What the arguments say beside the cache's settings, by name as `RunOptions` takes it."""
    flags = {name: getattr(arguments, name) for name in OPTION_FLAGS}
    return {name: value for name, value in flags.items() if value is not None}


def _prompt(arguments: argparse.Namespace) -> str:
    if (arguments.prompt is None) == (arguments.prompt_file is None):
        raise CommandError("give exactly one of --prompt TEXT and --prompt-file FILE.")
    if arguments.prompt is not None:
        return str(arguments.prompt)
    return read_text(arguments.prompt_file)


def read_text(name: str) -> str:
    """A UTF-8 file's text; "-" reads from stdin.

    Raises:
        PromptError: it cannot be read, or is not UTF-8.
    """
    try:
        if name == "-":
            return sys.stdin.buffer.read().decode("utf-8")
        return Path(name).read_text(encoding="utf-8")
    except OSError as error:
        raise PromptError(f"cannot read {name} ({error.strerror or error}).") from error
    except UnicodeDecodeError as error:
        raise PromptError(f"{name} must be UTF-8 text, but byte {error.start} is not.") from error


def follow(events: Iterator[TraceEvent], *, as_json: bool, max_new_tokens: int, record: _Record | None = None) -> int:
    """Prints a run's events as they come and returns the exit code."""
    end: EndEvent | None = None
    failure = ""
    written: list[str] = []
    shared_screen = sys.stdout.isatty()
    bar: tqdm[Any] = tqdm(total=max_new_tokens, unit="tok", file=sys.stderr, leave=False, disable=None)
    with bar:
        for event in events:
            if record is not None:
                record.take(event)
            match event:
                case RunMeta(notices=notices):
                    for notice in notices:
                        say(NOTICES.get(notice, plain(notice)))
                case Progress(stage=stage, done=done, total=total):
                    bar.set_postfix_str(f"{stage} {done}/{total}")
                case StepEvent(pieces=pieces):
                    if shared_screen:
                        # Text and bar on one screen would overwrite each other: the bar has shown the prompt.
                        bar.close()
                    written += pieces
                    _write(plain("".join(pieces)))
                    bar.update(len(pieces))
                case ErrorEvent(message=message):
                    failure = message
                case EndEvent():
                    end = event
                case _:
                    pass
    if end is None:
        raise TraceError("the run ended without a summary.")
    shown = "".join(written)
    # Bytes of an unfinished character come as text only when the run has ended.
    rest = str(end.summary.get("text", shown)).removeprefix(shown)
    _write(plain(rest))
    if shown + rest and not (shown + rest).endswith("\n"):
        _write("\n")
    if as_json:
        print(json.dumps({**end.summary, "why": end.why}, ensure_ascii=False, allow_nan=False), flush=True)
    else:
        _print_figures(end.summary)
    if failure:
        say(plain(failure))
        return WRONG_INPUT
    if end.why in ("stop", "interrupted"):
        say("stopped.")
        return INTERRUPTED
    return OK


def _write(words: str) -> None:
    sys.stdout.write(words)
    sys.stdout.flush()


def _print_figures(summary: dict[str, Any]) -> None:
    """Two lines on stderr: bytes and speed, then what the cache missed."""
    kv, timing, metrics = summary.get("kv"), summary.get("timing"), summary.get("metrics")
    if kv and timing:
        say(
            f"{summary['num_tokens']} tokens, {timing['tokens_per_s']:.1f} tok/s, backend {summary['backend']}, "
            f"KV {kv['peak_persistent_bytes'] / 1e6:.2f} MB, FullKV {kv['full_kv_bytes'] / 1e6:.2f} MB "
            f"at this length ({kv['share']:.1%}, {kv['kv_dtype']})."
        )
    if metrics:
        shown = {name: metrics.get(name) for name in ("fmm", "fmm_history", "fmm_fp_only", "churn")}
        say(", ".join(f"{name} {value:.4f}" for name, value in shown.items() if value is not None) + ".")


@contextlib.contextmanager
def _stop_on_ctrl_c() -> Iterator[Callable[[], bool]]:
    """Yields a function that says whether Ctrl-C was pressed; a second press raises KeyboardInterrupt."""
    pressed = False

    def press(_number: int, _frame: FrameType | None) -> None:
        nonlocal pressed
        if pressed:
            raise KeyboardInterrupt
        pressed = True

    try:
        before = signal.signal(signal.SIGINT, press)
    except ValueError:
        # Not the main thread: signals belong to somebody else.
        yield lambda: False
        return
    try:
        yield lambda: pressed
    finally:
        signal.signal(signal.SIGINT, before)


class LoadBar:
    """A progress bar for each stage of loading a model; none where stderr is not a terminal."""

    def __init__(self) -> None:
        self._bar: tqdm[Any] | None = None
        self._stage = ""

    def __enter__(self) -> LoadBar:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def show(self, progress: Progress) -> None:
        """Moves the bar."""
        if self._bar is None or self._stage != progress.stage:
            self.__exit__()
            self._stage = progress.stage
            self._bar = tqdm(total=progress.total, desc=progress.stage, file=sys.stderr, leave=False, disable=None)
        self._bar.update(progress.done - self._bar.n)


class _Record:
    """Stores a run as it happens; a store that fails is said once and the run goes on."""

    def __init__(self, sessions: Sessions, session: str, request: RunRequest) -> None:
        self._sessions = sessions
        self._session = session
        self._request = request
        self._seq = 0
        self._broken = False
        self._ended = False

    def take(self, event: TraceEvent) -> None:
        """Stores one event under the next number."""
        if self._broken:
            return
        try:
            if self._seq == 0:
                self._sessions.create(
                    model=event.model if isinstance(event, RunMeta) else self._request.model,
                    policy=self._request.policy,
                    settings=self._request.record(),
                    title=self._request.session_title,
                    versions=event.versions if isinstance(event, RunMeta) else {},
                    session=self._session,
                )
            self._sessions.append(self._session, [encode(event, self._seq)])
            self._seq += 1
            if isinstance(event, EndEvent):
                self._ended = True
                summary = {**event.summary, "why": event.why}
                self._sessions.finish(self._session, STATES.get(event.why, "error"), summary)
        except StoreError as error:
            self._broken = True
            say(f"{error} The run goes on without being stored.")

    def fail(self, sentence: str) -> None:
        """Stores why a run that had begun could not go on."""
        if self._seq and not self._ended:
            self.take(ErrorEvent(sentence))
            self.take(EndEvent("error"))

    def close(self) -> None:
        """Writes what is waiting; a run without an end is stored as stopped."""
        with contextlib.suppress(StoreError):
            if self._seq and not self._ended and not self._broken:
                self._sessions.append(self._session, [encode(EndEvent("stop"), self._seq)])
                self._sessions.finish(self._session, "stopped")
            self._sessions.close()
