"""Late metrics of a live run against stock attention probabilities over the whole sequence."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from engine.cache import QEvictCache
from engine.config import QEvictConfig
from engine.errors import CacheUseError
from engine.generate import RunOptions, generate, prompt_ids
from engine.models import LoadedModel
from engine.reference import Reference
from engine.trace import LateMetrics, RunMeta, StepEvent, Tier, TraceEvent
from engine.trace_board import Board
from tests.engine.drive import Drive
from tests.tiny import tiny_loaded

PROMPT = "The quick brown fox jumps over the lazy dog, and then it sleeps for a while."
CONFIG = QEvictConfig(window_size=4, kv_budget=0.3, local_tokens=8, backend="sdpa")


def run(loaded: LoadedModel, config: QEvictConfig, options: RunOptions) -> tuple[list[TraceEvent], list[int]]:
    """Events of a run, and the tokens that the model saw."""
    events = list(generate(loaded, PROMPT, config, options))
    ids = prompt_ids(loaded, PROMPT, options.chat)
    new = [token for event in events if isinstance(event, StepEvent) for token in event.ids]
    return events, ids + new[:-1]


def boards(events: list[TraceEvent]) -> dict[int, tuple[int, np.ndarray[Any, Any]]]:
    """Length and tiers after every routing event."""
    meta = next(event for event in events if isinstance(event, RunMeta))
    board, out = Board(meta), {}
    for event in events:
        board.forward(event)
        if event.kind in ("key", "route"):
            out[board.event_id] = (board.seq_len, board.tiers.copy())
    return out


def stock_attention(loaded: LoadedModel, ids: list[int], layers: list[int]) -> list[torch.Tensor]:
    """Probabilities [heads, T, T] of stock eager attention, for each managed layer."""
    model = loaded.model
    model.set_attn_implementation("eager")
    with torch.no_grad():
        out = model(input_ids=torch.tensor([ids]), output_attentions=True, use_cache=False)
    model.set_attn_implementation("qevict")
    return [out.attentions[layer][0].double() for layer in layers]


@pytest.mark.parametrize("architecture", ["llama", "gemma2", "gemma3"])
@pytest.mark.parametrize("changes", [{}, {"score_scope": "kv_head"}, {"routing_interval": 8, "kv_budget": 0.4}])
def test_late_metrics_equal_the_formulas(architecture: str, changes: dict[str, Any]) -> None:
    """FMM in both scopes and FP-tier-only, mass shares, churn: from tiers and probabilities by plain loops."""
    loaded = tiny_loaded(architecture)
    horizon, config = 10, CONFIG.replace(**changes)
    options = RunOptions(max_new_tokens=47, horizon=horizon, ignore_eos=True, chat=False)
    events, ids = run(loaded, config, options)
    at = boards(events)
    late = {event.event_id: event for event in events if isinstance(event, LateMetrics)}
    layers = [1, 3] if architecture != "llama" else [0, 1]
    attention = stock_attention(loaded, ids, layers)
    groups = 2 if config.score_scope == "kv_head" else 1
    total = len(ids)
    futures = {event_id for event_id, (length, _) in at.items() if length < total}
    assert set(late) == futures and len(late) > 4
    for event_id, event in late.items():
        length, tiers = at[event_id]
        steps = min(length + horizon, total) - length
        assert event.steps == steps
        sums = {"fmm": [], "history": [], "fp": [], "full": [], "quant": []}
        for layer, probs in enumerate(attention):
            per_group = probs.shape[0] // groups
            for head in range(probs.shape[0]):
                row = tiers[layer * groups + head // per_group]
                mass = dict.fromkeys(Tier, 0.0)
                for i in range(length):
                    where = Tier.SINK if i < 5 else Tier(int(row[(i - 5) // 4]))
                    mass[where] += float(probs[head, length : length + steps, i].sum())
                whole, history = sum(mass.values()), mass[Tier.FULL] + mass[Tier.QUANT] + mass[Tier.EVICTED]
                sums["fmm"].append(mass[Tier.EVICTED] / whole)
                sums["history"].append(mass[Tier.EVICTED] / history if history else 0.0)
                sums["fp"].append((mass[Tier.EVICTED] + mass[Tier.QUANT]) / whole)
                sums["full"].append(mass[Tier.FULL] / whole)
                sums["quant"].append(mass[Tier.QUANT] / whole)
        wanted = {name: float(np.mean(values)) for name, values in sums.items()}
        assert event.fmm == pytest.approx(wanted["fmm"], abs=1e-4)
        assert event.fmm_history == pytest.approx(wanted["history"], abs=1e-4)
        assert event.fmm_fp_only == pytest.approx(wanted["fp"], abs=1e-4)
        assert event.mass_share == pytest.approx((wanted["full"], wanted["quant"], wanted["fmm"]), abs=1e-4)
        if event_id == 0:
            assert event.churn is None
        else:
            kept = [np.isin(at[e][1], (Tier.FULL, Tier.QUANT)) for e in (event_id - 1, event_id)]
            union = (kept[0] | kept[1]).sum(1)
            common = (kept[0] & kept[1]).sum(1)
            assert event.churn == pytest.approx(float(np.mean(1 - common / np.maximum(union, 1))), abs=1e-6)
    assert any(event.fmm > 0.01 for event in late.values())


def test_regret_names_evicted_windows_only() -> None:
    loaded = tiny_loaded()
    options = RunOptions(max_new_tokens=40, ignore_eos=True, chat=False)
    events, _ = run(loaded, CONFIG, options)
    at = boards(events)
    named = 0
    for event in events:
        if isinstance(event, LateMetrics):
            masses = [mass for _, _, mass in event.regret]
            assert masses == sorted(masses, reverse=True)
            for row, window, mass in event.regret:
                named += 1
                assert at[event.event_id][1][row, window] == Tier.EVICTED and 0.0 <= mass <= 1.0
    assert named > 5


def test_a_reference_changes_nothing_of_the_run() -> None:
    loaded = tiny_loaded()
    made = [
        run(loaded, CONFIG, RunOptions(max_new_tokens=40, ignore_eos=True, reference=reference))
        for reference in (True, False)
    ]
    assert made[0][1] == made[1][1]
    tiers = [boards(events) for events, _ in made]
    assert tiers[0].keys() == tiers[1].keys()
    assert all(np.array_equal(tiers[0][e][1], tiers[1][e][1]) for e in tiers[0])
    assert not any(isinstance(event, LateMetrics) for event in made[1][0])


def test_nothing_evicted_misses_nothing() -> None:
    loaded = tiny_loaded()
    events, _ = run(loaded, QEvictConfig(kv_budget=1.0), RunOptions(max_new_tokens=60, ignore_eos=True))
    late = [event for event in events if isinstance(event, LateMetrics)]
    assert late and all(event.fmm == event.fmm_history == event.fmm_fp_only == 0.0 for event in late)


def test_a_reference_needs_a_staged_prompt() -> None:
    drive = Drive(CONFIG, seed=1)
    drive.run([60, 1])
    model = tiny_loaded().model
    with pytest.raises(CacheUseError, match="before its first routing"):
        Reference(model, drive.cache, 10, 32)
    assert isinstance(drive.cache, QEvictCache)
