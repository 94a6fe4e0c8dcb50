"""Staging: tokens of a multi-token forward, in full precision, until the event that ends it.

Workspace, not storage: it is reported as `prefill_peak_bytes` and is gone after the event. Columns lie
block-aligned, so that a staged block moves into a tier as it is. Knows no attention and no routing.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.tiers import PoolShape
from engine.windows import Grid


class Staging:
    """Keys (post-RoPE) and values [N, heads, blocks, Ω, d] and scores [N, blocks] from `first_block` on.

    Args:
        shape: decision rows.
        grid: the window grid.
        first_block: block id of the first staged block.
        start: first staged column; it lies in `first_block`.
    """

    def __init__(
        self,
        shape: PoolShape,
        grid: Grid,
        *,
        first_block: int,
        start: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.shape, self.grid = shape, grid
        self.first_block, self.start, self.end = first_block, start, start
        self.dtype, self.device = dtype, device
        self.key = torch.empty(0)
        self.value = torch.empty(0)
        self.scores = torch.zeros(shape.rows, 0, device=device)

    def reserve(self, end: int) -> None:
        """Makes room for columns up to `end`; what is staged stays."""
        blocks = self.grid.num_blocks(end) - self.first_block
        have = self.scores.shape[1]
        self.end = end
        if blocks <= have:
            return
        size = (self.shape.rows, self.shape.heads, blocks, self.grid.window_size, self.shape.head_dim)
        key = torch.zeros(size, dtype=self.dtype, device=self.device)
        value = torch.zeros_like(key)
        scores = torch.zeros(self.shape.rows, blocks, device=self.device)
        if have:
            key[:, :, :have], value[:, :, :have] = self.key, self.value
            scores[:, :have] = self.scores
        self.key, self.value, self.scores = key, value, scores

    def put_block(self, key: Tensor, value: Tensor, scores: Tensor) -> None:
        """Takes the open block over from the arena as the first staged block."""
        self.key[:, :, 0], self.value[:, :, 0] = key.to(self.dtype), value.to(self.dtype)
        self.scores[:, 0] = scores

    def write(self, layer: int, column: int, key: Tensor, value: Tensor) -> None:
        """Stores one layer's new columns, [B, H_kv, T, d], from `column` on."""
        at = column - self.grid.first_column(self.first_block)
        tokens = key.shape[2]
        for pool, new in ((self.key, key), (self.value, value)):
            self._flat(pool, layer)[:, :, at : at + tokens] = new

    def layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """Views of one layer's staged keys and values, [B, H_kv, T, d], columns `start` … `end`-1."""
        first = self.grid.first_column(self.first_block)
        inside = slice(self.start - first, self.end - first)
        return self._flat(self.key, layer)[:, :, inside], self._flat(self.value, layer)[:, :, inside]

    def layer_scores(self, layer: int) -> Tensor:
        """View of one layer's scores, [B·G, blocks]."""
        rows = self.shape.rows_per_layer
        return self.scores[layer * rows : (layer + 1) * rows]

    def _flat(self, pool: Tensor, layer: int) -> Tensor:
        rows = self.shape.rows_per_layer
        part = pool[layer * rows : (layer + 1) * rows]
        return part.view(self.shape.batch, self.shape.num_kv_heads, -1, self.shape.head_dim)

    @property
    def nbytes(self) -> int:
        return self.key.nbytes + self.value.nbytes + self.scores.nbytes
