"""Named systems that one run can be asked for: QEvict, the variants that its own settings make of it, and its rivals.

Knows settings; asks the engine's registry only when a name is none of QEvict's.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from app.engine_import import import_engine
from engine.config import QEvictConfig
from engine.errors import BackendError, ConfigError

SYSTEMS: Mapping[str, Mapping[str, Any]] = {
    "qevict": {},
    "fullkv": {"kv_budget": 1.0, "quant_share": 0.0},
    "qevict-r1": {"window_size": 1, "routing_interval": None, "quant_share": 0.0},
    "qevict-r2": {"quant_share": 0.0},
    "qevict-r4": {"window_size": 32, "routing_interval": None},
    "qevict-int4": {"bits": 4},
    "qevict-no-promotion": {"promotion": False},
}
"""QEvict and its variants: what each changes in the settings."""

RIVAL_SETTINGS = ("kv_budget", "kv_budget_bytes", "kv_dtype", "window_size", "sink_tokens", "planned_new_tokens")
"""Settings that mean something to a rival; the last but one and two only draw its board."""


def apply_system(name: str, config: QEvictConfig, given: Collection[str] = ()) -> QEvictConfig:
    """`config` as the named system has it.

    Args:
        given: settings that were asked for by name; one that the system does not have is refused.

    Raises:
        ConfigError: no such system, or its settings do not go with the rest.
        BackendError: what it needs is not installed.
    """
    changes = SYSTEMS.get(name)
    if changes is not None:
        return config.replace(**changes)
    import_engine()
    from engine.baselines import registry

    if name not in rival_names():
        if name in registry.names():
            raise ConfigError(f"{name} exists only where it is compared with others on the same tokens.")
        raise ConfigError(f"system must be one of {', '.join([*SYSTEMS, *rival_names()])}, got {name[:40]!r}.")
    info = registry.info(name)
    if info.unavailable is not None:
        raise BackendError(info.unavailable)
    for setting in given:
        if setting not in RIVAL_SETTINGS:
            raise ConfigError(f"{name} has no {setting}: leave it out. It takes {', '.join(RIVAL_SETTINGS)}.")
        if setting.startswith("kv_budget") and not info.budgeted:
            raise ConfigError(f"{name} keeps what its own settings say, whatever the budget: leave {setting} out.")
    return config


def rival_of(name: str) -> str:
    """The name for the engine's registry; empty where QEvict itself runs with changed settings."""
    return "" if name in SYSTEMS else name


def rival_names() -> tuple[str, ...]:
    """The registry's systems that generate freely, QEvict's variants left out."""
    import_engine()
    from engine.baselines import registry

    return tuple(
        one.name
        for one in registry.systems()
        if one.name not in SYSTEMS and one.family != "tiers" and not one.needs_reference
    )


def listed() -> list[dict[str, Any]]:
    """All systems, for those who choose one by name."""
    import_engine()
    from engine.baselines import registry

    facts = {one.name: one for one in registry.systems()}
    out: list[dict[str, Any]] = []
    for name in (*SYSTEMS, *rival_names()):
        one = facts[name]
        out.append(
            {
                "name": name,
                "changes": dict(SYSTEMS.get(name, {})),
                "family": one.family,
                "keeps": one.keeps,
                "storage": one.storage,
                "budgeted": one.budgeted,
                "unavailable": one.unavailable,
            }
        )
    return out
