"""Diagnostics of one text: tables are whole, figures of both sides stand beside one another, differences are said."""

from __future__ import annotations

import json

import pytest
import torch

from engine.config import QEvictConfig
from engine.errors import ConfigError, PromptError
from engine.evaluation import paper
from engine.evaluation.diagnose import DiagnoseOptions, diagnose
from tests.tiny import tiny_loaded

torch.set_num_threads(1)
IDS = [int(i) for i in torch.randint(0, 250, (360,), generator=torch.Generator().manual_seed(1))]


def test_a_live_diagnosis_fills_every_table_and_is_json() -> None:
    report = diagnose(tiny_loaded(positions=512), IDS, QEvictConfig(), DiagnoseOptions(steps=40, live=True))
    json.dumps(report, allow_nan=False)
    first = {row["quantity"]: row for row in report["table15"]}
    assert first["qsa_first_event"]["measured"] == pytest.approx(1.0, abs=1e-6)
    assert first["qsa_mean"]["paper"] == 0.9824
    fmm = {(row["system"], row["source"]): row for row in report["table14"] if row["quantity"] == "fmm"}
    assert fmm["R3", "trace"]["paper"] == 46.38
    for source in ("trace", "live"):
        assert fmm["R3 FP-tier-only", source]["measured"] >= fmm["R3", source]["measured"]
    assert all(report["oracle_checks"].values()) and report["oracle_checks"]
    assert any("FullKV's attention" in sentence for sentence in report["differs"])
    shares = [row["measured"] for row in report["figure1"] if (row["system"], row["source"]) == ("R3", "trace")]
    assert sum(shares) == pytest.approx(100.0)
    assert {row["holds"] for row in report["directions"]} <= {True, False}


def test_without_live_runs_table_15_says_so_and_the_budget_is_named() -> None:
    report = diagnose(tiny_loaded(positions=512), IDS, QEvictConfig(kv_budget=0.3), DiagnoseOptions(steps=40))
    assert report["table15"] is None
    assert any(sentence.startswith("budget: 30%") for sentence in report["differs"])


def test_wrong_input() -> None:
    with pytest.raises(ConfigError, match="steps"):
        DiagnoseOptions(steps=0)
    with pytest.raises(PromptError, match="needs a prompt"):
        diagnose(tiny_loaded(positions=512), IDS[:20], QEvictConfig(), DiagnoseOptions(steps=20))


def test_published_figures_are_found_by_table_system_and_quantity() -> None:
    assert paper.published("Table 14", "R1", "fmm") == 51.73
    assert paper.published("Table 3", "QEvict", "macro average", model="Mistral-7B") == 37.8
    assert paper.published("Table 12", "QEvict", "average", condition="q 0.10") == 41.87
    assert paper.published("Table 14", "R9", "fmm") is None
    keys = [(p.table, p.system, p.quantity, p.model, p.condition) for p in paper.PUBLISHED]
    assert len(keys) == len(set(keys))
