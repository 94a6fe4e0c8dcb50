"""The compiled path on a CPU: one pass over arena and packed codes, window masses as a by-product.

Decode appends the new token, attends and scores in one call of `native.py`. A ranker that needs
powers of probabilities takes the deferred way instead. Prompts run through torch's flash kernel, and
their column masses through a compiled kernel that works below the diagonal only.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.attention import native
from engine.attention.sdpa import SdpaBackend
from engine.attention.state import KVState
from engine.scores import Ranker

LEAST_TRITON = (3, 5)
"""Older ones take no product of fewer than 16 query heads."""


@dataclass(slots=True)
class _Bound:
    """A layer's plan and what it was bound to."""

    plan: native.DecodePlan
    stamp: tuple[int, ...]
    arena_scores: Tensor
    ledger_scores: Tensor | None


class FusedBackend(SdpaBackend):
    """Compiled decode and prompt scoring on a CPU."""

    name = "fused"

    def __init__(self, ranker: Ranker) -> None:
        self.scores_in_step = ranker.power == 1.0
        self._masses = ranker.uses_attention and self.scores_in_step
        self._one_pass = ranker.power == 1.0 and native.isa() in ("avx2", "avx512")
        self._bound: dict[int, _Bound] = {}
        native.set_threads(torch.get_num_threads())
        # With 2 threads at 8,192 tokens and 20 %, torch's team takes 0.63 of one thread's time, a pool of ours 0.93.
        native.share_torch_threads(True)

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
        bound = self._bind(state, layer, scale, softcap)
        slot, inside = state.place
        open_slot: int | Tensor = slot
        if slot < 0:
            open_slot = state.pool.arena_count[state.layer_slice(layer)] - 1
        masses = self._masses and bound.ledger_scores is not None
        out, lse = bound.plan.decode(
            query,
            state.columns,
            key=key,
            value=value,
            slot=open_slot,
            offset=inside,
            arena_mass=bound.arena_scores if masses else None,
            ledger_mass=bound.ledger_scores if masses else None,
        )
        out = out.view(query.shape)
        return (out if out.dtype == query.dtype else out.to(query.dtype)), (None if self.scores_in_step else lse)

    def read(self, layer: int) -> int:
        """Only reads what a decode step of a layer does, once `decode` has bound it: for benchmarks."""
        return self._bound[layer].plan.read()

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
        """Prompt queries [B, H_q, T, d] at columns `start` on; attention and masses in one compiled pass.

        A turn that comes on top of pools, a ranker of powers, and a processor without wide vectors take
        torch's flash kernel and the compiled column masses instead: there one pass is not faster.
        """
        staging = state.staging
        if staging is None or state.store is not None or not self._one_pass:
            return super().ingest(state, layer, query, start=start, scale=scale, softcap=softcap, weights=weights)
        key, value = staging.layer(layer)
        groups = state.shape.groups
        scores = staging.layer_scores(layer)
        out = torch.empty_like(query)
        for row, pad in enumerate(state.pads):
            part, _, masses = native.prefill_attention(
                query[row],
                key[row],
                value[row],
                scale=scale,
                window_size=state.config.window_size,
                grid_offset=staging.start - state.grid.first_column(staging.first_block),
                first_query_column=start - staging.start,
                first_column=max(0, pad - staging.start),
                groups=groups,
                softcap=softcap or 0.0,
                weights=weights,
                masses=state.ranker.uses_attention,
            )
            out[row] = part
            if masses is not None:
                scores[row * groups : (row + 1) * groups] += masses
        return out

    def _bind(self, state: KVState, layer: int, scale: float, softcap: float | None) -> _Bound:
        store, rope = state.pool, state.rope
        stamp = (store.arena_key.data_ptr(), store.ledger_ids.data_ptr(), rope.cos.data_ptr(), state.shape.batch)
        bound = self._bound.get(layer)
        if bound is not None and bound.stamp == stamp:
            return bound
        part, shape = state.layer_slice(layer), state.shape
        plan = native.DecodePlan(
            native.Shape(
                batch=shape.batch,
                num_heads=state.num_heads,
                num_kv_heads=shape.num_kv_heads,
                head_dim=shape.head_dim,
                window_size=state.config.window_size,
                rows_per_batch=shape.groups,
                bits=state.config.bits,
                value_groups=store.value_groups,
                rotary_dim=2 * rope.half,
                grid_offset=state.grid.offset,
                scale=scale,
                softcap=softcap or 0.0,
                rope_scale=rope.scale,
            ),
            rope.cos,
            rope.sin,
        )
        ledger = None
        if store.quant_slots:
            ledger = native.LedgerTensors(
                store.key_codes[part],
                store.key_scale[part],
                store.key_zero[part],
                store.value_codes[part],
                store.value_scale[part],
                store.value_zero[part],
                store.ledger_ids[part],
                store.live_count[part],
            )
        plan.bind(
            store.arena_key[part],
            store.arena_value[part],
            store.arena_ids[part],
            store.arena_count[part],
            state.rows(torch.tensor(state.pads))[part].to(torch.int32),
            ledger,
        )
        bound = _Bound(plan, stamp, store.arena_scores[part], store.ledger_scores[part])
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
        """Block sums of one batch row's queries over its staged keys, [G, blocks], compiled."""
        staging = state.staging
        if staging is None:
            raise RuntimeError("prompt scores need staged keys")
        first = staging.start
        skip = min(max(0, pad - start), query.shape[2])
        return native.column_masses(
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


def unavailable(device: str, head_dim: int | None = None, value_group_size: int | None = None) -> str | None:
    """Why the fused backend cannot run on `device`, as a sentence; None where it can."""
    if device.startswith("cuda"):
        return _unavailable_cuda(device, head_dim)
    if device != "cpu":
        return f"backend fused runs on a CPU or a CUDA device, and this run is on {device}; use sdpa."
    if not native.available():
        return f"backend fused cannot run: {native.reason()}."
    if head_dim is not None and head_dim % native.LANES:
        return f"backend fused needs a head_dim that is a multiple of {native.LANES}, got {head_dim}; use sdpa."
    if value_group_size is not None and value_group_size % native.LANES:
        return (
            f"backend fused needs a value_group_size that is a multiple of {native.LANES}, got {value_group_size}; "
            "use sdpa."
        )
    return None


def _unavailable_cuda(device: str, head_dim: int | None) -> str | None:
    try:
        import triton  # there on CUDA machines only: imported where it is asked for
    except ImportError:
        return "backend fused needs the package triton on a CUDA device, and it is not installed; use sdpa or flash2."
    if tuple(int(part) for part in triton.__version__.split(".")[:2]) < LEAST_TRITON:
        least = ".".join(map(str, LEAST_TRITON))
        return f"backend fused needs triton {least} or newer on a CUDA device, got {triton.__version__}; use sdpa."
    if head_dim is not None and head_dim > 256:
        return f"backend fused needs a head_dim of at most 256 on a CUDA device, got {head_dim}; use sdpa."
    if torch.cuda.is_available() and torch.cuda.get_device_capability(device) < (8, 0):
        return f"backend fused needs compute capability 8.0 or newer, and {device} is older; use sdpa."
    return None


def make(device: str, ranker: Ranker) -> SdpaBackend:
    """The fused backend of a device on which it is available."""
    if device == "cpu":
        return FusedBackend(ranker)
    from engine.attention.fused_cuda import FusedCudaBackend

    return FusedCudaBackend(ranker)
