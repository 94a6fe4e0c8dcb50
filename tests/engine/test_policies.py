"""Policies on one trace: figures by hand on a few tokens, definitions that no policy may break, and the real cache."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.adapter import cache_keyword
from engine.cache import RoutingRecord
from engine.config import QEvictConfig
from engine.errors import ConfigError
from engine.evaluation.live import HeadScores, run_live
from engine.evaluation.recording import record
from engine.metrics.fmm import FutureMass
from engine.metrics.history import TierHistory
from engine.policies import (
    FullTrace,
    Policy,
    by_blocks,
    event_boundaries,
    future_shares,
    horizon_masses,
    simulate,
    standard_policies,
)
from engine.trace import Tier
from tests.engine.evaluation.made_traces import random_trace, trace_of
from tests.tiny import tiny_loaded

torch.set_num_threads(1)
S, L, F, Q, E, N = Tier.SINK, Tier.LOCAL, Tier.FULL, Tier.QUANT, Tier.EVICTED, Tier.EMPTY
CONFIG = QEvictConfig(kv_budget=0.4, window_size=4, sink_tokens=2, kv_dtype="float16", local_tokens=8)


def by_hand() -> FullTrace:
    """One layer, two heads, 6 tokens, 4 of them the prompt."""
    probs = torch.zeros(1, 2, 6, 6)
    probs[0, :, 0, 0] = 1.0
    probs[0, :, 1, :2] = torch.tensor([0.5, 0.5])
    probs[0, :, 2, :3] = torch.tensor([0.2, 0.3, 0.5])
    probs[0, :, 3, :4] = torch.tensor([0.1, 0.2, 0.3, 0.4])
    probs[0, 0, 4, :5] = torch.tensor([0.1, 0.4, 0.2, 0.1, 0.2])
    probs[0, 1, 4, :5] = torch.tensor([0.6, 0.0, 0.0, 0.2, 0.2])
    probs[0, 0, 5] = torch.tensor([0.1, 0.2, 0.1, 0.1, 0.3, 0.2])
    probs[0, 1, 5] = torch.tensor([0.2, 0.2, 0.0, 0.1, 0.3, 0.2])
    return trace_of(probs, 4)


def history_of(boards: list[list[list[int]]], columns: list[int]) -> TierHistory:
    return TierHistory(np.arange(len(boards)), np.array(columns), np.array(boards, dtype=np.uint8))


def test_past_and_future_mass_by_hand() -> None:
    trace = by_hand()
    torch.testing.assert_close(trace.past(4)[0, 0], torch.tensor([1.8, 1.0, 0.8, 0.4]))
    torch.testing.assert_close(trace.past(5)[0, 1], torch.tensor([2.4, 1.0, 0.8, 0.6, 0.2]))
    mass, steps = trace.future(4, 32)
    assert steps == 2
    torch.testing.assert_close(mass[0, 0], torch.tensor([0.2, 0.6, 0.3, 0.2]))
    mass, steps = trace.future(4, 1)
    assert steps == 1
    torch.testing.assert_close(mass[0, 1], torch.tensor([0.6, 0.0, 0.0, 0.2]))


def test_future_missed_mass_by_hand() -> None:
    # Windows of one token after a sink of one: columns 1, 2, 3 are evicted, quantized, local at the prompt's end.
    config = QEvictConfig(window_size=1, sink_tokens=1, quant_share=0.0)
    (mass,) = horizon_masses(by_hand(), history_of([[[E, Q, L]]], [4]), config)
    # Ratio of sums per head, then the mean: head 0 (0.6 of 1.3), head 1 (0.2 of 1.3).
    assert float(mass.missed().mean()) == pytest.approx((0.6 / 1.3 + 0.2 / 1.3) / 2)
    assert float(mass.missed(fp_only=True).mean()) == pytest.approx((0.9 / 1.3 + 0.2 / 1.3) / 2)
    assert float(mass.missed("history").mean()) == pytest.approx((0.6 / 0.9 + 0.2 / 0.2) / 2)
    assert mass.steps == 2
    np.testing.assert_allclose(mass.protected, [[0.2 + 0.2, 0.8 + 0.3]], rtol=1e-6)


def test_future_shares_are_what_each_block_adds_to_fmm() -> None:
    config = QEvictConfig(window_size=1, sink_tokens=1, quant_share=0.0)
    shares = future_shares(by_hand(), 4, config, 32)
    expected = [(0.2 + 0.8) / 2.6, (0.6 + 0.2) / 2.6, 0.3 / 2.6, (0.2 + 0.3) / 2.6]
    torch.testing.assert_close(shares[0], torch.tensor(expected))


def test_blocks_align_the_sink_with_a_block_border() -> None:
    config = QEvictConfig(window_size=4, sink_tokens=2)
    # Block 0 holds the sink in its tail: columns 0 and 1; then 2 to 5, then 6 and 7 of a block that has begun.
    assert by_blocks(torch.arange(1.0, 9.0), config).tolist() == [3.0, 18.0, 15.0]


def test_events_fall_at_the_prompts_end_and_when_windows_age() -> None:
    config = QEvictConfig(window_size=4, sink_tokens=2)
    # Windows end at columns 2 + 4n.
    assert event_boundaries(config, 9, 20) == [9, 10, 14, 18]
    assert event_boundaries(config, 10, 12) == [10]


@pytest.mark.parametrize("groups", [1, 2])
def test_the_live_accumulator_agrees(groups: int) -> None:
    trace = random_trace(layers=2, heads=2, prompt=21, steps=18, seed=3)
    config = QEvictConfig(window_size=4, sink_tokens=2, score_scope="kv_head" if groups == 2 else "layer")
    draw = np.random.default_rng(0)
    boundaries = event_boundaries(config, 21, 39)
    boards, live = [], FutureMass(2, 2, 4, 2, horizon=7, groups=groups, keep=True)
    for event, boundary in enumerate(boundaries):
        blocks = -(-(boundary + 2) // 4)
        windows = draw.choice([F, Q, E], (2 * groups, blocks - 1)).astype(np.uint8)
        windows[:, -1] = L
        boards.append(np.pad(windows, ((0, 0), (0, 10 - windows.shape[1])), constant_values=N))
        sink = np.full((2 * groups, 1), S, dtype=np.uint8)
        begin = 21 if event == 0 else boundaries[event - 1]
        for layer in range(2):
            if boundary > begin:
                part = trace.step_mass[begin - 21 : boundary - 21, layer].transpose(0, 1)
                live.observe(layer, begin, part[:, :, :boundary])
        live.open(event, boundary, torch.from_numpy(np.concatenate([sink, windows], 1)).view(2, groups, blocks))
    for layer in range(2):
        live.observe(layer, boundaries[-1], trace.step_mass[boundaries[-1] - 21 :, layer].transpose(0, 1))
    live.finish(39)
    history = history_of([board.tolist() for board in boards], boundaries)
    ours = horizon_masses(trace, history, config, 7)
    assert [mass.steps for mass in ours] == [mass.steps for mass in live.closed] and len(ours) > 3
    for mine, theirs in zip(ours, live.closed, strict=True):
        for name in ("evicted", "quant", "full", "protected"):
            np.testing.assert_allclose(getattr(mine, name), getattr(theirs, name), rtol=1e-4, atol=1e-6)


@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    budget=st.sampled_from([0.25, 0.4, 0.6]),
    share=st.sampled_from([0.3, 0.7, 1.0]),
    scope=st.sampled_from(["layer", "kv_head"]),
)
def test_oracles_are_minimal_and_the_full_tier_alone_misses_more(
    seed: int, budget: float, share: float, scope: str
) -> None:
    trace = random_trace(seed=seed)
    config = CONFIG.replace(kv_budget=budget, quant_share=share, score_scope=scope)
    policies = standard_policies(config)
    runs, refused = simulate(trace, policies, horizon=8)
    by_name = {run.policy.name: run for run in runs}
    assert len(runs) + len(refused) == len(policies) and "R3" in by_name
    oracle, ours = by_name["oracle future-H"], by_name["R3"]
    for name in ("R3", "random", "oracle past-mass", "promotion off"):
        other = by_name[name]
        if (other.history.tiers == E).sum() != (oracle.history.tiers == E).sum():
            continue  # not a set of the same size
        for boundary, value in oracle.fmm_by_event().items():
            assert value <= other.fmm_by_event()[boundary] + 1e-6
    assert by_name["R3 FP-tier-only"].fmm() >= ours.fmm()  # type: ignore[operator]
    past = by_name["oracle past-mass"]
    for place, boundary in enumerate(ours.history.seq_lens.tolist()):
        rows = trace.past(boundary).unflatten(1, (2 if scope == "kv_head" else 1, -1)).mean(2).flatten(0, 1)
        windows = by_blocks(rows, config)[:, 1:].numpy()
        missed = [
            np.where(run.history.tiers[place][:, : windows.shape[1]] == E, windows, 0).sum(1) for run in (past, ours)
        ]
        assert (missed[0] <= missed[1] + 1e-4).all()
    for run in runs:
        for value in (run.fmm(), run.fmm("history"), run.churn.mean, run.returns().lir):
            assert value is not None and 0.0 <= value <= 1.0
    assert by_name["promotion off"].transitions.promotions == 0
    assert by_name["promotion off"].returns().lir == 0.0


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10_000), promotion=st.booleans())
def test_a_simulated_cache_obeys_its_plan(seed: int, promotion: bool) -> None:
    trace = random_trace(seed=seed)
    (run,), _ = simulate(trace, [Policy("R3", CONFIG.replace(promotion=promotion))], horizon=8)
    assert run.plan is not None
    ever_quant = np.zeros(run.history.tiers.shape[1:], dtype=bool)
    gone = np.zeros_like(ever_quant)
    for board in run.history.tiers:
        ever_quant |= board == Q
        shadows = (ever_quant & (board == F)).sum(1)
        assert ((board == F).sum(1) <= run.plan.full_capacity).all()
        assert ((board == Q).sum(1) + shadows <= run.plan.quant_capacity).all()
        assert (board[gone] == E).all()
        gone |= board == E
        ever_quant &= board != E


def test_an_infeasible_policy_is_named_and_the_others_run() -> None:
    trace = random_trace(prompt=40, steps=8)
    runs, refused = simulate(trace, standard_policies(CONFIG.replace(local_tokens=None)))
    assert "smallest feasible" in refused["R4"]
    assert "R3" in {run.policy.name for run in runs}


def test_a_ranker_that_a_trace_cannot_hold_is_refused() -> None:
    with pytest.raises(ConfigError, match="cumulative"):
        Policy("decayed", CONFIG.replace(ranker="decayed"))


@pytest.mark.parametrize("scope", ["layer", "kv_head"])
def test_the_real_cache_starts_as_simulated_and_quantizes_first(scope: str) -> None:
    loaded = tiny_loaded(positions=512)
    ids = [int(i) for i in torch.randint(0, 250, (120,), generator=torch.Generator().manual_seed(1))]
    trace = record(loaded, ids, 96)
    policy = Policy("R3", CONFIG.replace(score_scope=scope, local_tokens=None))
    (simulated,), _ = simulate(trace, [policy])
    live = run_live(loaded, ids, trace, policy)
    assert live.run.plan == simulated.plan
    ours, theirs = live.run.history, simulated.history
    assert ours.seq_lens.tolist() == theirs.seq_lens.tolist()
    width = ours.tiers.shape[2]
    np.testing.assert_array_equal(ours.tiers[0], theirs.tiers[0][:, :width])
    assert live.agreement is not None
    summary = live.agreement.summary()
    assert summary is not None and summary.first_event == pytest.approx(1.0, abs=1e-6)
    assert 0.5 < summary.mean <= 1.0 and (theirs.tiers[0] == Q).any()


def test_recorded_attention_is_the_models_own() -> None:
    loaded = tiny_loaded(positions=512)
    ids = torch.randint(0, 250, (1, 24), generator=torch.Generator().manual_seed(2))
    loaded.model.set_attn_implementation("eager")
    with torch.inference_mode():
        truth = torch.stack(loaded.model(ids, output_attentions=True).attentions)[:, 0]
    trace = record(loaded, ids[0].tolist(), 16)
    torch.testing.assert_close(trace.prompt_mass, truth[:, :, :16, :16].sum(2), atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(trace.step_mass, truth[:, :, 16:].permute(2, 0, 1, 3), atol=1e-5, rtol=1e-4)


def test_live_scores_by_head_average_to_what_the_cache_ranks_by() -> None:
    loaded = tiny_loaded(positions=512)
    ids = torch.randint(0, 250, (1, 128), generator=torch.Generator().manual_seed(4))
    trace = record(loaded, ids[0].tolist(), 96)
    cache = HeadScores(loaded.model, CONFIG.replace(planned_new_tokens=32, backend="sdpa", local_tokens=None))
    prompt = by_blocks(trace.prompt_mass, CONFIG).mean(1)
    compared = 0

    def check(record: RoutingRecord) -> None:
        nonlocal compared
        if cache.heads is None:
            return
        own = torch.nn.functional.pad(prompt, (0, cache.heads.shape[2] - prompt.shape[1])) + cache.heads.mean(1)
        ranked = record.scores > 0
        torch.testing.assert_close(own[:, : ranked.shape[1]][ranked], record.scores[ranked], atol=1e-3, rtol=1e-3)
        compared += int((ranked & (record.before == Q)).sum())

    cache.on_route = check
    given = {cache_keyword(loaded.model): cache}
    with torch.inference_mode():
        loaded.model(ids[:, :96], **given)
        for at in range(96, 128):
            loaded.model(ids[:, at : at + 1], **given)
    assert compared > 10
