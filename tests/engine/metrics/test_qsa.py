"""QSA and RQ: the equations by hand and their properties."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from engine.metrics.qsa import agreement, mass_ratio, score_agreement


def test_qsa_equation_by_hand() -> None:
    # Q = {w0, w1}; w2 is in Full and does not count. s^Q = (3, 4), s^Full = (4, 3): (12 + 12) / (5 · 5) = .96.
    policy, reference = np.array([3.0, 4.0, 100.0]), np.array([4.0, 3.0, 1.0])
    members = np.array([True, True, False])
    assert score_agreement(policy, reference, members) == pytest.approx(0.96)


def test_rq_equation_by_hand() -> None:
    # (3 + 1) / (4 + 4) = .5: half of FullKV's mass arrives.
    policy, reference = np.array([3.0, 1.0, 9.0]), np.array([4.0, 4.0, 1.0])
    members = np.array([True, True, False])
    assert mass_ratio(policy, reference, members) == pytest.approx(0.5)


def test_an_empty_quant_tier_has_no_agreement() -> None:
    nobody = np.zeros(2, dtype=bool)
    assert np.isnan(score_agreement(np.ones(2), np.ones(2), nobody))
    assert np.isnan(mass_ratio(np.ones(2), np.ones(2), nobody))


positive = arrays(np.float64, (2, 5), elements=st.floats(0.0, 1e3))


@given(positive, positive, arrays(np.bool_, (2, 5)))
def test_qsa_of_masses_lies_in_the_unit_interval(
    policy: np.ndarray, reference: np.ndarray, members: np.ndarray
) -> None:
    values = score_agreement(policy, reference, members)
    finite = values[np.isfinite(values)]
    assert ((finite >= 0.0) & (finite <= 1.0)).all()
    empty = ~(np.where(members, policy, 0) > 0).any(-1) | ~(np.where(members, reference, 0) > 0).any(-1)
    assert (np.isnan(values) == empty).all()


@given(arrays(np.float64, 5, elements=st.floats(1e-3, 1e3)), st.floats(1e-3, 1e3))
def test_qsa_ignores_amplitude_and_rq_measures_it(scores: np.ndarray, factor: float) -> None:
    everyone = np.ones(5, dtype=bool)
    assert score_agreement(factor * scores, scores, everyone) == pytest.approx(1.0)
    assert mass_ratio(factor * scores, scores, everyone) == pytest.approx(factor)


def run() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Two events, one layer, two heads, three windows; Q holds w0, w1, then w1, w2."""
    reference = np.array([[[[1.0, 1.0, 2.0], [1.0, 2.0, 1.0]]], [[[2.0, 1.0, 2.0], [1.0, 3.0, 1.0]]]])
    policy = reference.copy()
    policy[1, 0, 0] = [1.5, 1.5, 2.0]  # head 0, since the first event: (.5, .5, 0) where FullKV has (1, 0, 0)
    in_quant = np.array([[[[True, True, False]]], [[[False, True, True]]]])
    return policy, reference, in_quant


def test_qsa_is_one_at_the_first_event() -> None:
    result = agreement(*run())
    assert result.qsa[0] == pytest.approx(np.ones((1, 2)))
    assert result.ratio[0] == pytest.approx(np.ones((1, 2)))
    assert np.isnan(result.interval_qsa[0]).all()


def test_cumulative_and_interval_by_hand() -> None:
    result = agreement(*run(), event_ids=np.array([4, 5]))
    # Cumulative, head 0, Q = {w1, w2}: (1.5, 2) against (1, 2): 5.5 / (2.5 · √5); RQ 3.5 / 3.
    assert result.qsa[1, 0, 0] == pytest.approx(5.5 / (2.5 * np.sqrt(5)))
    assert result.ratio[1, 0, 0] == pytest.approx(3.5 / 3)
    # Interval, head 0, Q before it = {w0, w1}: (.5, .5) against (1, 0): cos 45°; RQ 1 / 1.
    assert result.interval_qsa[1, 0, 0] == pytest.approx(np.sqrt(0.5))
    assert result.interval_ratio[1, 0, 0] == pytest.approx(1.0)
    # Head 1 follows FullKV.
    assert result.qsa[1, 0, 1] == pytest.approx(1.0)
    assert result.by_head().shape == (1, 2)
    assert result.by_event(interval=True)[1] == pytest.approx((1 + np.sqrt(0.5)) / 2)
    assert list(result.event_ids) == [4, 5]


def test_summary_by_hand() -> None:
    summary = agreement(*run()).summary()
    assert summary is not None
    low = 5.5 / (2.5 * np.sqrt(5))
    assert summary.first_event == pytest.approx(1.0)
    assert summary.last_event == pytest.approx((low + 1) / 2)
    assert summary.mean == pytest.approx((1 + 1 + low + 1) / 4)
    assert summary.layer_min == summary.layer_max == pytest.approx(summary.mean)
    assert summary.head_min == pytest.approx((1 + low) / 2)
    assert summary.mass_ratio == pytest.approx((1 + 1 + 3.5 / 3 + 1) / 4)
    assert summary.interval_mean == pytest.approx((1 + np.sqrt(0.5)) / 2)


def test_without_quant_windows_there_is_no_summary() -> None:
    policy, reference, in_quant = run()
    assert agreement(policy, reference, np.zeros_like(in_quant)).summary() is None
    with pytest.raises(ValueError, match="events, layers, heads, windows"):
        agreement(policy[0], reference[0], in_quant[0])
