"""The addresses of comparisons: their list, a board's frames for the page's canvas, files to keep, deletion.

Knows FastAPI, the comparisons in memory and in the store; starts none.
"""

from __future__ import annotations

import gzip
from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import APIRouter, HTTPException, Path, Query, Request, Response
from fastapi.params import Depends as DependsParam

from app.api_route import LARGEST_SEQ, Route, SessionId
from app.compare_record import EXPORTS, Outcome, to_csv, to_json
from app.context import AppContext
from app.texts import language


def create_compare_router(context: AppContext, dependencies: Sequence[DependsParam] = ()) -> APIRouter:
    """Reading, exporting and deleting comparisons. `dependencies` guard every route."""
    router = APIRouter(prefix="/qe", route_class=Route, dependencies=list(dependencies), tags=["comparisons"])

    @router.get("/compares")
    def comparisons(
        limit: Annotated[int, Query(ge=1, le=1000)] = 200, offset: Annotated[int, Query(ge=0, le=LARGEST_SEQ)] = 0
    ) -> dict[str, Any]:
        """Stored comparisons that the visitor may see, newest first, without their prompts."""
        return {"comparisons": [info.shown() for info in context.listed_comparisons(limit, offset)]}

    @router.get("/compare/{sid}")
    def comparison(request: Request, sid: SessionId) -> Response:
        """What a comparison found, with the residency of every system at every look."""
        _, board = _found(context, sid)
        headers = {"Cache-Control": "no-store", "Vary": "Accept-Encoding"}
        if "gzip" in request.headers.get("accept-encoding", ""):
            headers["Content-Encoding"] = "gzip"
        else:
            board = gzip.decompress(board)
        return Response(board, media_type="application/json", headers=headers)

    @router.get("/compare/{sid}/export.{kind}")
    def exported(
        sid: SessionId, kind: Annotated[str, Path(max_length=8)], lang: Annotated[str, Query(max_length=16)] = "en"
    ) -> Response:
        """A comparison as a file: json (everything, with the board) or csv (the table)."""
        if kind not in EXPORTS:
            raise HTTPException(404, f"a comparison can be exported as {', '.join(EXPORTS)}, got {kind[:8]!r}.")
        outcome, board = _found(context, sid)
        name = f"qevict-compare-{sid[:8]}.{kind}"
        headers = {"Content-Disposition": f'attachment; filename="{name}"', "Cache-Control": "no-store"}
        body = to_json(outcome, board) if kind == "json" else to_csv(outcome, language(lang)).encode()
        return Response(body, media_type=EXPORTS[kind], headers=headers)

    @router.delete("/compare/{sid}")
    def delete(sid: SessionId) -> dict[str, bool]:
        """Deletes a comparison for good; one that goes on is stopped first."""
        if context.compares.stop(sid) and not context.runs.wait(sid, 30):
            raise HTTPException(409, "the comparison is still busy with one step: try again in a moment.")
        context.comparisons.delete(sid)
        context.bus.forget(sid)
        return {"deleted": True}

    return router


def _found(context: AppContext, sid: str) -> tuple[Outcome, bytes]:
    outcome, board = context.compares.outcome(sid), context.compares.board(sid)
    if outcome is None or board is None:
        raise HTTPException(404, "there is no such comparison here: it may be going on, have failed, or be deleted.")
    return outcome, board
