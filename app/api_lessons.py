"""Lessons, bundled traces, the glossary and QR codes under /qe: read only, the same for everybody.

Knows FastAPI; knows no Gradio and no session.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import APIRouter, HTTPException, Path, Query, Response
from fastapi.params import Depends as DependsParam

from app.api_route import NDJSON, Route
from app.context import AppContext
from app.glossary import glossary_payload
from app.lesson_trace import trace_bytes
from app.lessons import lessons_payload
from app.qr import LINK_CHARS, qr_svg
from app.texts import language

FRESH = "no-cache"


def create_lessons_router(context: AppContext, dependencies: Sequence[DependsParam] = ()) -> APIRouter:
    """Reading lessons. `context` is not needed: lessons are the same on every server."""
    router = APIRouter(prefix="/qe", route_class=Route, dependencies=list(dependencies), tags=["lessons"])

    @router.get("/lessons")
    def lessons(lang: Annotated[str, Query(max_length=16)] = "en") -> Response:
        """All lessons in one language: positions, words, questions and answers."""
        return _json(lessons_payload(language(lang)))

    @router.get("/glossary")
    def glossary(lang: Annotated[str, Query(max_length=16)] = "en") -> Response:
        """All terms in one language: name, words, formula, and where in the code it is computed."""
        return _json(glossary_payload(language(lang)))

    @router.get("/traces/{name}")
    def trace(name: Annotated[str, Path(max_length=40, pattern=r"^[a-z0-9-]+$")]) -> Response:
        """A recorded run that comes with the product, one wire message per line."""
        data = trace_bytes(name)
        if data is None:
            raise HTTPException(404, "there is no such recorded run.")
        return Response(data, media_type=NDJSON, headers={"Cache-Control": FRESH})

    @router.get("/qr")
    def qr(link: Annotated[str, Query(max_length=LINK_CHARS)]) -> Response:
        """A link as a QR code in SVG. The browser knows under which address it reached us; we do not."""
        return Response(qr_svg(link), media_type="image/svg+xml", headers={"Cache-Control": FRESH})

    return router


def _json(body: dict[str, Any]) -> Response:
    data = json.dumps(body, ensure_ascii=False, separators=(",", ":"))
    return Response(data, media_type="application/json", headers={"Cache-Control": FRESH})
