"""Mass shares, the run's means and the regret list."""

from __future__ import annotations

import numpy as np
import pytest

from engine.metrics.mass import HorizonMass, mass_shares, regret_list, summarise_late, window_text
from engine.trace import LateMetrics, Tier


def late(event_id: int, fmm: float, churn: float | None, steps: int = 32, regret: object = ()) -> LateMetrics:
    return LateMetrics(event_id, fmm, fmm, fmm, (0.5, 0.25, fmm), churn, steps, list(regret))  # type: ignore[call-overload]


def test_mass_shares_by_hand() -> None:
    # Masses 4, 3, 2, 1 in sink, F, E, Q; a window that has not begun does not count.
    tiers = np.array([Tier.SINK, Tier.FULL, Tier.EVICTED, Tier.QUANT, Tier.EMPTY], dtype=np.uint8)
    shares = mass_shares(np.array([4.0, 3.0, 2.0, 1.0, 7.0]), tiers)
    assert {tier.name: float(value) for tier, value in shares.items()} == pytest.approx(
        {"SINK": 0.4, "LOCAL": 0.0, "FULL": 0.3, "QUANT": 0.1, "EVICTED": 0.2}
    )


def test_mass_share_scopes_by_hand() -> None:
    # One head: E 1, Q 2, F 1, sink and local 6. All positions: .1, .2, .1 of 10; history: of 4.
    mass = HorizonMass(0, 4, *(np.full((1, 1), value) for value in (1.0, 2.0, 1.0, 6.0)))
    assert mass.mass_share("all") == pytest.approx((0.1, 0.2, 0.1))
    assert mass.mass_share("history") == pytest.approx((0.25, 0.5, 0.25))
    assert mass.missed(fp_only=True) == pytest.approx(np.array([[0.3]]))


def test_no_mass_is_no_miss() -> None:
    mass = HorizonMass(0, 4, *(np.zeros((1, 1)) for _ in range(4)))
    assert mass.late(None).fmm == 0.0


def test_summary_by_hand() -> None:
    summary = summarise_late([late(0, 0.2, None), late(1, 0.4, 0.1), late(2, 0.9, 0.3, steps=1)])
    assert summary is not None
    assert summary.fmm == pytest.approx(0.5)
    assert summary.churn == pytest.approx(0.2)
    assert summary.to_dict()["mass_share"] == pytest.approx({"full": 0.5, "quant": 0.25, "evicted": 0.5})
    whole = summarise_late([late(0, 0.2, None), late(1, 0.4, 0.1), late(2, 0.9, 0.3, steps=1)], full_horizon=32)
    assert whole is not None
    assert (whole.events, whole.fmm) == (2, pytest.approx(0.3))
    assert summarise_late([]) is None
    one = summarise_late([late(0, 0.2, None)])
    assert one is not None
    assert one.churn is None


def test_regret_list_keeps_the_worst_event_and_the_text() -> None:
    events = [
        late(0, 0.1, None, regret=[(0, 1, 0.02), (1, 0, 0.05)]),
        late(1, 0.1, 0.0, regret=[(0, 1, 0.08)]),
    ]
    # Ω = 2, one sink token: window 1 is tokens 3 and 4.
    worst = regret_list(events, list("abcdefg"), sink_tokens=1, window_size=2)
    assert [(entry.row, entry.window, entry.mass, entry.event_id, entry.events) for entry in worst] == [
        (0, 1, 0.08, 1, 2),
        (1, 0, 0.05, 0, 1),
    ]
    assert [entry.text for entry in worst] == ["de", "bc"]
    assert len(regret_list(events, top=1)) == 1
    assert window_text(["a"], 9, sink_tokens=0, window_size=2) == ""
