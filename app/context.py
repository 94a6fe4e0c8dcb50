"""What the parts of one server share.

Knows how they are put together; knows no page and no route.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from app.events import Bus
from app.runs import RunManager
from app.sessions import Sessions
from app.settings import Settings


@dataclass(frozen=True, slots=True)
class AppContext:
    """One server's settings, store, bus and runs."""

    settings: Settings
    sessions: Sessions
    bus: Bus
    runs: RunManager

    def close(self) -> None:
        """Ends runs as "interrupted", ends all streams, writes what is left."""
        self.runs.close()
        self.bus.close()
        self.sessions.close()


def create_context(settings: Settings, **parts: Any) -> AppContext:
    """Puts a server's parts together; opens nothing yet. `parts` go to `RunManager`: engine, loader, options."""
    sessions = Sessions(settings.database, wait_seconds=settings.store_wait_seconds, max_backlog=settings.ring_size)
    bus = Bus(settings.ring_size, sessions.events, sessions.catch_up)
    return AppContext(settings, sessions, bus, RunManager(settings, sessions, bus, **parts))
