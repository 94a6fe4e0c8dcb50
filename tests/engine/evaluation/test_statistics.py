"""Paired intervals: by hand where n is 2, and directions."""

from __future__ import annotations

import numpy as np
import pytest

from engine.evaluation.statistics import Estimate, estimate, paired, paired_ratio


def test_two_items_by_hand() -> None:
    # Resampled means are 0, 1/2 and 1 with 1/4, 1/2 and 1/4: both 95 % ends are the items themselves.
    assert estimate([0.0, 1.0]) == Estimate(0.5, 0.0, 1.0, 2)


def test_one_item_has_no_interval() -> None:
    assert estimate([3.0]) == Estimate(3.0, None, None, 1)
    assert estimate([3.0]).sign == 0


def test_pairing_removes_what_items_share() -> None:
    draw = np.random.default_rng(0)
    hard = draw.normal(0, 10, 60)
    better, worse = hard + 0.5 + draw.normal(0, 0.1, 60), hard
    close = paired(better.tolist(), worse.tolist())
    assert close.sign == 1 and close.low is not None and close.low > 0.4
    apart = estimate(better.tolist())
    assert apart.sign == 0
    assert paired(worse.tolist(), better.tolist()).sign == -1


def test_the_same_seed_gives_the_same_interval() -> None:
    values = np.random.default_rng(1).random(20).tolist()
    assert estimate(values, seed=4) == estimate(values, seed=4) != estimate(values, seed=5)


def test_ratio_of_sums() -> None:
    assert paired_ratio([2.0, 4.0], [1.0, 2.0]) == Estimate(2.0, 2.0, 2.0, 2)
    assert np.isnan(paired_ratio([1.0], [0.0]).mean)


@pytest.mark.parametrize("call", [lambda: estimate([]), lambda: paired([1.0], []), lambda: paired_ratio([], [])])
def test_nothing_to_estimate_is_an_error(call: object) -> None:
    with pytest.raises(ValueError):
        call()  # type: ignore[operator]
