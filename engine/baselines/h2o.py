"""H2O: half heavy hitters, half recent tokens, one choice per head and step.

A heavy hitter is a token with much attention summed over all queries so far. When the pool is full, a
new token takes the slot of the lightest token that is not recent.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.baselines.base import MASKED, Context, Needs, Resident, Rival, RunPlan, Staged, full_attend
from engine.baselines.kept import GROW, top_mask
from engine.baselines.matching import fit_tokens
from engine.budget import KVShape
from engine.trace import Tier

SLOT_BYTES = 8
"""float32 score and int32 position of one token of one head."""
UNBOUNDED = 2**31


class HeavyPool(Resident):
    """Slots [B, H_kv, n, d] in no order, with a score and a column each; column -1 = padding or empty.

    Args:
        size: how many tokens a head may hold once so many columns are known; never falls.
    """

    def __init__(self, part: Staged, context: Context, size: Callable[[int], int]) -> None:
        batch, heads, tokens, _ = part.key.shape
        self._size, self._columns = size, 0
        self._padded = any(context.pads)
        device = part.key.device
        self._dtype = context.dtype
        self.key = part.key.new_empty(batch, heads, 0, part.key.shape[3], dtype=context.dtype)
        self.value = self.key.clone()
        self.score = torch.zeros(batch, heads, 0, device=device)
        self.column = torch.zeros(batch, heads, 0, dtype=torch.int32, device=device)
        self.used = 0
        self._take(part.key, part.value, sums_of(part, heads), context.valid(), tokens)
        planned = tokens + context.run.planned_new_tokens
        self._reserve(min(size(planned), planned))

    def _take(self, key: Tensor, value: Tensor, sums: Tensor, valid: Tensor, tokens: int) -> None:
        """Old slots and `tokens` new ones compete for the capacity."""
        batch, heads = key.shape[:2]
        fresh = torch.arange(self._columns, self._columns + tokens, device=key.device, dtype=torch.int32)
        fresh = torch.where(valid[:, None, -tokens:], fresh, -1).expand(batch, heads, -1)
        column = torch.cat([self.column[:, :, : self.used], fresh], 2)
        score = torch.cat([self.score[:, :, : self.used], sums], 2)
        keys = torch.cat([self.key[:, :, : self.used], key.to(self._dtype)], 2)
        values = torch.cat([self.value[:, :, : self.used], value.to(self._dtype)], 2)
        self._columns += tokens
        keep = min(self._capacity, column.shape[2])
        wanted = score.masked_fill(column < 0, -torch.inf)
        wanted = wanted.masked_fill(column >= self._columns - self._recent, torch.inf)
        index = top_mask(wanted, keep).nonzero()[:, 2].view(batch, heads, keep)
        at = index.unsqueeze(-1).expand(-1, -1, -1, key.shape[3])
        self.key, self.value = keys.gather(2, at), values.gather(2, at)
        self.score, self.column = score.gather(2, index), column.gather(2, index)
        self.used = keep

    @property
    def _capacity(self) -> int:
        return self._size(self._columns)

    @property
    def _recent(self) -> int:
        return self._capacity // 2

    def _reserve(self, slots: int) -> None:
        more = slots - self.key.shape[2]
        if more <= 0:
            return
        batch, heads, _, dim = self.key.shape
        self.key = torch.cat([self.key, self.key.new_zeros(batch, heads, more, dim)], 2)
        self.value = torch.cat([self.value, self.value.new_zeros(batch, heads, more, dim)], 2)
        self.score = torch.cat([self.score, self.score.new_zeros(batch, heads, more)], 2)
        self.column = torch.cat([self.column, self.column.new_full((batch, heads, more), -1)], 2)

    def append(self, key: Tensor, value: Tensor) -> None:
        for token in range(key.shape[2]):
            self._put(key[:, :, token : token + 1], value[:, :, token : token + 1])

    def _put(self, key: Tensor, value: Tensor) -> None:
        if self.used < self._size(self._columns + 1):
            if self.used == self.key.shape[2]:
                self._reserve(self.used + GROW)
            slot = torch.full(key.shape[:2], self.used, device=key.device)
            self.used += 1
        else:
            # The new token counts as recent: of the others, the latest n/2 - 1 are protected.
            recent = self.column > self._columns - self._recent
            slot = self.score.masked_fill(self.column < 0, -torch.inf).masked_fill(recent, torch.inf).argmin(-1)
        at = slot[:, :, None]
        wide = at.unsqueeze(-1).expand(-1, -1, 1, key.shape[3])
        self.key.scatter_(2, wide, key.to(self._dtype))
        self.value.scatter_(2, wide, value.to(self._dtype))
        self.score.scatter_(2, at, 0.0)
        self.column.scatter_(2, at, self._columns)
        self._columns += 1

    def _bias(self) -> Tensor | None:
        column = self.column[:, :, : self.used]
        return torch.where(column < 0, MASKED, 0.0).unsqueeze(2) if self._padded else None

    def parts(self, query: Tensor, scale: float, softcap: float | None) -> list[tuple[Tensor, Tensor]]:
        key, value = self.key[:, :, : self.used], self.value[:, :, : self.used]
        return [full_attend(query, key, value, scale, softcap, self._bias())]

    def step(self, query: Tensor, key: Tensor, value: Tensor, scale: float, softcap: float | None) -> Tensor:
        self.append(key, value)
        out, lse = self.parts(query, scale, softcap)[0]
        batch, kv = self.key.shape[:2]
        grouped = query.reshape(batch, kv, -1, query.shape[3]).float()
        logits = grouped @ self.key[:, :, : self.used].float().transpose(-1, -2) * scale
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        mass = (logits - lse.reshape(batch, kv, -1, 1)).exp().mean(2)
        self.score[:, :, : self.used] += mass.masked_fill(self.column[:, :, : self.used] < 0, 0.0)
        return out.to(query.dtype)

    def absorb(self, staged: Staged, context: Context) -> None:
        """Takes over a later turn. Its queries score its own tokens only, not what was resident before."""
        tokens = staged.key.shape[2]
        sums = sums_of(staged, self.key.shape[1])
        valid = torch.ones(staged.key.shape[0], tokens, dtype=torch.bool, device=staged.key.device)
        self._take(staged.key, staged.value, sums, valid, tokens)

    def tensors(self) -> dict[str, Tensor]:
        end = self.used
        return {
            "key": self.key[:, :, :end],
            "value": self.value[:, :, :end],
            "score": self.score[:, :, :end],
            "column": self.column[:, :, :end],
        }

    def residency(self, columns: int) -> Tensor:
        batch, heads = self.key.shape[:2]
        out = torch.full((batch, heads, columns + 1), int(Tier.EVICTED), dtype=torch.uint8, device=self.key.device)
        column = self.column[:, :, : self.used].long()
        out.scatter_(2, torch.where(column >= 0, column, columns), int(Tier.FULL))
        out[:, :, self._columns : columns] = int(Tier.FULL)
        return out[:, :, :columns].clone()

    def dense(self, row: int) -> list[tuple[Tensor, Tensor]]:
        out = []
        for head in range(self.key.shape[1]):
            there = self.column[row, head, : self.used] >= 0
            out.append(
                (self.key[row, head, : self.used][there].float(), self.value[row, head, : self.used][there].float())
            )
        return out

    def select(self, rows: Tensor) -> None:
        for name in ("key", "value", "score", "column"):
            setattr(self, name, getattr(self, name).index_select(0, rows))


def sums_of(part: Staged, kv_heads: int) -> Tensor:
    """Column sums of a prompt, mean over the query heads of each KV head, [B, H_kv, P]."""
    if part.column_sums is None:
        raise RuntimeError("column sums were not collected")
    batch, _, tokens = part.column_sums.shape
    return part.column_sums.view(batch, kv_heads, -1, tokens).mean(2)


@dataclass(frozen=True, kw_only=True)
class H2O(Rival):
    """Cumulative attention over all queries, prompt and generated; evicts at every step."""

    name = "h2o"
    label = "systems.h2o"
    grows = True

    def needs(self) -> Needs:
        return Needs(column_sums=True)

    def capacity(self, shape: KVShape, prompt_tokens: int, run: RunPlan) -> int:
        """n: tokens that a head holds, new ones included; under a running budget, once `prompt_tokens` are known.

        Raises:
            BudgetError: fewer than 2.
        """
        if run.budget is None or run.budget.whole:
            return UNBOUNDED
        return fit_tokens(
            run.budget,
            shape,
            prompt_tokens,
            0 if run.running else run.planned_new_tokens,
            fixed=0,
            per_token=shape.token_bytes + SLOT_BYTES * shape.num_kv_heads,
            smallest=2,
            keeps_new=False,
        )

    def account(self, shape: KVShape, prompt_tokens: int, generated: int, run: RunPlan) -> int:
        columns = prompt_tokens + generated
        held = min(columns, self.capacity(shape, columns if run.running else prompt_tokens, run))
        return shape.num_layers * held * (shape.token_bytes + SLOT_BYTES * shape.num_kv_heads)

    def compress(self, staged: list[Staged], context: Context) -> list[Resident]:
        run, shape = context.run, context.shape
        fixed = self.capacity(shape, context.columns, run)

        def size(columns: int) -> int:
            return self.capacity(shape, columns, run) if run.running else fixed

        return [HeavyPool(part, context, size) for part in staged]
