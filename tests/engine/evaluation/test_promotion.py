"""The paired promotion experiment: one promotion by hand, and what holds for all."""

from __future__ import annotations

import numpy as np
import pytest

from engine.config import QEvictConfig
from engine.evaluation.promotion import listed, promotion_experiment, single_promotions, summarise
from engine.metrics.history import TierHistory
from engine.policies import Policy, simulate
from engine.trace import Tier
from tests.engine.evaluation.made_traces import random_trace

L, F, Q, E, N = Tier.LOCAL, Tier.FULL, Tier.QUANT, Tier.EVICTED, Tier.EMPTY
CONFIG = QEvictConfig(kv_budget=0.4, window_size=4, sink_tokens=2, kv_dtype="float16", local_tokens=8)


def test_a_promotion_is_set_against_the_same_event_without_it() -> None:
    trace = random_trace(prompt=96, steps=40, seed=5, spread=3.0)
    result = promotion_experiment(trace, CONFIG, horizon=8)
    moves = result.on.transitions.promotions
    at_the_end = sum(
        int(((a == Q) & (b == F)).sum())
        for a, b, columns in zip(
            result.on.history.tiers[:-1], result.on.history.tiers[1:], result.on.history.seq_lens[1:], strict=True
        )
        if columns >= trace.total_tokens
    )
    assert len(result.promotions) == moves - at_the_end > 0
    for promotion in result.promotions:
        mass, _ = trace.future(promotion.boundary, 8)
        part = mass[promotion.row] / mass[promotion.row].sum(-1, keepdim=True)
        first = 2 + 4 * promotion.window
        assert promotion.wanted == pytest.approx(float(part[:, first : first + 4].sum(1).mean()), rel=1e-4)
        if promotion.displaced is not None:
            first = 2 + 4 * promotion.displaced
            assert promotion.displaced_wanted == pytest.approx(
                float(part[:, first : first + 4].sum(1).mean()), rel=1e-4
            )
        assert promotion.net_gain == promotion.wanted - promotion.displaced_wanted - promotion.eviction_cost
    ranked = listed(result, 3)
    assert [row["net_gain"] for row in ranked] == sorted((row["net_gain"] for row in ranked), reverse=True)


def test_without_promotions_nothing_is_found() -> None:
    trace = random_trace(seed=1)
    (off,), _ = simulate(trace, [Policy("off", CONFIG.replace(promotion=False))])
    assert single_promotions(trace, CONFIG, off.history) == []


def test_boards_by_hand_name_the_displaced_window() -> None:
    trace = random_trace(layers=1, prompt=96, steps=16, seed=2)
    config = CONFIG.replace(kv_budget=0.6)
    plan = simulate(trace, [Policy("R3", config)])[0][0]
    tiers = plan.history.tiers.copy()
    # Event 1: the strongest quantized window takes the place of the weakest in Full.
    full, quant = np.flatnonzero(tiers[0, 0] == F), np.flatnonzero(tiers[0, 0] == Q)
    assert len(full) and len(quant)
    tiers[1, 0] = tiers[0, 0]
    tiers[1, 0, full[0]], tiers[1, 0, quant[0]] = Q, F
    history = TierHistory(plan.history.event_ids[:2], plan.history.seq_lens[:2], tiers[:2])
    (found,) = single_promotions(trace, config, history, horizon=4)
    assert (found.window, found.displaced) == (quant[0], full[0])


def test_summaries_resample_texts_where_there_are_several() -> None:
    results = [promotion_experiment(random_trace(seed=seed, spread=3.0), CONFIG, horizon=8) for seed in range(4)]
    together = summarise(results)
    assert together["resampled"] == "texts" and together["texts"] == 4
    assert together["promotions"] == sum(len(result.promotions) for result in results)
    assert together["lir_off"] == 0.0
    alone = summarise(results[:1])
    assert alone["resampled"] == "events of one text"
    with pytest.raises(ValueError, match="at least one"):
        summarise([])
