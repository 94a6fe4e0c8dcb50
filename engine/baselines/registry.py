"""The registry: a name, a rival, and parameters that make it a system of its own.

    make("snapkv", loaded, BudgetSpec(share=0.2), new_tokens=256)

A new system is one file beside this one and one line in `_SYSTEMS`.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.baselines.adakv import FLOORS, AdaKV
from engine.baselines.base import Rival, RunPlan
from engine.baselines.criticalkv import ALLOCATIONS, CriticalKV
from engine.baselines.defensivekv import MODES, DefensiveKV, LayerDefensiveKV
from engine.baselines.fullkv import FullKV
from engine.baselines.h2o import H2O
from engine.baselines.hf_quantized import HFQuantized, unavailable
from engine.baselines.kivi import Kivi
from engine.baselines.kvquant import KVQuant
from engine.baselines.matching import BudgetSpec
from engine.baselines.observation import GROUPS, POOLS
from engine.baselines.oracle import FutureOracle, PastOracle
from engine.baselines.qevict import FullTierOnly, QEvict
from engine.baselines.random_windows import RandomWindows
from engine.baselines.snapkv import SnapKV
from engine.baselines.streaming import POSITIONS, StreamingLLM
from engine.baselines.zipcache import ZipCache
from engine.budget import KVShape
from engine.config import RANKERS, SCORE_SCOPES
from engine.errors import ConfigError
from engine.models import LoadedModel

_SYSTEMS: tuple[tuple[str, type[Rival], dict[str, Any]], ...] = (
    ("fullkv", FullKV, {}),
    ("qevict", QEvict, {}),
    ("qevict-r1", QEvict, {"window_size": 1, "quant_share": 0.0}),
    ("qevict-r2", QEvict, {"quant_share": 0.0}),
    ("qevict-r3-fp-only", FullTierOnly, {}),
    ("qevict-r4", QEvict, {"window_size": 32}),
    ("qevict-int4", QEvict, {"bits": 4}),
    ("qevict-no-promotion", QEvict, {"promotion": False}),
    ("qevict-decayed", QEvict, {"ranker": "decayed"}),
    ("qevict-recent", QEvict, {"local_share": 0.5, "quant_share": 0.9}),
    ("oracle-past", PastOracle, {}),
    ("oracle-future", FutureOracle, {}),
    ("streamingllm", StreamingLLM, {}),
    ("snapkv", SnapKV, {}),
    ("adakv", AdaKV, {}),
    ("h2o", H2O, {}),
    ("random", RandomWindows, {}),
    ("kivi-2", Kivi, {"bits": 2}),
    ("kivi-4", Kivi, {"bits": 4}),
    ("criticalkv", CriticalKV, {}),
    ("critical-adakv", CriticalKV, {"allocation": "ada"}),
    ("defensivekv", DefensiveKV, {}),
    ("layer-defensivekv", LayerDefensiveKV, {}),
    ("zipcache", ZipCache, {}),
    ("kvquant-nuq2", KVQuant, {"bits": 2}),
    ("kvquant-nuq3", KVQuant, {"bits": 3}),
    ("kvquant-nuq4", KVQuant, {"bits": 4}),
    ("hf-quantized", HFQuantized, {}),
)
_CHOICES: dict[str, tuple[str, ...]] = {
    "positions": POSITIONS,
    "floor": FLOORS,
    "allocation": ALLOCATIONS,
    "mode": MODES,
    "pool": POOLS,
    "group": GROUPS,
    "ranker": RANKERS,
    "score_scope": SCORE_SCOPES,
}


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter of a system: its kind ("int", "float", "bool", "str"), default and choices."""

    name: str
    kind: str
    default: Any
    optional: bool
    choices: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SystemInfo:
    """What a list of systems shows.

    Attributes:
        label: text key of the name; `label` + "_line" is the one-line description, `label` + "_loss" what is lost.
        family: "exact", "evict", "quantize" or "tiers". keeps: "exact", "lossy" or "recoverable".
        storage: "real" or "simulated". budgeted: whether a budget decides what it keeps.
        grows: whether it can follow a running budget. needs_reference: whether it exists only in a teacher-forced
            comparison.
        unavailable: why it can't run here; None where it can.
    """

    name: str
    label: str
    family: str
    keeps: str
    storage: str
    budgeted: bool
    grows: bool
    needs_reference: bool
    parameters: tuple[Parameter, ...]
    unavailable: str | None

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        return dataclasses.asdict(self)


def names() -> tuple[str, ...]:
    """Names of all systems, in order of display."""
    return tuple(name for name, _, _ in _SYSTEMS)


def systems() -> list[SystemInfo]:
    """All systems with their parameters."""
    return [_info(name, kind, preset) for name, kind, preset in _SYSTEMS]


def info(name: str) -> SystemInfo:
    """One system with its parameters.

    Raises:
        ConfigError: an unknown name.
    """
    for known, kind, preset in _SYSTEMS:
        if known == name:
            return _info(name, kind, preset)
    raise ConfigError(f"unknown system {name!r}; known are {', '.join(names())}.")


def rival(name: str, parameters: Mapping[str, Any] | None = None) -> Rival:
    """A system with some parameters changed.

    Raises:
        ConfigError: an unknown name or parameter, or a value out of range.
    """
    found = next((entry for entry in _SYSTEMS if entry[0] == name), None)
    if found is None:
        raise ConfigError(f"unknown system {name!r}; known are {', '.join(names())}.")
    _, kind, preset = found
    given = dict(parameters or {})
    table = {parameter.name: parameter for parameter in _parameters(kind, preset)}
    for key, value in given.items():
        if key not in table:
            raise ConfigError(f"{name} has no parameter {key!r}; it has {', '.join(table) or 'none'}.")
        _check(name, table[key], value)
    return kind(**(preset | given))


def make(
    name: str,
    loaded: LoadedModel,
    budget: BudgetSpec | None = None,
    *,
    new_tokens: int = 256,
    kv_dtype: str = "model",
    seed: int = 0,
    parameters: Mapping[str, Any] | None = None,
) -> Any:
    """A cache of the system, for `model.generate(past_key_values=...)` and for comparisons.

    Raises:
        ConfigError: see `rival`. BackendError: a package is missing. UnsupportedModelError: the model can't be managed.
    """
    run = RunPlan(budget, new_tokens, kv_dtype, seed, loaded.tokenizer)
    return rival(name, parameters).build(loaded.model, run)


def match_to(
    name: str,
    shape: KVShape,
    prompt_tokens: int,
    new_tokens: int,
    *,
    kv_dtype: str = "model",
    parameters: Mapping[str, Any] | None = None,
) -> BudgetSpec:
    """The budget that gives another system the bytes that `name` has at its own operating point, at the run's end."""
    run = RunPlan(None, new_tokens, kv_dtype)
    return BudgetSpec(total_bytes=rival(name, parameters).account(shape, prompt_tokens, new_tokens, run))


def _info(name: str, kind: type[Rival], preset: dict[str, Any]) -> SystemInfo:
    missing = unavailable(str(HFQuantized().backend)) if kind is HFQuantized else None
    return SystemInfo(
        name=name,
        label="systems." + name.replace("-", "_"),
        family=kind.family,
        keeps=kind.keeps,
        storage=kind.storage,
        budgeted=kind.budgeted,
        grows=kind.grows,
        needs_reference=kind.needs_reference,
        parameters=_parameters(kind, preset),
        unavailable=missing,
    )


def _parameters(kind: type[Rival], preset: dict[str, Any]) -> tuple[Parameter, ...]:
    hints = typing.get_type_hints(kind)
    out = []
    for field in dataclasses.fields(kind):
        options = [option for option in (typing.get_args(hints[field.name]) or (hints[field.name],))]
        plain = [option for option in options if option is not type(None)]
        default = preset.get(field.name, field.default)
        choices = _CHOICES.get(field.name, ())
        out.append(Parameter(field.name, plain[0].__name__, default, len(plain) < len(options), choices))
    return tuple(out)


def _check(name: str, parameter: Parameter, value: Any) -> None:
    """Refuses a value of a wrong type: it may come from a form or a command line."""
    if value is None and parameter.optional:
        return
    good = {
        "bool": isinstance(value, bool),
        "int": isinstance(value, int) and not isinstance(value, bool),
        "float": isinstance(value, (int, float)) and not isinstance(value, bool),
        "str": isinstance(value, str),
    }[parameter.kind]
    if not good:
        raise ConfigError(f"{parameter.name} of {name} must be of type {parameter.kind}, got {value!r}.")
