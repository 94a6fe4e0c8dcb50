"""What a rival is: a frozen dataclass of its parameters, and what it does with a prompt.

    @dataclass(frozen=True, kw_only=True)
    class Mine(Rival):
        name = "mine"
        ...
        def compress(self, staged, context): ...      # prompt in full precision -> one Resident per layer

`RivalCache` (rival_cache.py) does the rest: staging of prompts, tags, masks, positions, batch rows. A
`Resident` is what one layer keeps between steps: it stores and attends. Knows no particular system.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from engine.attention.softmax import attend, merge
from engine.baselines.matching import RUNNING, BudgetSpec
from engine.budget import KVShape
from engine.config import KV_DTYPES
from engine.errors import ConfigError
from engine.rope import RopeTable

MASKED = -30_000.0
"""Added to a logit that must not count; finite in float16."""
ALL_QUERIES = -1


@dataclass(frozen=True, slots=True)
class RunPlan:
    """What is the same for all systems of a comparison.

    Attributes:
        budget: None = everything that the system would keep by itself.
        planned_new_tokens: tokens that will follow the prompt; budgets are matched at the sum.
        kv_dtype: what full-precision tokens are stored in; "model" keeps the model's own.
        seed: of everything random.
        tokenizer: of the model, for systems that calibrate on a bundled text.
        witness: FullKV beside a teacher-forced comparison, for oracles; None everywhere else.
    """

    budget: BudgetSpec | None = None
    planned_new_tokens: int = 256
    kv_dtype: str = "model"
    seed: int = 0
    tokenizer: Any = None
    witness: Any = None

    def __post_init__(self) -> None:
        if self.kv_dtype not in KV_DTYPES:
            raise ConfigError(f"kv_dtype must be one of {', '.join(KV_DTYPES)}, got {self.kv_dtype!r}.")
        if self.planned_new_tokens < 0:
            raise ConfigError(f"planned_new_tokens must be 0 or more, got {self.planned_new_tokens}.")

    @property
    def running(self) -> bool:
        """Whether the budget grows with the sequence."""
        return self.budget is not None and self.budget.reference == RUNNING

    def stored(self, model_dtype: torch.dtype) -> torch.dtype:
        """The dtype of full-precision tokens."""
        if self.kv_dtype == "model":
            return model_dtype
        return {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}[self.kv_dtype]


@dataclass(frozen=True, slots=True)
class Needs:
    """What a rival wants from the prompt's forward besides keys and values.

    queries: the last n queries of each layer, or `ALL_QUERIES`. column_sums: attention mass of every key, summed
    over all prompt queries.
    """

    queries: int = 0
    column_sums: bool = False


@dataclass(slots=True)
class Staged:
    """A prompt (or a later multi-token turn) of one layer, in full precision: workspace.

    Attributes:
        key, value: [B, H_kv, P, d], keys after RoPE.
        query: the last queries [B, H_q, w, d] that the rival asked for.
        column_sums: float32 [B, H_q, P] where asked for.
        module: the attention module, for its output projection.
    """

    key: Tensor
    value: Tensor
    query: Tensor
    column_sums: Tensor | None
    module: nn.Module

    @property
    def nbytes(self) -> int:
        sums = 0 if self.column_sums is None else self.column_sums.nbytes
        return self.key.nbytes + self.value.nbytes + self.query.nbytes + sums


@dataclass(frozen=True, slots=True)
class Context:
    """Facts about the run that a rival may use when it compresses.

    Attributes:
        shape: of all managed layers, in the stored dtype. num_heads: query heads.
        columns: prompt columns, padding included. pads: left padding of each row. shift: column minus position.
        scale, softcap: of the attention.
        rope: makes the model's RoPE table; raises UnsupportedModelError where keys can't be un-rotated.
        model: the model, for systems that calibrate on it.
    """

    run: RunPlan
    shape: KVShape
    num_heads: int
    columns: int
    pads: list[int]
    shift: Tensor
    dtype: torch.dtype
    device: torch.device
    scale: float
    softcap: float | None
    rope: Callable[[], RopeTable]
    model: Any

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.num_heads // self.shape.num_kv_heads

    def valid(self) -> Tensor:
        """bool [B, columns]: no padding."""
        pads = torch.tensor(self.pads, device=self.device)
        return torch.arange(self.columns, device=self.device)[None, :] >= pads[:, None]

    def generator(self, layer: int) -> torch.Generator:
        """A generator of this run's seed and a layer, on the CPU."""
        return torch.Generator().manual_seed(self.run.seed * 1_000_003 + layer)


class Resident(ABC):
    """What one layer keeps for one batch of rows. Batch rows come first in every tensor with a batch axis."""

    @abstractmethod
    def append(self, key: Tensor, value: Tensor) -> None:
        """Stores new tokens [B, H_kv, T, d] (keys after RoPE), evicting or quantizing what must give way."""

    @abstractmethod
    def parts(self, query: Tensor, scale: float, softcap: float | None) -> list[tuple[Tensor, Tensor]]:
        """Attention of [B, H_q, T, d] over everything resident, without a causal mask: (out, lse) to be merged."""

    @abstractmethod
    def tensors(self) -> dict[str, Tensor]:
        """All that must survive to the next step: views of what is occupied."""

    @abstractmethod
    def residency(self, columns: int) -> Tensor:
        """uint8 [B, H_kv, columns]: `Tier.FULL`, `QUANT` or `EVICTED`; workspace, made on demand."""

    @abstractmethod
    def dense(self, row: int) -> list[tuple[Tensor, Tensor]]:
        """Per KV head of a batch row: resident keys as attended to and values, float32 [n, d]."""

    @abstractmethod
    def select(self, rows: Tensor) -> None:
        """Keeps, repeats or reorders batch rows."""

    def step(self, query: Tensor, key: Tensor, value: Tensor, scale: float, softcap: float | None) -> Tensor:
        """One decode step: stores one token, then attends, [B, H_q, 1, d]."""
        self.append(key, value)
        return merge(self.parts(query, scale, softcap))[0].to(query.dtype)

    def absorb(self, staged: Staged, context: Context) -> None:
        """Takes over a later multi-token turn."""
        self.append(staged.key, staged.value)

    def allocated_bytes(self) -> int:
        """Bytes of the storages behind `tensors`, spare room included."""
        seen = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in self.tensors().values()}
        return sum(seen.values())

    @property
    def counters(self) -> dict[str, int]:
        """What happened so far, for tests and displays; empty by default."""
        return {}


@dataclass(frozen=True, kw_only=True)
class Rival:
    """A system to compare with; fields are its parameters, all with defaults.

    Class attributes:
        name: in the registry. label: text key of the one-line label.
        family: "exact", "evict" or "quantize". keeps: "exact", "lossy" or "recoverable".
        storage: "real", or "simulated" where bytes are not what they would be.
        budgeted: whether a budget decides what it keeps; else it has an operating point of its own.
        grows: whether it can hold a share of FullKV's bytes of every step, not only of the planned end.
        needs_reference: whether it looks at FullKV's own attention, which only a teacher-forced comparison has.
    """

    name: ClassVar[str] = ""
    label: ClassVar[str] = ""
    family: ClassVar[str] = "evict"
    keeps: ClassVar[str] = "lossy"
    storage: ClassVar[str] = "real"
    budgeted: ClassVar[bool] = True
    grows: ClassVar[bool] = False
    needs_reference: ClassVar[bool] = False

    def lookahead(self) -> int:
        """Steps that FullKV must be ahead of it."""
        return 0

    def check_run(self, run: RunPlan) -> None:
        """Refuses a run that it has no place in, before any work.

        Raises:
            ConfigError: names the system and says why.
        """
        if self.needs_reference and run.witness is None:
            raise ConfigError(
                f"{self.name} ranks by FullKV's own attention on the same tokens, which only a teacher-forced "
                "comparison has: compare it there (not free-running, and not by model.generate)."
            )
        if run.running and not self.grows:
            raise ConfigError(
                f"{self.name} can't follow a running budget: what it holds is settled at the prompt's end, and all "
                "new tokens stay. Match at prompt+new or prompt instead."
            )

    def needs(self) -> Needs:
        """What the prompt's forward must collect."""
        return Needs()

    def account(self, shape: KVShape, prompt_tokens: int, generated: int, run: RunPlan) -> int:
        """Persistent bytes of the whole model and one unpadded row, once `generated` tokens were appended.

        Pure integers from the configuration; a test asserts that the tensors' `nbytes` add up to it.

        Raises:
            BudgetError: the budget cannot be met.
        """
        raise NotImplementedError

    def notices(self, shape: KVShape, prompt_tokens: int, run: RunPlan) -> list[str]:
        """What a user should know about this run of it; text keys, not sentences."""
        return []

    def compress(self, staged: list[Staged], context: Context) -> list[Resident]:
        """What every layer keeps of a prompt."""
        raise NotImplementedError

    def check(self, shape: KVShape, head_dim: int) -> None:
        """Refuses a model that the parameters don't fit, before any work.

        Raises:
            ConfigError: names the parameter.
        """

    def build(self, model: Any, run: RunPlan) -> Any:
        """A transformers cache for `model`."""
        from engine.baselines.rival_cache import RivalCache

        self.check_run(run)
        return RivalCache(model, self, run)


def require(holds: bool, rule: str, came: object) -> None:
    """Raises a ConfigError that says what must hold and what came."""
    if not holds:
        raise ConfigError(f"{rule}, got {came!r}.")


def full_attend(
    query: Tensor, key: Tensor, value: Tensor, scale: float, softcap: float | None, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Attention over stored keys and values [B, H_kv, n, d] of any dtype; bias [B, 1 or H_kv, 1 or T, n]."""
    heads = query.shape[1]
    if bias is not None:
        bias = bias.to(query.dtype)
        if query.device.type == "cpu" and softcap is None and query.shape[2] > 1 and bias.shape[1] not in (1, heads):
            bias = bias.repeat_interleave(heads // bias.shape[1], dim=1)
    return attend(query, key.to(query.dtype), value.to(query.dtype), scale=scale, softcap=softcap, bias=bias)
