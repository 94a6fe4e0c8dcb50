"""The page's five public endpoints, for scripts that drive it through a Gradio client.

Everything else on the page is private. Knows runs and sessions; knows no component.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import gradio as gr
from gradio.events import api

from app.run_request import RunRequest
from app.trace_files import EXPORTS
from engine.errors import ConfigError, EngineError
from presets.loader import DEFAULT, load_preset

if TYPE_CHECKING:
    from app.context import AppContext
    from app.sessions import SessionInfo


def publish(context: AppContext) -> None:
    """Adds the endpoints to the current Blocks context."""

    def run_session(
        prompt: str,
        preset: str = DEFAULT,
        model: str = "embedded",
        max_new_tokens: int = 200,
        temperature: float = 0.0,
        seed: int = 0,
        reference: bool = True,
        settings: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Puts a run in the queue and returns its session id; `settings` overrides the preset's by name."""
        with _told():
            config = load_preset(preset).config.replace(planned_new_tokens=max_new_tokens, **(settings or {}))
            options = {
                "max_new_tokens": max_new_tokens,
                "temperature": temperature,
                "seed": seed,
                "reference": reference,
            }
            request = RunRequest(prompt, model, config, options, preset=preset, raise_budget=True)
            return {"sid": context.runs.start(request)}

    def stop_session(sid: str) -> bool:
        """Stops a run between two tokens; False if it is not running."""
        with _told():
            return context.runs.stop(sid)
        return False

    def list_sessions(limit: int = 200) -> list[dict[str, Any]]:
        """Stored sessions that the caller may see, newest first."""
        with _told():
            return [_plain(info) for info in context.listed(max(0, min(limit, 1000)))]

    def get_session(sid: str) -> dict[str, Any]:
        """One session with its settings, versions and summary."""
        with _told():
            info = context.sessions.get(sid)
            return _plain(info) | {
                "settings": info.settings,
                "versions": info.versions,
                "summary": info.summary,
                "status": context.runs.status(sid).state,
            }

    def export_session(sid: str, kind: str = "jsonl") -> dict[str, Any]:
        """The address, relative to this server, under which a session can be downloaded as `kind`."""
        with _told():
            if kind not in EXPORTS:
                raise ConfigError(f"kind must be one of {', '.join(EXPORTS)}, got {kind!r}.")
            return {"url": f"qe/s/{quote(context.sessions.get(sid).id, safe='')}/export.{kind}"}

    endpoints: tuple[Callable[..., Any], ...] = (
        run_session,
        stop_session,
        list_sessions,
        get_session,
        export_session,
    )
    for endpoint in endpoints:
        api(endpoint, api_name=endpoint.__name__, concurrency_limit=None)


class _told:
    """Turns an engine error into one that Gradio shows as it stands."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, EngineError):
            raise gr.Error(str(error)) from error


def _plain(info: SessionInfo) -> dict[str, Any]:
    return {
        "sid": info.id,
        "title": info.title,
        "model": info.model,
        "policy": info.policy,
        "state": info.state,
        "created": info.created,
        "num_events": info.num_events,
        "num_tokens": info.summary.get("num_tokens"),
    }
