"""Cells, the store that keeps them, and a sweep that is stopped and gone on with."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.config import QEvictConfig
from engine.errors import ConfigError
from engine.evaluation.cells import ItemGroup, Part, PolicyGroup, Suite, run_part
from engine.evaluation.forcing import System
from engine.evaluation.items import MAIN, Text, continuations
from engine.evaluation.store import Store, cell_key, newest
from engine.evaluation.suites import ablation, directions, one_task, quick
from engine.evaluation.sweep import Progress, in_turns, run_sweep, suite_keys
from tests.engine.evaluation.test_tasks import STORY, TEXTS
from tests.tiny import tiny_loaded

torch.set_num_threads(1)
LOADED = tiny_loaded(positions=2048)


def small_suite() -> Suite:
    items = continuations(LOADED.tokenizer, [Text("ferry", STORY)], 200, 12, 2)
    groups = [ItemGroup(item, (System("fullkv"), System("qevict", 0.3))) for item in items]
    traces = continuations(LOADED.tokenizer, [Text("ferry", STORY)], 300, 40, 1)
    policies = [PolicyGroup(item, (0.4, 0.3), QEvictConfig(window_size=4)) for item in traces]
    return Suite("small", in_turns(groups, policies))


def test_a_key_covers_every_setting_and_no_order() -> None:
    cell = {"task": "book", "kv_budget": 0.2, "parameters": {"bits": 2}}
    assert cell_key(cell) == cell_key(dict(reversed(cell.items())))
    assert cell_key(cell) != cell_key(cell | {"kv_budget": 0.1})
    keys = suite_keys(LOADED, small_suite())
    assert len(keys) == len(set(keys)) == 6
    other = dataclasses.replace(LOADED, fingerprint="other")
    assert not set(keys) & set(suite_keys(other, small_suite()))
    assert not set(keys) & set(suite_keys(LOADED, dataclasses.replace(small_suite(), kv_dtype="float32")))


def test_a_stopped_sweep_goes_on_where_it_stopped(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "cells.jsonl"
    seen: list[Progress] = []
    first = run_sweep(LOADED, small_suite(), Store(path), progress=seen.append, should_stop=lambda: len(seen) > 1)
    assert 0 < first.ran < 6 and first.missing == 6 - first.ran
    second = run_sweep(LOADED, small_suite(), Store(path))
    assert second.ran == 6 - first.ran and second.missing == 0
    third = run_sweep(LOADED, small_suite(), Store(path))
    assert third.ran == 0 and third.rows == second.rows
    assert seen[0].done == 0 and seen[0].left is None and seen[1].left is not None
    assert [row["kind"] for row in third.rows].count("policies") == 2
    for row in third.rows:
        if row["kind"] == "item":
            assert row["scores"][MAIN]["nll"] > 0 and row["scores"][MAIN]["output_error"] >= 0
            assert len(row["output_error_layers"]) == LOADED.model.config.num_hidden_layers
        assert row["versions"]["torch"] == torch.__version__ and row["prompt_hash"] and row["backend"]
        assert row["configuration"]["planned_new_tokens"] > 0 and 0 < row["share"] <= 1
        assert {"truncated", "degenerate"} <= row.keys()


def test_a_sweep_ends_in_time() -> None:
    result = run_sweep(LOADED, small_suite(), Store(None), seconds=0.0)
    assert result.ran == 0 and result.missing == 6


def test_a_cut_last_line_is_dropped_and_a_broken_one_is_named(tmp_path: Path) -> None:
    path = tmp_path / "cells.jsonl"
    store = Store(path)
    store.add("a", {"x": 1})
    store.add("b", {"x": 2})
    with path.open("a") as file:
        file.write('{"key": "c", "x"')
    again = Store(path)
    assert len(again) == 2 and "c" not in again
    again.add("c", {"x": 3})
    assert [row["x"] for row in Store(path)] == [1, 2, 3]
    path.write_text("no json\n" + path.read_text())
    with pytest.raises(ConfigError, match="line 1"):
        Store(path)


def test_of_a_cell_that_two_releases_measured_the_newest_row_counts() -> None:
    old = {"key": "a", "task": "book", "index": 0, "versions": {"qevict": "0"}, "kl": 1.0}
    new = old | {"key": "b", "versions": {"qevict": "1"}, "figures_of": 2, "kl": 2.0}
    other = new | {"key": "c", "match_to": "kivi-2"}
    assert newest([old, other, new]) == [other, new]


def test_parts_that_come_back_in_another_order_are_each_kept_once() -> None:
    def backwards(wanted: Iterator[Part]) -> Iterator[tuple[Part, Any]]:
        for part in reversed(list(wanted)):
            yield part, run_part(LOADED, small_suite(), part)

    store = Store(None)
    result = run_sweep(LOADED, small_suite(), store, runner=backwards)
    assert result.ran == 6 and result.missing == 0 and len(store) == 6
    assert [row["key"] for row in result.rows] == suite_keys(LOADED, small_suite())


def test_groups_take_turns() -> None:
    items = continuations(LOADED.tokenizer, TEXTS, 200, 12, 6)
    long, short = [ItemGroup(item, ()) for item in items[:4]], [ItemGroup(item, ()) for item in items[4:]]
    turns = in_turns(long, short)
    assert turns[0] is long[0] and turns[1] is short[0] and turns[4] is short[1]
    assert len(turns) == 6


def test_suites_say_what_they_leave_out_and_refuse_what_they_cannot() -> None:
    made = quick(LOADED, [Text("ferry", STORY[:5000])])
    assert any("eval full" in line for line in made.left_out)
    assert any("10 texts were wanted" in line for line in made.left_out)
    assert all(group.systems[0].name == "fullkv" for group in made.groups if isinstance(group, ItemGroup))
    many = directions(LOADED, TEXTS[:1])
    assert f"20 texts were wanted, {len(many.groups)} are there: name a folder with --data" in many.left_out
    tried = ablation(LOADED, TEXTS, "q", length=200, count=1).groups[0]
    assert isinstance(tried, ItemGroup)
    assert [s.parameters.get("quant_share") for s in tried.systems] == [None, 0.1, 0.3, 0.5, 0.7, 0.9]
    with pytest.raises(ConfigError, match="--what"):
        ablation(LOADED, TEXTS, "colour")
    first = one_task(LOADED, TEXTS, "kvline", [System("h2o", 0.2)], length=400, count=1).groups[0]
    assert isinstance(first, ItemGroup) and first.systems[0] == System("fullkv")
