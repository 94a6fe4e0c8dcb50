"""Selection churn: the equation by hand, its bounds, and a stored run."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from engine.metrics.churn import churn_series, retained, selection_churn
from engine.metrics.history import read_history
from engine.trace import Tier
from tests.engine.metrics.traces import trace_of

L, F, Q, E, EMPTY = Tier.LOCAL, Tier.FULL, Tier.QUANT, Tier.EVICTED, Tier.EMPTY


def rows(*states: list[Tier]) -> np.ndarray:
    return np.array(states, dtype=np.uint8)


def test_churn_equation_by_hand() -> None:
    # Ω = 2, windows 0..3 are tokens 0..7. R_r = {w0, w1, w2}; then w1 is evicted and w3 ages into Q:
    # R_{r+1} = {w0, w2, w3}. Common: 4 tokens of w0, w2; union: 8 tokens. Churn = 1 - 4/8.
    before, after = rows([F, Q, Q, L]), rows([Q, E, F, Q])
    assert selection_churn(before, after, np.full(4, 2)) == pytest.approx([0.5])
    # Sets are sets of positions: if w3 held only one token, the union would hold 7 and the churn be 3/7.
    assert selection_churn(before, after, np.array([2, 2, 2, 1])) == pytest.approx([3 / 7])


def test_moves_between_full_and_quant_are_no_churn() -> None:
    assert selection_churn(rows([F, Q]), rows([Q, F])) == pytest.approx([0.0])


def test_the_local_slide_is_no_churn() -> None:
    assert selection_churn(rows([F, L, L]), rows([F, E, L, L])) == pytest.approx([0.0])


def test_empty_sets() -> None:
    # Empty against empty is 0; empty against something is 1.
    assert selection_churn(rows([L, L], [L, E]), rows([E, L], [F, E])) == pytest.approx([0.0, 1.0])
    with pytest.raises(ValueError, match="same rows"):
        selection_churn(rows([L]), rows([L], [L]))


def boards(shape: tuple[int, int]) -> st.SearchStrategy[np.ndarray]:
    return arrays(np.uint8, shape, elements=st.integers(0, 5))


@given(boards((3, 5)), boards((3, 7)))
def test_churn_lies_in_the_unit_interval_and_equals_sets(before: np.ndarray, after: np.ndarray) -> None:
    values = selection_churn(before, after)
    for row in range(3):
        old, new = (set(np.flatnonzero(retained(board[row]))) for board in (before, after))
        expected = 1 - len(old & new) / len(old | new) if old | new else 0.0
        assert values[row] == pytest.approx(expected)
        assert 0.0 <= values[row] <= 1.0


@given(boards((2, 6)))
def test_churn_of_a_state_with_itself_is_zero(board: np.ndarray) -> None:
    assert not selection_churn(board, board).any()


def test_churn_of_a_stored_run() -> None:
    # Two rows. Row 0: {0} -> {0, 1} -> {1}: 1/2, 1/2. Row 1: {} -> {1} -> {1}: 1, 0. Ω = 2, so 4 steps in all.
    history = read_history(trace_of([[[F, L], [E, L]], [[F, Q, L], [E, F, L]], [[E, Q, E, L], [E, Q, E, L]]]))
    series = churn_series(history)
    assert series.values == pytest.approx(np.array([[0.5, 1.0], [0.5, 0.0]]))
    assert list(series.event_ids) == [1, 2]
    assert series.per_event == pytest.approx([0.75, 0.25])
    assert series.mean == pytest.approx(0.5)
    assert series.steps == 4
    assert series.per_step == pytest.approx(1.0 / 4)


def test_churn_of_a_single_event_is_nothing() -> None:
    series = churn_series(read_history(trace_of([[[F, L]]])))
    assert (series.mean, series.per_step, len(series.per_event)) == (0.0, 0.0, 0)
