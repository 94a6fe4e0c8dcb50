"""Global LIR, time to return and the oracles: by hand, against loops, and minimal among all sets."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.metrics.history import read_history
from engine.metrics.lir import future_oracle, future_scores, global_lir, missed, past_mass_oracle, policy_lir
from engine.trace import Tier
from tests.engine.metrics.traces import trace_of

L, F, Q, E, EMPTY = Tier.LOCAL, Tier.FULL, Tier.QUANT, Tier.EVICTED, Tier.EMPTY


def cells(*timelines: str) -> tuple[np.ndarray, np.ndarray]:
    """(active, aged) [events, 1 row, windows], one timeline a window: F in Full, . aged and not in Full, - young."""
    table = np.array([list(line) for line in timelines]).T[:, None, :]
    return table == "F", table != "-"


def test_global_lir_equation_by_hand() -> None:
    # m = 3, eight events, 8 tokens apart:
    #   w0  F...FFFF   one episode of 3, rescued: time to return 3 events, 24 tokens
    #   w1  FF..FF..   episodes of 2: too short
    #   w2  -....F..   starts at ageing, 4 events, rescued: 4 events, 32 tokens; the last 2 are too short
    #   w3  FF......   6 events, never back: stays in the denominator
    # Three eligible, two rescued: LIR = 2/3, median time to return 3.5 events, 28 tokens.
    active, aged = cells("F...FFFF", "FF..FF..", "-....F..", "FF......")
    stats = global_lir(active, aged, np.arange(8) * 8 + 100, 3)
    assert (stats.eligible, stats.rescued) == (3, 2)
    assert stats.lir == pytest.approx(2 / 3)
    assert sorted(stats.return_events) == [3, 4]
    assert sorted(stats.return_tokens) == [24, 32]
    assert (stats.median_events, stats.median_tokens) == (3.5, 28.0)


def test_a_long_absence_counts_once() -> None:
    active, aged = cells("F......F")
    assert global_lir(active, aged, np.arange(8), 3).eligible == 1


def test_nothing_eligible() -> None:
    active, aged = cells("FFFF", "--..")
    stats = global_lir(active, aged, np.arange(4), 3)
    assert (stats.lir, stats.median_events, stats.median_tokens) == (0.0, None, None)


def test_misfit_is_refused() -> None:
    active, aged = cells("FF")
    with pytest.raises(ValueError, match="agree"):
        global_lir(active, aged, np.arange(3))
    with pytest.raises(ValueError, match="min_events"):
        global_lir(active, aged, np.arange(2), 0)


@given(st.lists(st.tuples(st.integers(0, 6), st.lists(st.booleans(), min_size=6, max_size=6)), min_size=1, max_size=8))
def test_global_lir_equals_a_loop(windows: list[tuple[int, list[bool]]]) -> None:
    events = 6
    aged = np.array([[e >= born for born, _ in windows] for e in range(events)])[:, None]
    active = np.array([[e >= born and line[e] for born, line in windows] for e in range(events)])[:, None]
    seq_lens = np.array([10, 18, 26, 30, 38, 46])
    eligible, returns = 0, []
    for window in range(len(windows)):
        start = None
        for event in range(events + 1):
            gone = event < events and bool(aged[event, 0, window]) and not bool(active[event, 0, window])
            if gone and start is None:
                start = event
            if not gone and start is not None:
                if event - start >= 2:
                    eligible += 1
                    if event < events:
                        returns.append((event - start, int(seq_lens[event] - seq_lens[start])))
                start = None
    stats = global_lir(active, aged, seq_lens, 2)
    assert (stats.eligible, stats.rescued) == (eligible, len(returns))
    assert list(zip(stats.return_events.tolist(), stats.return_tokens.tolist(), strict=True)) == returns
    assert 0.0 <= stats.lir <= 1.0


def test_policy_lir_of_a_stored_run() -> None:
    # w0: F Q Q Q F. One episode of 3 events of 2 tokens, rescued. w1 ages at event 1 into F and stays.
    boards = [[F, L], [Q, F, L], [Q, F, E, L], [Q, F, E, E, L], [F, F, E, E, E, L]]
    stats = policy_lir(read_history(trace_of([[board] for board in boards])))
    assert (stats.eligible, stats.rescued) == (2, 1)  # w2 is evicted for good at event 2: three events, never back
    assert (stats.median_events, stats.median_tokens) == (3.0, 6.0)


def test_past_mass_oracle_by_hand() -> None:
    # K = 2. Window 3 has most mass but is still local; 0 and 2 tie for the second place: the lower id wins.
    mass = np.array([[[0.3, 0.5, 0.3, 0.9]]])
    aged = np.array([[[True, True, True, False]]])
    assert past_mass_oracle(mass, 2, aged).tolist() == [[[True, True, False, False]]]
    assert past_mass_oracle(mass, np.array([1]), aged).tolist() == [[[False, True, False, False]]]
    assert past_mass_oracle(mass, 9, aged).tolist() == aged.tolist()


def test_future_oracle_by_hand() -> None:
    # Two heads. Head 0 has denominator 1, head 1 has .1: w1's .05 there weighs .5, more than w0's .4 in head 0.
    # Scores: w0 (.4 + 0) / 2 = .2, w1 (0 + .5) / 2 = .25.
    mass, whole = np.array([[[[0.4, 0.0], [0.0, 0.05]]]]), np.array([[[1.0, 0.1]]])
    aged = np.ones((1, 1, 2), dtype=bool)
    assert future_scores(mass, whole) == pytest.approx(np.array([[[0.2, 0.25]]]))
    kept = future_oracle(mass, whole, 1, aged)
    assert kept.tolist() == [[[False, True]]]
    # Its FMM is what remains: mean over heads of .4 / 1 and 0 / .1.
    assert missed(future_scores(mass, whole), kept, aged) == pytest.approx(np.array([[0.2]]))


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**16), st.integers(1, 5))
def test_oracles_are_minimal_among_sets_of_their_size(seed: int, capacity: int) -> None:
    rng = np.random.default_rng(seed)
    windows, heads = 6, 3
    future = rng.random((1, 1, heads, windows)) ** 4
    whole = future.sum(-1) + rng.random((1, 1, heads))
    past = rng.random((1, 1, windows)) ** 4
    aged = np.ones((1, 1, windows), dtype=bool)
    by_past, by_future = past_mass_oracle(past, capacity, aged), future_oracle(future, whole, capacity, aged)
    assert by_past.sum() == by_future.sum() == capacity
    for members in combinations(range(windows), capacity):
        other = np.zeros_like(aged)
        other[0, 0, list(members)] = True
        assert missed(past, by_past, aged) <= missed(past, other, aged) + 1e-12
        # FMM from the definition: ratio of sums per head, then the mean.
        fmm_ours, fmm_other = (
            (np.where(kept[:, :, None], 0.0, future).sum(-1) / whole).mean() for kept in (by_future, other)
        )
        assert fmm_ours <= fmm_other + 1e-12
