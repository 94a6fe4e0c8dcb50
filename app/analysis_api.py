"""The addresses of the Analysis tab: a source's figures with their numbers, and plotly's script from this server.

Knows FastAPI and the sources; draws nothing.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from functools import cache
from typing import Annotated, Literal

from fastapi import APIRouter, Query, Request, Response
from fastapi.params import Depends as DependsParam

from app.api_route import Route
from app.context import AppContext
from app.texts import language

YEAR = 31_536_000


def create_analysis_router(context: AppContext, dependencies: Sequence[DependsParam] = ()) -> APIRouter:
    """Reading figures. `dependencies` guard every route."""
    router = APIRouter(prefix="/qe", route_class=Route, dependencies=list(dependencies), tags=["analysis"])

    @router.get("/analysis")
    def analysis(
        request: Request,
        source: Annotated[str, Query(max_length=200)],
        theme: Literal["light", "dark"] = "light",
        lang: Annotated[str, Query(max_length=35)] = "en",
    ) -> Response:
        """Figures of one source, such as session:ID, bundled or article: drawing, formula, and the table of numbers."""
        found = context.analysis.payload(source, theme, language(lang))
        body = json.dumps(found, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()
        headers = {"Cache-Control": "private, no-store", "Vary": "Accept-Encoding"}
        return _packed(request, body, gzip.compress(body, 4), "application/json", headers)

    @router.get("/plotly.js", include_in_schema=False)
    def plotly(request: Request) -> Response:
        """The plotting script: the one that plotly's own package brings."""
        headers = {"Cache-Control": f"public, max-age={YEAR}, immutable", "Vary": "Accept-Encoding"}
        return _packed(request, *_plotly(), "text/javascript; charset=utf-8", headers)

    return router


@cache
def _plotly() -> tuple[bytes, bytes]:
    """(script, script packed): 4.7 MB and 1.4 MB that are made once."""
    from plotly.offline import get_plotlyjs

    script = get_plotlyjs().encode()
    return script, gzip.compress(script, 6, mtime=0)


def _packed(request: Request, plain: bytes, packed: bytes, media: str, headers: dict[str, str]) -> Response:
    if "gzip" in request.headers.get("accept-encoding", ""):
        return Response(packed, media_type=media, headers={**headers, "Content-Encoding": "gzip"})
    return Response(plain, media_type=media, headers=headers)
