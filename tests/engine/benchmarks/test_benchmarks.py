"""The benchmarks measure what they say: true occupancy, the same prompt in all caches, ratios of their own times."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from engine.attention import native
from engine.benchmarks import attention, decode, table4
from engine.benchmarks.timing import interleave, paired_ratio, summarize
from engine.budget import KVShape, make_plan
from engine.cache import QEvictCache
from engine.config import QEvictConfig
from engine.errors import ModelTooLargeError
from tests.tiny import tiny_loaded


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_cases_take_turns_and_warm_up_is_not_counted() -> None:
    order: list[str] = []
    ticks = iter(range(1000))
    times = interleave(
        {"a": lambda number: order.append(f"a{number}"), "b": lambda number: order.append(f"b{number}")},
        rounds=3,
        warmup=1,
        clock=lambda: float(next(ticks)),
    )
    assert order == ["a0", "b0", "a1", "b1", "a2", "b2", "a3", "b3"]
    assert times["a"].runs == times["b"].runs == 3 and times["a"].median == 1.0


def test_a_ratio_is_base_over_other() -> None:
    assert paired_ratio(summarize([4.0, 6.0, 5.0]), summarize([1.0, 2.0, 2.5])) == 2.5


@pytest.mark.parametrize("budget", [0.1, 0.2])
@pytest.mark.parametrize("kv_dtype", ["float16", "float32"])
def test_filled_pools_hold_what_the_plan_allows(budget: float, kv_dtype: str) -> None:
    config = QEvictConfig(kv_budget=budget, kv_dtype=kv_dtype)
    dtype = getattr(torch, kv_dtype)
    shape = attention.SHAPES["smollm2"]
    state = attention.filled_state(shape, config, 1024, 2, 3, dtype)
    plan = make_plan(config.replace(planned_new_tokens=0), KVShape(3, 3, 64, dtype.itemsize), 1024)
    full, quant = attention.resident_tokens(state)
    assert quant == plan.quant_capacity * 8
    assert full <= plan.arena_blocks * 8 and full >= plan.full_capacity * 8 + plan.local_tokens
    store = state.pool
    assert store.persistent_bytes - store.lane_padding_bytes == plan.persistent_bytes * 3 * 2
    for row in range(store.shape.rows):
        arena = set(store.arena_ids[row][store.arena_ids[row] >= 0].tolist())
        live = set(store.ledger_ids[row][store.ledger_ids[row] >= 0].tolist())
        assert not arena & live and max(arena | live) < 129


@pytest.mark.skipif(not native.available(), reason="the compiled kernels are not built here")
def test_attention_row_is_made_of_its_own_times() -> None:
    row = attention.measure(attention.SHAPES["smollm2"], context=512, budget=0.2, rounds=4)
    times = row["times_us"]
    for name, ratio in row["ratio_to_stock_sdpa"].items():
        assert ratio == pytest.approx(times["stock_sdpa"]["median"] / times[name]["median"])
    assert row["ratio_to_stock_sdpa"]["stock_sdpa"] == 1.0 and {"fused", "sdpa", "own_full"} <= set(times)
    assert row["full_bytes"] == 2 * 3 * 512 * 64 * 4
    assert 0 < row["bytes_read"] < row["full_bytes"]


def test_all_caches_hold_the_same_prompt() -> None:
    loaded = tiny_loaded()
    ids = decode.random_prompt(loaded, 2, 100)
    caches = decode.filled_caches(loaded, ids, QEvictConfig(kv_budget=1.0, quant_share=0.0), ("sdpa",), room=8)
    token = ids[:, :1]
    logits = {name: decode.forward(loaded.model, token, cache) for name, cache in caches.items()}
    assert torch.allclose(logits["dynamic"], logits["sdpa"], atol=1e-4)
    assert torch.allclose(logits["dynamic"], logits["static"], atol=1e-4)


def test_decode_row_names_what_was_resident() -> None:
    row = decode.measure_decode(tiny_loaded(), context=160, budget=0.5, rounds=10, backends=("sdpa",))
    assert row["ratio_to_dynamic"]["dynamic"] == 1.0 and row["ratio_to_static"]["static"] == 1.0
    assert 0 < row["resident"]["sdpa"]["persistent_bytes"] < row["resident"]["sdpa"]["full_kv_bytes"]
    assert row["routing_share"]["sdpa"] > 0.0


def test_prefill_row_counts_against_stock() -> None:
    row = decode.measure_prefill(tiny_loaded(), context=160, budget=0.5, rounds=1, backends=("sdpa",))
    assert row["cost_against_dynamic"]["dynamic"] == 1.0 and row["cost_against_dynamic"]["sdpa"] > 0.0


def test_table4_gives_each_system_once_with_full_first() -> None:
    tiny = table4.ModelShape(64, 128, 2, 4, 2, 128)
    model = table4.build(tiny, "cpu", torch.float32)
    rows = list(table4.measure(model, prompt_tokens=96, new_tokens=6, batch=2, budget=0.6, backends=("sdpa",)))
    assert [row["system"] for row in rows] == ["full", "sdpa"] and rows[0]["speed_against_full"] == 1.0
    assert rows[0]["persistent_kv_bytes"] == 2 * 2 * 2 * 2 * 16 * (96 + 5) * 4
    assert rows[1]["persistent_kv_bytes"] < rows[0]["persistent_kv_bytes"]
    assert all(row["ttft_ms"] > 0 and row["tokens_per_s"] > 0 for row in rows)


def test_parameter_count_is_the_models_own() -> None:
    tiny = table4.ModelShape(64, 128, 2, 4, 2, 128)
    model = table4.build(tiny, "cpu", torch.float32)
    norms = sum(p.numel() for name, p in model.named_parameters() if "norm" in name)
    assert tiny.parameters == sum(p.numel() for p in model.parameters()) - norms


def test_a_shape_that_does_not_fit_is_refused_before_anything_is_built() -> None:
    with pytest.raises(ModelTooLargeError, match="--shape small"):
        table4.build(table4.ModelShape(65536, 262144, 200, 64, 8, 128_256), "cpu", torch.float32)


def test_rows_that_repeat_a_prompt_route_alike() -> None:
    """Two caches of one prompt make the same decisions: the benchmark compares like with like."""
    loaded = tiny_loaded()
    ids = decode.random_prompt(loaded, 1, 120)
    boards = []
    for _ in range(2):
        cache = QEvictCache(loaded.model, QEvictConfig(kv_budget=0.5, backend="sdpa"))
        with torch.inference_mode():
            decode.prefill(loaded.model, ids, cache)
            cache.settle()
        boards.append(cache.board)
    assert torch.equal(*boards)
