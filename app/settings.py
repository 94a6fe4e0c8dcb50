"""Limits and paths of one server, read once from QEVICT_* variables.

Knows names, ranges and defaults. Opens nothing, creates nothing, and knows no web framework.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from engine.errors import EngineError

ASSETS = Path(__file__).resolve().parent.parent / "assets"
"""Scripts, styles, texts, sample documents and recorded traces."""

DEFAULT_PORT = 7860


class SettingsError(EngineError, ValueError):
    """A QEVICT_* variable is unknown, of a wrong type or out of range."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What one server may do and where it keeps things.

    Attributes:
        data_dir: folder of the session database; made on first use.
        host, port: where the server listens.
        hosted: running as a public Space: stricter defaults, no listing of other people's sessions.
        max_new_tokens: most tokens that one run may generate.
        max_prompt_chars: longest prompt that is accepted, in characters.
        max_run_seconds: a run is stopped after this long; 0 = no limit.
        queue_length: most runs that may wait.
        ring_size: events of a running session that are kept in memory for its followers.
        max_followers: most event streams that are served at once.
        max_loaded_models: models kept in memory between runs.
        allowed_models: names that may be run; None = any.
        list_sessions: whether anyone who reaches the server may list all sessions.
        store_wait_seconds: how long a locked database is tried before the store is called broken.
    """

    data_dir: Path = Path(".qevict")
    host: str = "127.0.0.1"
    port: int = DEFAULT_PORT
    hosted: bool = False
    max_new_tokens: int = 4096
    max_prompt_chars: int = 400_000
    max_run_seconds: int = 3600
    queue_length: int = 32
    ring_size: int = 8192
    max_followers: int = 256
    max_loaded_models: int = 2
    allowed_models: tuple[str, ...] | None = None
    list_sessions: bool = True
    store_wait_seconds: int = 5

    def __post_init__(self) -> None:
        for name, (low, high) in RANGES.items():
            value = getattr(self, name)
            if not low <= value <= high:
                raise SettingsError(f"{name} must be in [{low}, {high}], got {value}.")

    @property
    def database(self) -> Path:
        """The session database."""
        return self.data_dir / "sessions.db"

    @classmethod
    def from_env(cls, env: Mapping[str, str] | None = None) -> Settings:
        """Reads the environment; a hosted Space gets the stricter defaults.

        Raises:
            SettingsError: an unknown QEVICT_* variable, a wrong type, or a value out of range.
        """
        env = os.environ if env is None else env
        _refuse_unknown(env)
        hosted = bool(env.get("SPACE_ID"))
        numbers = {
            name: _integer(env, f"QEVICT_{name.upper()}", _default(name, hosted)) for name in RANGES if name != "port"
        }
        return cls(
            data_dir=_data_dir(env, hosted),
            host=env.get("QEVICT_HOST") or env.get("GRADIO_SERVER_NAME") or ("0.0.0.0" if hosted else "127.0.0.1"),
            port=_port(env),
            hosted=hosted,
            allowed_models=_names(env.get("QEVICT_ALLOWED_MODELS"), ("embedded",) if hosted else None),
            list_sessions=_switch(env, "QEVICT_LIST_SESSIONS", not hosted),
            **numbers,
        )


RANGES: dict[str, tuple[int, int]] = {
    "port": (0, 65535),
    "max_new_tokens": (1, 1_000_000),
    "max_prompt_chars": (1, 100_000_000),
    "max_run_seconds": (0, 1_000_000),
    "queue_length": (0, 10_000),
    "ring_size": (16, 1_000_000),
    "max_followers": (1, 100_000),
    "max_loaded_models": (1, 64),
    "store_wait_seconds": (0, 600),
}

HOSTED_DEFAULTS = {"max_new_tokens": 512, "max_prompt_chars": 40_000, "max_run_seconds": 600, "max_loaded_models": 1}

VARIABLES = frozenset(
    [f"QEVICT_{name.upper()}" for name in RANGES]
    + ["QEVICT_DATA_DIR", "QEVICT_HOST", "QEVICT_ALLOWED_MODELS", "QEVICT_LIST_SESSIONS"]
)
"""Every variable that is read here."""

ENGINE_VARIABLES = frozenset(["QEVICT_CACHE_DIR", "QEVICT_ISA"])
"""Read by the engine: where prepared weights are kept, and which instruction set kernels are made for."""


def _default(name: str, hosted: bool) -> int:
    default: int = HOSTED_DEFAULTS[name] if hosted and name in HOSTED_DEFAULTS else _PLAIN[name]
    return default


def _refuse_unknown(env: Mapping[str, str]) -> None:
    for name in sorted(env):
        if name.startswith("QEVICT_") and name not in VARIABLES | ENGINE_VARIABLES:
            known = sorted(VARIABLES | ENGINE_VARIABLES)
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.75)
            hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(known)}."
            raise SettingsError(f"unknown variable {name}: {hint}")


def _integer(env: Mapping[str, str], name: str, default: int) -> int:
    text = env.get(name, "").strip()
    if not text:
        return default
    try:
        value = int(text.replace("_", ""))
    except ValueError as error:
        raise SettingsError(f"{name} must be a whole number, got {text!r}.") from error
    low, high = RANGES[name.removeprefix("QEVICT_").lower()]
    if not low <= value <= high:
        raise SettingsError(f"{name} must be in [{low}, {high}], got {value}.")
    return value


def _port(env: Mapping[str, str]) -> int:
    for name in ("QEVICT_PORT", "GRADIO_SERVER_PORT", "PORT"):
        text = env.get(name, "").strip()
        if text:
            if not (text.isascii() and text.isdigit()) or not 0 <= int(text) <= 65535:
                raise SettingsError(f"{name} must be a port in [0, 65535], got {text!r}.")
            return int(text)
    return DEFAULT_PORT


def _switch(env: Mapping[str, str], name: str, default: bool) -> bool:
    text = env.get(name, "").strip().lower()
    if not text:
        return default
    if text in ("1", "true", "yes", "on"):
        return True
    if text in ("0", "false", "no", "off"):
        return False
    raise SettingsError(f"{name} must be one of 1, 0, true, false, yes, no, on, off, got {text!r}.")


def _names(text: str | None, default: tuple[str, ...] | None) -> tuple[str, ...] | None:
    if text is None or not text.strip():
        return default
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _data_dir(env: Mapping[str, str], hosted: bool) -> Path:
    chosen = env.get("QEVICT_DATA_DIR", "").strip()
    if chosen:
        path = Path(chosen).expanduser()
        if path.exists() and not path.is_dir():
            raise SettingsError(f"QEVICT_DATA_DIR must be a folder, got the file {chosen!r}.")
        return path
    shared = Path("/data")
    if hosted and shared.is_dir() and os.access(shared, os.W_OK):
        return shared
    return Path(".qevict")


_PLAIN: dict[str, int] = {name: getattr(Settings(), name) for name in RANGES}
