"""Which tokens the eviction rivals keep: cases computed by hand."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from engine.attention.softmax import merge
from engine.baselines.adakv import ada_mask, mixed_counts, ranks, shared_mask
from engine.baselines.criticalkv import critical_ada_mask, critical_mask
from engine.baselines.defensivekv import (
    defensive_scores,
    layered_masks,
    pooled_rows,
    sure_columns,
    worst_case,
)
from engine.baselines.kept import top_mask
from engine.baselines.matching import BudgetSpec
from engine.baselines.observation import observed_window, pool_columns, snap_scores, value_norms, with_window
from engine.baselines.streaming import slot_positions
from engine.rope import rotate
from engine.trace import Tier
from tests.engine.baselines.matrix import build, feed, follow, loaded, prompt


def kept(mask: Tensor) -> list[int]:
    return mask.nonzero().flatten().tolist()


# ---- StreamingLLM ---------------------------------------------------------------------------------------


def test_streaming_keeps_sinks_and_recent() -> None:
    held = slot_positions(torch.tensor([10]), 2, 3, 5)[0]
    assert sorted(held.tolist()) == [0, 1, 7, 8, 9]


@given(st.integers(0, 60), st.integers(0, 6), st.integers(1, 9))
def test_streaming_slots_hold_first_and_latest(count: int, sinks: int, recent: int) -> None:
    held = slot_positions(torch.tensor([count]), sinks, recent, sinks + recent)[0].tolist()
    expected = {*range(min(sinks, count)), *range(max(sinks, count - recent), count)}
    assert sorted(token for token in held if token >= 0) == sorted(expected)
    if count <= sinks + recent:
        assert held[:count] == list(range(count))


def test_streaming_never_exceeds_its_size() -> None:
    model = loaded()
    cache = build("streamingllm", BudgetSpec(tokens=30), new_tokens=20)
    follow(model, cache, prompt(1, 50), prompt(1, 10 * 25, 1))
    table = cache.residency()
    assert cache.persistent_tensors()["0.key"].shape[2] == 29
    assert [int((row == Tier.FULL).sum()) for row in table.flatten(0, 1)] == [29] * 4
    assert kept(table[0, 0] == Tier.FULL) == [0, 1, 2, 3, *range(300 - 25, 300)]


def test_streaming_in_cache_positions_is_attention_over_renumbered_tokens() -> None:
    """Keys un-rotated, rotated again at their slot index; the query at the cache's length."""
    model = loaded()
    cache = build("streamingllm", BudgetSpec(tokens=41), new_tokens=20)
    follow(model, cache, prompt(1, 90), prompt(1, 17, 1))
    ring, rope = cache.residents[0], cache._rope_table()
    rope.ensure(200)
    true = torch.tensor([0, 1, 2, 3, *range(107 - 36, 107)])
    slot = torch.arange(40)
    order = slot_positions(torch.tensor([107]), 4, 36, 40)[0].argsort()
    query = torch.randn(1, 6, 1, 32)
    got = merge(ring.parts(query, 0.2, None))[0][0, :, 0]
    renumbered = rope.apply(rope.undo(query, torch.tensor([106])), torch.tensor([39]))[0, :, 0]
    for head in range(2):
        key = rope.apply(rope.undo(ring.key[0, head, order], true), slot)
        value = ring.value[0, head, order]
        own = slice(head * 3, head * 3 + 3)
        want = (renumbered[own] @ key.T * 0.2).softmax(-1) @ value
        torch.testing.assert_close(got[own], want, atol=1e-5, rtol=1e-4)


def test_streaming_positions_differ_only_once_something_was_dropped() -> None:
    model = loaded()
    ids, later = prompt(1, 90), prompt(1, 6, 1)
    small, large = BudgetSpec(tokens=41), BudgetSpec(tokens=120)
    for budget, same in ((large, True), (small, False)):
        in_cache = follow(model, build("streamingllm", budget), ids, later)
        original = follow(model, build("streamingllm original", budget), ids, later)
        assert torch.equal(in_cache, original) is same


def test_rotation_composes() -> None:
    angles = torch.rand(8)
    x = torch.randn(16)
    turned = rotate(rotate(x, angles.cos(), angles.sin()), angles.cos(), -angles.sin())
    torch.testing.assert_close(turned, x)


# ---- SnapKV -----------------------------------------------------------------------------------------------

ROWS = torch.tensor(
    [
        [[0.30, 0.10, 0.20, 0.00, 0.10, 0.10, 0.20, 0.00], [0.20, 0.10, 0.20, 0.10, 0.10, 0.10, 0.10, 0.10]],
        [[0.10, 0.00, 0.60, 0.00, 0.00, 0.10, 0.20, 0.00], [0.10, 0.10, 0.40, 0.10, 0.00, 0.10, 0.10, 0.10]],
    ]
)


def test_snapkv_example() -> None:
    scores = snap_scores(ROWS[None, None], 2, 3, "avg")
    expected = torch.tensor([0.083333, 0.2, 0.158333, 0.15, 0.066667, 0.05])
    torch.testing.assert_close(scores[0, 0], expected, atol=1e-6, rtol=0)
    full = with_window(scores, 2, torch.ones(1, 8, dtype=torch.bool))
    assert kept(top_mask(full, 4)[0, 0]) == [1, 2, 6, 7]


def test_snapkv_original_max_pool_of_the_sum() -> None:
    pooled = pool_columns(ROWS[:, :, :6].sum(1), 3, "max")
    expected = torch.tensor([[0.5, 0.5, 0.4, 0.4, 0.2, 0.2], [0.2, 1.0, 1.0, 1.0, 0.2, 0.2]])
    torch.testing.assert_close(pooled, expected)


def test_group_may_be_joined_by_its_largest() -> None:
    joined = snap_scores(ROWS[None, None], 2, 3, "avg", "max")[0, 0]
    each = snap_scores(ROWS[None, :, None], 2, 3, "avg")[0]
    torch.testing.assert_close(joined, each.amax(0))


@pytest.mark.parametrize(
    ("window", "kept_", "tokens", "expected"), [(32, 100, 200, 32), (32, 10, 200, 5), (32, 64, 3, 2), (32, 1, 1, 0)]
)
def test_observation_window_shrinks(window: int, kept_: int, tokens: int, expected: int) -> None:
    assert observed_window(window, kept_, tokens) == expected


def test_snapkv_against_eager_attention_of_the_model() -> None:
    """Scores from the model's own probabilities choose the same tokens."""
    model = loaded()
    ids = prompt()
    cache = build("snapkv")
    follow(model, cache, ids, prompt(1, 1, 1))
    model.model.set_attn_implementation("eager")
    with torch.inference_mode():
        attentions = model.model(ids, output_attentions=True).attentions
    for layer, probs in enumerate(attentions):
        scores = snap_scores(probs[:, :, -8:].unflatten(1, (2, 3)), 8, 7, "max")
        count = len(cache.residents[layer].dense(0)[0][0]) - 1
        mask = top_mask(with_window(scores, 8, torch.ones(1, 160, dtype=torch.bool)), count)[0]
        assert torch.equal(cache.residency()[layer, :, :160] == Tier.FULL, mask)


# ---- AdaKV ------------------------------------------------------------------------------------------------

ADA = torch.tensor([[[0.9, 0.8, 0.7, 0.6, 0.5, 0.01], [0.3, 0.2, 0.1, 0.05, 0.02, 0.01]]])


@pytest.mark.parametrize(("share", "counts"), [(0.0, [5, 1]), (0.34, [5, 1]), (0.67, [4, 2]), (1.0, [3, 3])])
def test_adakv_example(share: float, counts: list[int]) -> None:
    assert ada_mask(ADA, 3, "kvpress", share).sum(-1)[0].tolist() == counts


def test_adakv_original_floor() -> None:
    assert ada_mask(ADA, 3, "original", 0.5).sum(-1)[0].tolist() == [4, 2]
    # The original rounds to 4 and 1 and loses a slot; the largest remainder gets it.
    assert ada_mask(ADA, 3, "original", 0.2).sum(-1)[0].tolist() == [5, 1]


@given(st.integers(0, 10_000), st.integers(1, 12), st.floats(0, 1), st.sampled_from(["kvpress", "original"]))
def test_adakv_spends_exactly_its_budget(seed: int, count: int, share: float, floor: str) -> None:
    scores = torch.rand(2, 3, 12, generator=torch.Generator().manual_seed(seed))
    assert ada_mask(scores, count, floor, share).sum((1, 2)).tolist() == [3 * count] * 2
    assert torch.equal(ada_mask(scores, count, floor, 1.0), top_mask(scores, count))


def test_equal_heads_get_equal_budgets() -> None:
    scores = torch.rand(1, 1, 20).expand(1, 4, 20)
    assert ada_mask(scores, 6, "kvpress", 0.2).sum(-1)[0].tolist() == [6, 6, 6, 6]
    assert mixed_counts(torch.tensor([[6, 6, 6, 6]]), 6, 0.3)[0].tolist() == [6, 6, 6, 6]


def test_adakv_with_a_whole_floor_is_snapkv() -> None:
    model = loaded()
    ids, later = prompt(), prompt(1, 6, 1)
    budget = BudgetSpec(tokens=120)
    ada = build("adakv", budget, seed=0)
    object.__setattr__(ada.rival, "floor_share", 1.0)
    snap = build("snapkv", budget)
    a, b = follow(model, ada, ids, later), follow(model, snap, ids, later)
    # The table of head lengths costs AdaKV less than one token here.
    if int((ada.residency() == Tier.FULL).sum()) == int((snap.residency() == Tier.FULL).sum()):
        assert torch.equal(a, b)
    else:
        assert bool(((ada.residency() == Tier.FULL) <= (snap.residency() == Tier.FULL)).all())


def test_ties_go_to_the_lower_column() -> None:
    assert kept(top_mask(torch.ones(6), 3)) == [0, 1, 2]
    assert ranks(torch.tensor([1.0, 2.0, 2.0])).tolist() == [2, 0, 1]


def test_ragged_bytes_fall_with_the_tokens() -> None:
    model = loaded()
    cache = build("adakv", BudgetSpec(tokens=100))
    follow(model, cache, prompt(), prompt(1, 4, 1))
    table = cache.residency()
    counts = (table[:, :, :160] == Tier.FULL).sum(-1)
    assert len(set(counts[0].tolist())) > 1, "heads should differ here"
    tensors = cache.persistent_tensors()
    assert tensors["0.key"].shape == (int(counts[0].sum()), 32)
    assert tensors["0.cu_seqlens"].tolist() == [0, int(counts[0, 0]), int(counts[0].sum())]


# ---- CriticalKV -------------------------------------------------------------------------------------------

SCORE = torch.tensor([[[0.40, 0.30, 0.15, 0.10, 0.05, 0.0]]])
VALUES = torch.tensor([[0.1, 0.1], [1.0, 1.0], [0.2, 0.2], [3.0, -3.0], [5.0, 5.0], [9.0, 9.0]])


def test_criticalkv_example() -> None:
    norms = VALUES.abs().sum(-1)[None, None]
    second = (SCORE + 1e-4) * norms
    torch.testing.assert_close(second[0, 0, 1:], torch.tensor([0.6002, 0.06004, 0.6006, 0.501, 0.0018]))
    assert kept(critical_mask(SCORE, norms, 3, 0.5)[0, 0]) == [0, 1, 3]
    assert kept(top_mask(SCORE, 3)[0, 0]) == [0, 1, 2]


@given(st.integers(0, 10_000), st.integers(1, 12))
def test_criticalkv_invariants(seed: int, count: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    scores, norms = torch.rand(2, 3, 12, generator=generator), torch.rand(2, 3, 12, generator=generator) + 0.1
    assert torch.equal(critical_mask(scores, norms, count, 1.0), top_mask(scores, count))
    assert torch.equal(critical_mask(scores, norms * 8.0, count, 0.5), critical_mask(scores, norms, count, 0.5))
    assert torch.equal(critical_ada_mask(scores, norms, count, 1.0, 0.2), ada_mask(scores, count, "kvpress", 0.2))
    assert critical_ada_mask(scores, norms, count, 0.5, 0.2).sum((1, 2)).tolist() == [3 * count] * 2


def test_window_survives_a_small_first_stage() -> None:
    scores = torch.cat([torch.rand(1, 1, 10), torch.full((1, 1, 4), torch.inf)], -1)
    mask = critical_mask(scores, torch.rand(1, 1, 14), 5, 0.2)
    assert bool(mask[0, 0, -4:].all())
    assert int(mask.sum()) == 5


def test_value_norms_are_those_of_projected_values() -> None:
    model = loaded()
    cache = build("criticalkv")
    feed(model, cache, prompt(1, 20))
    staged = cache._staging[1].staged
    weight = model.model.model.layers[1].self_attn.o_proj.weight.detach()
    norms = value_norms(staged, 6)
    for head in range(2):
        each = [staged.value[0, head] @ weight[:, q * 32 : q * 32 + 32].T for q in range(head * 3, head * 3 + 3)]
        torch.testing.assert_close(norms[0, head], torch.stack([e.abs().sum(-1) for e in each]).mean(0))
    staged.value = -staged.value
    torch.testing.assert_close(value_norms(staged, 6), norms)


# ---- DefensiveKV ------------------------------------------------------------------------------------------

DEFENSIVE = torch.tensor([[0.50, 0.10, 0.20, 0.10], [0.05, 0.70, 0.05, 0.10]])


def test_defensive_worst_case_example() -> None:
    scores = worst_case(DEFENSIVE[None, None, None])[0, 0]
    torch.testing.assert_close(scores, torch.tensor([0.5, 0.7, 0.375, 0.375]))


def test_defensive_pooling_keeps_each_rows_mass() -> None:
    pooled = pooled_rows(DEFENSIVE, 3)
    expected = torch.tensor([[0.2571, 0.3429, 0.1714, 0.1286], [0.2647, 0.2824, 0.3000, 0.0529]])
    torch.testing.assert_close(pooled, expected, atol=5e-5, rtol=0)
    torch.testing.assert_close(pooled.sum(-1), DEFENSIVE.sum(-1))


def _probs(seed: int, heads: int = 2) -> Tensor:
    return torch.randn(1, heads, 3, 4, 24, generator=torch.Generator().manual_seed(seed)).softmax(-1)


def _scores(probs: Tensor, norms: Tensor, kept_: int = 12, mode: str = "paper") -> Tensor:
    lengths = torch.tensor([probs.shape[-1]])
    return defensive_scores(probs, norms, lengths, window=4, kernel=3, kept=kept_, mode=mode)


def test_one_kv_head_does_not_look_at_values() -> None:
    probs = _probs(0, heads=1)
    torch.testing.assert_close(_scores(probs, torch.rand(1, 1, 24)), _scores(probs, torch.rand(1, 1, 24) + 3))


def test_every_score_reaches_its_heads_mean() -> None:
    rows = _probs(1)[..., :20]
    scores = worst_case(rows)
    assert bool((scores >= rows.amax((2, 3)).mean(-1, keepdim=True) - 1e-7).all())


def test_sure_columns_leave_out_the_one_that_crosses() -> None:
    mean = torch.tensor([[[0.5, 0.3, 0.15, 0.05]]])
    none, most = torch.zeros(1, 1), torch.tensor([[9]])
    assert kept(sure_columns(mean, none, most, "paper")[0, 0]) == [0, 1]
    assert kept(sure_columns(mean, none + 0.2, most, "paper")[0, 0]) == [0]
    assert kept(sure_columns(mean, none, torch.tensor([[1]]), "paper")[0, 0]) == [0]


def test_a_budget_below_the_window_inverts_only_the_repository() -> None:
    mean = torch.tensor([[[0.5, 0.3, 0.15, 0.05]]])
    negative = torch.tensor([[-1]])
    assert kept(sure_columns(mean, torch.zeros(1, 1), negative, "paper")[0, 0]) == []
    assert kept(sure_columns(mean, torch.zeros(1, 1), negative, "repo")[0, 0]) == [0, 1, 2]


def test_window_is_safe_in_the_paper_mode() -> None:
    mask = shared_mask(_scores(_probs(2), torch.rand(1, 2, 24), 6), 6)
    assert bool(mask[..., -4:].all())
    assert int(mask.sum()) == 12


def test_layer_form_with_equal_layers_is_the_layer_by_layer_form() -> None:
    scores = torch.rand(1, 2, 24)
    masks = layered_masks([scores, scores, scores], 6)
    assert sum(int(mask.sum()) for mask in masks) == 3 * 2 * 6
    for mask in masks:
        assert torch.equal(mask, shared_mask(scores, 6))


def test_layer_form_spends_one_budget() -> None:
    first, second = torch.rand(1, 2, 24) + 0.5, torch.rand(1, 2, 24)
    masks = layered_masks([first, second], 6)
    assert int(masks[0].sum()) + int(masks[1].sum()) == 24
    assert int(masks[0].sum()) > int(masks[1].sum())


# ---- H2O and random ---------------------------------------------------------------------------------------


def test_h2o_follows_a_plain_loop() -> None:
    """Against a dictionary per head that is told the model's attention over what it holds."""
    model = loaded()
    cache = build("h2o", BudgetSpec(tokens=60), new_tokens=20)
    ids = prompt(1, 80)
    follow(model, cache, ids, ids[:, :0])
    cache.settle()
    pool = cache.residents[0]
    capacity = pool._capacity
    held = [dict(zip(pool.column[0, h].tolist(), pool.score[0, h].tolist(), strict=True)) for h in range(2)]
    store = [dict(zip(pool.column[0, h].tolist(), pool.key[0, h].unbind(0), strict=True)) for h in range(2)]
    generator = torch.Generator().manual_seed(0)
    with torch.inference_mode():
        for step in range(40):
            query = torch.randn(1, 6, 1, 32, generator=generator)
            key = torch.randn(1, 2, 1, 32, generator=generator)
            pool.step(query, key, key, 0.3, None)
            for head in range(2):
                now = 80 + step
                if len(held[head]) == capacity:
                    old = [c for c in held[head] if c <= now - capacity // 2]
                    victim = min(old, key=lambda c: held[head][c])
                    del held[head][victim], store[head][victim]
                held[head][now], store[head][now] = 0.0, key[0, head, 0]
                columns = list(held[head])
                keys = torch.stack([store[head][c] for c in columns])
                mass = (query[0, head * 3 : head * 3 + 3, 0] @ keys.T * 0.3).softmax(-1).mean(0)
                for column, gain in zip(columns, mass.tolist(), strict=True):
                    held[head][column] += gain
                assert sorted(held[head]) == sorted(pool.column[0, head, : pool.used].tolist())
    assert pool.used == capacity


def test_h2o_starts_from_sums_over_all_queries() -> None:
    model = loaded()
    ids = prompt(1, 50)
    cache = build("h2o", BudgetSpec(share=1.0))
    feed(model, cache, ids)
    cache.settle()
    model.model.set_attn_implementation("eager")
    with torch.inference_mode():
        attentions = model.model(ids, output_attentions=True).attentions
    for layer, probs in enumerate(attentions):
        want = probs[0].sum(1).unflatten(0, (2, 3)).mean(1)
        torch.testing.assert_close(cache.residents[layer].score[0, :, :50], want, atol=1e-4, rtol=1e-4)


def test_random_keeps_whole_windows_and_both_ends() -> None:
    model = loaded()
    cache = build("random", BudgetSpec(tokens=24 + 5 + 8 + 32), seed=3)
    follow(model, cache, prompt(1, 5 + 8 * 18), prompt(1, 1, 1))
    table = cache.residency()[:, :, : 5 + 8 * 18] == Tier.FULL
    assert bool(table[:, :, :5].all()) and bool(table[:, :, -8:].all())
    for layer in range(2):
        assert torch.equal(table[layer, 0], table[layer, 1])
        assert sorted(table[layer, 0, 5:].view(18, 8).sum(1).tolist()) == [0] * 13 + [8] * 5
    assert not torch.equal(table[0], table[1])
