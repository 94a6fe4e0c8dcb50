"""What a diagnosis keeps event by event: it is plain JSON and says the same as the tables' means."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from engine.config import QEvictConfig
from engine.evaluation.diagnose import DiagnoseOptions, diagnose
from engine.evaluation.series import return_stats, return_values
from engine.metrics.lir import ReturnStats
from tests.tiny import tiny_loaded

torch.set_num_threads(1)
IDS = [int(i) for i in torch.randint(0, 250, (300,), generator=torch.Generator().manual_seed(2))]


def test_series_have_the_means_of_the_tables() -> None:
    options = DiagnoseOptions(steps=40, live=True, live_policies=("R3",))
    report = diagnose(tiny_loaded(positions=512), IDS, QEvictConfig(), options)
    found = json.loads(json.dumps(report["series"], allow_nan=False))
    assert [summary["policy"] for summary in report["live_policies"]] == ["R3"]
    means = {
        row["system"]: row["measured"]
        for row in report["table14"]
        if (row["quantity"], row["source"]) == ("fmm", "trace")
    }
    for name in ("R1", "R3"):
        run = found["fmm"][name]
        assert len(run["tokens"]) == len(run["all"]) == len(run["history"]) == len(run["steps"])
        assert 100 * np.mean(run["all"]) == pytest.approx(means[name], abs=1e-3)
        assert run["tokens"] == sorted(run["tokens"]) and run["tokens"][0] == 260
    heads = np.array(found["agreement"]["R3"]["by_head"]["cumulative"], dtype=float)
    first = {row["quantity"]: row["measured"] for row in report["table15"]}
    assert np.nanmean(heads) == pytest.approx(first["qsa_mean"], abs=2e-3)
    assert found["agreement"]["R3"]["qsa"]["cumulative"][0] == pytest.approx(1.0, abs=1e-5)
    assert found["agreement"]["R3"]["qsa"]["interval"][0] is None
    assert "R3 (live)" in found["returns"] and "R3 FP-tier-only" not in found["returns"]


def test_absences_survive_a_round_trip() -> None:
    stats = ReturnStats(3, 9, 4, np.array([3, 5, 3, 12]), np.array([24, 40, 24, 96]))
    values = json.loads(json.dumps(return_values(stats)))
    assert values["events"] == {"3": 2, "5": 1, "12": 1}
    again = return_stats(values)
    assert sorted(again.return_events.tolist()) == [3, 3, 5, 12]
    assert (again.lir, again.median_tokens) == (stats.lir, stats.median_tokens)
    assert (
        return_stats(
            return_values(ReturnStats(3, 0, 0, np.array([], dtype=np.int64), np.array([], dtype=np.int64)))
        ).rescued
        == 0
    )
    with pytest.raises(KeyError):
        return_stats({"eligible": 1})
