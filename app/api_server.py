"""Addresses about the server itself: whether it is well, what it has, its figures, and the list of its addresses.

Knows FastAPI; knows no Gradio and no single session.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from html import escape
from typing import Any

from fastapi import APIRouter, FastAPI, Response
from fastapi.openapi.utils import get_openapi
from fastapi.params import Depends as DependsParam
from fastapi.responses import HTMLResponse

from app.api_route import Route, program_version
from app.context import AppContext
from app.metrics import CONTENT_TYPE, memory_bytes
from app.systems import listed
from app.versions import versions
from presets.loader import load_models, load_presets


def create_server_router(context: AppContext, dependencies: Sequence[DependsParam] = ()) -> APIRouter:
    """Addresses under /qe, and /metrics."""
    router = APIRouter(route_class=Route, dependencies=list(dependencies), tags=["server"])
    began = time.monotonic()

    @router.get("/qe/ping")
    def ping() -> dict[str, bool]:
        """Whether the server answers."""
        return {"ok": True}

    @router.get("/qe/health")
    def health() -> dict[str, Any]:
        """How the server is: version, store, runs."""
        trouble = context.sessions.trouble
        return {
            "status": "degraded" if trouble or context.housekeeping.trouble else "ok",
            "version": program_version(),
            "versions": dict(versions()),
            "uptime_s": round(time.monotonic() - began, 1),
            "store": trouble or "ok",
            "backup": context.housekeeping.trouble or "ok",
            "running": len(context.runs.running),
            "waiting": len(context.runs.waiting),
            "followers": context.bus.followers,
        }

    @router.get("/metrics")
    def metrics() -> Response:
        """Figures for Prometheus."""
        gauges: dict[str, Any] = {
            "qevict_running": float(len(context.runs.running)),
            "qevict_waiting": float(len(context.runs.waiting)),
            "qevict_followers": float(context.bus.followers),
            "qevict_memory_bytes": memory_bytes(),
            "qevict_store_ok": float(not context.sessions.trouble),
            "qevict_up_seconds": round(time.monotonic() - began, 1),
            "qevict_info": (1.0, {"version": program_version()}),
        }
        return Response(context.runs.metrics.text(gauges), media_type=CONTENT_TYPE)

    @router.get("/qe/presets")
    def presets() -> dict[str, Any]:
        """Named settings that a run can begin from."""
        listed = [
            {"name": one.name, "title": one.title_en, "note": one.note_en, "config": one.config.to_dict()}
            for one in load_presets().values()
        ]
        return {"presets": listed}

    @router.get("/qe/systems")
    def systems() -> dict[str, Any]:
        """Systems that a run can be asked for by name: what each keeps, what QEvict's own change in the settings."""
        return {"systems": listed()}

    @router.get("/qe/models")
    def models() -> dict[str, Any]:
        """Models that may be run here; `any` is true where every other name may be tried as well."""
        return {"models": model_names(context), "any": context.settings.allowed_models is None}

    return router


def model_names(context: AppContext) -> list[str]:
    """The models that this server names."""
    allowed = context.settings.allowed_models
    return [one.name for one in load_models()] if allowed is None else list(allowed)


def add_docs(app: FastAPI, routers: Sequence[APIRouter]) -> None:
    """Adds /openapi.json and /docs: our own addresses alone, on a page that fetches nothing from elsewhere."""
    routes = [route for router in routers for route in router.routes]

    def schema() -> dict[str, Any]:
        return get_openapi(title="QEvict Lab", version=program_version(), routes=routes)

    router = APIRouter(route_class=Route, include_in_schema=False)

    @router.get("/openapi.json")
    def openapi() -> dict[str, Any]:
        return schema()

    @router.get("/docs")
    def docs() -> HTMLResponse:
        policy = "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'self'"
        return HTMLResponse(docs_html(schema()), headers={"Content-Security-Policy": policy})

    app.include_router(router)


def docs_html(schema: dict[str, Any]) -> str:
    """All addresses with what they take, as one plain page."""
    parts: list[str] = []
    for path, methods in schema["paths"].items():
        for method, about in methods.items():
            takes = "".join(
                f"<li><code>{escape(one['name'])}</code> ({escape(one['in'])})</li>"
                for one in about.get("parameters", [])
            )
            content = about.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", {})
            takes += "".join(
                f"<li><code>{escape(name)}</code> (body) {escape(str(one.get('description', '')))}</li>"
                for name, one in content.get("properties", {}).items()
            )
            parts.append(
                f"<section><h2><b>{method.upper()}</b> <code>{escape(path)}</code></h2>"
                f"<p>{escape(about.get('description', ''))}</p>{f'<ul>{takes}</ul>' if takes else ''}</section>"
            )
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>QEvict Lab: HTTP interface</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><style>'
        "body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#111;"
        "background:#fff}h2{font-size:1.05rem;margin:1.6rem 0 .2rem;border-top:1px solid #ddd;padding-top:1rem}"
        "p,ul{margin:.2rem 0}code{background:#f3f3f5;padding:.1em .3em;border-radius:3px}</style></head><body>"
        f"<h1>QEvict Lab {escape(str(schema['info']['version']))}: HTTP interface</h1>"
        '<p>The same as <a href="openapi.json">OpenAPI</a>. Errors are one sentence: '
        '<code>{"detail": "..."}</code>.</p>' + "".join(parts) + "</body></html>"
    )
