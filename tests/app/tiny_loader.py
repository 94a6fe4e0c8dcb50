"""A loader for tests that need the real engine in the app: a tiny random model under any name."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

from engine.models import LoadedModel
from tests.tiny import tiny_loaded


@cache
def tiny() -> LoadedModel:
    """One model for all tests of a process: heads wide enough for every system's groups, and no end of its own."""
    loaded = tiny_loaded(head_dim=32)
    loaded.model.config.eos_token_id = None
    loaded.tokenizer.eos_token = None
    return loaded


def load_tiny(name: str, **_: Any) -> LoadedModel:
    """Called like `engine.models.load_model`."""
    return replace(tiny(), name=name)
