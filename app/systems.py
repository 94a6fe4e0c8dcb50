"""Named systems that one run can be asked for: QEvict, the variants that its own settings make of it, and its rivals.

Knows settings and the names of the engine's registry; does not load the engine, so that a server answers at once.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
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
    "qevict-decayed": {"ranker": "decayed"},
    "qevict-recent": {"local_share": 0.5, "quant_share": 0.9},
}
"""QEvict and its variants: what each changes in the settings."""

EVICTING = (
    *("streamingllm", "snapkv", "adakv", "h2o", "random", "criticalkv", "critical-adakv"),
    *("defensivekv", "layer-defensivekv"),
)
"""Rivals that keep as many tokens as a budget holds; names of the engine's registry."""
QUANTIZING = ("kivi-2", "kivi-4", "zipcache", "kvquant-nuq2", "kvquant-nuq3", "kvquant-nuq4", "hf-quantized")
"""Rivals that keep all tokens at the bits of their own settings, whatever the budget."""
RIVALS = (*EVICTING, *QUANTIZING)

RIVAL_SETTINGS = ("kv_budget", "kv_budget_bytes", "kv_dtype", "window_size", "sink_tokens", "planned_new_tokens")
"""Settings that mean something to a rival; windows and sinks only draw its board."""


def apply_system(name: str, config: QEvictConfig, given: Collection[str] = ()) -> QEvictConfig:
    """`config` as the named system has it.

    Args:
        given: settings that were asked for by name; one that the system does not have is refused.

    Raises:
        ConfigError: no such system, or its settings do not go with the rest.
    """
    changes = SYSTEMS.get(name)
    if changes is not None:
        return config.replace(**changes)
    if name not in RIVALS:
        raise ConfigError(f"system must be one of {', '.join([*SYSTEMS, *RIVALS])}, got {name[:40]!r}.")
    for setting in given:
        if setting not in RIVAL_SETTINGS:
            raise ConfigError(f"{name} has no {setting}: leave it out. It takes {', '.join(RIVAL_SETTINGS)}.")
        if setting.startswith("kv_budget") and name in QUANTIZING:
            raise ConfigError(f"{name} keeps what its own settings say, whatever the budget: leave {setting} out.")
    return config


def rival_of(name: str) -> str:
    """The name for the engine's registry; empty where QEvict itself runs with changed settings."""
    return "" if name in SYSTEMS else name


def listed() -> list[dict[str, Any]]:
    """All systems, for those who choose one by name."""
    own = [{"name": name, "rival": False, "budgeted": True, "changes": dict(SYSTEMS[name])} for name in SYSTEMS]
    rivals = [{"name": name, "rival": True, "budgeted": name in EVICTING, "changes": {}} for name in RIVALS]
    return [*own, *rivals]
