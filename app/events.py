"""The event bus: what a running session says, to any number of followers.

One channel per running session holds its newest wire messages in a ring. A follower owns no queue, only
a cursor into that ring, so a slow one costs no memory; one that fell out of the ring is brought back by
`history`. Carries `engine.trace`'s bytes as they are: it reads their head, never their body. Knows asyncio;
knows no database, no web framework.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import replace

from engine.errors import EngineError, TraceError
from engine.trace import StepEvent, TraceEvent

log = logging.getLogger("qevict.events")

PING_SECONDS = 15.0
TOKEN_HZ = 20.0
BATCH = 256
SSE_HEADERS = {
    "Cache-Control": "no-cache, no-transform",
    "X-Accel-Buffering": "no",
    "Content-Type": "text/event-stream; charset=utf-8",
}
PING = b": ping\n\n"
OPENING = b"retry: 1000\n\n"

_HEAD = re.compile(rb'\{"k":"([a-z]+)","s":(-?\d+)(?:,"r":(-?\d+))?')

History = Callable[[str, int], Iterable[bytes]]
"""(session, from_seq) -> stored messages; may raise an `EngineError`, then there are none."""


def head(body: bytes) -> tuple[str, int, int | None]:
    """Kind, seq and routing event (or None) of a wire message, without parsing its body.

    Raises:
        TraceError: the bytes are not a wire message.
    """
    match = _HEAD.match(body)
    if match:
        event_id = match[3]
        return match[1].decode("ascii"), int(match[2]), None if event_id is None else int(event_id)
    try:
        fields = json.loads(body)
        event_id = fields.get("r")
        return str(fields["k"]), int(fields["s"]), None if event_id is None else int(event_id)
    except (ValueError, KeyError, TypeError, AttributeError, UnicodeDecodeError) as error:
        raise TraceError(f"not a trace message: {body[:60]!r}.") from error


def frame(body: bytes, seq: int) -> bytes:
    """One server-sent event; a message with negative `seq` has no id, so that it can't be resumed from."""
    if seq < 0:
        return b"data: " + body + b"\n\n"
    return b"id: %d\ndata: %s\n\n" % (seq, body)


class TokenCoalescer:
    """Joins token events that come faster than `hz`; everything else passes at once and in order."""

    def __init__(self, hz: float = TOKEN_HZ, clock: Callable[[], float] = time.monotonic) -> None:
        self._gap = 1.0 / hz
        self._clock = clock
        self._held: StepEvent | None = None
        self._last = float("-inf")

    def push(self, event: TraceEvent) -> list[TraceEvent]:
        """The events that are due now, `event` among them unless it is a token that can wait."""
        if not isinstance(event, StepEvent):
            return [*self.flush(), event]
        held = self._held
        if held is not None:
            event = replace(event, pieces=[*held.pieces, *event.pieces], ids=[*held.ids, *event.ids])
        self._held = event
        return self.flush() if self._clock() - self._last >= self._gap else []

    def flush(self) -> list[TraceEvent]:
        """The token event that was held back, if any."""
        held, self._held = self._held, None
        if held is None:
            return []
        self._last = self._clock()
        return [held]


class Channel:
    """The newest messages of one running session. Safe from any thread.

    `read` and `first_seq` speak of a dense numbering: message n+1 follows message n.
    """

    def __init__(self, session: str, ring_size: int) -> None:
        self.session = session
        self._ring: deque[bytes] = deque(maxlen=ring_size)
        self._next = 0
        self._closed = False
        self._status: bytes | None = None
        self._status_count = 0
        self._lock = threading.Lock()
        self._waiting: dict[asyncio.AbstractEventLoop, set[asyncio.Event]] = {}

    @property
    def next_seq(self) -> int:
        """Number of the message that comes next."""
        return self._next

    @property
    def first_seq(self) -> int:
        """Number of the oldest message that is still in the ring."""
        with self._lock:
            return self._next - len(self._ring)

    @property
    def closed(self) -> bool:
        """Whether the session has ended; what is in the ring can still be read."""
        return self._closed

    def publish(self, body: bytes, seq: int) -> None:
        """Appends message `seq`, which must be `next_seq`, and wakes the followers."""
        with self._lock:
            if seq != self._next:
                raise TraceError(f"message {self._next} must come next in session {self.session}, got {seq}.")
            self._ring.append(body)
            self._next += 1
            self._status = None
        self._wake()

    def say(self, body: bytes) -> None:
        """Shows a passing message (place in the queue, loading): not numbered, not stored, only the newest kept."""
        with self._lock:
            self._status = body
            self._status_count += 1
        self._wake()

    def close(self) -> None:
        """No more messages: followers end when they have read what there is."""
        with self._lock:
            self._closed = True
            self._status = None
        self._wake()

    def read(self, from_seq: int, limit: int = BATCH) -> tuple[int, list[bytes]]:
        """Up to `limit` messages from `from_seq` on: (number of the first one, messages).

        The first number is larger than `from_seq` where the ring no longer reaches back so far.
        """
        with self._lock:
            first = self._next - len(self._ring)
            start = max(from_seq, first)
            stop = min(self._next, start + limit)
            if stop <= start:
                return start, []
            offset = start - first
            if offset == 0 and stop == self._next:
                return start, list(self._ring)
            return start, [self._ring[index] for index in range(offset, stop - first)]

    def status(self, seen: int) -> tuple[int, bytes | None]:
        """The passing message, if it is newer than the one counted `seen`."""
        with self._lock:
            return self._status_count, self._status if self._status_count > seen else None

    def subscribe(self) -> asyncio.Event:
        """An event of the current loop that is set whenever something new can be read."""
        event = asyncio.Event()
        with self._lock:
            self._waiting.setdefault(asyncio.get_running_loop(), set()).add(event)
        return event

    def unsubscribe(self, event: asyncio.Event) -> None:
        """Stops waking `event`."""
        loop = asyncio.get_running_loop()
        with self._lock:
            events = self._waiting.get(loop)
            if events is not None:
                events.discard(event)
                if not events:
                    del self._waiting[loop]

    @property
    def followers(self) -> int:
        """How many wait on this channel."""
        with self._lock:
            return sum(len(events) for events in self._waiting.values())

    def _wake(self) -> None:
        with self._lock:
            loops = list(self._waiting)
        for loop in loops:
            try:
                loop.call_soon_threadsafe(self._set_all, loop)
            except RuntimeError:  # that loop has been closed: its followers are gone
                with self._lock:
                    self._waiting.pop(loop, None)

    def _set_all(self, loop: asyncio.AbstractEventLoop) -> None:
        with self._lock:
            events = list(self._waiting.get(loop, ()))
        for event in events:
            event.set()


class Bus:
    """All channels of a server.

    Args:
        ring_size: messages kept per running session.
        history: all stored messages, for a session that has ended.
        catch_up: what brings a follower who fell out of the ring up to now; None = `history`.
        keep_unsaved: ended sessions that could not be stored and are kept in memory instead.
    """

    def __init__(
        self,
        ring_size: int = 8192,
        history: History | None = None,
        catch_up: History | None = None,
        keep_unsaved: int = 4,
    ) -> None:
        self._ring_size = ring_size
        self._history = history
        self._catch_up = catch_up or history
        self._keep_unsaved = keep_unsaved
        self._channels: dict[str, Channel] = {}
        self._unsaved: deque[str] = deque()
        self._lock = threading.Lock()

    def open(self, session: str) -> Channel:
        """The channel of a session that begins."""
        channel = Channel(session, self._ring_size)
        with self._lock:
            self._channels[session] = channel
        return channel

    def channel(self, session: str) -> Channel | None:
        """The channel of a running session, or of an ended one that was not stored."""
        with self._lock:
            return self._channels.get(session)

    def retire(self, session: str, *, stored: bool) -> None:
        """Ends a channel; followers read it to its end. One that is not stored stays readable for a while."""
        with self._lock:
            channel = self._channels.get(session)
            if stored:
                self._channels.pop(session, None)
            else:
                self._unsaved.append(session)
                while len(self._unsaved) > self._keep_unsaved:
                    self._channels.pop(self._unsaved.popleft(), None)
        if channel is not None:
            channel.close()

    def forget(self, session: str) -> None:
        """Drops a channel and everything in it."""
        with self._lock:
            channel = self._channels.pop(session, None)
            if session in self._unsaved:
                self._unsaved.remove(session)
        if channel is not None:
            channel.close()

    def close(self) -> None:
        """Ends all channels, so that every stream of this server ends."""
        with self._lock:
            channels = list(self._channels.values())
        for channel in channels:
            channel.close()

    @property
    def followers(self) -> int:
        """How many streams wait on running sessions."""
        with self._lock:
            channels = list(self._channels.values())
        return sum(channel.followers for channel in channels)

    async def follow(
        self, session: str, after: int = -1, *, ping_seconds: float = PING_SECONDS
    ) -> AsyncIterator[bytes]:
        """Server-sent events of a session from message `after + 1` on, until it ends.

        Every message comes exactly once and in order. Only where a follower fell out of the ring may numbers be
        missing: moves before the keyframe that it gets instead. Comes to an end for a session that is not running.
        """
        yield OPENING
        channel = self.channel(session)
        cursor = after + 1
        if channel is None:
            async for chunk, _ in _recall(self._history, session, cursor):
                yield chunk
            return
        news = channel.subscribe()
        seen = 0
        try:
            while True:
                news.clear()
                closed = channel.closed
                first, bodies = channel.read(cursor)
                if first > cursor:
                    async for chunk, last in _recall(self._catch_up, session, cursor):
                        cursor = last + 1
                        yield chunk
                    cursor = max(cursor, channel.first_seq)
                    continue
                if bodies:
                    cursor = first + len(bodies)
                    yield b"".join(frame(body, first + index) for index, body in enumerate(bodies))
                    continue
                seen, status = channel.status(seen)
                if status is not None:
                    yield frame(status, -1)
                if closed:
                    return
                try:
                    async with asyncio.timeout(ping_seconds):
                        await news.wait()
                except TimeoutError:
                    yield PING
        finally:
            channel.unsubscribe(news)


async def _recall(history: History | None, session: str, from_seq: int) -> AsyncIterator[tuple[bytes, int]]:
    """Stored messages in chunks of frames, each with the number of its last message."""
    if history is None:
        return
    rows: Iterable[bytes] | None = None
    while True:
        try:
            if rows is None:
                rows = iter(history(session, from_seq))
            page = await asyncio.to_thread(_take, rows, BATCH)
        except EngineError:
            log.warning("session %s: its stored messages can't be read", session, exc_info=True)
            return
        if not page:
            return
        numbers = [head(body)[1] for body in page]
        yield b"".join(frame(body, seq) for body, seq in zip(page, numbers, strict=True)), numbers[-1]


def _take(rows: Iterable[bytes], count: int) -> list[bytes]:
    out = []
    for body in rows:
        out.append(body)
        if len(out) == count:
            break
    return out
