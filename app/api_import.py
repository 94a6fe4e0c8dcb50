"""POST /qe/import: a run that was exported as a file becomes a session again.

Knows FastAPI and the store; what a file must be is in `app/trace_import.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, HTTPException, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.params import Depends as DependsParam

from app.api_route import NDJSON, Route
from app.context import AppContext
from app.trace_import import import_trace
from app.visitors import current_visitor

KINDS = ("text/html", NDJSON)

_BODY: dict[str, Any] = {
    "requestBody": {"required": True, "content": {kind: {"schema": {"type": "string"}} for kind in KINDS}}
}


def create_import_router(context: AppContext, dependencies: Sequence[DependsParam] = ()) -> APIRouter:
    """Bringing an exported run back."""
    router = APIRouter(prefix="/qe", route_class=Route, dependencies=list(dependencies), tags=["sessions"])

    @router.post("/import", status_code=201, openapi_extra=_BODY)
    async def imported(request: Request) -> dict[str, str]:
        """Stores the run in an exported file (html or jsonl) as a new session."""
        kind = request.headers.get("content-type", "").split(";")[0].strip().lower()
        if kind not in KINDS:  # a page of another origin can't send these without being asked first
            raise HTTPException(415, f"the body must be {' or '.join(KINDS)}, by its Content-Type.")
        data = bytearray()
        async for chunk in request.stream():
            data += chunk
            if len(data) > context.settings.max_body_bytes:
                raise HTTPException(413, f"the body must have at most {context.settings.max_body_bytes} bytes.")
        visitor = current_visitor()
        user = "" if visitor is None else visitor.user
        return {"sid": await run_in_threadpool(import_trace, context.sessions, bytes(data), user)}

    return router
