"""The address of a comparison's frames, for the page's canvas.

Knows FastAPI and the comparisons in memory; starts none.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence

from fastapi import APIRouter, HTTPException, Request, Response
from fastapi.params import Depends as DependsParam

from app.api_route import Route, SessionId
from app.compare_wire import to_wire
from app.context import AppContext


def create_compare_router(context: AppContext, dependencies: Sequence[DependsParam] = ()) -> APIRouter:
    """Reading comparisons. `dependencies` guard every route."""
    router = APIRouter(prefix="/qe", route_class=Route, dependencies=list(dependencies), tags=["comparisons"])

    @router.get("/compare/{sid}")
    def comparison(request: Request, sid: SessionId) -> Response:
        """What a finished comparison found, with the residency of every system at every look; kept for a while."""
        outcome = context.compares.outcome(sid)
        if outcome is None:
            raise HTTPException(404, "there is no such comparison here: it may be going on, have failed, or be old.")
        body = json.dumps(to_wire(outcome), ensure_ascii=False, separators=(",", ":")).encode()
        headers = {"Cache-Control": "private, max-age=3600", "Vary": "Accept-Encoding"}
        if "gzip" in request.headers.get("accept-encoding", ""):
            body, headers["Content-Encoding"] = gzip.compress(body, 4), "gzip"
        return Response(body, media_type="application/json", headers=headers)

    return router
