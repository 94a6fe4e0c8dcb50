"""The body of POST /qe/runs: bounded, JSON, every key known.

Knows presets and the run request; knows no queue.
"""

from __future__ import annotations

import json
from typing import Any

from fastapi import HTTPException, Request

from app.run_request import RunRequest
from app.settings import SPARE_BYTES, Settings
from app.systems import apply_system, rival_of
from engine.config import QEvictConfig
from engine.errors import ConfigError

TEXTS = ("prompt", "document", "model", "system", "preset", "title", "device", "dtype", "lang")
MOST_DIGITS = 40
KEYS = (*TEXTS, "config", "options", "raise_budget", "watched_row")

RUN_SCHEMA: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {
            "application/json": {
                "schema": {
                    "type": "object",
                    "required": ["prompt"],
                    "additionalProperties": False,
                    "properties": {
                        "prompt": {"type": "string", "description": "what the model reads"},
                        "document": {
                            "type": "string",
                            "description": "text before the prompt, compressed first and kept for the next question; "
                            "a kept one is used where options.reference is false",
                        },
                        "model": {"type": "string", "description": "embedded, a hub name or a folder"},
                        "system": {"type": "string", "description": "one of /qe/systems; qevict by default"},
                        "preset": {"type": "string", "description": "named settings to begin from"},
                        "config": {"type": "object", "description": "settings of the cache by name"},
                        "options": {"type": "object", "description": "max_new_tokens, temperature, top_p, seed, ..."},
                        "title": {"type": "string"},
                        "device": {"type": "string"},
                        "dtype": {"type": "string"},
                        "lang": {"type": "string"},
                        "raise_budget": {"type": "boolean", "description": "raise a budget that is too small"},
                        "watched_row": {"type": "integer", "description": "board row whose scores are sent"},
                    },
                }
            }
        },
    }
}
"""How the interface's description shows the body."""


async def read_request(request: Request, settings: Settings) -> RunRequest:
    """The run that a request's body asks for.

    Raises:
        HTTPException: 415 not JSON by its type, 413 too large, 400 not a JSON object.
        ConfigError: an unknown key, a wrong type or a value out of range.
    """
    return build_request(await read_json(request, settings.max_prompt_chars * 12 + SPARE_BYTES))


async def read_json(request: Request, limit: int) -> dict[str, Any]:
    """A request's body of at most `limit` bytes as a JSON object.

    Raises:
        HTTPException: 415 not JSON by its type, 413 too large, 400 not a JSON object.
    """
    # A page of another origin can't send this type without being asked first, so it can't start runs here.
    if request.headers.get("content-type", "").split(";")[0].strip().lower() != "application/json":
        raise HTTPException(415, "the body must be JSON: send Content-Type: application/json.")
    data = bytearray()
    async for chunk in request.stream():
        data += chunk
        if len(data) > limit:
            raise HTTPException(413, f"the body must have at most {limit} bytes.")
    try:
        body = json.loads(bytes(data), parse_constant=_refuse_constant, parse_int=_small_int)
    except (ValueError, RecursionError) as error:
        raise HTTPException(400, "the body must be a JSON object, and this is not JSON.") from error
    if not isinstance(body, dict):
        raise HTTPException(400, "the body must be a JSON object.")
    return body


def build_request(body: dict[str, Any]) -> RunRequest:
    """The run that plain values ask for; `config` changes what `preset` says.

    Raises:
        ConfigError: an unknown key, a wrong type or a value out of range.
    """
    for name, value in body.items():
        if name not in KEYS:
            raise ConfigError(f"unknown key {name[:40]!r}; known are {', '.join(sorted(KEYS))}.")
        kind: type = str
        if name in ("config", "options"):
            kind = dict
        elif name == "raise_budget":
            kind = bool
        elif name == "watched_row":
            kind = int
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise ConfigError(f"{name} must be of type {kind.__name__}, got {str(value)[:40]!r}.")
    options = body.get("options", {})
    changes = dict(body.get("config", {}))
    if "max_new_tokens" in options and isinstance(options["max_new_tokens"], int):
        changes.setdefault("planned_new_tokens", options["max_new_tokens"])
    system = body.get("system") or "qevict"
    return RunRequest(
        prompt=body.get("prompt", ""),
        document=body.get("document", "").strip(),
        model=body.get("model", "embedded"),
        config=_config(body.get("preset", ""), system, changes),
        system=rival_of(system),
        policy=system,
        options=options,
        preset=body.get("preset", ""),
        title=body.get("title", ""),
        device=body.get("device", "auto"),
        dtype=body.get("dtype", "auto"),
        raise_budget=body.get("raise_budget", False),
        watched_row=body.get("watched_row", 0),
        lang=body.get("lang", "en"),
    )


def _config(preset: str, system: str, changes: dict[str, Any]) -> QEvictConfig:
    """Settings by preset, then by system, then as given."""
    from presets.loader import load_preset

    try:
        given = changes.keys() - {"planned_new_tokens"}
        if not preset and system == "qevict":
            return QEvictConfig.from_mapping(changes)
        chosen = load_preset(preset).config if preset else QEvictConfig()
        return apply_system(system, chosen, given).replace(**changes)
    except OverflowError as error:
        raise ConfigError("a number in config is too large.") from error


def _small_int(digits: str) -> int:
    """A whole number of a body; none of ours has more digits, and larger ones have no place in a float."""
    if len(digits) > MOST_DIGITS:
        raise ValueError(f"a whole number has at most {MOST_DIGITS} digits")
    return int(digits)


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")
