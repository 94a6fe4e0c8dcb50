"""Bytes and capacities: the hand-computed plans, and the rules over random settings."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given

from engine.budget import KVShape, Plan, make_plan, window_costs
from engine.config import QEvictConfig
from engine.errors import BudgetError
from engine.windows import Grid

SMOL = KVShape(num_layers=30, num_kv_heads=3, head_dim=64, element_bytes=2)


@pytest.mark.parametrize(
    "budget, total, local, full, quant",
    [(0.05, 46_080, 8, 1, 13), (0.10, 92_160, 16, 3, 29), (0.20, 184_320, 48, 6, 59)],
)
def test_plans_by_hand(budget: float, total: int, local: int, full: int, quant: int) -> None:
    """SmolLM2, float16, prompt 1,000 + 200, sink 5, Ω 8, q 0.7."""
    plan = make_plan(QEvictConfig(kv_budget=budget, planned_new_tokens=200), SMOL, 1000)
    assert (plan.costs.full, plan.costs.quant) == (6152, 1640)
    assert plan.planned_tokens == 1200 and plan.total_bytes == total
    assert (plan.local_tokens, plan.full_capacity, plan.quant_capacity) == (local, full, quant)
    assert plan.sink_blocks == 1 and plan.local_blocks == local // 8 + 1
    assert plan.persistent_bytes <= total


@pytest.mark.parametrize("dim, ratio, bits", [(64, 3.77, 4.25), (128, 3.88, 4.125)])
def test_a_quant_window_costs_more_than_two_bits(dim: int, ratio: float, bits: float) -> None:
    costs = window_costs(QEvictConfig(), KVShape(1, 1024, dim, 2))
    assert costs.full / costs.quant == pytest.approx(ratio, abs=0.01)
    elements = 2 * 1024 * 8 * dim
    assert (costs.quant - 8) * 8 / elements == pytest.approx(bits)
    assert costs.quant_codes == elements * 2 // 8
    assert costs.quant_codes + costs.quant_metadata == costs.quant


def test_float32_makes_quant_look_twice_as_cheap() -> None:
    costs = window_costs(QEvictConfig(), KVShape(1, 3, 64, 4))
    assert costs.quant / costs.full == pytest.approx(0.13, abs=0.005)
    half = window_costs(QEvictConfig(), KVShape(1, 3, 64, 2))
    assert half.quant / half.full == pytest.approx(0.27, abs=0.005)


def test_an_index_for_every_decision() -> None:
    layer = window_costs(QEvictConfig(), SMOL)
    head = window_costs(QEvictConfig(score_scope="kv_head"), SMOL)
    assert head.full - layer.full == head.quant - layer.quant == 8 * 2


def test_value_groups_cost_metadata() -> None:
    plain = window_costs(QEvictConfig(), SMOL)
    grouped = window_costs(QEvictConfig(value_group_size=16), SMOL)
    assert grouped.quant - plain.quant == 4 * 3 * 8 * 3
    assert grouped.full == plain.full


def test_full_kv_bytes_by_hand() -> None:
    assert SMOL.full_kv_bytes(1200) == 2 * 30 * 3 * 64 * 1200 * 2


shapes = st.builds(
    KVShape, st.integers(1, 40), st.integers(1, 8), st.sampled_from([16, 64, 128]), st.sampled_from([2, 4])
)


@st.composite
def settings_drawn(draw: st.DrawFn) -> QEvictConfig:
    window = draw(st.sampled_from([1, 2, 4, 8, 16, 32]))
    bits = draw(st.sampled_from([2, 4]))
    share = draw(st.sampled_from([0.0, 0.1, 0.3, 0.7, 0.9, 1.0])) if window * bits % 8 == 0 else 0.0
    return QEvictConfig(
        window_size=window,
        routing_interval=window * draw(st.integers(1, 3)),
        sink_tokens=draw(st.integers(0, 40)),
        local_tokens=draw(st.none() | st.integers(1, 6).map(lambda n: n * window)),
        local_share=draw(st.floats(0.05, 0.9)),
        kv_budget=draw(st.floats(0.02, 0.999)),
        quant_share=share,
        bits=bits,
        value_group_size=draw(st.sampled_from([None, None, 1, 4])),
        planned_new_tokens=draw(st.integers(0, 300)),
        score_scope=draw(st.sampled_from(["layer", "kv_head"])),
    )


def history_of(config: QEvictConfig, plan: Plan) -> int:
    """Bytes left for history windows."""
    return plan.total_bytes - (plan.sink_blocks + plan.local_blocks) * plan.costs.full


@given(settings_drawn(), shapes, st.integers(1, 5000), st.booleans())
def test_plans_spend_all_and_never_more(config: QEvictConfig, shape: KVShape, prompt: int, padded: bool) -> None:
    grid = Grid(config.window_size, config.sink_tokens)
    try:
        plan = make_plan(config, shape, prompt, padded=padded)
    except BudgetError as error:
        planned = prompt + config.planned_new_tokens
        assert int(config.kv_budget * shape.token_bytes * planned) < error.smallest_bytes
        assert f"{error.smallest_bytes:,}" in str(error) and f"{error.smallest_share:.4g}" in str(error)
        return
    costs = plan.costs
    assert plan.total_bytes == int(config.kv_budget * shape.token_bytes * plan.planned_tokens + 1e-6)
    assert plan.persistent_bytes <= plan.total_bytes
    assert plan.sink_blocks == -(-config.sink_tokens // config.window_size) + padded
    assert plan.local_blocks * config.window_size == plan.local_tokens + config.interval
    assert plan.local_tokens % config.window_size == 0 and plan.local_tokens >= config.window_size
    if config.local_tokens is not None:
        assert plan.local_tokens == config.local_tokens
    elif plan.local_tokens > config.window_size:
        assert plan.local_blocks * costs.full <= config.local_share * plan.total_bytes
        window = costs.quant if config.quant_share > 0 else costs.full
        crowded = (grid.sink_blocks + 1 + plan.local_blocks + 1) * costs.full + window > plan.total_bytes
        assert crowded or (plan.local_blocks + 1) * costs.full > config.local_share * plan.total_bytes - 1
    most = grid.max_history_windows(plan.planned_tokens, plan.local_tokens)
    full, quant = plan.full_capacity, plan.quant_capacity
    if config.quant_share == 0.0:
        assert quant == 0
    if config.quant_share == 1.0:
        assert full == 0
    left = history_of(config, plan) - full * costs.full - quant * costs.quant
    assert left >= 0
    # Every byte works: no further window fits, or no window is left over for an idle slot.
    assert full + quant <= max(most, 0) or (quant == 0 and full <= most)
    if full + quant < most:
        assert left < (costs.full if config.quant_share == 0.0 else costs.quant)
    elif 0.0 < config.quant_share < 1.0 and quant > 0 and costs.full > costs.quant:
        assert left + costs.quant < costs.full


@given(settings_drawn(), shapes, st.integers(1, 5000))
def test_the_named_smallest_budget_works(config: QEvictConfig, shape: KVShape, prompt: int) -> None:
    config = config.replace(kv_budget_bytes=1)
    with pytest.raises(BudgetError) as caught:
        make_plan(config, shape, prompt)
    smallest = caught.value.smallest_bytes
    plan = make_plan(config.replace(kv_budget_bytes=smallest * shape.num_layers), shape, prompt)
    assert plan.full_capacity + plan.quant_capacity >= 1 or not Grid(
        config.window_size, config.sink_tokens
    ).max_history_windows(plan.planned_tokens, plan.local_tokens)
    assert plan.smallest_bytes == smallest
    for more in (1, 7, 1000, 100_000):
        make_plan(config.replace(kv_budget_bytes=(smallest + more) * shape.num_layers), shape, prompt)
    with pytest.raises(BudgetError):
        make_plan(config.replace(kv_budget_bytes=(smallest - 1) * shape.num_layers), shape, prompt)
    share = caught.value.smallest_share
    if share < 1.0:
        make_plan(config.replace(kv_budget_bytes=None, kv_budget=share), shape, prompt)


@given(settings_drawn(), shapes, st.integers(1, 3000), st.booleans())
def test_budget_one_holds_every_window_in_full(config: QEvictConfig, shape: KVShape, prompt: int, padded: bool) -> None:
    plan = make_plan(config.replace(kv_budget=1.0), shape, prompt, padded=padded)
    grid = Grid(config.window_size, config.sink_tokens)
    assert plan.full_capacity == grid.max_history_windows(plan.planned_tokens, plan.local_tokens)
    assert plan.quant_capacity == 0
    assert plan.persistent_bytes == plan.total_bytes
    blocks = plan.arena_blocks * config.window_size
    assert blocks >= plan.planned_tokens


@given(settings_drawn(), shapes, st.integers(1, 3000))
def test_padded_rows_share_the_local_region(config: QEvictConfig, shape: KVShape, prompt: int) -> None:
    try:
        padded = make_plan(config, shape, prompt, padded=True)
    except BudgetError:
        return
    plain = make_plan(config, shape, prompt)
    assert (padded.local_tokens, padded.total_bytes) == (plain.local_tokens, plain.total_bytes)
    assert padded.sink_blocks == plain.sink_blocks + 1


def test_absolute_bytes_win() -> None:
    plan = make_plan(QEvictConfig(kv_budget=1.0, kv_budget_bytes=30 * 100_000), SMOL, 4000)
    assert plan.total_bytes == 100_000 and plan.persistent_bytes <= 100_000


def test_twenty_per_cent_of_a_short_prompt_is_refused() -> None:
    config = QEvictConfig(kv_budget=0.2, planned_new_tokens=0)
    with pytest.raises(BudgetError, match="smallest feasible"):
        make_plan(config, SMOL, 110)
    make_plan(config, SMOL, 200)


def test_no_full_history_is_legal_and_said() -> None:
    config = QEvictConfig(kv_budget=0.2, planned_new_tokens=0)
    plans = [make_plan(config, SMOL, length) for length in range(170, 1200, 10)]
    for plan in plans:
        assert ("no_full_history" in plan.notices) == (plan.full_capacity == 0)
    assert make_plan(config.replace(quant_share=1.0), SMOL, 1000).notices == ["no_full_history"]
