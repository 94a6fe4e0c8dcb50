"""QEvictConfig: every choice that decides what the engine computes.

Knows ranges and defaults; knows nothing of models, bytes or tensors.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.errors import ConfigError

KV_DTYPES = ("model", "float16", "bfloat16", "float32")
BACKENDS = ("auto", "eager", "sdpa", "flash2", "fused")
RANKERS = ("cumulative", "decayed", "p_norm", "key_norm")
SCORE_SCOPES = ("layer", "kv_head")
PREFILL_ROUTING = ("end", "chunk")


@dataclass(frozen=True, slots=True)
class QEvictConfig:
    """All settings of one cache. Frozen and validated; an unknown key is an error (`from_mapping`).

    Attributes:
        window_size: tokens per window, Ω (paper §3.4). 1 allows no Quant tier.
        routing_interval: tokens between routing events, a multiple of `window_size`; None = `window_size`.
        sink_tokens: first tokens, never evicted.
        local_tokens: most recent tokens, never evicted, a multiple of `window_size`; None = from `local_share`.
        local_share: share of the total budget that the local region's peak may take.
        kv_budget: share of FullKV bytes **kept** at the planned length, (0, 1].
        kv_budget_bytes: absolute budget for the whole model and one batch row; overrides `kv_budget`.
        quant_share: byte share of the history budget given to the Quant tier, q in [0, 1].
        bits: code width of the Quant tier, 2 or 4.
        value_group_size: channels that share one value scale and zero; None = the whole head.
        kv_dtype: what sink, local and Full are stored in; "model" keeps the model's own.
        planned_new_tokens: planned length = prompt + this.
        promotion: whether Quant windows compete for Full.
        score_scope: "layer" shares one decision among KV heads, "kv_head" decides per head.
        ranker: how windows are ranked (paper appendix); higher is better.
        decay_half_life: steps until a mass counts half (`decayed`).
        norm_p: exponent of `p_norm`.
        key_norm_sign: -1 prefers keys of small norm, +1 of large norm (`key_norm`).
        prefill_queries: score the prompt by its last n queries only; None = all.
        age_normalised: rank by score divided by the number of queries that could see the window.
        prefill_routing: "end" compresses when the first single token comes, "chunk" after every multi-token forward.
        backend: attention backend; "auto" takes `fused` where it runs, else `sdpa`.
    """

    window_size: int = 8
    routing_interval: int | None = None
    sink_tokens: int = 5
    local_tokens: int | None = None
    local_share: float = 0.25
    kv_budget: float = 0.20
    kv_budget_bytes: int | None = None
    quant_share: float = 0.70
    bits: int = 2
    value_group_size: int | None = None
    kv_dtype: str = "model"
    planned_new_tokens: int = 256
    promotion: bool = True
    score_scope: str = "layer"
    ranker: str = "cumulative"
    decay_half_life: float = 64.0
    norm_p: float = 2.0
    key_norm_sign: int = -1
    prefill_queries: int | None = None
    age_normalised: bool = False
    prefill_routing: str = "end"
    backend: str = "auto"

    def __post_init__(self) -> None:
        _check_types(self)
        if self.window_size not in (1, 2, 4, 8, 16, 32, 64):
            raise ConfigError(f"window_size must be one of 1, 2, 4, 8, 16, 32, 64, got {self.window_size}.")
        if self.quant_share > 0 and (self.window_size * self.bits) % 8:
            raise ConfigError(
                f"window_size {self.window_size} with bits {self.bits} does not fill whole bytes: "
                "use window_size 4 or more, or quant_share 0."
            )
        _require(0.0 <= self.quant_share <= 1.0, "quant_share must be in [0, 1]", self.quant_share)
        _require(0.0 < self.kv_budget <= 1.0, "kv_budget must be in (0, 1]", self.kv_budget)
        _require(
            self.kv_budget_bytes is None or self.kv_budget_bytes > 0,
            "kv_budget_bytes must be positive",
            self.kv_budget_bytes,
        )
        _require(0.0 < self.local_share < 1.0, "local_share must be in (0, 1)", self.local_share)
        _require(self.sink_tokens >= 0, "sink_tokens must be 0 or more", self.sink_tokens)
        _require(self.bits in (2, 4), "bits must be 2 or 4", self.bits)
        _require(self.planned_new_tokens >= 0, "planned_new_tokens must be 0 or more", self.planned_new_tokens)
        _require(self.decay_half_life > 0, "decay_half_life must be positive", self.decay_half_life)
        _require(self.norm_p >= 1, "norm_p must be 1 or more", self.norm_p)
        _require(self.key_norm_sign in (-1, 1), "key_norm_sign must be -1 or 1", self.key_norm_sign)
        _require(
            self.prefill_queries is None or self.prefill_queries > 0,
            "prefill_queries must be positive",
            self.prefill_queries,
        )
        _require(
            self.value_group_size is None or self.value_group_size > 0,
            "value_group_size must be positive",
            self.value_group_size,
        )
        for name, allowed in (
            ("kv_dtype", KV_DTYPES),
            ("backend", BACKENDS),
            ("ranker", RANKERS),
            ("score_scope", SCORE_SCOPES),
            ("prefill_routing", PREFILL_ROUTING),
        ):
            value = getattr(self, name)
            if value not in allowed:
                raise ConfigError(f"{name} must be one of {', '.join(allowed)}, got {value!r}.")
        for name in ("routing_interval", "local_tokens"):
            value = getattr(self, name)
            if value is not None and (value < self.window_size or value % self.window_size):
                raise ConfigError(f"{name} must be a positive multiple of window_size {self.window_size}, got {value}.")

    @property
    def interval(self) -> int:
        """Tokens between two routing events."""
        return self.window_size if self.routing_interval is None else self.routing_interval

    def replace(self, **changes: Any) -> QEvictConfig:
        """A copy with some settings changed; an unknown name is a `ConfigError`."""
        _refuse_unknown(changes)
        return dataclasses.replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        """All settings as plain values, ready for JSON."""
        return dataclasses.asdict(self)

    @classmethod
    def from_mapping(cls, settings: Mapping[str, Any]) -> QEvictConfig:
        """Builds a config from plain values.

        Raises:
            ConfigError: an unknown key, a wrong type or a value out of range.
        """
        _refuse_unknown(settings)
        return cls(**settings)


def _require(holds: bool, rule: str, came: object) -> None:
    if not holds:
        raise ConfigError(f"{rule}, got {came}.")


def _refuse_unknown(settings: Mapping[str, Any]) -> None:
    known = {field.name for field in dataclasses.fields(QEvictConfig)}
    unknown = sorted(set(settings) - known)
    if unknown:
        raise ConfigError(f"unknown setting {unknown[0]!r}; known are {', '.join(sorted(known))}.")


def _check_types(config: QEvictConfig) -> None:
    """Refuses wrong types early: a TOML file or a form may hold anything."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        kinds = str(field.type)
        if value is None and "None" in kinds:
            continue
        if "bool" in kinds:
            good = isinstance(value, bool)
        elif "int" in kinds:
            good = isinstance(value, int) and not isinstance(value, bool)
        elif "float" in kinds:
            good = isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
        else:
            good = isinstance(value, str)
        if not good:
            raise ConfigError(f"{field.name} must be of type {kinds}, got {value!r}.")
