"""The engine's named errors, one for each thing that a user can mend.

    EngineError
    ├── ConfigError            a setting is out of range, unknown, or contradicts another
    ├── BudgetError            the KV budget cannot hold sink + local + one window
    ├── BackendError           the chosen attention backend cannot run here
    ├── ModelError
    │   ├── ModelNotFoundError     no such model, or no access to it
    │   ├── ModelTooLargeError     the weights do not fit this machine's memory
    │   └── UnsupportedModelError  the architecture cannot be managed (named reason)
    ├── CacheUseError          the cache is used in a way that it cannot honour
    ├── PromptError            empty, or longer than the model's positions
    ├── TraceError             bytes that are not a trace
    └── OutOfMemoryError       the device ran out of memory during a run

Every text says what must hold, what came, and what to do. A caller shows it as it stands.
"""

from __future__ import annotations


class EngineError(Exception):
    """Base of every error that the engine raises on purpose."""


class ConfigError(EngineError, ValueError):
    """A setting is out of range, unknown, or contradicts another."""


class BudgetError(EngineError, ValueError):
    """The KV budget cannot hold sink, local region and one history window.

    Args:
        message: the whole sentence, with the smallest feasible budget in it.
        smallest_bytes: smallest feasible budget, bytes per layer and batch row.
        smallest_share: the same as a share of FullKV at the planned length, rounded up to 1e-4.
    """

    def __init__(self, message: str, *, smallest_bytes: int, smallest_share: float) -> None:
        super().__init__(message)
        self.smallest_bytes = smallest_bytes
        self.smallest_share = smallest_share


class BackendError(EngineError, RuntimeError):
    """The chosen attention backend cannot run here; the text says what is missing."""


class ModelError(EngineError, RuntimeError):
    """A model cannot be loaded or used."""


class ModelNotFoundError(ModelError):
    """No such model in the hub, in a local folder, or among the embedded ones; or no access to it."""


class ModelTooLargeError(ModelError):
    """The weights do not fit the memory that this machine has free."""


class UnsupportedModelError(ModelError):
    """The architecture cannot be managed; the text names the reason."""


class CacheUseError(EngineError, RuntimeError):
    """The cache is used in a way that it cannot honour, such as bringing evicted tokens back."""


class PromptError(EngineError, ValueError):
    """The prompt is empty, or longer than the model's positions allow."""


class TraceError(EngineError, ValueError):
    """Bytes that are not a trace of a known version."""


class OutOfMemoryError(EngineError, MemoryError):
    """The device ran out of memory during a run."""
