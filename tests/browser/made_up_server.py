"""The product's server with a made-up engine: 30 rows, 512 windows, a given number of events per second.

    python -m tests.browser.made_up_server EVENTS PER_SECOND

No model, no torch: what is measured in the browser is the page and the server alone.
"""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Iterator
from typing import Any

import uvicorn

from app.context import create_context
from app.main import create_app
from app.settings import Settings
from engine.trace import RoutingEvent, TraceEvent
from tests.app.fake_engine import FakeLoader, FakeOptions
from tests.visuals.synthetic import Plan, synthetic_events

WINDOWS = 512


def main(events: int, per_second: float) -> None:
    """Serves until the process is ended; the port is free choice and printed."""
    run = synthetic_events(Plan(prompt=(WINDOWS - events) * 8, events=events, full=40, quant=150))

    def engine(*_: Any, **__: Any) -> Iterator[TraceEvent]:
        due = time.monotonic()
        for event in run:
            if isinstance(event, RoutingEvent):
                due += 1 / per_second
                time.sleep(max(0.0, due - time.monotonic()))
            yield event

    settings = Settings.from_env()
    context = create_context(settings, engine=engine, loader=FakeLoader(), options=FakeOptions)
    app = create_app(settings, context)
    listening = socket.create_server(("127.0.0.1", 0))
    print(f"A made-up run is at http://127.0.0.1:{listening.getsockname()[1]}/ now", flush=True)
    uvicorn.Server(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=2)).run(sockets=[listening])


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]))
