"""What a comparison is asked and what it answers: plain data, and the pure functions behind its figures.

Knows residency tables, no models and no caches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.baselines.matching import BudgetSpec
from engine.baselines.recorder import FutureMass
from engine.errors import ConfigError
from engine.trace import Tier

MODES = ("teacher", "free")
MOST_SYSTEMS = 8


@dataclass(frozen=True, slots=True)
class SystemChoice:
    """One system of a comparison.

    Attributes:
        name: in the registry. parameters: those that differ from the defaults.
        budget: its own budget; None takes the comparison's.
        match_to: name of a system of the comparison whose bytes it gets instead (a quantizer, usually).
    """

    name: str
    parameters: Mapping[str, Any] = field(default_factory=dict)
    budget: BudgetSpec | None = None
    match_to: str | None = None


@dataclass(frozen=True, slots=True)
class CompareOptions:
    """What a comparison does.

    Attributes:
        mode: "teacher" or "free". budget: of every system that takes one.
        kv_dtype: what full-precision tokens are stored in, by all systems; the reference keeps the model's dtype.
        interval: steps between two looks at residency, and tokens of a window in its frames.
        sink_tokens: where the windows of frames begin. horizon: H of future missed mass, a multiple of `interval`.
        frames: keep residency at every look, for drawing. chat, ignore_eos, seed: as in a run.
    """

    mode: str = "teacher"
    budget: BudgetSpec = field(default_factory=lambda: BudgetSpec(share=0.2))
    max_new_tokens: int = 128
    kv_dtype: str = "model"
    interval: int = 8
    sink_tokens: int = 5
    horizon: int = 32
    frames: bool = True
    chat: bool = True
    ignore_eos: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        for name, holds, rule in (
            ("mode", self.mode in MODES, f"one of {', '.join(MODES)}"),
            ("max_new_tokens", self.max_new_tokens >= 1, "1 or more"),
            ("interval", self.interval >= 1, "1 or more"),
            ("sink_tokens", self.sink_tokens >= 0, "0 or more"),
            ("horizon", self.horizon >= self.interval and self.horizon % self.interval == 0, "a multiple of interval"),
        ):
            if not holds:
                raise ConfigError(f"{name} must be {rule}, got {getattr(self, name)!r}.")


@dataclass(frozen=True, slots=True)
class CompareStep:
    """One token of a teacher-forced comparison.

    Attributes:
        step: 0 for the first decode step. token_id, piece: what all systems were asked to predict: FullKV's choice.
        kl: KL(FullKV ‖ system) in nats, per system. agrees: whether its likeliest token is FullKV's.
    """

    step: int
    token_id: int
    piece: str
    kl: tuple[float, ...]
    agrees: tuple[bool, ...]


@dataclass(frozen=True, slots=True)
class Frame:
    """What a system held at one look: shares of each window in [0, 255], uint8 [rows, windows].

    Rows are layers, or layers x KV heads where heads differ. What is in neither was evicted.

    Attributes:
        columns: tokens known at this look.
        sink: shares of the columns in front of window 0, uint8 [rows, 2]: full precision, codes.
    """

    columns: int
    full: NDArray[np.uint8]
    quant: NDArray[np.uint8]
    sink: NDArray[np.uint8]


@dataclass(slots=True)
class SystemResult:
    """What one system did. None where the mode does not measure it.

    Attributes:
        label, family, keeps, storage: see `registry.SystemInfo`.
        notices: text keys of what a user should know, such as "window_shrunk", "sinks_quantized", "bytes_nominal",
            and "same_set" where the prompt's end leaves another system the very same tokens.
        bytes, allocated_bytes: persistent at the end; the second with spare room. expected_bytes: the accountant's.
        share: bytes over FullKV's in the same kv_dtype and at the same length.
        full_tokens, quant_tokens: mean share of all tokens, prompt and new, that a head holds at the end.
        ms_per_token: median decode step. compress_ms: what ends the prompt.
        kl, agreement, perplexity, perplexity_difference: against FullKV on its own tokens.
        output_error: mean ‖o - o_full‖ / ‖o_full‖ of attention outputs, per managed layer; lower layers' errors
            included.
        fmm, fmm_fp_only: mean future missed mass; `future` holds every event.
        churn: mean 1 - |A ∩ B| / |A ∪ B| of resident positions between two looks, on those known at both.
        text, token_ids, pieces, first_difference: free mode; index of the first token that differs from FullKV's.
    """

    name: str
    label: str
    family: str
    keeps: str
    storage: str
    parameters: dict[str, Any]
    budget: dict[str, float] | None
    notices: list[str]
    expected_bytes: int
    bytes: int = 0
    allocated_bytes: int = 0
    share: float = 0.0
    full_tokens: float = 0.0
    quant_tokens: float = 0.0
    ms_per_token: float = 0.0
    compress_ms: float = 0.0
    kl: float | None = None
    kl_steps: list[float] = field(default_factory=list)
    agreement: float | None = None
    perplexity: float | None = None
    perplexity_difference: float | None = None
    output_error: list[float] = field(default_factory=list)
    fmm: float | None = None
    fmm_fp_only: float | None = None
    future: list[FutureMass] = field(default_factory=list)
    churn: float | None = None
    text: str | None = None
    token_ids: list[int] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)
    first_difference: int | None = None
    frames: list[Frame] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON, without frames and pieces."""
        values = asdict(replace(self, frames=[], pieces=[]))
        del values["frames"], values["pieces"]
        return values


@dataclass(slots=True)
class CompareResult:
    """A whole comparison.

    Attributes:
        token_ids, text: FullKV's. pieces: prompt and FullKV's tokens, one piece each; untrusted.
        perplexity: FullKV's on its own tokens (teacher mode).
        seconds: wall clock of the whole comparison; reference_ms_per_token: FullKV's step, with recording.
    """

    mode: str
    prompt_tokens: int
    token_ids: list[int]
    text: str
    pieces: list[str]
    kv_dtype: str
    full_kv_bytes: int
    perplexity: float | None
    reference_ms_per_token: float
    prefill_ms: float
    seconds: float
    stopped: bool
    systems: list[SystemResult]

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON, without frames and pieces."""
        values = {name: getattr(self, name) for name in self.__slots__ if name not in ("systems", "pieces")}
        return values | {"systems": [system.to_dict() for system in self.systems]}


def relative_error(outputs: Tensor, truth: Tensor) -> Tensor:
    """mean over heads of ‖o - o_full‖ / ‖o_full‖: [layers, heads, d] each → [layers]."""
    distance = (outputs - truth).norm(dim=-1)
    shares: Tensor = distance / truth.norm(dim=-1).clamp_min(1e-12)
    return shares.mean(-1)


def churn(before: Tensor, after: Tensor) -> float:
    """Mean over layers and heads of 1 - |A ∩ B| / |A ∪ B| on the positions known at both looks; empty sets give 0."""
    old = (before == Tier.FULL) | (before == Tier.QUANT)
    later = after[:, :, : before.shape[2]]
    new = (later == Tier.FULL) | (later == Tier.QUANT)
    union = (old | new).sum(-1)
    kept = (old & new).sum(-1)
    return float(torch.where(union > 0, 1.0 - kept / union.clamp_min(1), 0.0).mean())


def same_sets(tables: Sequence[Tensor]) -> list[int]:
    """Which systems, by number, have dropped something and hold exactly what another one holds: a comparison of
    equal sets says nothing about how they were chosen."""
    dropped = [number for number, table in enumerate(tables) if bool((table == Tier.EVICTED).any())]
    return [a for a in dropped if any(a != b and torch.equal(tables[a], tables[b]) for b in dropped)]


def frame(residency: Tensor, sink_tokens: int, window_size: int) -> Frame:
    """Shares of every window in Full and Quant.

    Args:
        residency: uint8 [layers, H_kv, columns]. sink_tokens: columns in front of window 0.
    """
    table = residency
    if table.shape[1] > 1 and bool((table == table[:, :1]).all()):
        table = table[:, :1]
    first = table[:, :, :sink_tokens].flatten(0, 1)
    rows = table[:, :, sink_tokens:].flatten(0, 1)
    columns = rows.shape[1]
    windows = -(-columns // window_size)
    spare = windows * window_size - columns
    padded = torch.nn.functional.pad(rows, (0, spare), value=int(Tier.EMPTY)).unflatten(1, (windows, window_size))
    sizes = (padded != Tier.EMPTY).sum(-1).clamp_min(1)

    def shares(tier: Tier) -> NDArray[np.uint8]:
        part = (padded == tier).sum(-1) * 255 / sizes
        out: NDArray[np.uint8] = part.round().to(torch.uint8).cpu().numpy()
        return out

    kept = torch.stack([(first == tier).sum(-1) * 255 / max(1, first.shape[1]) for tier in (Tier.FULL, Tier.QUANT)], -1)
    sink: NDArray[np.uint8] = kept.round().to(torch.uint8).cpu().numpy()
    return Frame(residency.shape[2], shares(Tier.FULL), shares(Tier.QUANT), sink)
