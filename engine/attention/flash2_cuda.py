"""Backend flash2 on a CUDA device: a flash kernel over the full-precision slots, the fused kernel over the codes.

The paper's fast path called flash attention and then materialised probabilities to score windows, and lost 2.45x.
Here none are: the flash kernel's log-sum-exp joins those of the codes in one merge, the codes' window masses are a
by-product of their kernel, and the full-precision windows are scored at the next event from the queries that were
kept. Knows the state of a cache; knows no model. Never run on a GPU by this project; see `benchmarks/gpu_check.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.attention.flash_arena import FlashKernel, Runs, check_types
from engine.attention.fused_cuda import FusedCudaBackend, Step
from engine.attention.state import KVState
from engine.attention.triton_decode import LOG2E
from engine.scores import Ranker


class Flash2Backend(FusedCudaBackend):
    """A flash kernel for the arena; everything else is the fused backend's."""

    name = "flash2"

    def __init__(self, ranker: Ranker, flash: FlashKernel) -> None:
        super().__init__(ranker)
        self._flash = flash
        self.scores_in_step = False
        # Where old masses fade or are raised to a power, all windows are scored together at the event.
        self._masses = ranker.uses_attention and ranker.power == 1.0 and ranker.decay == 1.0
        self._arena_masses = False
        self._ends: Tensor | None = None

    @property
    def scores_codes(self) -> bool:
        """Whether the windows of the Quant tier are scored in the step, so that only the arena's wait."""
        return self._masses

    def ingest(
        self,
        state: KVState,
        layer: int,
        query: Tensor,
        *,
        start: int,
        scale: float,
        softcap: float | None,
        weights: Tensor | None,
    ) -> Tensor:
        """Prompt queries [B, H_q, T, d] at columns `start` on, as torch's flash kernel does them.

        Raises:
            BackendError: model or pools are not in half precision.
        """
        if state.staging is not None:
            check_types(query, state.staging.dtype if state.store is None else state.store.dtype)
        return super().ingest(state, layer, query, start=start, scale=scale, softcap=softcap, weights=weights)

    def _arena_splits(self, wanted: int) -> int:
        # The flash kernel splits its work itself and hands over one result.
        return 1

    def _attend_arena(self, state: KVState, layer: int, query: Tensor, step: Step) -> None:
        """Puts the flash kernel's output and log-sum-exp where the merge looks for the first part."""
        store, shape = state.pool, state.shape
        check_types(query, store.dtype)
        part, rows = state.layer_slice(layer), shape.rows_per_layer
        size = (rows, shape.heads, store.slots * state.config.window_size, shape.head_dim)
        out, lse = self._flash(
            # The query is turned into what is stored, not the pool into the query's type.
            query.view(rows, -1, 1, shape.head_dim).to(store.dtype),
            store.arena_key[part].view(size),
            store.arena_value[part].view(size),
            scale=step.scale,
            softcap=step.softcap,
            runs=self._runs(state, layer, step),
        )
        heads, group = rows * shape.heads, state.group_heads
        cells = heads * step.parts * group
        outs = step.space.part_out.flatten()[: cells * shape.head_dim].view(heads, step.parts, group, shape.head_dim)
        outs[:, 0].copy_(out.reshape(heads, group, shape.head_dim))
        lses = step.space.part_lse.flatten()[:cells].view(heads, step.parts, group)
        torch.mul(lse.reshape(heads, group), LOG2E.value, out=lses[:, 0])

    def _runs(self, state: KVState, layer: int, step: Step) -> Runs:
        window, part = state.config.window_size, state.layer_slice(layer)
        ends = self._ends
        if layer == 0 or ends is None or ends.shape[0] != state.shape.rows:
            # From the device's own counters, so that a captured step can be replayed.
            inside = (step.space.clock - 1 + state.grid.offset) % window
            ends = self._ends = (state.pool.arena_count - 1) * window + inside + 1
        front = [(pad + state.grid.offset) % window for pad in state.pads for _ in range(state.shape.groups)]
        known = (state.occupied[0, part] - 1) * window + state.place[1] + 1
        return Runs(front, ends[part], known.tolist())
