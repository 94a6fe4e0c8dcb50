"""One run while it waits and goes on: who asked, where it stands, whether it is to stop.

Knows its request and its output; knows no queue, no engine.
"""

from __future__ import annotations

import secrets
import threading
import time
from contextvars import Context
from dataclasses import dataclass, field

from app.run_output import RunOutput
from app.run_request import RunRequest
from engine.trace import Progress

STOP_SECONDS = 5.0
"""How long the engine may take to sum up a run that was stopped, before it is cut off."""

DEFAULT_TOKENS = 256
"""What a run generates that does not say how much."""


@dataclass(frozen=True, slots=True)
class RunStatus:
    """Where a run stands: "queued", "loading", "running" or "ended".

    Attributes:
        ahead: runs that come before a queued one.
        wait_seconds: how long a queued one will wait, judged by runs that have ended; None = not known yet.
    """

    state: str
    ahead: int = 0
    wait_seconds: float | None = None
    stage: str = ""
    done: int = 0
    total: int = 0


@dataclass(eq=False, slots=True)
class Run:
    """One run that is waiting or going on."""

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
    said: str = ""
    """Why it was stopped, to be said in the trace."""
    entered: float = field(default_factory=time.monotonic)
    began: float = 0.0
    seen: float = field(default_factory=time.monotonic)
    """When somebody last looked at it."""
    done: threading.Event = field(default_factory=threading.Event)
    context: Context = field(default_factory=Context)
    """What its request was: a GPU that is lent by the second is asked for in it."""

    @property
    def tokens(self) -> int:
        """Tokens that were asked for."""
        return int(self.request.option_values.get("max_new_tokens", DEFAULT_TOKENS))

    @property
    def group(self) -> tuple[str, ...]:
        """Runs of one group may share the device."""
        request = self.request
        return (self.session,) if request.job is not None else (request.model, request.device, request.dtype)

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
