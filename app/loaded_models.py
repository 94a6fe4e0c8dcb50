"""Models that stay in memory between runs: the few used last.

Knows how many; knows nothing of runs.
"""

from __future__ import annotations

import gc
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from app.engine_import import import_engine
from engine.errors import ModelNotFoundError
from engine.trace import Progress

Loader = Callable[..., Any]
"""(name, *, device, dtype, progress) -> engine.models.LoadedModel"""


def _load_model(name: str, **options: Any) -> Any:
    import_engine()
    from engine.models import load_model

    return load_model(name, **options)


class LoadedModels:
    """At most `capacity` models; the one used longest ago goes before another is loaded.

    Args:
        allowed: the only names that are loaded; None = any.
    """

    def __init__(self, capacity: int, loader: Loader | None = None, allowed: tuple[str, ...] | None = None) -> None:
        self._allowed = allowed
        self._capacity = capacity
        self._loader: Loader = loader or _load_model
        self._models: OrderedDict[tuple[str, str, str], Any] = OrderedDict()
        self._lock = threading.Lock()

    def get(
        self,
        name: str,
        device: str = "auto",
        dtype: str = "auto",
        progress: Callable[[Progress], None] | None = None,
    ) -> Any:
        """The model, loaded if need be; one load at a time.

        Raises:
            ModelNotFoundError: not one of the allowed names.
            EngineError: what the loader says.
        """
        if self._allowed is not None and name not in self._allowed:
            raise ModelNotFoundError(f"this server runs {', '.join(self._allowed)}, got {name!r}.")
        key = (name, device, dtype)
        with self._lock:
            if key in self._models:
                self._models.move_to_end(key)
                return self._models[key]
            while len(self._models) >= self._capacity:
                self._models.popitem(last=False)
                _give_memory_back()
            loaded = self._loader(name, device=device, dtype=dtype, progress=progress)
            self._models[key] = loaded
            return loaded

    def has(self, name: str, device: str = "auto", dtype: str = "auto") -> bool:
        """Whether a run with this model starts without loading."""
        return (name, device, dtype) in self._models

    def clear(self) -> None:
        """Lets all models go."""
        with self._lock:
            self._models.clear()
        _give_memory_back()


def _give_memory_back() -> None:
    gc.collect()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        torch.cuda.empty_cache()
