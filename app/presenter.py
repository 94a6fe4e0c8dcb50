"""Presentations: one person shows, everybody who has the link follows. In memory; a position, never any content.

A presentation is one small state in a ring of its own: a follower owns a cursor and no queue, and what is pushed
never touches the engine. Only who holds the token that `begin` gave may push. Knows asyncio through `Channel`;
knows no route, no session and no page.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import secrets
import threading
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any, Final

from app.events import OPENING, PING, PING_SECONDS, Channel
from app.presenter_place import Place
from engine.errors import EngineError

RING: Final = 64
"""States that a slow follower may lag behind before it jumps to the newest."""
MOST_PRESENTATIONS: Final = 64
KEPT_SECONDS: Final = 100.0
"""A presenter that says nothing for so long has left. A page in the background is woken once a minute."""
PUSHES_PER_SECOND: Final = 20.0
BURST: Final = 40.0


class PresentError(EngineError, RuntimeError):
    """A presentation can't be begun or changed; the text says why."""


class TakenError(PresentError):
    """Somebody else presents this, or too many present."""


class NotPresentingError(PresentError):
    """The token is not that of the presentation that goes on, if one does."""


class TooFastError(PresentError):
    """More pushes than a presentation may make."""


@dataclass(slots=True)
class _Room:
    """Followers of one key, and the presenter if there is one."""

    channel: Channel
    followers: int = 0
    token: str = ""
    user: str = ""
    used: float = 0.0
    allowance: float = BURST
    notes: int = 0
    place: Place = field(default_factory=Place)


class Presentations:
    """All presentations of one server. Safe from any thread.

    Args:
        clock: seconds that only go up; for tests.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._rooms: dict[str, _Room] = {}
        self._closed = False

    @property
    def followers(self) -> int:
        """How many streams are open."""
        with self._lock:
            return sum(room.followers for room in self._rooms.values())

    @property
    def count(self) -> int:
        """How many presentations go on."""
        with self._lock:
            return sum(1 for room in self._rooms.values() if room.token)

    def begin(self, key: str, user: str = "") -> str:
        """Begins a presentation and returns the token that may change it. The same user's older one is taken over.

        Raises:
            TakenError: somebody else presents this, or too many present.
        """
        with self._lock:
            for name in list(self._rooms):
                self._expire(name)
            room = self._rooms.get(key)
            if room is not None and room.token and not (user and hmac.compare_digest(room.user, user)):
                raise TakenError("somebody presents this already: it can be followed until they end it.")
            if (room is None or not room.token) and self._presenting() >= MOST_PRESENTATIONS:
                raise TakenError(f"{MOST_PRESENTATIONS} presentations go on already: try again later.")
            room = self._rooms.setdefault(key, _Room(Channel(key, RING)))
            room.token, room.user, room.used = secrets.token_urlsafe(16), user, self._clock()
            room.allowance, room.notes, room.place = BURST, room.notes + 1, Place()
            return room.token

    def push(self, key: str, token: str, place: Place) -> int:
        """Moves the followers to `place` and returns how many there are.

        Raises:
            NotPresentingError: not the presenter's token.
            TooFastError: too many pushes.
        """
        with self._lock:
            room = self._presented(key, token)
            now = self._clock()
            room.allowance = min(BURST, room.allowance + (now - room.used) * PUSHES_PER_SECOND)
            room.used = now
            if room.allowance < 1.0:
                raise TooFastError(f"at most {PUSHES_PER_SECOND:.0f} pushes a second.")
            room.allowance -= 1.0
            room.place = place
            self._publish(room)
            return room.followers

    def notes_changed(self, key: str) -> None:
        """Lets the followers of a presentation, if there is one, read its notes again."""
        with self._lock:
            room = self._rooms.get(key)
            if room is not None and room.token:
                room.notes += 1
                self._publish(room)

    def end(self, key: str, token: str) -> None:
        """Ends a presentation.

        Raises:
            NotPresentingError: not the presenter's token.
        """
        with self._lock:
            self._end(key, self._presented(key, token))

    def forget(self, key: str) -> None:
        """Ends the presentation of something that is gone, and its followers' streams."""
        with self._lock:
            room = self._rooms.pop(key, None)
            if room is not None:
                room.token = ""
                self._publish(room)
                room.channel.close()

    def state(self, key: str) -> dict[str, Any]:
        """What a follower is shown now."""
        with self._lock:
            self._expire(key)
            room = self._rooms.get(key)
            return _state(room) if room is not None else {"on": False}

    def close(self) -> None:
        """Ends every presentation and every stream."""
        with self._lock:
            self._closed = True
            rooms = list(self._rooms.values())
            self._rooms.clear()
        for room in rooms:
            room.channel.close()

    async def follow(self, key: str, *, ping_seconds: float = PING_SECONDS) -> AsyncIterator[bytes]:
        """Server-sent events named "present": the state now, then every one that is pushed.

        Goes on while nobody presents. A follower that falls `RING` states behind goes on at the oldest that is left.
        """
        yield OPENING
        with self._lock:
            if self._closed:
                return
            self._expire(key)
            room = self._rooms.setdefault(key, _Room(Channel(key, RING)))
            room.followers += 1
            now, cursor = _frame(_state(room)), room.channel.next_seq
        news = room.channel.subscribe()
        try:
            yield now
            while True:
                news.clear()
                closed = room.channel.closed
                first, bodies = room.channel.read(cursor, RING)
                if bodies:
                    cursor = first + len(bodies)
                    yield b"".join(bodies)
                    continue
                if closed:
                    return
                try:
                    async with asyncio.timeout(ping_seconds):
                        await news.wait()
                except TimeoutError:
                    with self._lock:
                        self._expire(key)
                    yield PING
        finally:
            room.channel.unsubscribe(news)
            with self._lock:
                room.followers -= 1
                self._drop(key, room)

    def _presenting(self) -> int:
        return sum(1 for room in self._rooms.values() if room.token)

    def _presented(self, key: str, token: str) -> _Room:
        self._expire(key)
        room = self._rooms.get(key)
        if room is None or not room.token or not hmac.compare_digest(room.token.encode(), token.encode()):
            raise NotPresentingError("you do not present this, or no longer.")
        return room

    def _expire(self, key: str) -> None:
        room = self._rooms.get(key)
        if room is not None and room.token and self._clock() - room.used > KEPT_SECONDS:
            self._end(key, room)

    def _end(self, key: str, room: _Room) -> None:
        room.token = room.user = ""
        self._publish(room)
        self._drop(key, room)

    def _drop(self, key: str, room: _Room) -> None:
        """Forgets a room in which nobody is left."""
        if not room.followers and not room.token and self._rooms.get(key) is room:
            del self._rooms[key]

    def _publish(self, room: _Room) -> None:
        room.channel.publish(_frame(_state(room)), room.channel.next_seq)


def _state(room: _Room) -> dict[str, Any]:
    return {"on": True, "notes": room.notes, **room.place.to_dict()} if room.token else {"on": False}


def _frame(state: dict[str, Any]) -> bytes:
    # No id: a browser's Last-Event-ID stays that of the run which may come in the same stream.
    return b"event: present\ndata: " + json.dumps(state, separators=(",", ":")).encode() + b"\n\n"
