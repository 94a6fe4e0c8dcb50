"""Notes on windows and events of a session: read by whoever has its link, written by whoever may change it.

And who shows a session to others: see `app/presenter_api.py`. A note that changes is read again by followers.

Knows FastAPI and the store; knows no Gradio.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import APIRouter, HTTPException, Path, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.params import Depends as DependsParam

from app.api_route import Route, SessionId
from app.context import AppContext
from app.presenter_api import add_presenting
from app.run_body import read_json
from app.sessions import clean_title
from engine.errors import ConfigError

MOST_MARKS = 500
MOST_WINDOWS = 64
TEXT_CHARS = 500
AUTHOR_CHARS = 60
BODY_BYTES = 16_384
LARGEST = 2**31 - 1

Number = Annotated[int, Path(ge=1, le=LARGEST)]

_BODY: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {
            "application/json": {
                "schema": {
                    "type": "object",
                    "required": ["text"],
                    "additionalProperties": False,
                    "properties": {
                        "r": {"type": "integer", "minimum": 0, "description": "routing event"},
                        "row": {"type": "integer", "minimum": 0, "description": "board row"},
                        "windows": {"type": "array", "items": {"type": "integer", "minimum": 0}},
                        "text": {"type": "string"},
                        "author": {"type": "string"},
                    },
                }
            }
        },
    }
}

_TEXT: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {
            "application/json": {
                "schema": {
                    "type": "object",
                    "required": ["text"],
                    "additionalProperties": False,
                    "properties": {"text": {"type": "string"}},
                }
            }
        },
    }
}


def create_marks_router(context: AppContext, dependencies: Sequence[DependsParam] = ()) -> APIRouter:
    """Reading and writing notes."""
    router = APIRouter(prefix="/qe/s/{sid}/marks", route_class=Route, dependencies=list(dependencies), tags=["marks"])

    @router.get("")
    def marks(sid: SessionId) -> dict[str, Any]:
        """Notes of a session, oldest first. Their texts come from people: show them as text."""
        context.sessions.get(sid)
        return {"marks": context.sessions.marks(sid)}

    @router.post("", status_code=201, openapi_extra=_BODY)
    async def mark(request: Request, sid: SessionId) -> dict[str, Any]:
        """Keeps a note: {"text", "r", "row", "windows", "author"}; on the event itself where there are no windows."""
        note = _note(await read_json(request, BODY_BYTES))

        def keep() -> int:
            context.sessions.get(sid)
            if len(context.sessions.marks(sid)) >= MOST_MARKS:
                raise HTTPException(409, f"this session has {MOST_MARKS} notes already: no more can be kept.")
            return context.sessions.mark(sid, **note)

        number = await run_in_threadpool(keep)
        context.presentations.notes_changed(presented(sid))
        return {"kept": True, "id": number}

    @router.put("/{number}", openapi_extra=_TEXT)
    async def change(request: Request, sid: SessionId, number: Number) -> dict[str, bool]:
        """Changes a note's text: {"text"}."""
        body = await read_json(request, BODY_BYTES)
        if set(body) != {"text"}:
            raise ConfigError("only a note's text can be changed: send text alone.")
        text = _text("text", body["text"], TEXT_CHARS)
        if not text:
            raise ConfigError("text must not be empty.")
        await run_in_threadpool(touch, sid, number, text)
        return {"kept": True}

    @router.delete("/{number}")
    def remove(sid: SessionId, number: Number) -> dict[str, bool]:
        """Removes a note."""
        touch(sid, number, None)
        return {"deleted": True}

    def touch(sid: str, number: int, text: str | None) -> None:
        if not context.sessions.change_mark(sid, number, text):
            raise HTTPException(404, "there is no such note.")
        context.presentations.notes_changed(presented(sid))

    return router


def create_present_router(context: AppContext, dependencies: Sequence[DependsParam] = ()) -> APIRouter:
    """Presenting a session: its link's viewers follow whoever may change it."""
    router = APIRouter(prefix="/qe/s", route_class=Route, dependencies=list(dependencies), tags=["presentations"])

    def exists(sid: str) -> None:
        if context.bus.channel(sid) is None:
            context.sessions.get(sid)

    def demand(sid: str) -> None:
        context.access.demand(context.sessions.get(sid).user)

    add_presenting(router, "/{name}/present", context, key=presented, exists=exists, demand=demand, run=True)
    return router


def presented(sid: str) -> str:
    """What the presentation of a session is kept under."""
    return f"session {sid}"


def _text(name: str, value: object, most: int) -> str:
    if not isinstance(value, str) or len(value) > most:
        raise ConfigError(f"{name} must be text of at most {most} characters.")
    return clean_title(value, most)


def _note(body: dict[str, Any]) -> dict[str, Any]:
    unknown = sorted(set(body) - {"r", "row", "windows", "text", "author"})
    if unknown:
        raise ConfigError(f"unknown key {unknown[0][:40]!r}; known are author, r, row, text, windows.")
    windows = body.get("windows", [])
    if not isinstance(windows, list) or len(windows) > MOST_WINDOWS:
        raise ConfigError(f"windows must be a list of at most {MOST_WINDOWS} numbers.")
    for name, value in (("r", body.get("r", 0)), ("row", body.get("row", 0)), *(("windows", one) for one in windows)):
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= LARGEST:
            raise ConfigError(f"{name} must be a whole number in [0, {LARGEST}], got {str(value)[:40]!r}.")
    texts = {}
    for name, most in (("text", TEXT_CHARS), ("author", AUTHOR_CHARS)):
        texts[name] = _text(name, body.get(name, ""), most)
    if not texts["text"]:
        raise ConfigError("text must not be empty.")
    return {"event_id": body.get("r", 0), "row": body.get("row", 0), "windows": windows, **texts}
