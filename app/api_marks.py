"""Notes on windows of a session: read by whoever has its link, written by whoever may change it.

Knows FastAPI and the store; knows no Gradio.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, HTTPException, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.params import Depends as DependsParam

from app.api_route import Route, SessionId
from app.context import AppContext
from app.run_body import read_json
from app.sessions import clean_title
from engine.errors import ConfigError

MOST_MARKS = 500
MOST_WINDOWS = 64
TEXT_CHARS = 500
AUTHOR_CHARS = 60
BODY_BYTES = 16_384
LARGEST = 2**31 - 1

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


def create_marks_router(context: AppContext, dependencies: Sequence[DependsParam] = ()) -> APIRouter:
    """Reading and writing notes."""
    router = APIRouter(prefix="/qe/s/{sid}/marks", route_class=Route, dependencies=list(dependencies), tags=["marks"])

    @router.get("")
    def marks(sid: SessionId) -> dict[str, Any]:
        """Notes of a session, oldest first. Their texts come from people: show them as text."""
        context.sessions.get(sid)
        return {"marks": context.sessions.marks(sid)}

    @router.post("", status_code=201, openapi_extra=_BODY)
    async def mark(request: Request, sid: SessionId) -> dict[str, bool]:
        """Keeps a note: {"text", "r", "row", "windows", "author"}."""
        note = _note(await read_json(request, BODY_BYTES))

        def keep() -> None:
            context.sessions.get(sid)
            if len(context.sessions.marks(sid)) >= MOST_MARKS:
                raise HTTPException(409, f"this session has {MOST_MARKS} notes already: no more can be kept.")
            context.sessions.mark(sid, **note)

        await run_in_threadpool(keep)
        return {"kept": True}

    return router


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
        value = body.get(name, "")
        if not isinstance(value, str) or len(value) > most:
            raise ConfigError(f"{name} must be text of at most {most} characters.")
        texts[name] = clean_title(value, most)
    if not texts["text"]:
        raise ConfigError("text must not be empty.")
    return {"event_id": body.get("r", 0), "row": body.get("row", 0), "windows": windows, **texts}
