"""The server: the page and the HTTP interface in one FastAPI application. Nothing happens at import.

Knows how the rooms of the app fit together; computes nothing itself.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from app.context import AppContext, create_context
from app.housekeeping import UPLOADS
from app.logs import set_up
from app.settings import LARGEST_UPLOAD_BYTES, Settings
from app.store_file import StoreError
from app.visitors import SCOPE_KEY, Visitor
from engine.errors import EngineError

if TYPE_CHECKING:
    import uvicorn
    from fastapi import FastAPI, Request
    from starlette.middleware import Middleware

__all__ = ["AppContext", "StartError", "create_app", "create_context", "serve"]

log = logging.getLogger("qevict.app")

SHUTDOWN_SECONDS = 5
KEEP_ALIVE_SECONDS = 75
"""Longer than proxies keep an idle connection: else one asks just as the server hangs up, and gets no answer."""


class StartError(EngineError, RuntimeError):
    """The server can't start; the text says why."""


def create_app(settings: Settings, context: AppContext | None = None) -> FastAPI:
    """The whole application: routes under /qe, the page at /."""
    prepare_gradio(settings)
    import gradio as gr
    from fastapi import FastAPI

    from app.api import include_routes
    from app.api_route import program_version
    from app.ui import build_ui

    shared = context or create_context(settings)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await asyncio.to_thread(open_store, shared)
        yield
        await asyncio.to_thread(shared.close)

    app = FastAPI(
        title="QEvict Lab",
        version=program_version(),
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        middleware=gates(shared),
    )
    app.state.context = shared
    include_routes(app, shared)  # before the page, which takes every other address
    mounted: FastAPI = gr.mount_gradio_app(app, build_ui(shared), path="/", show_error=True, **entry_options(shared))
    return mounted


def gates(context: AppContext) -> list[Middleware]:
    """What every request passes before it reaches page or routes."""
    from starlette.middleware import Middleware

    from app.gate import Gate, inline_scripts
    from app.look import head

    inline = inline_scripts(head())
    return [
        Middleware(
            Gate,
            settings=context.settings,
            signature=context.signature,
            inline=inline,
            metrics=context.runs.metrics,
        )
    ]


def entry_options(context: AppContext) -> dict[str, Any]:
    """What both `launch` and `mount_gradio_app` need: the page's looks, the largest file, who is logged in."""
    from app.ui import page_options

    options = {**page_options(), "max_file_size": LARGEST_UPLOAD_BYTES}
    if context.settings.login:
        options["auth_dependency"] = logged_in
    return options


def logged_in(request: Request) -> str | None:
    """The name that the gate let in; None keeps a request out that did not come through the gate."""
    visitor = request.scope.get(SCOPE_KEY)
    return visitor.user if isinstance(visitor, Visitor) and visitor.user.startswith("login:") else None


def prepare_gradio(settings: Settings) -> None:
    """Sets what Gradio reads from the environment when it is imported: no telemetry, files in a folder of our own."""
    os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")
    os.environ.setdefault("GRADIO_TEMP_DIR", str((settings.data_dir / UPLOADS).resolve()))


def open_store(context: AppContext) -> None:
    """Opens the store, from a copy if need be; where that fails the server runs without one and says so."""
    context.housekeeping.restore()
    try:
        context.sessions.open()
    except StoreError as error:
        log.error("%s", error)
    context.housekeeping.start()


def serve(settings: Settings, *, desktop: bool = False) -> None:
    """Runs the server until it is told to end; runs that are going on are kept as "interrupted".

    Args:
        desktop: show the page in a window, and end when that is closed.

    Raises:
        StartError: the port is taken or can't be used.
    """
    import uvicorn

    listening = _listen(settings)
    set_up(settings.log_json)
    port = listening.getsockname()[1]
    try:
        context = create_context(settings)
        app = create_app(settings, context)
        shown = "127.0.0.1" if settings.host in ("0.0.0.0", "::", "") else settings.host
        print(f"QEvict Lab is at http://{shown}:{port}/ (end it with Ctrl-C)", flush=True)

        class Server(uvicorn.Server):
            async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
                # Event streams never end by themselves: end them before uvicorn waits for them.
                await asyncio.to_thread(context.close)
                await super().shutdown(sockets)

        config = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=SHUTDOWN_SECONDS,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            proxy_headers=False,  # the gate reads what proxies say, as far as they are trusted
        )
        server = Server(config)
        if desktop:
            _show(f"http://{shown}:{port}/", server, listening)
        else:
            server.run(sockets=[listening])
    finally:
        listening.close()


def _show(url: str, server: uvicorn.Server, listening: socket.socket) -> None:
    """Serves in a thread and keeps the main one for the window, which window toolkits ask for."""
    from app.cli import say
    from app.desktop import show

    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, name="qevict-server")
    thread.start()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        while not server.started and thread.is_alive():
            time.sleep(0.05)
        show(url, say, thread.join)
    except KeyboardInterrupt:
        say("stopping ...")
    finally:
        server.should_exit = True
        thread.join(SHUTDOWN_SECONDS * 3)


def _listen(settings: Settings) -> socket.socket:
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((settings.host, settings.port))
        listening.listen(128)  # here, not later: two servers may bind one port until one of them listens
    except OSError as error:
        listening.close()
        if error.errno == errno.EADDRINUSE:
            why = f"port {settings.port} is taken: end the program that uses it, or set PORT to another one."
        elif error.errno == errno.EACCES:
            why = f"port {settings.port} needs special rights: set PORT to one above 1023."
        else:
            why = f"{settings.host}:{settings.port} can't be used: {error.strerror or error}."
        raise StartError(why) from error
    return listening
