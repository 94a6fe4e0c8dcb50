"""`bench decode` and `bench routing`: a whole token through transformers, our cache against stock caches.

All caches are filled from one prompt pass and then fed the same tokens in turns, on the same weights.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, StaticCache
from transformers.cache_utils import Cache

from engine.adapter import cache_keyword
from engine.benchmarks.timing import Clock, Timing, interleave, paired_ratio
from engine.cache import QEvictCache
from engine.config import QEvictConfig
from engine.models import LoadedModel

CHUNK = 512


@torch.inference_mode()
def forward(model: PreTrainedModel, ids: Tensor, cache: Any) -> Tensor:
    """Logits of the last position."""
    output = model(input_ids=ids, use_cache=True, logits_to_keep=1, **{cache_keyword(model): cache})
    logits: Tensor = output.logits
    return logits


def prefill(model: PreTrainedModel, ids: Tensor, cache: Any, chunk: int = CHUNK) -> None:
    """Feeds a prompt in chunks."""
    for begin in range(0, ids.shape[1], chunk):
        forward(model, ids[:, begin : begin + chunk], cache)


def random_prompt(loaded: LoadedModel, batch: int, tokens: int) -> Tensor:
    """Random token ids without padding, whose zero keys old static caches do not count; meaning has no speed."""
    vocabulary = int(loaded.model.config.get_text_config(decoder=True).vocab_size)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(5, vocabulary - 1, (batch, tokens), generator=generator)
    pad = loaded.tokenizer.pad_token_id
    return (ids if pad is None else ids.masked_fill(ids == pad, 5)).to(loaded.device)


@torch.inference_mode()
def filled_caches(
    loaded: LoadedModel, ids: Tensor, config: QEvictConfig, backends: tuple[str, ...], room: int
) -> dict[str, Any]:
    """Stock caches and ours, all holding the same prompt; stock ones get copies of the staged keys and values."""
    model = loaded.model
    tokens = ids.shape[1]
    dynamic = DynamicCache(config=model.config)
    static = StaticCache(config=model.config, max_cache_len=tokens + room)
    caches: dict[str, Any] = {"dynamic": dynamic, "static": static}
    for name in backends:
        cache = QEvictCache(model, config.replace(backend=name, planned_new_tokens=room))
        prefill(model, ids, cache)
        if name == backends[0]:
            _copy_staged(cache, dynamic, static)
        cache.settle()
        caches[name] = cache
    return caches


def _copy_staged(cache: QEvictCache, *targets: Cache) -> None:
    if cache.lead.staging is None or len(cache.managed_layers) != len(cache.layers):
        raise RuntimeError("the decode benchmark needs a model whose layers are all full attention")
    for index in range(len(cache.managed_layers)):
        key, value = cache.staged(index)
        for target in targets:
            target.update(key.contiguous(), value.contiguous(), index)


def measure_decode(
    loaded: LoadedModel,
    *,
    context: int,
    budget: float,
    kv_dtype: str = "float16",
    batch: int = 1,
    rounds: int = 32,
    backends: tuple[str, ...] = ("fused", "sdpa"),
    clock: Clock = time.perf_counter,
) -> dict[str, Any]:
    """Times of one decode step per cache and ratios against DynamicCache and StaticCache; routing's share."""
    ids = random_prompt(loaded, batch, context)
    config = QEvictConfig(kv_budget=budget, kv_dtype=kv_dtype)
    caches = filled_caches(loaded, ids, config, backends, room=rounds + 16)
    token = ids[:, :1]
    ours = {name: cache for name, cache in caches.items() if isinstance(cache, QEvictCache)}
    for cache in ours.values():
        cache.clock = clock  # a share of two clocks would be none
    before = {name: cache.route_seconds for name, cache in ours.items()}
    cases = {name: (lambda number, cache=cache: forward(loaded.model, token, cache)) for name, cache in caches.items()}
    times = interleave(cases, rounds=rounds, warmup=4, clock=clock)
    row: dict[str, Any] = {
        "model": loaded.label,
        "weights": getattr(loaded, "weights", loaded.dtype),
        "context": context,
        "batch": batch,
        "kv_budget": budget,
        "kv_dtype": kv_dtype,
        "times_ms": {name: _milli(timing) for name, timing in times.items()},
        "ratio_to_dynamic": {name: paired_ratio(times["dynamic"], timing) for name, timing in times.items()},
        "ratio_to_static": {name: paired_ratio(times["static"], timing) for name, timing in times.items()},
        "routing_share": {},
    }
    for name, cache in ours.items():
        routed = (cache.route_seconds - before[name]) / (rounds + 4)
        row["routing_share"][name] = routed / times[name].median
        row.setdefault("resident", {})[name] = {
            "arena_blocks": max(state.arena_used for state in cache.states),
            "live_windows": max(state.live_used for state in cache.states),
            "persistent_bytes": cache.pool_bytes,
            "full_kv_bytes": cache.kv_shape.full_kv_bytes(cache.lead.columns) * batch,
        }
    return row


def measure_prefill(
    loaded: LoadedModel,
    *,
    context: int,
    budget: float,
    kv_dtype: str = "float16",
    batch: int = 1,
    rounds: int = 3,
    backends: tuple[str, ...] = ("fused", "sdpa"),
    clock: Clock = time.perf_counter,
) -> dict[str, Any]:
    """Times of a whole prompt: stock DynamicCache against our cache with scoring and its first routing event."""
    ids = random_prompt(loaded, batch, context)
    model = loaded.model

    def stock(number: int) -> None:
        prefill(model, ids, DynamicCache(config=model.config))

    def ours(name: str) -> Any:
        def work(number: int) -> None:
            cache = QEvictCache(model, QEvictConfig(kv_budget=budget, kv_dtype=kv_dtype, backend=name))
            prefill(model, ids, cache)
            cache.settle()

        return work

    cases: dict[str, Any] = {"dynamic": stock}
    cases.update({name: ours(name) for name in backends})
    times = interleave(cases, rounds=rounds, warmup=1, clock=clock)
    return {
        "model": loaded.label,
        "weights": getattr(loaded, "weights", loaded.dtype),
        "context": context,
        "batch": batch,
        "kv_budget": budget,
        "kv_dtype": kv_dtype,
        "times_ms": {name: _milli(timing) for name, timing in times.items()},
        "cost_against_dynamic": {name: timing.median / times["dynamic"].median for name, timing in times.items()},
    }


def _milli(timing: Timing) -> dict[str, float]:
    return {
        "median": timing.median * 1e3,
        "lower": timing.lower * 1e3,
        "upper": timing.upper * 1e3,
        "least": timing.least * 1e3,
    }
