"""The HTTP interface under /qe: start, follow and stop runs; read, export and delete sessions; static files.

Thin: it checks what comes in and hands it on. Knows FastAPI; knows no Gradio.
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import asdict
from typing import Annotated, Any

from fastapi import APIRouter, FastAPI, HTTPException, Path, Query, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.params import Depends as DependsParam
from fastapi.responses import StreamingResponse

from app.analysis_api import create_analysis_router
from app.api_class import create_class_router
from app.api_import import create_import_router
from app.api_lessons import create_lessons_router
from app.api_marks import create_marks_router, create_present_router, presented
from app.api_route import LARGEST_SEQ, NDJSON, Route, Seq, SessionId
from app.api_server import add_docs, create_server_router
from app.compare_api import create_compare_router
from app.context import AppContext
from app.events import SSE_HEADERS
from app.openai_api import create_openai_router
from app.run_body import RUN_SCHEMA, read_request
from app.sessions import UnknownSessionError
from app.settings import ASSETS
from app.store_file import StoreError
from app.trace_files import EXPORTS, export, first_trace, with_marks
from visuals.replay import page_script

STATIC_TYPES = {
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".map": "application/json",
}
BOARD_SCRIPT = "js/board.js"
"""Made of the board's scripts, without what only people read; the page brings the words itself."""


def include_routes(app: FastAPI, context: AppContext, dependencies: Sequence[DependsParam] = ()) -> None:
    """Adds all our addresses to an application. `dependencies` guard every one of them."""
    makers = (
        create_server_router,
        create_router,
        create_marks_router,
        create_present_router,
        create_import_router,
        create_lessons_router,
        create_class_router,
        create_compare_router,
        create_analysis_router,
        create_openai_router,
    )
    routers = [make(context, dependencies) for make in makers]
    for router in routers:
        app.include_router(router)
    add_docs(app, routers)


def create_router(context: AppContext, dependencies: Sequence[DependsParam] = ()) -> APIRouter:
    """Starting, following, reading and deleting sessions. `dependencies` guard every route."""
    router = APIRouter(prefix="/qe", route_class=Route, dependencies=list(dependencies), tags=["sessions"])

    @router.post("/runs", status_code=202, openapi_extra=RUN_SCHEMA)
    async def start(request: Request) -> dict[str, str]:
        """Starts a run: {"prompt", "model", "preset", "config", "options", ...}; answers with its session at once."""
        wanted = await read_request(request, context.settings)
        return {"sid": await run_in_threadpool(context.runs.start, wanted)}

    @router.post("/s/{sid}/stop")
    def stop(sid: SessionId) -> dict[str, bool]:
        """Stops a run between two tokens, or takes it out of the queue."""
        stopped = context.runs.stop(sid)
        if not stopped:
            context.sessions.get(sid)
        return {"stopped": stopped}

    @router.post("/s/{sid}/row")
    def row(sid: SessionId, row: Annotated[int, Query(ge=0, le=100_000)]) -> dict[str, bool]:
        """Chooses the board row whose scores a running session sends at every event."""
        watched = context.runs.watch(sid, row)
        if not watched:
            context.sessions.get(sid)
        return {"watched": watched}

    @router.get("/s/{sid}/status")
    def status(sid: SessionId) -> dict[str, Any]:
        """Where a run stands: queued, loading, running or ended."""
        return asdict(context.runs.status(sid))

    @router.get("/s/{sid}/events")
    def events(request: Request, sid: SessionId, after: Annotated[int, Query(ge=-1, le=LARGEST_SEQ)] = -1) -> Response:
        """Follows a session as server-sent events, from `Last-Event-ID` (or `after`) on."""
        last = request.headers.get("last-event-id", "").strip()
        if last:
            if not (last.isascii() and last.isdigit()) or int(last) > LARGEST_SEQ:
                raise HTTPException(400, "Last-Event-ID must be the number of a message.")
            after = int(last)
        if context.bus.channel(sid) is None:
            info = context.sessions.get(sid)
            if info.state not in ("queued", "running") and 0 <= context.sessions.last_seq(sid) <= after:
                return Response(status_code=204)  # tells an EventSource to stop asking
        if context.bus.followers >= context.settings.max_followers:
            raise HTTPException(503, f"{context.settings.max_followers} streams are open already: try again later.")
        return StreamingResponse(_followed(context, sid, after), headers=SSE_HEADERS)

    @router.get("/s/{sid}/trace")
    def trace(sid: SessionId) -> Response:
        """The whole trace so far, one wire message per line."""
        return _lines(_rows(context, sid, 0))

    @router.get("/s/{sid}/key")
    def key(sid: SessionId, before: Seq) -> Response:
        """Wire messages from the last keyframe before message `before` to the newest, one per line."""
        return _lines(_rows(context, sid, before, keyframe=True))

    @router.get("/sessions")
    def sessions(
        limit: Annotated[int, Query(ge=1, le=1000)] = 200, offset: Annotated[int, Query(ge=0, le=LARGEST_SEQ)] = 0
    ) -> dict[str, Any]:
        """Sessions that the visitor may see, newest first, without their prompts."""
        found = [info.shown() for info in context.listed(limit, offset)]
        for info in found:
            info["settings"].pop("prompt", None)
            info["settings"].pop("document", None)
        return {"sessions": found}

    @router.get("/s/{sid}")
    def session(sid: SessionId) -> dict[str, Any]:
        """One session's settings, versions and summary."""
        info = context.sessions.get(sid)
        return info.shown() | {"yours": context.access.may_change(info.user)}

    @router.delete("/s/{sid}")
    def delete(sid: SessionId) -> dict[str, bool]:
        """Deletes a session for good; a run is stopped first."""
        if context.runs.stop(sid):
            if not context.runs.wait(sid, 30):
                raise HTTPException(409, "the run is still busy with one step: try again in a moment.")
            context.bus.forget(sid)
        context.sessions.delete(sid)
        context.bus.forget(sid)
        context.presentations.forget(presented(sid))
        return {"deleted": True}

    @router.get("/s/{sid}/export.{kind}")
    def exported(
        sid: SessionId, kind: Annotated[str, Path(max_length=8)], lang: Annotated[str, Query(max_length=16)] = "en"
    ) -> Response:
        """A session as a file: html (plays by itself, offline), csv, jsonl or gif."""
        if kind not in EXPORTS:
            raise HTTPException(404, f"a session can be exported as {', '.join(EXPORTS)}, got {kind[:8]!r}.")
        info = context.sessions.get(sid)
        name = f"qevict-{sid[:8]}.{kind}"
        headers = {"Content-Disposition": f'attachment; filename="{name}"', "Cache-Control": "no-store"}
        rows = with_marks(_rows(context, sid, 0), context.sessions.marks(sid))
        if kind == "jsonl":
            return StreamingResponse((body + b"\n" for body in rows), media_type=NDJSON, headers=headers)
        return Response(export(kind, list(rows), info.title, lang), media_type=EXPORTS[kind], headers=headers)

    @router.get("/first")
    def first() -> Response:
        """The recorded run that the page shows before anybody has started one."""
        data = first_trace()
        if data is None:
            raise HTTPException(404, "no recorded run is installed: assets/traces/first.ndjson is missing.")
        return Response(data, media_type=NDJSON, headers={"Cache-Control": "public, max-age=3600"})

    @router.get("/static/{path:path}")
    def static(request: Request, path: str) -> Response:
        """Scripts and styles of the page."""
        return _static(request, path)

    return router


async def _followed(context: AppContext, sid: str, after: int) -> AsyncIterator[bytes]:
    async for chunk in context.bus.follow(sid, after):
        yield chunk


def _rows(context: AppContext, sid: str, from_seq: int, *, keyframe: bool = False) -> Iterator[bytes]:
    """Stored messages, then those of a running session that are newer than the store.

    With `keyframe`, from the last keyframe before `from_seq` on. A session that is not stored is read from memory.
    """
    channel = context.bus.channel(sid)
    try:
        if channel is not None:
            context.sessions.flush()
        if keyframe:
            context.sessions.get(sid)
            from_seq = context.sessions.keyframe_before(sid, from_seq) or 0
        stored = context.sessions.events(sid, from_seq)
    except (StoreError, UnknownSessionError):
        if channel is None:
            raise
        stored = iter(())
        from_seq = 0 if keyframe else from_seq

    def rows() -> Iterator[bytes]:
        seq = from_seq
        for body in stored:
            seq += 1
            yield body
        while channel is not None:
            first, bodies = channel.read(seq)
            if not bodies:
                return
            yield from bodies
            seq = first + len(bodies)

    return rows()


def _lines(rows: Iterator[bytes]) -> StreamingResponse:
    def chunks() -> Iterator[bytes]:
        gathered: list[bytes] = []
        for body in rows:
            gathered.append(body)
            if len(gathered) == 128:
                yield b"\n".join(gathered) + b"\n"
                gathered = []
        if gathered:
            yield b"\n".join(gathered) + b"\n"

    return StreamingResponse(chunks(), media_type=NDJSON, headers={"Cache-Control": "no-store"})


def _static(request: Request, path: str) -> Response:
    if path == BOARD_SCRIPT:
        return _cached(request, page_script(with_texts=False).encode(), STATIC_TYPES[".js"])
    folder, _, _ = path.partition("/")
    root = (ASSETS / folder).resolve()
    file = (ASSETS / path).resolve() if "\0" not in path else root
    kind = STATIC_TYPES.get(file.suffix)
    if folder not in ("js", "css") or kind is None or not file.is_relative_to(root) or not file.is_file():
        raise HTTPException(404, "there is no such file.")
    return _cached(request, file.read_bytes(), kind)


def _cached(request: Request, data: bytes, kind: str) -> Response:
    etag = f'"{hashlib.sha256(data).hexdigest()[:24]}"'
    lasting = "public, max-age=31536000, immutable" if "v" in request.query_params else "no-cache"
    headers = {"ETag": etag, "Cache-Control": lasting}
    if etag in [tag.strip().removeprefix("W/") for tag in request.headers.get("if-none-match", "").split(",")]:
        return Response(status_code=304, headers=headers)
    return Response(data, media_type=kind, headers=headers)
