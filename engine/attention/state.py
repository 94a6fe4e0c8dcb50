"""KVState: what the cache shares with attention backends and routing during a run.

Plain data with derived views; decides nothing. Rows: see `tiers.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from engine.config import QEvictConfig
from engine.rope import RopeTable
from engine.scores import QueryRing, Ranker
from engine.staging import Staging
from engine.tiers import LOW_BIAS, PoolShape, TierStore
from engine.windows import Grid


@dataclass(slots=True)
class KVState:
    """State of one sequence batch.

    Attributes:
        columns: columns known, the current forward's included.
        pads: left-padding columns of each batch row; shift: column minus position of each row.
        arena_bias: [N, S·Ω], 0 where a token may be attended to, else `LOW_BIAS`.
        arena_used, live_used: largest occupied counts over rows, as host integers.
        place: (arena slot, place inside the block) of the newest token; slot -1 where rows differ.
    """

    config: QEvictConfig
    grid: Grid
    ranker: Ranker
    rope: RopeTable
    shape: PoolShape
    num_heads: int
    device: torch.device
    columns: int = 0
    pads: list[int] = field(default_factory=list)
    shift: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    store: TierStore | None = None
    staging: Staging | None = None
    ring: QueryRing | None = None
    arena_bias: Tensor = field(default_factory=lambda: torch.empty(0))
    arena_used: int = 0
    live_used: int = 0
    place: tuple[int, int] = (0, 0)

    @property
    def group_heads(self) -> int:
        """Query heads per KV head."""
        return self.num_heads // self.shape.num_kv_heads

    def rows(self, per_batch: Tensor) -> Tensor:
        """Repeats a per-batch-row tensor [B] for every decision row [N]."""
        return per_batch.to(self.device).repeat_interleave(self.shape.groups).repeat(self.shape.num_layers)

    def layer_slice(self, layer: int) -> slice:
        """Decision rows of one layer."""
        count = self.shape.rows_per_layer
        return slice(layer * count, (layer + 1) * count)

    @property
    def pool(self) -> TierStore:
        """The store; only asked for after capacities are fixed."""
        if self.store is None:
            raise RuntimeError("pools are not allocated yet")
        return self.store

    def refresh(self) -> None:
        """Recomputes what depends on who is where: once per event, with one small host read."""
        store = self.pool
        self.arena_used, self.live_used = torch.stack([store.arena_count.max(), store.live_count.max()]).tolist()
        columns = store.columns(store.arena_ids)
        pads = self.rows(torch.tensor(self.pads))[:, None, None]
        seen = (store.arena_ids >= 0)[..., None] & (columns >= pads) & (columns >= 0) & (columns < self.columns)
        bias = torch.where(seen.flatten(1), 0.0, LOW_BIAS)
        if self.arena_bias.shape == bias.shape:
            self.arena_bias.copy_(bias)
        else:
            self.arena_bias = bias

    def admit(self) -> None:
        """Makes the newest column, in the open block, visible in every row."""
        store = self.pool
        inside = (self.columns - 1 + self.grid.offset) % self.config.window_size
        slot = (store.arena_count.long() - 1) * self.config.window_size + inside
        self.arena_bias.scatter_(1, slot[:, None], 0.0)

    def arena(self, layer: int) -> tuple[Tensor, Tensor, Tensor]:
        """Occupied arena of a layer: keys, values [B, H_kv, K, d] as stored, bias [B, 1 or H_kv, 1, K]."""
        store, part, shape = self.pool, self.layer_slice(layer), self.shape
        window = self.config.window_size
        count = self.arena_used * window
        kv = (shape.batch, shape.num_kv_heads, count, shape.head_dim)
        key = store.arena_key[part, :, : self.arena_used].reshape(kv)
        value = store.arena_value[part, :, : self.arena_used].reshape(kv)
        bias = self.arena_bias[part, :count].view(shape.batch, shape.groups, 1, count)
        return key, value, bias

    def append(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Stores the newest token of a layer, [B, H_kv, 1, d], in the open block of every row."""
        store, part, shape = self.pool, self.layer_slice(layer), self.shape
        slot, inside = self.place
        size = (shape.rows_per_layer, shape.heads, shape.head_dim)
        key, value = key.reshape(size).to(store.dtype), value.reshape(size).to(store.dtype)
        if slot >= 0:
            store.arena_key[part, :, slot, inside] = key
            store.arena_value[part, :, slot, inside] = value
            return
        n = torch.arange(part.start, part.stop, device=self.device)
        last = store.arena_count[part].long() - 1
        store.arena_key[n, :, last, inside] = key
        store.arena_value[n, :, last, inside] = value

    def add_scores(self, layer: int, arena: Tensor | None, ledger: Tensor | None) -> None:
        """Adds window masses [B·G, slots] of one layer, to live windows only."""
        store, part = self.pool, self.layer_slice(layer)
        if arena is not None:
            store.arena_scores[part, : arena.shape[1]] += arena
        if ledger is not None:
            store.ledger_scores[part, : ledger.shape[1]] += ledger
