"""Named systems that one run can be asked for: QEvict and the variants that its own settings make of it.

Knows settings; knows no model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.config import QEvictConfig
from engine.errors import ConfigError

SYSTEMS: Mapping[str, Mapping[str, Any]] = {
    "qevict": {},
    "fullkv": {"kv_budget": 1.0, "quant_share": 0.0},
    "qevict-r1": {"window_size": 1, "routing_interval": None, "quant_share": 0.0},
    "qevict-r2": {"quant_share": 0.0},
    "qevict-r4": {"window_size": 32, "routing_interval": None},
    "qevict-int4": {"bits": 4},
    "qevict-no-promotion": {"promotion": False},
}
"""What each changes in the settings."""


def apply_system(name: str, config: QEvictConfig) -> QEvictConfig:
    """`config` as the named system has it.

    Raises:
        ConfigError: no such system, or its settings do not go with the rest.
    """
    changes = SYSTEMS.get(name)
    if changes is None:
        raise ConfigError(f"system must be one of {', '.join(SYSTEMS)}, got {name[:40]!r}.")
    return config.replace(**changes)
