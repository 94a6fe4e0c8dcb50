"""Limits and paths of one server, read once from QEVICT_* variables.

Knows names, ranges and defaults. Opens nothing, creates nothing, and knows no web framework.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
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
        hosted: serving strangers, as a public Space does: stricter defaults, everybody sees their own sessions.
        max_new_tokens: most tokens that one run may generate.
        max_prompt_chars: longest prompt that is accepted, in characters.
        max_run_seconds: a run is stopped after this long; 0 = no limit.
        queue_length: most runs that may wait.
        ring_size: events of a running session that are kept in memory for its followers.
        max_followers: most event streams that are served at once.
        max_loaded_models: models kept in memory between runs.
        allowed_models: names that may be run; None = any.
        list_sessions: whether anyone who reaches the server may list and change all sessions; else a session is
            read by its link, and listed for and changed by the one who made it.
        store_wait_seconds: how long a locked database is tried before the store is called broken.
        login: (name, password) pairs of those who may use the server; empty = anyone.
        secret: what visitors' cookies are signed with; empty = a key kept in the data folder.
        allowed_hosts: the only names under which the server may be asked for; empty = any.
        public_host: the name that browsers know the server by, where a proxy asks for it under another one.
        frame_ancestors: origins whose pages may show this page in a frame.
        proxy_hops: reverse proxies in front, each of which adds the address that it saw to X-Forwarded-For.
        max_runs_per_user: runs that one visitor may have waiting and running; 0 = any number.
        max_runs_per_address: the same for all visitors of one address.
        starts_per_minute: runs that one address may start in a minute; 0 = any number.
        abandon_seconds: a run that nobody has looked at for so long is stopped; 0 = never.
        keep_days: sessions older than this are deleted; 0 = never.
        backup_dir: where copies of the session database go, and where one is taken from if there is none.
        backup_minutes: time between two copies; the last one is made at the end.
        log_json: whether each line of the log is a JSON object.
        batch: runs of one model that are decoded together; 1 = one after the other.
        batch_mb: megabytes that the runs of a batch may take beside the model; 0 = what the device has free.
        prefix_mb: megabytes of compressed documents that are kept for the next question, per model; 0 = none.
        gpu_seconds: longest that one run may hold a GPU which is lent by the second, see `app.zero_gpu`.
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
    login: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    secret: str = field(default="", repr=False)
    allowed_hosts: tuple[str, ...] = ()
    public_host: str = ""
    frame_ancestors: tuple[str, ...] = ()
    proxy_hops: int = 0
    max_runs_per_user: int = 0
    max_runs_per_address: int = 0
    starts_per_minute: int = 0
    abandon_seconds: int = 0
    keep_days: int = 0
    backup_dir: Path | None = None
    backup_minutes: int = 10
    log_json: bool = False
    batch: int = 1
    batch_mb: int = 0
    prefix_mb: int = 256
    gpu_seconds: int = 60

    def __post_init__(self) -> None:
        for name, (low, high) in RANGES.items():
            value = getattr(self, name)
            if not low <= value <= high:
                raise SettingsError(f"{name} must be in [{low}, {high}], got {value}.")

    @property
    def database(self) -> Path:
        """The session database."""
        return self.data_dir / "sessions.db"

    @property
    def max_body_bytes(self) -> int:
        """Longest body of a request. JSON may write one character as \\uXXXX\\uXXXX: 12 bytes."""
        return max(self.max_prompt_chars * 12 + SPARE_BYTES, LARGEST_UPLOAD_BYTES)

    @classmethod
    def from_env(cls, env: Mapping[str, str] | None = None) -> Settings:
        """Reads the environment; a hosted Space gets the stricter defaults.

        Raises:
            SettingsError: an unknown QEVICT_* variable, a wrong type, or a value out of range.
        """
        env = os.environ if env is None else env
        _refuse_unknown(env)
        space = bool(env.get("SPACE_ID"))
        hosted = _switch(env, "QEVICT_HOSTED", space)
        numbers = {
            name: _integer(env, f"QEVICT_{name.upper()}", _default(name, hosted)) for name in RANGES if name != "port"
        }
        return cls(
            data_dir=_data_dir(env),
            host=env.get("QEVICT_HOST") or env.get("GRADIO_SERVER_NAME") or ("0.0.0.0" if hosted else "127.0.0.1"),
            port=_port(env),
            hosted=hosted,
            allowed_models=_names(env.get("QEVICT_ALLOWED_MODELS"), ("embedded",) if hosted else None),
            list_sessions=_switch(env, "QEVICT_LIST_SESSIONS", not hosted),
            login=_login(env.get("QEVICT_LOGIN", "")),
            secret=_secret(env.get("QEVICT_SECRET", "")),
            allowed_hosts=_names(env.get("QEVICT_ALLOWED_HOSTS"), ()) or (),
            public_host=(env.get("QEVICT_PUBLIC_HOST") or env.get("SPACE_HOST") or "").strip(),
            frame_ancestors=_names(env.get("QEVICT_FRAME_ANCESTORS"), SPACE_FRAMES if space else ()) or (),
            backup_dir=_backup_dir(env, space),
            log_json=_switch(env, "QEVICT_LOG_JSON", hosted),
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
    "proxy_hops": (0, 16),
    "max_runs_per_user": (0, 10_000),
    "max_runs_per_address": (0, 10_000),
    "starts_per_minute": (0, 100_000),
    "abandon_seconds": (0, 1_000_000),
    "keep_days": (0, 100_000),
    "backup_minutes": (1, 100_000),
    "batch": (1, 64),
    "batch_mb": (0, 10_000_000),
    "prefix_mb": (0, 1_000_000),
    "gpu_seconds": (5, 600),
}

HOSTED_DEFAULTS = {
    "max_new_tokens": 512,
    "max_prompt_chars": 40_000,
    "max_run_seconds": 600,
    "max_loaded_models": 1,
    "proxy_hops": 1,
    "max_runs_per_user": 2,
    "max_runs_per_address": 16,
    "starts_per_minute": 30,
    "abandon_seconds": 60,
    "keep_days": 30,
    "prefix_mb": 64,
}

SPACE_FRAMES = ("https://huggingface.co", "https://*.hf.space")
"""Whose pages show a Space in a frame."""

SPARE_BYTES = 65_536
LARGEST_UPLOAD_BYTES = 512 * 1024
"""Longest file that the page takes, with room for what a form adds."""

VARIABLES = frozenset(
    [f"QEVICT_{name.upper()}" for name in RANGES]
    + ["QEVICT_DATA_DIR", "QEVICT_HOST", "QEVICT_ALLOWED_MODELS", "QEVICT_LIST_SESSIONS", "QEVICT_HOSTED"]
    + ["QEVICT_LOGIN", "QEVICT_SECRET", "QEVICT_ALLOWED_HOSTS", "QEVICT_PUBLIC_HOST", "QEVICT_FRAME_ANCESTORS"]
    + ["QEVICT_BACKUP_DIR", "QEVICT_LOG_JSON"]
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


def _login(text: str) -> tuple[tuple[str, str], ...]:
    """Pairs from "name:password, name:password"."""
    pairs = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, _, password = part.partition(":")
        if not name or not password:
            raise SettingsError("QEVICT_LOGIN must be name:password, several of them separated by commas.")
        pairs.append((name, password))
    return tuple(pairs)


def _secret(text: str) -> str:
    secret = text.strip()
    if secret and len(secret) < 16:
        raise SettingsError(f"QEVICT_SECRET must have at least 16 characters, got {len(secret)}.")
    return secret


def _data_dir(env: Mapping[str, str]) -> Path:
    return _folder(env, "QEVICT_DATA_DIR") or Path(".qevict")


def _backup_dir(env: Mapping[str, str], space: bool) -> Path | None:
    """A database on a Space's lasting storage would be locked or torn, so only copies of it go there."""
    chosen = _folder(env, "QEVICT_BACKUP_DIR")
    lasting = Path("/data")
    if chosen is None and space and lasting.is_dir() and os.access(lasting, os.W_OK):
        return lasting / "qevict"
    return chosen


def _folder(env: Mapping[str, str], name: str) -> Path | None:
    chosen = env.get(name, "").strip()
    if not chosen:
        return None
    try:
        path = Path(chosen).expanduser()
    except RuntimeError as error:
        raise SettingsError(f"{name} must be a folder, and there is no such user as in {chosen!r}.") from error
    if "\0" in chosen:
        raise SettingsError(f"{name} must be a folder, got {chosen!r}.")
    if path.exists() and not path.is_dir():
        raise SettingsError(f"{name} must be a folder, got the file {chosen!r}.")
    return path


_PLAIN: dict[str, int] = {name: getattr(Settings(), name) for name in RANGES}
