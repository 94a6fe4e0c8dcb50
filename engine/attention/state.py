"""KVState: what the cache shares with attention backends and routing during a run.

Plain data with derived views; decides nothing. Rows: see `tiers.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.config import QEvictConfig
from engine.rope import RopeTable
from engine.scores import QueryRing, Ranker
from engine.staging import Staging
from engine.tiers import LOW_BIAS, SHADOW_BASE, PoolShape, TierStore
from engine.windows import Grid


@dataclass(slots=True)
class KVState:
    """State of one sequence batch.

    Attributes:
        columns: columns known, the current forward's included.
        pads: left-padding columns of each batch row; shift: column minus position of each row.
        arena_bias: [N, S·Ω], 0 where a token may be attended to, else `LOW_BIAS`; good while `bias_known`.
        arena_used, live_used: largest occupied counts over rows, as host integers.
        occupied: arena blocks, live entries and shadows of every row, [3, N], as the host knows them.
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
    bias_known: bool = False
    arena_used: int = 0
    live_used: int = 0
    occupied: NDArray[np.int64] = field(default_factory=lambda: np.zeros((3, 0), dtype=np.int64))
    place: tuple[int, int] = (0, 0)
    _row_pads: tuple[object, Tensor] | None = None
    _row_shift: tuple[Tensor, object, Tensor] | None = None

    @property
    def group_heads(self) -> int:
        """Query heads per KV head."""
        return self.num_heads // self.shape.num_kv_heads

    def rows(self, per_batch: Tensor) -> Tensor:
        """Repeats a per-batch-row tensor [B] for every decision row [N]."""
        return per_batch.to(self.device).repeat_interleave(self.shape.groups).repeat(self.shape.num_layers)

    @property
    def row_pads(self) -> Tensor:
        """Padding columns of every decision row, int64 [N], on the device."""
        of = (tuple(self.pads), self.shape, self.device)
        if self._row_pads is None or self._row_pads[0] != of:
            self._row_pads = (of, self.rows(torch.tensor(self.pads)))
        return self._row_pads[1]

    @property
    def row_shift(self) -> Tensor:
        """Column minus position of every decision row, int64 [N], on the device."""
        known = self._row_shift
        if known is None or known[0] is not self.shift or known[1] != (self.shape, self.device):
            known = self._row_shift = (self.shift, (self.shape, self.device), self.rows(self.shift))
        return known[2]

    def layer_slice(self, layer: int, layers: int = 1) -> slice:
        """Decision rows of one layer, or of several from it on."""
        count = self.shape.rows_per_layer
        return slice(layer * count, (layer + layers) * count)

    @property
    def pool(self) -> TierStore:
        """The store; only asked for after capacities are fixed."""
        if self.store is None:
            raise RuntimeError("pools are not allocated yet")
        return self.store

    def refresh(self, occupied: NDArray[np.int64] | None = None) -> None:
        """Takes note that the pools have changed; reads how full they are from the device, unless it is given."""
        store = self.pool
        if occupied is None:
            shadows = (store.ledger_ids <= SHADOW_BASE).sum(1, dtype=torch.int32)
            occupied = torch.stack([store.arena_count, store.live_count, shadows]).cpu().numpy().astype(np.int64)
        self.occupied = occupied
        self.arena_used, self.live_used = int(occupied[0].max()), int(occupied[1].max())
        self.bias_known = False

    def opened(self) -> None:
        """Takes note of a new block in every row; nothing is visible in it yet."""
        self.occupied[0] += 1
        self.arena_used += 1

    def _know_bias(self) -> None:
        """Works out who may be seen; backends that see for themselves never ask."""
        store = self.pool
        columns = store.columns(store.arena_ids)
        pads = self.row_pads[:, None, None]
        seen = (store.arena_ids >= 0)[..., None] & (columns >= pads) & (columns >= 0) & (columns < self.columns)
        bias = torch.where(seen.flatten(1), 0.0, LOW_BIAS)
        if self.arena_bias.shape == bias.shape:
            self.arena_bias.copy_(bias)
        else:
            self.arena_bias = bias
        self.bias_known = True

    def admit(self) -> None:
        """Makes the newest column, in the open block, visible in every row."""
        if not self.bias_known:
            return
        store = self.pool
        inside = (self.columns - 1 + self.grid.offset) % self.config.window_size
        slot = (store.arena_count.long() - 1) * self.config.window_size + inside
        self.arena_bias.scatter_(1, slot[:, None], 0.0)

    def arena(self, layer: int, layers: int = 1) -> tuple[Tensor, Tensor, Tensor]:
        """Occupied arena of one layer, or of several from it on.

        Returns:
            keys, values [layers·B, H_kv, K, d] as stored, bias [layers·B, 1 or H_kv, 1, K].
        """
        if not self.bias_known:
            self._know_bias()
        store, part, shape = self.pool, self.layer_slice(layer, layers), self.shape
        window = self.config.window_size
        count = self.arena_used * window
        kv = (layers * shape.batch, shape.num_kv_heads, count, shape.head_dim)
        key = store.arena_key[part, :, : self.arena_used].reshape(kv)
        value = store.arena_value[part, :, : self.arena_used].reshape(kv)
        bias = self.arena_bias[part, :count].view(layers * shape.batch, shape.groups, 1, count)
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

    def add_scores(self, layer: int, arena: Tensor | None, ledger: Tensor | None, layers: int = 1) -> None:
        """Adds window masses [layers·B·G, slots] of one layer, or of several from it on."""
        store, part = self.pool, self.layer_slice(layer, layers)
        if arena is not None:
            store.arena_scores[part, : arena.shape[1]] += arena
        if ledger is not None:
            store.ledger_scores[part, : ledger.shape[1]] += ledger
