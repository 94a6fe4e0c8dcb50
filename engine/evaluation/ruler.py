"""RULER's tasks from seeded generators (stub)."""

from __future__ import annotations

from typing import Any

RULER: dict[str, Any] = {}
