"""Future missed mass: the equation by hand, and the live accumulator against a triple loop."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.metrics.fmm import FutureMass
from engine.metrics.mass import HorizonMass, share
from engine.trace import LateMetrics, Tier

torch.set_num_threads(1)
S, L, F, Q, E = Tier.SINK, Tier.LOCAL, Tier.FULL, Tier.QUANT, Tier.EVICTED


def tiers_of(*blocks: Tier) -> torch.Tensor:
    """One layer, one group."""
    return torch.tensor([[list(blocks)]], dtype=torch.uint8)


def attention(*rows: list[float]) -> torch.Tensor:
    """[1 head, queries, columns]; rows are filled up with zeros."""
    width = max(len(row) for row in rows)
    return torch.tensor([[row + [0.0] * (width - len(row)) for row in rows]])


def test_fmm_equation_by_hand() -> None:
    # Ω = 2, no sink, H = 2. At the event 6 tokens exist: blocks E (0, 1), Q (2, 3), F (4, 5). Two more queries:
    #   τ = 6: .1 .1 | .2 .1 | .1 .2 | .2       missed .2, quant .3, full .3, existing .8
    #   τ = 7: .3 .0 | .1 .0 | .1 .1 | .1 .3    missed .3, quant .1, full .2, existing .6
    # FMM = (.2 + .3) / (.8 + .6) = .5 / 1.4, a ratio of sums, not the mean of .25 and .5.
    # FP-only = (.5 + .4) / 1.4.
    acc = FutureMass(1, 1, 2, 0, horizon=2)
    assert acc.open(0, 6, tiers_of(E, Q, F)) is None
    acc.observe(0, 6, attention([0.1, 0.1, 0.2, 0.1, 0.1, 0.2, 0.2], [0.3, 0.0, 0.1, 0.0, 0.1, 0.1, 0.1, 0.3]))
    (late,) = acc.close_due(8)
    assert late.fmm == pytest.approx(0.5 / 1.4)
    assert late.fmm_fp_only == pytest.approx(0.9 / 1.4)
    assert late.fmm_history == pytest.approx(late.fmm)
    assert late.mass_share == pytest.approx((0.5 / 1.4, 0.4 / 1.4, 0.5 / 1.4))
    assert late.steps == 2
    assert late.churn is None
    # Regret: window 0 misses .5 over two steps.
    assert [(row, window) for row, window, _ in late.regret] == [(0, 0)]
    assert late.regret[0][2] == pytest.approx(0.25)


def test_fmm_history_scope_by_hand() -> None:
    # Ω = 2, one sink token: offset 1, so blocks are {0} sink, {1, 2} E, {3, 4} F, {5, 6} local. Seven tokens exist.
    #   τ = 7: .4 | .1 .1 | .1 .0 | .1 .1 | .1
    # All positions: FMM = .2 / .9. Without sink (.4) and local (.2): .2 / .3.
    acc = FutureMass(1, 1, 2, 1, horizon=1)
    acc.open(0, 7, tiers_of(S, E, F, L))
    acc.observe(0, 7, attention([0.4, 0.1, 0.1, 0.1, 0.0, 0.1, 0.1, 0.1]))
    (late,) = acc.close_due(8)
    assert late.fmm == pytest.approx(0.2 / 0.9)
    assert late.fmm_history == pytest.approx(0.2 / 0.3)
    assert late.mass_share == pytest.approx((0.1 / 0.9, 0.0, 0.2 / 0.9))
    assert late.regret == [(0, 0, pytest.approx(0.2))]  # block 1 is window 0: the sink block does not count


def test_fmm_counts_only_positions_that_existed() -> None:
    # Ω = 4, no sink; the event comes at 6 tokens, inside block 1. Its columns 4 and 5 existed, 6 and 7 did not.
    #   τ = 6: .2 .0 .0 .0 | .1 .3 .4         existing .6
    #   τ = 7: .1 .1 .0 .0 | .0 .2 .1 .5      existing .4; 8 is past the horizon
    acc = FutureMass(1, 1, 4, 0, horizon=2)
    acc.open(0, 6, tiers_of(E, L))
    acc.observe(
        0,
        6,
        attention([0.2, 0, 0, 0, 0.1, 0.3, 0.4], [0.1, 0.1, 0, 0, 0, 0.2, 0.1, 0.5], [1.0, 0, 0, 0, 0, 0, 0, 0, 0]),
    )
    (late,) = acc.close_due(9)
    assert late.fmm == pytest.approx(0.4 / 1.0)
    assert late.fmm_history == pytest.approx(1.0)


def test_fmm_of_a_cut_horizon() -> None:
    # The run ends after one of H = 3 future queries: min(r + H, T) = r + 1. The event at the very end has none.
    for only_full, expected in ((False, [1]), (True, [])):
        acc = FutureMass(1, 1, 1, 0, horizon=3, full_horizon_only=only_full)
        acc.open(0, 2, tiers_of(E, F))
        acc.observe(0, 2, attention([0.25, 0.25, 0.5]))
        acc.open(1, 3, tiers_of(E, F, F))
        assert acc.close_due(3) == []
        late = acc.finish(3)
        assert [event.steps for event in late] == expected
        assert [event.fmm for event in late] == [0.5] * len(expected)
        assert acc.pending == 0


def test_fmm_averages_heads_after_the_ratio() -> None:
    # Head 0 misses 1/2 of .2, head 1 misses 1/4 of .8: the mean is 3/8, whatever the heads' masses.
    acc = FutureMass(1, 2, 1, 0, horizon=1)
    acc.open(0, 2, tiers_of(E, F))
    acc.observe(0, 2, torch.tensor([[[0.1, 0.1, 0.8]], [[0.2, 0.6, 0.2]]]))
    assert acc.close_due(3)[0].fmm == pytest.approx(0.375)


def test_churn_joins_its_event() -> None:
    # {0} then {0, 1}: 1 - 1/2.
    acc = FutureMass(1, 1, 1, 0, horizon=1)
    assert acc.open(0, 2, tiers_of(F, L)) is None
    assert acc.open(1, 3, tiers_of(F, Q, L)) == 0.5
    acc.observe(0, 2, attention([0.5, 0.25, 0.25], [0.5, 0.25, 0.25, 0.0]))
    assert [event.churn for event in acc.close_due(4)] == [None, 0.5]


@dataclass
class Run:
    """A random run: causal attention of all layers, and events with random tiers."""

    window_size: int
    sink_tokens: int
    horizon: int
    groups: int
    probs: torch.Tensor  # [layers, heads, tokens, tokens]
    boundaries: list[int]
    tiers: list[torch.Tensor]
    chunks: list[tuple[int, int]]


@st.composite
def runs(draw: st.DrawFn) -> Run:
    window_size = draw(st.sampled_from([1, 2, 4, 8]))
    sink_tokens = draw(st.integers(0, 6))
    groups, per_group = draw(st.sampled_from([(1, 1), (1, 3), (2, 1), (3, 2)]))
    layers = draw(st.integers(1, 2))
    prompt, new = draw(st.integers(1, 24)), draw(st.integers(1, 24))
    tokens = prompt + new
    seed = draw(st.integers(0, 2**16))
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(layers, groups * per_group, tokens, tokens, generator=generator) * 2
    hidden = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)
    probs = logits.masked_fill(hidden, -torch.inf).softmax(-1)
    extra = draw(st.lists(st.integers(prompt, tokens), max_size=6))
    boundaries = sorted({prompt, *extra})
    offset = -sink_tokens % window_size
    tiers = []
    for boundary in boundaries:
        blocks = -(-(boundary + offset) // window_size)
        tiers.append(torch.randint(0, 6, (layers, groups, blocks), generator=generator, dtype=torch.uint8))
    chunks, at = [], prompt
    while at < tokens:
        size = draw(st.integers(1, 9))
        chunks.append((at, min(at + size, tokens)))
        at += size
    return Run(window_size, sink_tokens, draw(st.integers(1, 12)), groups, probs, boundaries, tiers, chunks)


def accumulate(run: Run, **options: bool) -> tuple[list[LateMetrics], FutureMass]:
    layers, heads, tokens, _ = run.probs.shape
    acc = FutureMass(
        layers, heads, run.window_size, run.sink_tokens, horizon=run.horizon, groups=run.groups, keep=True, **options
    )
    late, opened = [], 0
    for first, end in run.chunks:
        while opened < len(run.boundaries) and run.boundaries[opened] < end:
            acc.open(opened, run.boundaries[opened], run.tiers[opened])
            opened += 1
        for layer in range(layers):
            acc.observe(layer, first, run.probs[layer, :, first:end, :end])
        late += acc.close_due(end)
    while opened < len(run.boundaries):
        acc.open(opened, run.boundaries[opened], run.tiers[opened])
        opened += 1
    return late + acc.finish(tokens), acc


def naive(run: Run, event: int) -> tuple[np.ndarray, np.ndarray, int]:
    """[layers, heads, tiers] sums and [layers, groups, blocks] missed mass, by loops over the definition."""
    layers, heads, tokens, _ = run.probs.shape
    probs, tiers, boundary = run.probs.double().numpy(), run.tiers[event].numpy(), run.boundaries[event]
    offset = -run.sink_tokens % run.window_size
    per_group = heads // run.groups
    sums = np.zeros((layers, heads, len(Tier)))
    missed = np.zeros(tiers.shape)
    last = min(boundary + run.horizon, tokens)
    for layer in range(layers):
        for head in range(heads):
            for query in range(boundary, last):
                for column in range(boundary):
                    block = (column + offset) // run.window_size
                    tier = tiers[layer, head // per_group, block]
                    sums[layer, head, tier] += probs[layer, head, query, column]
                    if tier == E:
                        missed[layer, head // per_group, block] += probs[layer, head, query, column] / per_group
    return sums, missed, last - boundary


@settings(max_examples=120, deadline=None)
@given(runs())
def test_accumulator_equals_the_triple_loop(run: Run) -> None:
    late, acc = accumulate(run)
    tokens = run.probs.shape[2]
    with_future = [i for i, boundary in enumerate(run.boundaries) if boundary < tokens]
    assert [event.event_id for event in late] == with_future
    first_window = -(-run.sink_tokens // run.window_size)
    for event, kept in zip(late, acc.closed, strict=True):
        sums, missed, steps = naive(run, event.event_id)
        protected = sums[..., [Tier.SINK, Tier.LOCAL, Tier.EMPTY]].sum(-1)
        for ours, theirs in (
            (kept.evicted, sums[..., E]),
            (kept.quant, sums[..., Q]),
            (kept.full, sums[..., F]),
            (kept.protected, protected),
        ):
            np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)
        assert event.steps == steps
        whole = sums.sum(-1)
        assert event.fmm == pytest.approx(share(sums[..., E], whole).mean(), abs=1e-5)
        history = sums[..., [E, Q, F]].sum(-1)
        assert event.fmm_history == pytest.approx(share(sums[..., E], history).mean(), abs=1e-5)
        assert event.fmm_fp_only == pytest.approx(share(sums[..., E] + sums[..., Q], whole).mean(), abs=1e-5)
        expected = missed.reshape(-1, missed.shape[-1])[:, first_window:] / steps
        assert len(event.regret) == min(16, (expected > 0).sum())
        masses = [mass for _, _, mass in event.regret]
        np.testing.assert_allclose(masses, np.sort(expected.reshape(-1))[::-1][: len(masses)], atol=1e-6)
        for row, window, mass in event.regret:
            assert mass == pytest.approx(expected[row, window], abs=1e-6)


@settings(max_examples=60, deadline=None)
@given(runs())
def test_fmm_lies_in_the_unit_interval_and_fp_only_is_not_below(run: Run) -> None:
    for event in accumulate(run)[0]:
        assert 0.0 <= event.fmm <= event.fmm_fp_only <= 1.0
        assert event.fmm <= event.fmm_history + 1e-9 <= 1.0 + 1e-6
        assert 0.0 <= sum(event.mass_share) <= 1.0 + 1e-6
        assert event.mass_share[2] == pytest.approx(event.fmm)


@settings(max_examples=40, deadline=None)
@given(runs(), st.integers(1, 9))
def test_chunk_borders_do_not_matter(run: Run, size: int) -> None:
    first, tokens = run.chunks[0][0], run.probs.shape[2]
    late, _ = accumulate(run)
    run.chunks = [(at, min(at + size, tokens)) for at in range(first, tokens, size)]
    again, _ = accumulate(run)
    for one, other in zip(late, again, strict=True):
        assert one.fmm == pytest.approx(other.fmm, abs=1e-5)
        assert one.mass_share == pytest.approx(other.mass_share, abs=1e-5)


def test_many_events_reuse_their_slots() -> None:
    # 200 events, one per token, 5 pending at a time: values stay those of a fresh accumulator.
    generator = torch.Generator().manual_seed(3)
    probs = torch.rand(2, 210, 210, generator=generator).tril()
    tiers = torch.randint(1, 5, (1, 1, 210), generator=generator, dtype=torch.uint8)
    acc = FutureMass(1, 2, 1, 0, horizon=5)
    late = []
    for at in range(5, 205):
        acc.open(at, at, tiers[:, :, :at])
        acc.observe(0, at, probs[:, at : at + 1, : at + 1])
        late += acc.close_due(at + 1)
        assert acc.pending <= 5
    assert [event.event_id for event in late] == list(range(5, 201))
    gone = (tiers[0, 0] == E).double()
    for event in late[::17]:
        at = event.event_id
        future = probs[:, at : at + 5, :at].double().sum(1)
        expected = ((future * gone[:at]).sum(-1) / future.sum(-1)).mean()
        assert event.fmm == pytest.approx(float(expected), abs=1e-5)


def test_misuse_is_refused() -> None:
    acc = FutureMass(1, 1, 2, 0, horizon=4)
    with pytest.raises(ValueError, match="tiers must be"):
        acc.open(0, 6, tiers_of(E, F))
    acc.open(0, 4, tiers_of(E, F))
    with pytest.raises(ValueError, match="missing"):
        acc.observe(0, 5, torch.ones(1, 1, 6))
    acc.observe(0, 4, torch.ones(1, 2, 6))
    with pytest.raises(ValueError, match="once and in order"):
        acc.observe(0, 5, torch.ones(1, 1, 6))
    with pytest.raises(ValueError, match="precede"):
        acc.open(1, 5, tiers_of(E, F, L))
    with pytest.raises(ValueError, match="multiple of groups"):
        FutureMass(1, 4, 2, 0, groups=3)
    with pytest.raises(ValueError, match="scope"):
        HorizonMass(0, 1, *[np.ones((1, 1))] * 4).missed("local")  # type: ignore[arg-type]


def test_wants_only_the_future_of_open_events() -> None:
    acc = FutureMass(1, 1, 2, 0, horizon=4)
    assert not acc.wants(0, 100)
    acc.open(0, 4, tiers_of(E, F))
    assert not acc.wants(0, 4)
    assert acc.wants(0, 5)
    assert acc.wants(7, 1)
    assert not acc.wants(8, 5)


def test_inference_mode_may_come_and_go() -> None:
    probs = attention([0.25, 0.25, 0.5], [0.5, 0.25, 0.25, 0.0]).requires_grad_()
    with torch.inference_mode():
        acc = FutureMass(1, 1, 1, 0, horizon=2)
        acc.open(0, 2, tiers_of(E, F))
    acc.observe(0, 2, probs[:, :1])
    acc.open(1, 3, tiers_of(E, F, L))
    with torch.inference_mode():
        acc.observe(0, 3, probs[:, 1:])
    assert [event.fmm for event in acc.finish(4)] == pytest.approx([0.75 / 1.25, 0.5])


def test_bfloat16_probabilities_are_summed_in_float32() -> None:
    # 256 + 1 is 256 in bfloat16: a sum of 300 equal masses would stop at 256 times one of them.
    acc = FutureMass(1, 1, 4, 0, horizon=1, keep=True)
    acc.open(0, 300, torch.full((1, 1, 75), int(E), dtype=torch.uint8))
    acc.observe(0, 300, torch.full((1, 1, 301), 1.0, dtype=torch.bfloat16))
    acc.close_due(301)
    assert acc.closed[0].evicted[0, 0] == 300.0
