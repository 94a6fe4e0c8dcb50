"""The fused backend on a CUDA device: Triton kernels over arena and packed codes, masses as a by-product.

Prompts run through torch's flash kernel where the dtype allows it, and their column masses through
`triton_columns.py`. Decode never waits for the host, so a step may be captured in a CUDA graph; a graph is
good until the next routing event, as everything else that is bound to the pools. Knows the state of a cache;
knows no model. Checked in Triton's interpreter and compiled for sm_80 and sm_90; see `benchmarks/gpu_check.py`
for the check on a real device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from engine.attention import triton_columns, triton_decode, triton_merge
from engine.attention.sdpa import SdpaBackend
from engine.attention.state import KVState
from engine.attention.triton_shape import MASS_TILE, MAX_PARTS, KernelShape
from engine.quant import LANES
from engine.scores import Ranker

PROGRAMS_PER_PROCESSOR = 4


@dataclass(slots=True)
class _Workspace:
    """What one step writes and reads again; layers use it one after the other."""

    turned: Tensor
    part_out: Tensor
    part_lse: Tensor
    raw_arena: Tensor
    raw_ledger: Tensor
    clock: Tensor
    pads: Tensor
    shift: Tensor


@dataclass(slots=True)
class _Bound:
    """One layer's slices of the pools and what they were taken from."""

    stamp: tuple[int, ...]
    arena: tuple[Tensor, ...]
    ledger: tuple[Tensor, ...]
    arena_scores: Tensor
    ledger_scores: Tensor


@dataclass(frozen=True, slots=True)
class Step:
    """One layer's decode step, on its way through the kernels.

    `parts` partial results of each head are merged, the arena's `arena_splits` first.
    """

    space: _Workspace
    bound: _Bound
    launch: dict[str, dict[str, Any]]
    scale: float
    softcap: float | None
    factor: float
    arena_splits: int
    parts: int


class FusedCudaBackend(SdpaBackend):
    """Triton decode and prompt scoring.

    `stages` is how many tiles of codes are in flight at once, the one in use included.
    """

    name = "fused"

    def __init__(self, ranker: Ranker) -> None:
        self.scores_in_step = ranker.power == 1.0
        self._masses = ranker.uses_attention and self.scores_in_step
        self._arena_masses = True
        self._bound: dict[int, _Bound] = {}
        self._space: _Workspace | None = None
        self._space_for: tuple[Any, ...] = ()
        self._shift: Tensor | None = None
        self._columns = -1
        self.stages = 2
        self._fixed: dict[KernelShape, dict[str, dict[str, Any]]] = {}

    def decode(
        self,
        state: KVState,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scale: float,
        softcap: float | None,
    ) -> tuple[Tensor, Tensor | None]:
        """Stores one token per row, [B, H_kv, 1, d], and attends for query [B, H_q, 1, d]."""
        if query.device.type == "cuda" and query.device.index != torch.cuda.current_device():
            with torch.cuda.device(query.device):
                return self._decode(state, layer, query, key, value, scale, softcap)
        return self._decode(state, layer, query, key, value, scale, softcap)

    def _decode(
        self,
        state: KVState,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        softcap: float | None,
    ) -> tuple[Tensor, Tensor | None]:
        store, shape, rope = state.pool, state.shape, state.rope
        query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
        kernels = self._kernels(state, query, softcap)
        fixed = self._fixed.get(kernels)
        if fixed is None:
            fixed = {name: kernels.launch(name) for name in ("prepare", "arena", "ledger", "merge")}
            self._fixed[kernels] = fixed
        arena_splits, ledger_splits = splits(state, kernels, query.device)
        arena_splits = self._arena_splits(arena_splits)
        parts = arena_splits + ledger_splits
        space, bound = self._workspace(state, query), self._bind(state, layer)
        self._tick(state, space)
        heads = shape.batch * shape.num_kv_heads
        # Base-2 logits: the factor goes into the query, except under a cap, which needs them as they are.
        factor = scale if kernels.capped else scale * triton_decode.LOG2E.value
        cap = softcap or 1.0
        arena_key, arena_value, _, arena_count = bound.arena
        step = Step(space, bound, fixed, scale, softcap, factor, arena_splits, parts)
        *codes, ledger_ids, live_count = bound.ledger
        out = torch.empty_like(query)
        lse = torch.empty(query.shape[:2], dtype=torch.float32, device=query.device)
        triton_decode.prepare[(heads, kernels.window)](
            query, key, value, arena_key, arena_value, arena_count, space.clock, rope.cos, rope.sin, space.turned,
            store.slots, factor,
            **fixed["prepare"],
        )  # fmt: skip
        self._attend_arena(state, layer, query, step)
        if ledger_splits:
            triton_decode.ledger[(heads, ledger_splits)](
                space.turned, *codes, ledger_ids, live_count, space.shift, rope.cos, rope.sin,
                space.part_out, space.part_lse, space.raw_ledger, store.lane_blocks, cap, parts, arena_splits,
                **fixed["ledger"],
            )  # fmt: skip
        places = store.lane_blocks * LANES
        arena_tiles = -(-store.slots // MASS_TILE) if self._arena_masses else 0
        ledger_tiles = -(-places // MASS_TILE) if ledger_splits else 0
        tasks = shape.heads + (arena_tiles + ledger_tiles if self._masses else 0)
        triton_merge.merge[(shape.rows_per_layer, tasks)](
            space.part_out, space.part_lse, out, lse,
            space.raw_arena, bound.arena_scores, arena_count, space.raw_ledger, bound.ledger_scores, live_count,
            store.slots, places, arena_tiles, parts,
            **fixed["merge"],
        )  # fmt: skip
        return out, (None if self.scores_in_step else lse)

    def _arena_splits(self, wanted: int) -> int:
        """Partial results of the arena that a step merges."""
        return wanted

    def _attend_arena(self, state: KVState, layer: int, query: Tensor, step: Step) -> None:
        """Writes the arena's partial results, and its windows' raw masses."""
        arena_key, arena_value, arena_ids, arena_count = step.bound.arena
        space, store, shape = step.space, state.pool, state.shape
        triton_decode.arena[(shape.batch * shape.num_kv_heads, step.arena_splits)](
            query, arena_key, arena_value, arena_ids, arena_count, space.pads, space.clock,
            space.part_out, space.part_lse, space.raw_arena, store.slots, step.factor, step.softcap or 1.0, step.parts,
            **step.launch["arena"],
        )  # fmt: skip

    def _kernels(self, state: KVState, query: Tensor, softcap: float | None) -> KernelShape:
        store = state.pool
        wide = query.dtype not in (torch.float16, torch.bfloat16)
        return KernelShape(
            group=state.group_heads,
            head_dim=state.shape.head_dim,
            heads_per_row=state.shape.heads,
            window=state.config.window_size,
            grid_offset=state.grid.offset,
            half=state.rope.half,
            rope_scale=state.rope.scale,
            bits=state.config.bits,
            value_groups=store.value_groups,
            capped=softcap is not None,
            masses=self._masses,
            wide_arena=wide or store.dtype == torch.float32,
            wide_ledger=wide,
            assembly=query.is_cuda and torch.version.cuda is not None,
            stages=self.stages,
        )

    def _tick(self, state: KVState, space: _Workspace) -> None:
        """Brings the device's column counter up to date; one step on is a device operation, for captured steps."""
        if self._columns == state.columns:
            return
        if self._columns == state.columns - 1:
            space.clock.add_(1)
        else:
            space.clock.fill_(state.columns)
        self._columns = state.columns

    def _workspace(self, state: KVState, query: Tensor) -> _Workspace:
        store, shape, space = state.pool, state.shape, self._space
        wanted = (shape.batch, store.slots, store.lane_blocks, query.dtype, query.device, tuple(state.pads))
        if space is not None and self._space_for == wanted and self._shift is state.shift:
            return space
        heads, group, dim = shape.batch * shape.num_kv_heads, state.group_heads, shape.head_dim
        half = query.dtype in (torch.float16, torch.bfloat16)
        parts = 2 * most_splits(state, query.device)

        def empty(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.empty(size, dtype=dtype, device=query.device)

        def rows(numbers: Tensor) -> Tensor:
            return state.rows(numbers)[: shape.rows_per_layer].to(torch.int32).contiguous()

        self._columns = -1
        self._space_for, self._shift = wanted, state.shift
        self._space = _Workspace(
            # Codes, scales and zeros are made for float16: its products carry more digits than bfloat16's.
            turned=empty(heads, state.config.window_size, group, dim, dtype=torch.float16 if half else torch.float32),
            part_out=empty(heads, parts, group, dim),
            part_lse=empty(heads, parts, group),
            raw_arena=empty(heads * group, store.slots),
            raw_ledger=empty(heads * group, store.lane_blocks * LANES),
            clock=torch.zeros(1, dtype=torch.int32, device=query.device),
            pads=rows(torch.tensor(state.pads)),
            shift=rows(state.shift),
        )
        return self._space

    @property
    def workspace_bytes(self) -> int:
        """Bytes of what steps write and read again; one set for all layers."""
        space = self._space
        return 0 if space is None else sum(getattr(space, name).nbytes for name in _Workspace.__slots__)

    def _bind(self, state: KVState, layer: int) -> _Bound:
        store = state.pool
        stamp = (store.arena_key.data_ptr(), store.ledger_ids.data_ptr(), store.arena_count.data_ptr(), store.slots)
        bound = self._bound.get(layer)
        if bound is not None and bound.stamp == stamp:
            return bound
        part = state.layer_slice(layer)
        bound = _Bound(
            stamp,
            (store.arena_key[part], store.arena_value[part], store.arena_ids[part], store.arena_count[part]),
            (
                store.key_codes[part],
                store.key_scale[part],
                store.key_zero[part],
                store.value_codes[part],
                store.value_scale[part],
                store.value_zero[part],
                store.ledger_ids[part],
                store.live_count[part],
            ),
            store.arena_scores[part],
            store.ledger_scores[part],
        )
        self._bound[layer] = bound
        return bound

    def staged_masses(
        self,
        state: KVState,
        query: Tensor,
        key: Tensor,
        lse: Tensor,
        *,
        start: int,
        pad: int,
        scale: float,
        softcap: float | None,
        weights: Tensor | None,
    ) -> Tensor:
        """Block sums of one batch row's queries over its staged keys, [G, blocks]."""
        staging = state.staging
        if staging is None:
            raise RuntimeError("prompt scores need staged keys")
        first = staging.start
        skip = min(max(0, pad - start), query.shape[2])
        # Triton launches on the current device, which need not be the layer's.
        with torch.cuda.device_of(query):
            return triton_columns.column_masses(
                query[0, :, skip:],
                key[0],
                lse[0, :, skip:],
                scale=scale,
                window_size=state.config.window_size,
                grid_offset=first - state.grid.first_column(staging.first_block),
                first_query_column=start + skip - first,
                first_column=max(0, pad - first),
                groups=state.shape.groups,
                softcap=softcap or 0.0,
                weights=None if weights is None else weights[skip:],
                power=state.ranker.power,
            )


def interpreted() -> bool:
    """Whether Triton runs kernels in its interpreter, on a CPU."""
    return bool(triton.knobs.runtime.interpret)


def most_splits(state: KVState, device: torch.device) -> int:
    """Programs per KV head that fill the device."""
    processors = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
    heads = state.shape.batch * state.shape.num_kv_heads
    return max(1, min(MAX_PARTS // 2, -(-PROGRAMS_PER_PROCESSOR * processors // heads)))


def splits(state: KVState, kernels: KernelShape, device: torch.device) -> tuple[int, int]:
    """Programs per KV head for arena and ledger; any numbers are correct, these leave none idle.

    They follow host counts that change at events only, or when a block opens.
    """
    most = most_splits(state, device)
    arena = -(-state.arena_used * kernels.window // kernels.arena_tokens)
    ledger = -(-state.live_used // kernels.ledger_windows)
    return max(1, min(most, arena)), min(most, ledger)
