"""Watching one run for the page's words: where it stands, how far it is, what it said and how it ended.

Reads the same wire messages as the board, at a calm pace. Knows the bus, the runs and the store; knows no page.
"""

from __future__ import annotations

import json
import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from app.events import head
from engine.errors import EngineError

if TYPE_CHECKING:
    from app.events import Bus, Channel
    from app.runs import RunManager
    from app.sessions import Sessions

WORDS = ("meta", "tok", "end")
"""What is read. A run's error is left to the board, which hears the same message: it is said once."""
RATE_SECONDS = 4.0
PAGE = 1024


@dataclass(slots=True)
class Standing:
    """A run as it stands. `state` is "queued", "loading", "running" or "ended"; tokens are generated ones.

    `trouble` says why a run's end can't be read; it is not the run's own error. `wait_seconds` is what a queued one
    will wait, None = not known yet.
    """

    state: str = "queued"
    ahead: int = 0
    stage: str = ""
    done: int = 0
    total: int = 0
    tokens: int = 0
    planned: int = 0
    rate: float | None = None
    notices: list[str] = field(default_factory=list)
    trouble: str = ""
    why: str = ""
    wait_seconds: float | None = None
    summary: dict[str, Any] = field(default_factory=dict)


class RunWatch:
    """Follows one session from its first message on; `poll` says how it stands now."""

    def __init__(self, session: str, runs: RunManager, bus: Bus, sessions: Sessions) -> None:
        self._session = session
        self._runs = runs
        self._sessions = sessions
        self._channel: Channel | None = bus.channel(session)
        self._cursor = 0
        self._prompt = 0
        self._pace: deque[tuple[float, int]] = deque()
        self._now = Standing()

    def poll(self) -> Standing:
        """Reads what is new. Once `state` is "ended", `why`, `error` and `summary` are final."""
        now = self._now
        if now.state == "ended":
            return now
        status = self._runs.status(self._session)
        self._read()
        now.state = "ended" if now.why else status.state
        now.ahead, now.stage, now.done, now.total = status.ahead, status.stage, status.done, status.total
        now.wait_seconds = status.wait_seconds
        if now.state == "ended" and not now.why:
            self._recall()
        return now

    def _read(self) -> None:
        channel = self._channel
        if channel is None:
            return
        while True:
            first, bodies = channel.read(self._cursor, PAGE)
            if not bodies:
                return
            for body in bodies:
                self._take(body)
            self._cursor = first + len(bodies)

    def _recall(self) -> None:
        """The end from the store, for a run whose messages this watch did not hear."""
        try:
            for body in self._sessions.events(self._session, 0, WORDS):
                self._take(body)
        except EngineError as error:
            self._now.trouble = str(error)
        self._now.why = self._now.why or "interrupted"

    def _take(self, body: bytes) -> None:
        kind = head(body)[0]
        if kind not in WORDS:
            return
        message = json.loads(body)
        now = self._now
        if kind == "meta":
            self._prompt = message["prompt_tokens"]
            now.planned = message["planned_tokens"] - self._prompt
            now.notices = list(message.get("notices", []))
        elif kind == "tok":
            now.tokens = max(0, message["t"] - self._prompt)
            now.rate = self._measure(now.tokens)
        else:
            now.why, now.summary = message["why"], message["summary"]

    def _measure(self, tokens: int) -> float | None:
        """Tokens per second over the last few seconds."""
        clock = time.monotonic()
        self._pace.append((clock, tokens))
        while len(self._pace) > 2 and clock - self._pace[0][0] > RATE_SECONDS:
            self._pace.popleft()
        begin, count = self._pace[0]
        return (tokens - count) / (clock - begin) if clock - begin > 0.5 else self._now.rate
