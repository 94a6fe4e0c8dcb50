"""A server without page, over a made-up engine, for tests that end or kill a process: python -m tests.app.served"""

from __future__ import annotations

import sys
from typing import Any

import app.main as served
from app.context import create_context
from app.settings import Settings
from tests.app.fake_engine import FakeEngine, FakeLoader, FakeOptions


def main(delay: float = 0.005) -> None:
    """Serves as `qevict serve` does, with the routes alone."""
    from fastapi import FastAPI
    from starlette.middleware import Middleware

    from app.api import include_routes
    from app.gate import Gate

    engine = FakeEngine(delay=delay)

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
