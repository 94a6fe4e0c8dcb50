"""Oracles and R3's Full tier alone: bounds by construction, real storage, and where they do not exist."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.adapter import cache_keyword
from engine.attention.softmax import merge
from engine.baselines import registry
from engine.baselines.base import RunPlan
from engine.baselines.fanout import FanOut
from engine.baselines.matching import BudgetSpec
from engine.baselines.oracle import OracleArena
from engine.baselines.rival_cache import RivalCache
from engine.compare import CompareOptions, CompareResult, CompareStep, SystemChoice, compare, iter_compare
from engine.config import QEvictConfig
from engine.errors import BudgetError, CacheUseError, ConfigError
from engine.evaluation.recording import record
from engine.policies import FullTrace, Policy, row_scores, simulate
from engine.trace import Tier
from tests.engine.baselines.matrix import loaded, prompt

ORACLES = ["oracle-past", "oracle-future"]
TEXT = "The tide table is a short story of the moon, told by water to whoever waits. " * 3
NEW = 42
# The embedded grid: 5 sink tokens, windows of 8. Cut so that looks fall on the grid's events.
PROMPT = 5 + 8 * 27
OPTIONS = CompareOptions(budget=BudgetSpec(share=0.4), max_new_tokens=NEW, chat=False, ignore_eos=True)


def _text() -> str:
    return TEXT[:PROMPT]


def _run(
    systems: list[str], options: CompareOptions = OPTIONS, probe: Callable[[str, Any], None] | None = None
) -> CompareResult:
    """A comparison, with a look at each system's cache after every step."""
    caches: list[Any] = []

    class Noting(FanOut):
        def __init__(self, model: Any, found: Sequence[Any]) -> None:
            super().__init__(model, found)
            caches.extend(found[1:])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("engine.compare.FanOut", Noting)
        for event in iter_compare(loaded(), _text(), systems, options):
            if isinstance(event, CompareStep) and probe is not None:
                for name, cache in zip(systems, caches, strict=True):
                    probe(name, cache)
            if isinstance(event, CompareResult):
                return event
    raise AssertionError("no result")


@lru_cache
def _result() -> CompareResult:
    names = ["qevict", "qevict-r2", "qevict-r3-fp-only", *ORACLES, "random", "streamingllm"]
    result = _run(names)
    assert result.prompt_tokens == PROMPT
    return result


@lru_cache
def _trace() -> FullTrace:
    model, result = loaded(), _result()
    ids = model.tokenizer(_text())["input_ids"] + result.token_ids[:-1]
    return record(model, ids, PROMPT, kv_dtype="float32")


def _config(**changes: Any) -> QEvictConfig:
    settings = {"kv_budget": 0.4, "quant_share": 0.0, "planned_new_tokens": NEW, "kv_dtype": "float32"}
    return QEvictConfig(**(settings | changes))


def _boards(rule: str, config: QEvictConfig) -> dict[int, Tensor]:
    """Windows that an oracle of the trace holds after each event: bool [layers, windows], by columns known."""
    run = simulate(_trace(), [Policy("oracle", config, rule=rule)])[0][0]
    pairs = zip(run.history.seq_lens.tolist(), run.history.tiers, strict=True)
    return {columns: torch.from_numpy((tiers != Tier.EVICTED) & (tiers != Tier.EMPTY)) for columns, tiers in pairs}


def _named(result: CompareResult) -> dict[str, Any]:
    return {system.name: system for system in result.systems}


@pytest.mark.parametrize(("name", "rule"), [("oracle-past", "past_oracle"), ("oracle-future", "future_oracle")])
def test_it_holds_what_the_oracle_of_a_trace_holds(name: str, rule: str) -> None:
    """Two ways to the same sets: live beside the reference, and afterwards on its recorded attention."""
    seen: dict[int, Tensor] = {}

    def look(system: str, cache: Any) -> None:
        if system == name:
            seen[cache.columns] = cache.residency()[:, 0, 5:] == Tier.FULL

    _run(["fullkv", name], probe=look)
    planned = _config(planned_new_tokens=_trace().steps)
    # The trace plans for its own steps, one fewer than the run: the same capacities here.
    boards = _boards(rule, planned)
    compared = 0
    for columns, board in boards.items():
        if columns in seen:
            windows = (columns - 5) // 8
            whole = seen[columns][:, : windows * 8].unflatten(1, (windows, 8))
            assert bool((whole.all(-1) == whole.any(-1)).all()), "windows are whole or absent"
            assert torch.equal(whole.all(-1), board[:, :windows]), columns
            compared += 1
    assert compared == (NEW - 1) // 8


@pytest.mark.parametrize("name", ORACLES)
def test_bytes_are_those_of_r2(name: str) -> None:
    systems = _named(_result())
    own, r2 = systems[name], systems["qevict-r2"]
    assert own.bytes == own.expected_bytes == r2.bytes
    assert own.share <= 0.41 and own.storage == "real"
    assert own.notices[0] == "oracle"


def test_the_future_oracle_misses_least() -> None:
    """Event by event, against window systems with the same protected tokens and as many windows."""
    systems = _named(_result())
    best = systems["oracle-future"].future
    for other in ("qevict-r2", "oracle-past"):
        assert [event.columns for event in best] == [event.columns for event in systems[other].future]
        for mine, theirs in zip(best, systems[other].future, strict=True):
            assert mine.fmm <= theirs.fmm + 1e-6, (other, mine.columns)
    assert systems["oracle-future"].fmm < systems["qevict-r2"].fmm


@pytest.mark.parametrize("seed", range(5))
def test_no_set_of_the_same_size_beats_an_oracle(seed: int) -> None:
    """Missed past mass, and future missed mass, against sets drawn by lot."""
    trace, config = _trace(), _config()
    generator = torch.Generator().manual_seed(seed)
    for rule in ("past_oracle", "future_oracle"):
        for columns, board in _boards(rule, config).items():
            if columns == trace.total_tokens:
                continue
            mass = trace.past(columns)
            if rule == "future_oracle":
                future, _ = trace.future(columns, 32)
                mass = future / future.sum(-1, keepdim=True)
            wanted = row_scores(mass, config, trace.shape)[:, 1:]
            windows = wanted.shape[1]
            held = board[:, :windows]
            local = int(held[0].flip(0).int().cumprod(0).sum())
            aged = windows - min(local, windows)
            for layer in range(held.shape[0]):
                count = int(held[layer, :aged].sum())
                lot = torch.randperm(aged, generator=generator)[:count]
                drawn = wanted[layer, lot].sum()
                assert float(wanted[layer, :aged][held[layer, :aged]].sum()) >= float(drawn) - 1e-5


def test_past_oracle_misses_no_more_past_mass_than_any_system_of_its_size() -> None:
    """FullKV's attention until now on what is evicted, at each event."""
    tables: dict[str, dict[int, Tensor]] = {}

    def look(system: str, cache: Any) -> None:
        table = cache.residency()
        tables.setdefault(system, {})[table.shape[2]] = table

    others = ["oracle-future", "qevict-r2"]
    _run(["oracle-past", *others], probe=look)
    trace = _trace()
    checked = 0
    for columns, table in tables["oracle-past"].items():
        if (columns - 5) % 8 or columns > trace.total_tokens:
            continue
        past = trace.past(columns).mean(1)

        def missed(found: Tensor, past: Tensor = past) -> Tensor:
            return (past * (found[:, 0] == Tier.EVICTED)).sum(-1)

        for other in others:
            rival = tables[other][columns]
            assert int((rival == Tier.FULL).sum()) == int((table == Tier.FULL).sum())
            assert bool((missed(table) <= missed(rival) + 1e-4).all())
        checked += 1
    assert checked == (NEW - 1) // 8


@pytest.mark.parametrize("name", ORACLES)
def test_the_articles_size_is_the_full_tier_of_r3(name: str) -> None:
    """With QEvict's quant_share, an oracle has the K_f of R3 and leaves the rest of the budget unspent."""
    budget = SystemChoice(name, {"quant_share": 0.7})
    result = _named(compare(loaded(), _text(), [budget, "qevict-r3-fp-only"], OPTIONS))
    own, fp_only = result[name], result["qevict-r3-fp-only"]
    assert own.full_tokens == pytest.approx(fp_only.full_tokens)
    assert own.bytes == own.expected_bytes < fp_only.bytes
    if name == "oracle-future":
        for mine, theirs in zip(own.future, fp_only.future, strict=True):
            assert mine.fmm <= theirs.fmm + 1e-6


def test_full_tier_alone_is_r3_looked_at_differently() -> None:
    systems = _named(_result())
    r3, alone = systems["qevict"], systems["qevict-r3-fp-only"]
    assert alone.kl_steps == pytest.approx(r3.kl_steps, abs=1e-6)
    assert alone.bytes == r3.bytes and alone.quant_tokens == 0.0 < r3.quant_tokens
    assert alone.notices[0] == "fp_only"
    for mine, theirs in zip(alone.future, r3.future, strict=True):
        assert mine.fmm == pytest.approx(theirs.fp_only, abs=1e-6) and mine.fmm >= theirs.fmm
    assert alone.fmm > r3.fmm


@pytest.mark.parametrize("name", ORACLES)
def test_storage_is_real(name: str) -> None:
    """What it attends to is dense attention over what residency names; bytes are summed nbytes; it repeats."""
    model = loaded()
    checked = []

    def look(system: str, cache: Any) -> None:
        if system != name:
            return
        table = cache.residency()
        held = sum(tensor.nbytes for tensor in cache.persistent_tensors().values())
        assert held == cache.persistent_bytes == cache.rival.account(cache.kv_shape, PROMPT, NEW - 1, cache.run)
        for layer, resident in enumerate(cache.residents):
            assert isinstance(resident, OracleArena)
            query = torch.randn(1, 6, 1, 32, generator=torch.Generator().manual_seed(layer))
            for softcap in (None, 5.0):
                got = merge(resident.parts(query, 0.2, softcap))[0]
                for head, (key, value) in enumerate(resident.dense(0)):
                    assert key.shape[0] == int((table[layer, head] == Tier.FULL).sum())
                    logits = query[0, head * 3 : head * 3 + 3, 0] @ key.T * 0.2
                    if softcap is not None:
                        logits = softcap * torch.tanh(logits / softcap)
                    torch.testing.assert_close(
                        got[0, head * 3 : head * 3 + 3, 0], logits.softmax(-1) @ value, atol=1e-5, rtol=1e-4
                    )
            columns = resident.held_columns()
            known = columns[columns >= 0]
            assert known.unique().numel() == known.numel() and int(known.max()) == cache.columns - 1
        checked.append(cache.columns)

    first = _run(["fullkv", name], probe=look)
    assert len(checked) == NEW - 1 and checked[-1] == PROMPT + NEW - 1
    again = compare(model, _text(), ["fullkv", name], OPTIONS)
    assert again.systems[1].kl_steps == pytest.approx(first.systems[1].kl_steps, abs=1e-5)
    assert again.token_ids == first.token_ids


@pytest.mark.parametrize("name", ORACLES)
def test_a_whole_budget_is_fullkv(name: str) -> None:
    whole = CompareOptions(budget=BudgetSpec(share=1.0), max_new_tokens=20, chat=False, ignore_eos=True)
    own = compare(loaded(), _text(), ["fullkv", name], whole).systems[1]
    assert own.kl == pytest.approx(0.0, abs=1e-6) and own.fmm == 0.0 and own.full_tokens == 1.0


def test_running_ahead_changes_nothing_else() -> None:
    """What stands beside an oracle is measured as without it."""
    with_it = compare(loaded(), _text(), ["streamingllm", "oracle-future"], OPTIONS)
    without = compare(loaded(), _text(), ["streamingllm"], OPTIONS)
    a, b = with_it.systems[0], without.systems[0]
    assert with_it.token_ids == without.token_ids and with_it.perplexity == pytest.approx(without.perplexity)
    assert a.kl_steps == pytest.approx(b.kl_steps, abs=1e-5)
    assert a.output_error == pytest.approx(b.output_error, abs=1e-5)
    assert [event.steps for event in a.future] == [event.steps for event in b.future]
    assert a.fmm == pytest.approx(b.fmm, abs=1e-7)


def test_stopping_while_fullkv_is_ahead() -> None:
    asked: list[int] = []

    def stop() -> bool:
        asked.append(1)
        return len(asked) > 12

    events = list(iter_compare(loaded(), _text(), ["oracle-future", "fullkv"], OPTIONS, should_stop=stop))
    out = events[-1]
    assert isinstance(out, CompareResult) and out.stopped
    assert len(out.token_ids) == len(out.systems[0].kl_steps) + 1 < NEW
    assert not any(module._forward_pre_hooks for module in loaded().model.modules())


def test_short_prompts_and_runs() -> None:
    model = loaded()
    for tokens in (2, 6, 9, 23):
        options = CompareOptions(budget=BudgetSpec(tokens=60), max_new_tokens=6, chat=False, ignore_eos=True)
        result = compare(model, _text()[:tokens], ["fullkv", *ORACLES], options)
        for system in result.systems[1:]:
            assert system.kl == pytest.approx(0.0, abs=1e-6)
    single = CompareOptions(budget=BudgetSpec(share=0.5), max_new_tokens=1, chat=False)
    assert compare(model, _text(), ORACLES, single).systems[0].kl is None
    with pytest.raises(BudgetError, match="smallest"):
        compare(model, _text(), ["oracle-past"], CompareOptions(budget=BudgetSpec(share=0.02), chat=False))


@pytest.mark.parametrize("name", ORACLES)
def test_where_there_is_no_reference_there_is_no_oracle(name: str) -> None:
    model = loaded()
    message = f"{name} ranks by FullKV's own attention"
    with pytest.raises(ConfigError, match=message):
        registry.make(name, model, BudgetSpec(share=0.5))
    with pytest.raises(ConfigError, match=message):
        compare(model, _text(), ["fullkv", name], CompareOptions(mode="free", chat=False))
    with pytest.raises(ConfigError, match="window_size"):
        registry.rival(name, {"window_size": 7}).account(
            RivalCache(model.model, registry.rival("fullkv"), RunPlan()).kv_shape, 100, 0, RunPlan()
        )
    info = next(info for info in registry.systems() if info.name == name)
    assert info.needs_reference and info.storage == "real"


def test_an_oracle_follows_one_sequence() -> None:
    model = loaded()
    caches: list[Any] = []
    _run(["oracle-past"], probe=lambda _, cache: caches.append(cache))
    cache = caches[0]
    with pytest.raises(CacheUseError, match="one sequence"), torch.inference_mode():
        cache.reorder_cache(torch.tensor([0, 0]))
    rival = registry.rival("oracle-past")
    fresh = RivalCache(model.model, rival, RunPlan(BudgetSpec(share=0.5)))
    keyword = cache_keyword(model.model)
    with torch.inference_mode():
        model.model(prompt(), use_cache=True, **{keyword: fresh})
        with pytest.raises(CacheUseError, match="one sequence"):
            fresh.settle()
