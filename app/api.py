"""The HTTP interface under /qe: start, follow and stop runs; read, export and delete sessions; static files.

Thin: it checks what comes in and hands it on. Knows FastAPI; knows no Gradio.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated, Any

from fastapi import APIRouter, HTTPException, Path, Query, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.exceptions import RequestValidationError
from fastapi.params import Depends as DependsParam
from fastapi.responses import JSONResponse, StreamingResponse
from fastapi.routing import APIRoute

from app.context import AppContext
from app.events import SSE_HEADERS
from app.run_body import read_request
from app.runs import QueueFullError
from app.sessions import UnknownSessionError
from app.settings import ASSETS
from app.store_file import StoreError
from app.trace_files import EXPORTS, export, first_trace
from engine.errors import EngineError

SECURITY_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",
}
STATIC_TYPES = {
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".map": "application/json",
}
NDJSON = "application/x-ndjson"
LARGEST_SEQ = 2**53

SessionId = Annotated[str, Path(max_length=64, pattern=r"^[A-Za-z0-9_-]+$")]
Seq = Annotated[int, Query(ge=0, le=LARGEST_SEQ)]


class _Route(APIRoute):
    """Turns the program's own errors into clear answers, and adds the security headers to every answer."""

    def get_route_handler(self) -> Callable[[Request], Any]:
        handle = super().get_route_handler()

        async def guarded(request: Request) -> Response:
            try:
                response: Response = await handle(request)
            except HTTPException as error:
                response = JSONResponse({"detail": error.detail}, error.status_code, dict(error.headers or {}))
            except RequestValidationError as error:
                response = JSONResponse({"detail": _sentence(error)}, 404 if _is_bad_id(error) else 422)
            except EngineError as error:
                response = JSONResponse({"detail": str(error)}, _status_of(error))
            for name, value in SECURITY_HEADERS.items():
                response.headers.setdefault(name, value)
            return response

        return guarded


def _is_bad_id(error: RequestValidationError) -> bool:
    return any(tuple(fault["loc"])[:2] == ("path", "sid") for fault in error.errors())


def _sentence(error: RequestValidationError) -> str:
    if _is_bad_id(error):
        return "there is no such session."
    fault = error.errors()[0]
    return f"{fault['loc'][-1]}: {fault['msg']}."


def _status_of(error: EngineError) -> int:
    if isinstance(error, UnknownSessionError):
        return 404
    if isinstance(error, QueueFullError):
        return 429
    return 503 if isinstance(error, StoreError) else 422


def program_version() -> str:
    """The installed version of this program."""
    try:
        return version("qevict-lab")
    except PackageNotFoundError:
        return "unknown"


def create_router(context: AppContext, dependencies: Sequence[DependsParam] = ()) -> APIRouter:
    """All routes of one server. `dependencies` guard every one of them, for a login."""
    router = APIRouter(prefix="/qe", route_class=_Route, dependencies=list(dependencies), tags=["qevict"])
    began = time.monotonic()

    @router.get("/ping")
    def ping() -> dict[str, bool]:
        """Whether the server answers."""
        return {"ok": True}

    @router.get("/health")
    def health() -> dict[str, Any]:
        """How the server is: version, store, runs."""
        trouble = context.sessions.trouble
        return {
            "status": "degraded" if trouble else "ok",
            "version": program_version(),
            "uptime_s": round(time.monotonic() - began, 1),
            "store": trouble or "ok",
            "running": int(context.runs.active is not None),
            "waiting": len(context.runs.waiting),
            "followers": context.bus.followers,
        }

    @router.post("/runs", status_code=202)
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
        """Sessions, newest first, without their prompts."""
        if not context.settings.list_sessions:
            raise HTTPException(403, "this server does not list its sessions: use the link of yours.")
        found = [asdict(info) for info in context.sessions.list(limit, offset)]
        for info in found:
            info["settings"].pop("prompt", None)
        return {"sessions": found}

    @router.get("/s/{sid}")
    def session(sid: SessionId) -> dict[str, Any]:
        """One session's settings, versions and summary."""
        return asdict(context.sessions.get(sid))

    @router.delete("/s/{sid}")
    def delete(sid: SessionId) -> dict[str, bool]:
        """Deletes a session for good; a run is stopped first."""
        if context.runs.stop(sid):
            if not context.runs.wait(sid, 30):
                raise HTTPException(409, "the run is still busy with one step: try again in a moment.")
            context.bus.forget(sid)
        context.sessions.delete(sid)
        context.bus.forget(sid)
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
        rows = _rows(context, sid, 0)
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
    folder, _, _ = path.partition("/")
    root = (ASSETS / folder).resolve()
    file = (ASSETS / path).resolve() if "\0" not in path else root
    kind = STATIC_TYPES.get(file.suffix)
    if folder not in ("js", "css") or kind is None or not file.is_relative_to(root) or not file.is_file():
        raise HTTPException(404, "there is no such file.")
    data = file.read_bytes()
    etag = f'"{hashlib.sha256(data).hexdigest()[:24]}"'
    lasting = "public, max-age=31536000, immutable" if "v" in request.query_params else "no-cache"
    headers = {"ETag": etag, "Cache-Control": lasting}
    if etag in [tag.strip().removeprefix("W/") for tag in request.headers.get("if-none-match", "").split(",")]:
        return Response(status_code=304, headers=headers)
    return Response(data, media_type=kind, headers=headers)
