"""Where a run's events go: numbered and encoded once, then the same bytes to the bus and to the store.

Knows the bus and the store; knows no engine, no queue.
"""

from __future__ import annotations

import logging
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError

from app.events import Channel, TokenCoalescer
from app.sessions import Sessions
from app.store_file import StoreError
from app.tally import Tally
from engine.trace import EndEvent, ErrorEvent, Keyframe, Progress, RoutingEvent, RunMeta, TraceEvent, encode

log = logging.getLogger("qevict.runs")

STATE_OF = {
    "eos": "done",
    "length": "done",
    "stop": "stopped",
    "interrupted": "interrupted",
    "error": "error",
}


class RunOutput:
    """Sends one run's events. For one thread at a time.

    At a routing event it waits until the one before is on disk, so that a killed process loses at most the last
    interval. A store that fails is said once; the run goes on.

    Args:
        stored: whether the session has a row in the store.
    """

    def __init__(
        self, session: str, channel: Channel, sessions: Sessions, *, stored: bool, wait_seconds: float = 5.0
    ) -> None:
        self.session = session
        self.tally = Tally()
        self.stored = stored
        self.ended = False
        self._channel = channel
        self._sessions = sessions
        self._wait_seconds = wait_seconds
        self._coalescer = TokenCoalescer()
        self._seq = 0
        self._pending: Future[None] | None = None
        self._complained = False

    def emit(self, event: TraceEvent) -> None:
        """Sends an event; its own number is replaced by the next one."""
        self.tally.take(event)
        for due in self._coalescer.push(event):
            self._send(due)

    def progress(self, event: Progress) -> None:
        """Before the run has begun: shown to followers, neither numbered nor stored."""
        self._channel.say(encode(event, -1))

    def end(self, event: EndEvent) -> bool:
        """Sends the last event and returns whether the whole session is safely stored."""
        self.emit(event)
        self.ended = True
        if not self.stored:
            return False
        summary = {**event.summary, "why": event.why}
        done = self._sessions.finish(self.session, STATE_OF.get(event.why, "error"), summary)
        return self._is_written(done)

    def _send(self, event: TraceEvent) -> None:
        body = encode(event, self._seq)
        self._channel.publish(body, self._seq)
        self._seq += 1
        if not self.stored:
            return
        if isinstance(event, RunMeta):
            self._sessions.update(self.session, model=event.model, versions=event.versions)
        written = self._sessions.append(self.session, [body])
        if isinstance(event, Keyframe | RoutingEvent):
            before, self._pending = self._pending, written
            if before is not None and not self._is_written(before):
                self._complain(before)

    def _is_written(self, future: Future[None]) -> bool:
        try:
            future.result(timeout=self._wait_seconds)
        except (StoreError, FutureTimeoutError):
            return False
        return True

    def _complain(self, future: Future[None]) -> None:
        if self._complained:
            return
        self._complained = True
        failure = future.exception() if future.done() else None
        reason = str(failure) if failure is not None else "sessions can't be stored fast enough."
        log.error("session %s: %s", self.session, reason)
        self._send(ErrorEvent(f"{reason} The run goes on; it may be missing from the stored sessions."))
