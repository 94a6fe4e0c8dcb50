"""`bench attention`: one decode step of one layer over tiers, against attention over the full cache.

Random keys and values in pools that are filled as a run at that length and budget would fill them.
One turn of a case goes through all its layers, as one token of a model does, and all its rivals' pools
pass through the processor's caches before its next turn: a step finds its pools in memory and its own
instructions in a cache. Rivals: torch's SDPA as transformers calls it, SDPA over the retained tokens
only, a full-cache kernel as well optimised as ours, and nothing but reading the same pools.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.attention import AttentionBackend, make_backend, native, unavailable
from engine.attention.fused import FusedBackend
from engine.attention.state import KVState
from engine.benchmarks.timing import Clock, Timing, interleave, paired_ratio
from engine.budget import KVShape, make_plan
from engine.config import QEvictConfig
from engine.rope import RopeTable
from engine.scores import QueryRing, Ranker
from engine.tiers import PoolShape, TierStore
from engine.windows import Grid


@dataclass(frozen=True, slots=True)
class HeadShape:
    """What one attention layer looks like."""

    name: str
    num_heads: int
    num_kv_heads: int
    head_dim: int


SHAPES = {
    "smollm2": HeadShape("smollm2", 9, 3, 64),
    "llama8b": HeadShape("llama8b", 32, 8, 128),
    "qwen0.5b": HeadShape("qwen0.5b", 14, 2, 64),
}
POOL_TARGET_BYTES = 192 * 2**20
"""Layers take turns until their pools are far larger than a processor cache."""


class _PlainRotary(nn.Module):
    """The frequencies of default RoPE, where no model is loaded."""

    inv_freq: Tensor

    def __init__(self, head_dim: int) -> None:
        super().__init__()
        steps = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
        self.register_buffer("inv_freq", 10_000.0**-steps, persistent=False)


def filled_state(
    shape: HeadShape, config: QEvictConfig, context: int, batch: int, layers: int, dtype: torch.dtype
) -> KVState:
    """Pools of `layers` layers as they stand at `context` columns: random contents, true occupancy."""
    grid = Grid(config.window_size, config.sink_tokens)
    kv = KVShape(layers, shape.num_kv_heads, shape.head_dim, dtype.itemsize)
    plan = make_plan(config.replace(planned_new_tokens=0), kv, context)
    groups = shape.num_kv_heads if config.score_scope == "kv_head" else 1
    pools = PoolShape(layers, batch, groups, shape.num_kv_heads // groups, shape.head_dim)
    device = torch.device("cpu")
    rope = RopeTable(_PlainRotary(shape.head_dim), None, device)
    rope.ensure(context + 8)
    store = TierStore(config, pools, [plan] * batch, dtype, device)
    state = KVState(
        config=config,
        grid=grid,
        ranker=Ranker(config),
        rope=rope,
        shape=pools,
        num_heads=shape.num_heads,
        device=device,
        columns=context,
        pads=[0] * batch,
        shift=torch.zeros(batch, dtype=torch.int64),
        store=store,
    )
    for tensor in (store.arena_key, store.arena_value):
        tensor.normal_()
    for tensor in (store.key_codes, store.value_codes):
        tensor.random_(0, 256)
    for tensor in (store.key_scale, store.value_scale):
        tensor.fill_(0.5)
    for tensor in (store.key_zero, store.value_zero):
        tensor.fill_(-0.75)
    last = grid.num_blocks(context)
    local = list(range(last - (plan.local_tokens // config.window_size) - 1, last))
    between = torch.arange(grid.sink_blocks, local[0])
    for row in range(pools.rows):
        order = between[torch.randperm(len(between))]
        full = order[: plan.full_capacity].tolist()
        quant = order[plan.full_capacity : plan.full_capacity + plan.quant_capacity]
        held = [*range(plan.sink_blocks), *full, *local]
        store.arena_ids[row, : len(held)] = torch.tensor(held, dtype=torch.int32)
        store.arena_count[row] = len(held)
        store.ledger_ids[row, : len(quant)] = quant.to(torch.int32)
        store.live_count[row] = len(quant)
    state.refresh()
    state.place = (state.arena_used - 1, (context - 1 + grid.offset) % config.window_size)
    return state


def resident_tokens(state: KVState) -> tuple[int, int]:
    """(full-precision, quantized) tokens that one row attends to."""
    window = state.config.window_size
    return int((state.arena(0)[2][0, 0] >= 0).sum()), int(state.pool.live_count[0]) * window


def measure(
    shape: HeadShape,
    *,
    context: int,
    budget: float,
    kv_dtype: str = "float16",
    full_dtype: str = "float32",
    batch: int = 1,
    rounds: int = 240,
    backends: tuple[str, ...] = ("fused", "sdpa"),
    clock: Clock = time.perf_counter,
) -> dict[str, Any]:
    """One row: times of all rivals for one layer's step, and ratios against stock SDPA.

    Args:
        rounds: steps of each case, over all layers.

    Returns:
        Beside times (microseconds) and ratios: `ratio_to_own_full`, the full-cache kernel of our own over the fused
        one; `share_of_read_limit`, the time of only reading the same pools over the fused step's;
        `share_of_bandwidth`, the same against a plain read of a large array.
    """
    store_dtype, whole_dtype = getattr(torch, kv_dtype), getattr(torch, full_dtype)
    full_bytes = 2 * batch * shape.num_kv_heads * context * shape.head_dim * whole_dtype.itemsize
    layers = int(max(2, min(16, POOL_TARGET_BYTES // full_bytes)))
    config = QEvictConfig(kv_budget=budget, kv_dtype=kv_dtype)
    states = filled_state(shape, config, context, batch, layers, store_dtype)
    full_tokens, quant_tokens = resident_tokens(states)
    retained = full_tokens + quant_tokens
    size = (layers, batch, shape.num_kv_heads, context, shape.head_dim)
    key, value = torch.randn(size).to(whole_dtype), torch.randn(size).to(whole_dtype)
    kept_key = key[..., :retained, :].contiguous()
    kept_value = value[..., :retained, :].contiguous()
    query = torch.randn(batch, shape.num_heads, 1, shape.head_dim)
    whole_query = query.to(whole_dtype)
    scale = shape.head_dim**-0.5
    new = torch.randn(batch, shape.num_kv_heads, 1, shape.head_dim)

    def stock(layer: int) -> Tensor:
        return F.scaled_dot_product_attention(whole_query, key[layer], value[layer], scale=scale, enable_gqa=True)

    def kept(layer: int) -> Tensor:
        return F.scaled_dot_product_attention(
            whole_query, kept_key[layer], kept_value[layer], scale=scale, enable_gqa=True
        )

    def own(layer: int) -> Tensor:
        return native.full_decode(whole_query[:, :, 0], key[layer], value[layer], scale=scale)[0]

    steps: dict[str, Callable[[int], object]] = {"stock_sdpa": stock, "sdpa_retained": kept}
    if native.available():
        steps["own_full"] = own
    for name in backends:
        if unavailable(name, "cpu", shape.head_dim) is None:
            backend = make_backend(name, "cpu", Ranker(config), shape.head_dim)
            steps[name] = _decode_step(backend, states, query, new, scale)
            if isinstance(backend, FusedBackend):
                steps["pool_read"] = backend.read
    with torch.inference_mode():
        turns = {name: _turn(step, layers) for name, step in steps.items()}
        taken = interleave(turns, rounds=max(3, rounds // layers), warmup=2, clock=clock)
        bandwidth = read_bandwidth(clock=clock)
    times = {name: timing.divided(layers) for name, timing in taken.items()}
    base, read = times["stock_sdpa"], times.pop("pool_read", None)
    bytes_read = _bytes_read(states)
    row: dict[str, Any] = {
        "shape": shape.name,
        "context": context,
        "batch": batch,
        "layers": layers,
        "kv_budget": budget,
        "kv_dtype": kv_dtype,
        "full_dtype": full_dtype,
        "full_tokens": full_tokens,
        "quant_tokens": quant_tokens,
        "full_bytes": full_bytes,
        "bytes_read": bytes_read,
        "read_bandwidth_gb_s": bandwidth / 1e9,
        "times_us": {name: _micro(timing) for name, timing in times.items()},
        "ratio_to_stock_sdpa": {name: paired_ratio(base, timing) for name, timing in times.items()},
    }
    if "own_full" in times and "fused" in times:
        row["ratio_to_own_full"] = paired_ratio(times["own_full"], times["fused"])
    if "fused" in times and read is not None:
        row["pool_read_us"] = _micro(read)
        row["share_of_read_limit"] = paired_ratio(read, times["fused"])
        row["share_of_bandwidth"] = bytes_read / bandwidth / times["fused"].median
        row["isa"] = native.isa()
    return row


def _turn(step: Callable[[int], object], layers: int) -> Callable[[int], object]:
    def turn(_: int) -> None:
        for layer in range(layers):
            step(layer)

    return turn


def _decode_step(
    backend: AttentionBackend, state: KVState, query: Tensor, new: Tensor, scale: float
) -> Callable[[int], Tensor]:
    config, layers = state.config, state.shape.num_layers
    ring = QueryRing(layers, query.shape[0], query.shape[1], config.interval, query.shape[-1], query)

    def step(layer: int) -> Tensor:
        out, lse = backend.decode(state, layer, query, new, new, scale=scale, softcap=None)
        if lse is not None:
            ring.put(layer, query, lse)
        return out

    for layer in range(layers):  # a layer's first call checks and binds its pools
        step(layer)
    return step


def _bytes_read(state: KVState) -> int:
    """Bytes of one layer's occupied arena and live entries: what a step must read."""
    store = state.pool
    per_layer = state.shape.rows_per_layer
    costs = store.plans[0].costs
    arena = int(store.arena_count[:per_layer].sum())
    live = int(store.live_count[:per_layer].sum())
    return (arena * costs.full + live * costs.quant) // state.shape.groups


def read_bandwidth(megabytes: int = 256, rounds: int = 7, clock: Clock = time.perf_counter) -> float:
    """Bytes per second of a plain read (a float32 sum) with as many threads as torch uses."""
    data = torch.ones(megabytes * 2**18)
    times = interleave({"read": lambda _: data.sum()}, rounds=rounds, warmup=2, clock=clock)
    return data.nbytes / times["read"].median


def _micro(timing: Timing) -> dict[str, float]:
    return {
        "median": timing.median * 1e6,
        "lower": timing.lower * 1e6,
        "upper": timing.upper * 1e6,
        "least": timing.least * 1e6,
    }


def sweep(
    shapes: list[str],
    contexts: list[int],
    budgets: list[float],
    *,
    kv_dtypes: tuple[str, ...] = ("float16", "float32"),
    full_dtypes: tuple[str, ...] = ("float32",),
    batches: tuple[int, ...] = (1,),
    rounds: int = 240,
    backends: tuple[str, ...] = ("fused", "sdpa"),
    clock: Clock = time.perf_counter,
) -> Iterator[dict[str, Any]]:
    """All combinations, one row at a time."""
    for name in shapes:
        for context in contexts:
            for batch in batches:
                for full_dtype in full_dtypes:
                    for kv_dtype in kv_dtypes:
                        for budget in budgets:
                            yield measure(
                                SHAPES[name],
                                context=context,
                                budget=budget,
                                kv_dtype=kv_dtype,
                                full_dtype=full_dtype,
                                batch=batch,
                                rounds=rounds,
                                backends=backends,
                                clock=clock,
                            )
