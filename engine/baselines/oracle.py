"""Oracles: sink and local region, and of the history the K_f windows that FullKV itself wants most.

`oracle-past` knows FullKV's attention until now, `oracle-future` that of the next H queries. No real system can
know either, and both may take a window back that they have dropped: it is read from FullKV's own cache. What they
hold between steps is held for real, in blocks of QEvict's grid and at QEvict's byte costs, so that they are bounds
for hard eviction by windows at the same bytes. Events fall where QEvict's do.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import ClassVar

import torch
from torch import Tensor

from engine.baselines.base import MASKED, Context, Resident, Rival, RunPlan, Staged, full_attend, require
from engine.baselines.qevict import QEvict
from engine.baselines.witness import Witness
from engine.budget import KVShape, Plan, make_plan
from engine.config import QEvictConfig
from engine.errors import CacheUseError
from engine.policies import by_blocks
from engine.trace import Tier
from engine.windows import Grid

ONE_ROW = "an oracle must follow the one sequence of its comparison: no batch, no second turn."


class OracleArena(Resident):
    """Blocks [1, H_kv, blocks, Ω, d] in no order, with an id (-1 = empty) and the score that chose it.

    Args:
        plan: how many blocks there are, and how many windows of the history. horizon: of the future; None = past.
    """

    def __init__(self, part: Staged, layer: int, context: Context, plan: Plan, rival: Oracle, witness: Witness) -> None:
        _, heads, tokens, dim = part.key.shape
        size, device = rival.window_size, part.key.device
        self._plan, self._witness, self._layer, self._rival = plan, witness, layer, rival
        self._config = rival.config(context.run, context.shape, context.columns)
        self._grid = Grid(size, rival.sink_tokens)
        self._columns = tokens
        self.key = torch.zeros(1, heads, plan.arena_blocks, size, dim, dtype=context.dtype, device=device)
        self.value = torch.zeros_like(self.key)
        self.block = torch.full((plan.arena_blocks,), -1, dtype=torch.int32, device=device)
        self.score = torch.zeros(plan.arena_blocks, device=device)
        self._slots: dict[int, int] = {}
        self._free = list(range(plan.arena_blocks))[::-1]
        self._route()

    # ---- decisions ------------------------------------------------------------------------------------

    def _scores(self) -> Tensor:
        """What FullKV wants of every block now, float32 [blocks]; higher is better."""
        return by_blocks(self._rival.wanted(self._witness, self._layer).mean(0), self._config)

    def _route(self) -> None:
        """One event: the history is chosen anew; blocks that are not held are read from FullKV's cache."""
        grid, columns = self._grid, self._columns
        begun, aged = grid.num_blocks(columns), grid.aged_blocks(columns, self._plan.local_tokens)
        first = min(grid.sink_blocks, begun)
        aged = max(first, min(aged, begun))
        scores = self._scores().cpu()
        best = scores[first:aged].sort(descending=True, stable=True).indices[: self._plan.full_capacity] + first
        wanted = {*range(first), *best.tolist(), *range(aged, begun)}
        for block in [block for block in self._slots if block not in wanted]:
            self._free.append(self._slots.pop(block))
        for block in sorted(wanted):
            slot = self._slots.get(block)
            if slot is None:
                slot = self._open(block)
                self._fetch(block, slot)
            self.score[slot] = scores[block]
        self._sync()

    def _open(self, block: int) -> int:
        self._slots[block] = slot = self._free.pop()
        return slot

    def _fetch(self, block: int, slot: int) -> None:
        begin = self._grid.first_column(block)
        first, last = max(0, begin), min(begin + self._rival.window_size, self._columns)
        key, value = self._witness.read(self._layer, first, last)
        inside = slice(first - begin, last - begin)
        self.key[:, :, slot, inside], self.value[:, :, slot, inside] = key, value

    def _sync(self) -> None:
        """Ids, and the workspace that follows from them."""
        ids = [-1] * self.block.shape[0]
        for block, slot in self._slots.items():
            ids[slot] = block
        self.block.copy_(torch.tensor(ids, dtype=torch.int32))
        there = self.held_columns() >= 0
        self._bias = torch.where(there, 0.0, MASKED).to(self.key.device)

    def held_columns(self) -> Tensor:
        """int64 [blocks · Ω]: the column in every place, -1 = none."""
        first = self.block.long() * self._rival.window_size - self._grid.offset
        column = first[:, None] + torch.arange(self._rival.window_size, device=first.device)
        there = (self.block[:, None] >= 0) & (column >= 0) & (column < self._columns)
        return torch.where(there, column, -1).flatten()

    # ---- a resident -----------------------------------------------------------------------------------

    def append(self, key: Tensor, value: Tensor) -> None:
        for token in range(key.shape[2]):
            block = self._grid.block_of(self._columns)
            inside = self._columns - self._grid.first_column(block)
            fresh = block not in self._slots
            slot = self._open(block) if fresh else self._slots[block]
            self.key[:, :, slot, inside], self.value[:, :, slot, inside] = key[:, :, token], value[:, :, token]
            self._columns += 1
            if fresh:
                self._sync()
            else:
                self._bias[slot * self._rival.window_size + inside] = 0.0

    def parts(self, query: Tensor, scale: float, softcap: float | None) -> list[tuple[Tensor, Tensor]]:
        key, value = self.key.flatten(2, 3), self.value.flatten(2, 3)
        return [full_attend(query, key, value, scale, softcap, self._bias[None, None, None])]

    def step(self, query: Tensor, key: Tensor, value: Tensor, scale: float, softcap: float | None) -> Tensor:
        out = super().step(query, key, value, scale, softcap)
        if self._grid.ages_at(self._columns, self._rival.window_size):
            self._route()
        return out

    def absorb(self, staged: Staged, context: Context) -> None:
        raise CacheUseError(ONE_ROW)

    def tensors(self) -> dict[str, Tensor]:
        return {"key": self.key, "value": self.value, "block": self.block, "score": self.score}

    def residency(self, columns: int) -> Tensor:
        out = torch.full((columns + 1,), int(Tier.EVICTED), dtype=torch.uint8, device=self.key.device)
        held = self.held_columns()
        out[torch.where(held >= 0, held, columns)] = int(Tier.FULL)
        out[self._columns : columns] = int(Tier.FULL)
        return out[None, None, :columns].expand(1, self.key.shape[1], -1).clone()

    def dense(self, row: int) -> list[tuple[Tensor, Tensor]]:
        there = self.held_columns() >= 0
        key, value = self.key[row].flatten(1, 2).float(), self.value[row].flatten(1, 2).float()
        return [(key[head, there], value[head, there]) for head in range(key.shape[0])]

    def select(self, rows: Tensor) -> None:
        if rows.tolist() != [0]:
            raise CacheUseError(ONE_ROW)


@dataclass(frozen=True, kw_only=True)
class Oracle(Rival):
    """The K_f windows that FullKV wants most; grid, sink and local region are QEvict's.

    quant_share: 0 spends the whole budget on the oracle's windows, as R2 does; 0.7 leaves it the K_f that the Full
    tier of R3 has at this budget (the article's oracle) and the rest unspent.
    """

    needs_reference: ClassVar[bool] = True

    window_size: int = 8
    sink_tokens: int = 5
    local_tokens: int | None = None
    local_share: float = 0.25
    quant_share: float = 0.0

    def wanted(self, witness: Witness, layer: int) -> Tensor:
        """What FullKV wants of every column known now, float32 [H_q, columns]."""
        raise NotImplementedError

    def config(self, run: RunPlan, shape: KVShape, prompt_tokens: int) -> QEvictConfig:
        """The settings of the QEvict whose grid, protected tokens and K_f these are."""
        names = [field.name for field in fields(Oracle)]
        return QEvict(**{name: getattr(self, name) for name in names}).config(run, shape, prompt_tokens)

    def plan(self, shape: KVShape, prompt_tokens: int, run: RunPlan) -> Plan:
        """How the budget is spent.

        Raises:
            BudgetError: sink, local region and one window do not fit.
        """
        return make_plan(self.config(run, shape, prompt_tokens), shape, prompt_tokens)

    def account(self, shape: KVShape, prompt_tokens: int, generated: int, run: RunPlan) -> int:
        plan = self.plan(shape, prompt_tokens, run)
        return shape.num_layers * plan.arena_blocks * plan.costs.full

    def notices(self, shape: KVShape, prompt_tokens: int, run: RunPlan) -> list[str]:
        return ["oracle"]

    def compress(self, staged: list[Staged], context: Context) -> list[Resident]:
        witness = context.run.witness
        if witness is None or staged[0].key.shape[0] != 1:
            raise CacheUseError(ONE_ROW)
        plan = self.plan(context.shape, context.columns, context.run)
        return [OracleArena(part, layer, context, plan, self, witness) for layer, part in enumerate(staged)]


@dataclass(frozen=True, kw_only=True)
class PastOracle(Oracle):
    """Top K_f by FullKV's cumulative attention: no set of the same size misses less of it (paper §4, oracle)."""

    name = "oracle-past"
    label = "systems.oracle_past"

    def wanted(self, witness: Witness, layer: int) -> Tensor:
        return witness.past(layer)


@dataclass(frozen=True, kw_only=True)
class FutureOracle(Oracle):
    """Top K_f by what each window adds to the future missed mass of the next `horizon` queries: at its events, no
    set of the same size has a lower one."""

    name = "oracle-future"
    label = "systems.oracle_future"

    horizon: int = 32

    def __post_init__(self) -> None:
        require(self.horizon >= 1, "horizon must be 1 or more", self.horizon)

    def lookahead(self) -> int:
        return self.horizon

    def wanted(self, witness: Witness, layer: int) -> Tensor:
        mass = witness.future(layer, self.horizon)
        return mass / mass.sum(-1, keepdim=True).clamp_min(1e-30)
