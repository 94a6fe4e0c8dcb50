"""Byte matching: a budget as share, bytes or tokens, and what it comes to for one layer.

Eviction rivals are matched so that their bytes at the planned end do not exceed the budget. Quantizers
have an operating point of their own; QEvict is matched to it instead. Integers only; knows no tensors.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.budget import KVShape
from engine.errors import BudgetError, ConfigError

RUNNING = "running"
REFERENCES = ("prompt", "prompt+new", RUNNING)


@dataclass(frozen=True, slots=True)
class BudgetSpec:
    """Persistent KV bytes that a system may hold. Give exactly one of the three.

    Attributes:
        share: of FullKV's bytes at the reference length, (0, 1]; 1 keeps everything.
        total_bytes: for the whole model and one batch row.
        tokens: as many bytes as this many full-precision tokens take in every layer.
        reference: the length at which bytes are matched: "prompt+new" (default) or "prompt", which leaves the
            generated tokens out, as some published comparisons do; or "running": the share of FullKV's bytes at
            every step's own length, for systems whose storage can follow (`Rival.grows`).
    """

    share: float | None = None
    total_bytes: int | None = None
    tokens: int | None = None
    reference: str = "prompt+new"

    def __post_init__(self) -> None:
        given = [value for value in (self.share, self.total_bytes, self.tokens) if value is not None]
        if len(given) != 1:
            raise ConfigError(
                f"a budget must be exactly one of share, total_bytes and tokens, got {len(given)} of them."
            )
        if self.share is not None and not 0.0 < self.share <= 1.0:
            raise ConfigError(f"share must be in (0, 1], got {self.share}.")
        if given[0] <= 0:
            raise ConfigError(f"a budget must be positive, got {given[0]}.")
        if self.reference not in REFERENCES:
            raise ConfigError(f"reference must be one of {', '.join(REFERENCES)}, got {self.reference!r}.")
        if self.reference == RUNNING and self.share is None:
            raise ConfigError("a running budget must be a share: bytes and tokens do not grow with the sequence.")

    @property
    def whole(self) -> bool:
        """A share of 1 means by definition: everything stays."""
        return self.share == 1.0

    def length(self, prompt_tokens: int, new_tokens: int) -> int:
        """Tokens at which bytes are matched. A running budget is asked for a step: its columns, and 0 new tokens."""
        return prompt_tokens + (0 if self.reference == "prompt" else new_tokens)

    def model_bytes(self, shape: KVShape, prompt_tokens: int, new_tokens: int) -> int:
        """The budget in bytes: whole model, one row."""
        if self.total_bytes is not None:
            return self.total_bytes
        if self.tokens is not None:
            return shape.full_kv_bytes(self.tokens)
        full = shape.token_bytes * self.length(prompt_tokens, new_tokens)
        return shape.num_layers * int((self.share or 0.0) * full + 1e-6)

    def layer_bytes(self, shape: KVShape, prompt_tokens: int, new_tokens: int) -> int:
        """The same for one layer."""
        return self.model_bytes(shape, prompt_tokens, new_tokens) // shape.num_layers

    def resolved(self, shape: KVShape, prompt_tokens: int, new_tokens: int) -> tuple[float, int, float]:
        """(share, bytes, tokens): the same budget said in all three ways."""
        total = self.model_bytes(shape, prompt_tokens, new_tokens)
        full = shape.full_kv_bytes(max(1, self.length(prompt_tokens, new_tokens)))
        return total / full, total, total / shape.full_kv_bytes(1)


def fit_tokens(
    spec: BudgetSpec | None,
    shape: KVShape,
    prompt_tokens: int,
    new_tokens: int,
    *,
    fixed: int,
    per_token: int,
    smallest: int,
    keeps_new: bool,
) -> int:
    """How many tokens per head a budget leaves of the prompt (or in all, where new tokens evict old ones).

    Args:
        fixed: bytes per layer that do not depend on the number of tokens.
        per_token: bytes per layer of one resident token, metadata included.
        smallest: fewest tokens that the system can work with.
        keeps_new: whether all generated tokens stay, so that they take their part of the budget.

    Returns:
        Tokens; `prompt_tokens + new_tokens` where everything stays.

    Raises:
        BudgetError: fewer than `smallest` fit; names the smallest feasible budget.
    """
    if spec is None or spec.whole:
        return prompt_tokens + new_tokens
    later = new_tokens * shape.token_bytes if keeps_new and spec.reference == "prompt+new" else 0
    total = spec.layer_bytes(shape, prompt_tokens, new_tokens)
    fits = (total - fixed - later) // per_token
    smallest = min(smallest, prompt_tokens)
    if fits < smallest:
        raise too_small(spec, shape, prompt_tokens, new_tokens, total, fixed + later + smallest * per_token)
    return int(fits)


def too_small(
    spec: BudgetSpec, shape: KVShape, prompt_tokens: int, new_tokens: int, total: int, need: int
) -> BudgetError:
    """The error that names the smallest feasible budget; `total` and `need` are bytes of one layer."""
    length = spec.length(prompt_tokens, new_tokens)
    share = -(-need * 10_000 // max(1, shape.token_bytes * length)) / 10_000
    return BudgetError(
        f"the budget must hold what this system keeps at {length:,} tokens: {total:,} bytes per layer came, the "
        f"smallest feasible is {need:,}, a share of {share:.4g}. Raise the budget, or plan fewer new tokens.",
        smallest_bytes=need,
        smallest_share=share,
    )
