"""Importing the engine in a program of many threads.

The engine brings torch and transformers, which takes seconds: it is imported when something first needs it. Two
threads that import parts of it at once can each be given the half of a module; so the first import is made by one.
"""

from __future__ import annotations

import importlib
import threading

_lock = threading.Lock()
_done = threading.Event()


def import_engine() -> None:
    """Returns when the engine can be imported from any thread; the first call takes as long as torch does."""
    if _done.is_set():
        return
    with _lock:
        # It stands on everything else that a server uses of the engine: models, generation, systems.
        importlib.import_module("engine.compare")
        _done.set()
