"""The bodies of /v1/chat/completions and /v1/completions, checked and made into runs.

Takes the fields that existing clients send and a few of its own: kv_budget, quant_share, bits, system, document,
preset, reference. Knows presets and systems; knows no queue and no web framework.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from app.messages_prompt import with_document
from app.run_request import RunRequest
from app.settings import Settings
from app.systems import apply_system, rival_of
from engine.errors import ConfigError, PromptError
from presets.loader import DEFAULT, load_preset

DEFAULT_TOKENS = 256
ROLES = ("system", "developer", "user", "assistant")
MOST_MESSAGES = 512
MOST_STOPS = 4
STOP_CHARS = 200

OWN = ("kv_budget", "quant_share", "bits", "system", "document", "preset", "reference")
SHARED = ("model", "max_tokens", "temperature", "top_p", "seed", "stop", "stream", "stream_options", *OWN)
CHAT = ("messages", "max_completion_tokens", *SHARED)
COMPLETION = ("prompt", *SHARED)
IGNORED = ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key")
"""Said by clients and without meaning here."""
ONLY: Mapping[str, tuple[Any, ...]] = {
    "n": (None, 1),
    "best_of": (None, 1),
    "echo": (None, False),
    "logprobs": (None, False),
    "top_logprobs": (None, 0),
    "logit_bias": (None, {}),
    "presence_penalty": (None, 0),
    "frequency_penalty": (None, 0),
    "suffix": (None, ""),
    "tools": (None, []),
    "tool_choice": (None, "none", "auto"),
    "response_format": (None, {"type": "text"}),
}
"""Fields that are understood but can have these values only."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """A run and how its answer is to be sent."""

    request: RunRequest
    stops: tuple[str, ...]
    stream: bool
    usage_in_stream: bool
    system: str


def read_chat(body: Mapping[str, Any], settings: Settings) -> Wanted:
    """What a chat body asks for.

    Raises:
        EngineError: an unknown field, a wrong type, a value out of range, or a role that does not exist.
    """
    _refuse_unknown(body, CHAT)
    given = body.get("messages")
    if not isinstance(given, list) or not given:
        raise PromptError("messages must be a list with at least one message.")
    if len(given) > MOST_MESSAGES:
        raise PromptError(f"messages must have at most {MOST_MESSAGES} entries, got {len(given)}.")
    messages = tuple(_message(one) for one in given)
    prompt = "\n".join(text for _, text in messages)
    # One question alone is a run like the page's own; a conversation needs the model's template, once it is loaded.
    alone = len(messages) == 1 and messages[0][0] == "user"
    return _wanted(body, settings, prompt, () if alone else messages, chat=True)


def read_completion(body: Mapping[str, Any], settings: Settings) -> Wanted:
    """What a plain completion body asks for.

    Raises:
        EngineError: an unknown field, a wrong type or a value out of range.
    """
    _refuse_unknown(body, COMPLETION)
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1:
        prompt = prompt[0]
    if not isinstance(prompt, str):
        raise PromptError("prompt must be one text; token ids and several texts are not taken.")
    return _wanted(body, settings, prompt, (), chat=False)


def _wanted(
    body: Mapping[str, Any], settings: Settings, prompt: str, messages: tuple[tuple[str, str], ...], *, chat: bool
) -> Wanted:
    tokens = _number(body, "max_completion_tokens", int)
    tokens = _number(body, "max_tokens", int) if tokens is None else tokens
    tokens = min(DEFAULT_TOKENS, settings.max_new_tokens) if tokens is None else tokens
    temperature = _number(body, "temperature", float)
    top_p = _number(body, "top_p", float)
    seed = _number(body, "seed", int)
    system = _text(body, "system", "qevict")
    stream = _flag(body, "stream")
    extras = body.get("stream_options")
    if extras is not None and not isinstance(extras, dict):
        raise ConfigError("stream_options must be an object.")
    options = {
        "max_new_tokens": tokens,
        "temperature": 1.0 if temperature is None else temperature,
        "top_p": 1.0 if top_p is None else top_p,
        "seed": secrets.randbelow(2**31) if seed is None else seed,
        "reference": _flag(body, "reference"),
        "chat": chat,
    }
    preset = _text(body, "preset", DEFAULT)
    config = load_preset(preset).config.replace(planned_new_tokens=max(0, tokens))
    changes = {name: body[name] for name in ("kv_budget", "quant_share", "bits") if body.get(name) is not None}
    config = apply_system(system, config, changes)
    document = _text(body, "document", "").strip()
    if document and messages:
        messages = with_document(messages, document)
    request = RunRequest(
        prompt,
        _text(body, "model", "embedded"),
        config.replace(**changes),
        options,
        preset=preset,
        raise_budget=True,
        messages=messages,
        policy=system,
        system=rival_of(system),
        document=document,
    )
    return Wanted(request, _stops(body.get("stop")), stream, bool((extras or {}).get("include_usage")), system)


def _message(one: object) -> tuple[str, str]:
    if not isinstance(one, dict):
        raise PromptError("each message must be an object with role and content.")
    role, content = one.get("role"), one.get("content")
    if role not in ROLES:
        raise PromptError(f"role must be one of {', '.join(ROLES)}, got {str(role)[:40]!r}.")
    if isinstance(content, list):
        parts = []
        for part in content:
            if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
                raise PromptError("content may have parts of type text only.")
            parts.append(part["text"])
        content = "".join(parts)
    if not isinstance(content, str):
        raise PromptError("content must be text.")
    return ("system" if role == "developer" else str(role)), content


def _stops(given: object) -> tuple[str, ...]:
    listed = [] if given is None else [given] if isinstance(given, str) else given
    if not isinstance(listed, list) or not all(isinstance(one, str) for one in listed):
        raise ConfigError("stop must be a text or a list of texts.")
    if len(listed) > MOST_STOPS or any(len(one) > STOP_CHARS for one in listed):
        raise ConfigError(f"stop may have {MOST_STOPS} texts of at most {STOP_CHARS} characters.")
    return tuple(one for one in listed if one)


def _refuse_unknown(body: Mapping[str, Any], known: tuple[str, ...]) -> None:
    for name, value in body.items():
        if name in ONLY:
            if not any(value == allowed and type(value) is type(allowed) for allowed in (*ONLY[name], 0.0)) or (
                value == 0.0 and 0 not in ONLY[name]
            ):
                raise ConfigError(f"{name} is not supported here: leave it out.")
        elif name not in known and name not in IGNORED:
            raise ConfigError(f"unknown field {name[:40]!r}; this server's own are {', '.join(OWN)}.")


def _number(body: Mapping[str, Any], name: str, kind: type) -> Any:
    value = body.get(name)
    if value is None:
        return None
    kinds = (int, float) if kind is float else (int,)
    if not isinstance(value, kinds) or isinstance(value, bool):
        raise ConfigError(f"{name} must be a number, got {str(value)[:40]!r}.")
    return value


def _text(body: Mapping[str, Any], name: str, default: str) -> str:
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, str):
        raise ConfigError(f"{name} must be text, got {str(value)[:40]!r}.")
    return value


def _flag(body: Mapping[str, Any], name: str) -> bool:
    value = body.get(name)
    if value is not None and not isinstance(value, bool):
        raise ConfigError(f"{name} must be true or false, got {str(value)[:40]!r}.")
    return bool(value)


_TEXT = {"type": "string"}
_FIELDS: dict[str, Any] = {
    "model": {**_TEXT, "description": "one of /v1/models"},
    "max_tokens": {"type": "integer", "minimum": 1},
    "temperature": {"type": "number", "minimum": 0, "maximum": 2},
    "top_p": {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
    "seed": {"type": "integer", "minimum": 0},
    "stop": {"anyOf": [_TEXT, {"type": "array", "items": _TEXT, "maxItems": MOST_STOPS}]},
    "stream": {"type": "boolean"},
    "stream_options": {"type": "object", "properties": {"include_usage": {"type": "boolean"}}},
    "kv_budget": {"type": "number", "exclusiveMinimum": 0, "maximum": 1, "description": "share of FullKV bytes kept"},
    "quant_share": {"type": "number", "minimum": 0, "maximum": 1, "description": "byte share of the low-bit tier"},
    "bits": {"type": "integer", "enum": [2, 4], "description": "code width of the low-bit tier"},
    "system": {**_TEXT, "description": "QEvict, a variant of it or a rival: one of /qe/systems"},
    "document": {**_TEXT, "description": "text before the first question, compressed first and kept for the next one"},
    "preset": {**_TEXT, "description": "named settings to begin from, see /qe/presets"},
    "reference": {"type": "boolean", "description": "measure against FullKV (slower)"},
}


def schema(chat: bool) -> dict[str, Any]:
    """How the interface's description shows the body."""
    role = {"type": "string", "enum": list(ROLES)}
    message = {"type": "object", "required": ["role", "content"], "properties": {"role": role, "content": _TEXT}}
    first: dict[str, Any] = (
        {"messages": {"type": "array", "minItems": 1, "items": message}} if chat else {"prompt": _TEXT}
    )
    described = {
        "type": "object",
        "required": list(first),
        "properties": {**first, **_FIELDS},
    }
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": described}}}}
