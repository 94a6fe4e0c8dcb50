"""A server without page, over a made-up engine, for tests that end or kill a process: python -m tests.app.served"""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Iterator
from typing import Any

import app.main as served
from app.context import create_context
from app.settings import Settings
from engine.trace import StepEvent, TraceEvent
from tests.app.fake_engine import FakeEngine, FakeLoader, FakeOptions


class Stamped(FakeEngine):
    """Each token's text is the time at which it was made, on the clock that all processes of a machine share."""

    def _events(self, *arguments: Any) -> Iterator[TraceEvent]:
        for event in super()._events(*arguments):
            if isinstance(event, StepEvent):
                event = dataclasses.replace(event, pieces=[f" {time.monotonic():.4f}"])
            yield event


def main(delay: float = 0.005) -> None:
    """Serves as `qevict serve` does, with the routes alone."""
    from fastapi import FastAPI
    from starlette.middleware import Middleware

    from app.api import include_routes
    from app.gate import Gate

    engine = Stamped(delay=delay)

    def create_app(settings: Settings, context: Any) -> FastAPI:
        gate = Middleware(Gate, settings=settings, signature=context.signature)
        app = FastAPI(docs_url=None, openapi_url=None, middleware=[gate])
        include_routes(app, context)
        served.open_store(context)
        return app

    served.create_app = create_app  # type: ignore[assignment]
    served.create_context = lambda settings: create_context(
        settings, engine=engine, loader=FakeLoader(), options=FakeOptions
    )
    served.serve(Settings.from_env())


if __name__ == "__main__":
    main(*map(float, sys.argv[1:]))
