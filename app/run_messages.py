"""All messages of one run, each once and in order, for code that waits for it: from memory, or from the store.

Knows the bus and the store; knows no web framework.
"""

from __future__ import annotations

import asyncio
from itertools import islice

from app.events import Bus
from app.sessions import Sessions
from engine.errors import EngineError

PAGE = 1024


class RunMessages:
    """Reads a session from its first message on."""

    def __init__(self, session: str, bus: Bus, sessions: Sessions) -> None:
        self._session = session
        self._sessions = sessions
        self._channel = bus.channel(session)
        self._cursor = 0

    def read(self) -> list[bytes]:
        """What is new, up to a page.

        Raises:
            EngineError: what comes next is neither in memory nor in the store.
        """
        channel = self._channel
        if channel is not None:
            first, bodies = channel.read(self._cursor, PAGE)
            if first == self._cursor:
                self._cursor += len(bodies)
                return bodies
            self._sessions.flush()  # fell out of the ring: what is missing has gone to the store
        bodies = list(islice(self._sessions.events(self._session, self._cursor), PAGE))
        if not bodies:
            raise EngineError("the rest of this run can't be read.")
        self._cursor += len(bodies)
        return bodies

    def subscribe(self) -> asyncio.Event:
        """An event of the current loop that is set when there is something new."""
        event = asyncio.Event()
        if self._channel is None:
            event.set()
            return event
        return self._channel.subscribe()

    def unsubscribe(self, event: asyncio.Event) -> None:
        """Stops waking `event`."""
        if self._channel is not None:
            self._channel.unsubscribe(event)
