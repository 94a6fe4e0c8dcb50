"""What somebody asks for: one run, checked against the server's limits before anything is loaded.

Knows settings and the engine's configuration; imports neither torch nor a web framework.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, is_dataclass
from typing import TYPE_CHECKING, Any

from app.settings import Settings
from engine.config import QEvictConfig
from engine.errors import ConfigError, ModelNotFoundError, PromptError

if TYPE_CHECKING:
    from engine.run_options import RunOptions
    from engine.trace import TraceEvent

OPTIONS: dict[str, tuple[type, ...]] = {
    "max_new_tokens": (int,),
    "temperature": (int, float),
    "top_p": (int, float),
    "seed": (int,),
    "reference": (bool,),
    "horizon": (int,),
    "keyframe_every": (int,),
    "prefill_chunk": (int, type(None)),
    "chat": (bool,),
    "ignore_eos": (bool,),
}
"""The names of `engine.generate.RunOptions`, known here so that a form can be checked before torch is imported."""

_RANGES: dict[str, tuple[float, float]] = {
    "max_new_tokens": (1, math.inf),
    "temperature": (0, 100),
    "top_p": (0, 1),
    "seed": (0, 2**63 - 1),
    "horizon": (1, 4096),
    "keyframe_every": (1, 100_000),
    "prefill_chunk": (1, 10_000_000),
}


@dataclass(frozen=True, slots=True)
class RunRequest:
    """One run, as asked for.

    Attributes:
        prompt: what the model reads.
        model: "embedded", a hub name or a folder.
        config: what the cache does.
        options: `engine.generate.RunOptions`, or some of its fields by name; names left out keep their defaults.
        preset: name of the preset that `config` came from, for the record.
        title: of the session; empty = the prompt's beginning.
        raise_budget: raise a budget that can't hold sink, local and one window to the smallest that can, and say so.
        watched_row: board row whose scores are sent at every event.
        lang: language of notices.
        policy: name that the trace carries.
        messages: a conversation of (role, text) that stands in for `prompt` once the model's template is at hand.
        system: a rival from the engine's registry that runs instead of QEvict; empty = QEvict as `config` says.
        document: text in front of the prompt that is compressed before the prompt is read, and kept for the next
            question about it.
        user, address: who asks, see `app.visitors`; empty = filled in from the current request.
        job: makes the events instead of the engine, called in the same way; such a run is not stored.
    """

    prompt: str
    model: str = "embedded"
    config: QEvictConfig = field(default_factory=QEvictConfig)
    options: RunOptions | Mapping[str, Any] = field(default_factory=dict)
    preset: str = ""
    title: str = ""
    device: str = "auto"
    dtype: str = "auto"
    raise_budget: bool = False
    watched_row: int = 0
    lang: str = "en"
    policy: str = "qevict"
    messages: tuple[tuple[str, str], ...] = ()
    system: str = ""
    document: str = ""
    user: str = ""
    address: str = ""
    job: Callable[..., Iterator[TraceEvent]] | None = field(default=None, compare=False, repr=False)

    @property
    def session_title(self) -> str:
        """The title, or the prompt's beginning."""
        return self.title or self.prompt.strip()[:80]

    @property
    def option_values(self) -> dict[str, Any]:
        """The options by name."""
        options = self.options
        return dict(options) if isinstance(options, Mapping) else _fields(options)

    def record(self) -> dict[str, Any]:
        """Everything that was asked for, as plain values: enough to ask again."""
        return {
            "model": self.model,
            "prompt": self.prompt,
            "preset": self.preset,
            "config": self.config.to_dict(),
            "options": self.option_values,
            "device": self.device,
            "dtype": self.dtype,
            **({"system": self.system} if self.system else {}),
            **({"document": self.document} if self.document else {}),
        }


def check(request: RunRequest, settings: Settings) -> None:
    """Refuses what can't work here.

    Raises:
        PromptError: empty, too long, or not text.
        ModelNotFoundError: not one of the models that this server allows.
        ConfigError: an option is unknown, of a wrong type, or beyond the server's limits.
    """
    if not request.prompt.strip():
        raise PromptError("the prompt is empty: type something for the model to read.")
    length = len(request.prompt) + len(request.document)
    if length > settings.max_prompt_chars:
        raise PromptError(f"the prompt must have at most {settings.max_prompt_chars} characters here, got {length}.")
    if request.document and request.system:
        raise ConfigError(f"{request.system} reads a prompt as a whole: put the document into the prompt.")
    texts = ("prompt", "document", "model", "preset")
    for name, value in ((name, str(getattr(request, name))) for name in texts):
        if not _is_unicode(value):
            raise PromptError(f"the {name} must be Unicode text, got half of a surrogate pair in it.")
    allowed = settings.allowed_models
    if not request.model.strip():
        raise ModelNotFoundError("the model has no name: “embedded”, a hub name such as owner/model, or a folder.")
    if allowed is not None and request.model not in allowed:
        raise ModelNotFoundError(f"this server runs {', '.join(allowed)}, got {request.model!r}.")
    if not 0 <= request.watched_row <= 100_000:
        raise ConfigError(f"watched_row must be in [0, 100000], got {request.watched_row}.")
    options = request.option_values
    check_options(options)
    tokens = options.get("max_new_tokens", 0)
    if tokens > settings.max_new_tokens:
        raise ConfigError(f"max_new_tokens must be at most {settings.max_new_tokens} here, got {tokens}.")


def check_options(options: Mapping[str, Any]) -> None:
    """Refuses unknown names, wrong types and values out of range.

    Raises:
        ConfigError: names the option and the rule.
    """
    for name, value in options.items():
        kinds = OPTIONS.get(name)
        if kinds is None:
            raise ConfigError(f"unknown option {name!r}; known are {', '.join(sorted(OPTIONS))}.")
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            wanted = " or ".join("none" if kind is type(None) else kind.__name__ for kind in kinds)
            raise ConfigError(f"{name} must be of type {wanted}, got {value!r}.")
        if name in _RANGES and isinstance(value, int | float):
            low, high = _RANGES[name]
            if not low <= value <= high:
                raise ConfigError(f"{name} must be in [{low:g}, {high:g}], got {value}.")


def _fields(options: object) -> dict[str, Any]:
    if not is_dataclass(options) or isinstance(options, type):
        raise ConfigError(f"options must be a table of names and values, got {options!r}.")
    return asdict(options)


def _is_unicode(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True
