"""Runs decoded together send what each sends alone, whoever comes, goes or fails beside them."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Any

import pytest
import torch

from engine.config import QEvictConfig
from engine.errors import OutOfMemoryError
from engine.generate import RunOptions, generate
from engine.generate_batch import Batch, make_row
from engine.models import LoadedModel
from engine.trace import EndEvent, Keyframe, Progress, RoutingEvent, RunMeta, StepEvent, TraceEvent
from engine.trace_board import Board
from tests.tiny import tiny_loaded

CONFIG = QEvictConfig(kv_budget=0.5, sink_tokens=3, window_size=4, local_tokens=8)
PROMPTS = {
    "a": "A baker counts the loaves of every day and writes them down in a book.",
    "b": "Rain fell on the harbour all night long; in the morning the ropes were stiff and the boats lay deep.",
    "c": "One, two, three.",
    "d": "The old map showed a river where there was none, and a road that went to the sea. " * 3,
}
OPTIONS = RunOptions(max_new_tokens=40, reference=False, ignore_eos=True, prefill_chunk=64)


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return tiny_loaded()


def alone(loaded: LoadedModel, name: str, options: RunOptions = OPTIONS) -> list[TraceEvent]:
    return list(generate(loaded, PROMPTS[name], CONFIG, options))


def together(batch: Batch) -> dict[Hashable, list[Any]]:
    heard: dict[Hashable, list[Any]] = {}
    while batch:
        for key, event in batch.round():
            heard.setdefault(key, []).append(event)
    return heard


def text_of(events: list[TraceEvent]) -> str:
    return "".join(piece for event in events if isinstance(event, StepEvent) for piece in event.pieces)


def moves_of(events: list[TraceEvent]) -> list[tuple[int, bytes]]:
    return [
        (event.event_id, event.tiers.tobytes() if isinstance(event, Keyframe) else tier_moves(event))
        for event in events
        if isinstance(event, Keyframe | RoutingEvent)
    ]


def tier_moves(event: RoutingEvent) -> bytes:
    moves = event.migrations
    return b"".join(moves[name].tobytes() for name in ("layer", "move", "window"))


def check_trace(events: list[TraceEvent]) -> None:
    """A whole trace: numbered, begun, ended, and its board reaches the last token."""
    assert [event.seq for event in events] == list(range(len(events)))
    meta, end = events[0], events[-1]
    assert isinstance(meta, RunMeta) and isinstance(end, EndEvent)
    board = Board(meta)
    for event in events:
        board.forward(event)
    assert board.seq_len == meta.prompt_tokens + end.summary["num_tokens"]


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_each_run_of_a_batch_is_the_run_alone(loaded: LoadedModel, temperature: float) -> None:
    batch = Batch(loaded)
    options = {
        name: RunOptions(max_new_tokens=24 + 8 * at, temperature=temperature, seed=at, reference=False, ignore_eos=True)
        for at, name in enumerate(PROMPTS)
    }
    for name, text in PROMPTS.items():
        batch.add(name, make_row(loaded, text, CONFIG, options[name], session=name))
    heard = together(batch)
    for name in PROMPTS:
        single = alone(loaded, name, options[name])
        check_trace(heard[name])
        assert text_of(heard[name]) == text_of(single)
        assert moves_of(heard[name]) == moves_of(single)
        assert heard[name][0].session == name
        assert [type(event) for event in heard[name]] == [type(event) for event in single]
        mine, other = heard[name][-1].summary, single[-1].summary  # type: ignore[union-attr]
        assert mine["kv"]["peak_persistent_bytes"] == other["kv"]["peak_persistent_bytes"]
        assert mine["timing"]["batch_rows"] > 1 == other["timing"]["batch_rows"]


def test_the_others_do_not_notice_who_stops_and_who_joins(loaded: LoadedModel) -> None:
    batch = Batch(loaded)
    stopped: list[bool] = []
    batch.add("a", make_row(loaded, PROMPTS["a"], CONFIG, OPTIONS))
    batch.add("b", make_row(loaded, PROMPTS["b"], CONFIG, OPTIONS), should_stop=lambda: bool(stopped))
    heard: dict[Hashable, list[Any]] = {}
    rounds = 0
    while batch:
        for key, event in batch.round():
            heard.setdefault(key, []).append(event)
        rounds += 1
        if rounds == 12:
            stopped.append(True)
        if rounds == 15:
            batch.add("d", make_row(loaded, PROMPTS["d"], CONFIG, OPTIONS))
    assert heard["b"][-1].why == "stop" and 0 < heard["b"][-1].summary["num_tokens"] < 40
    for name in ("a", "d"):
        assert text_of(heard[name]) == text_of(alone(loaded, name))
    assert text_of(alone(loaded, "b")).startswith(text_of(heard["b"]))
    for events in heard.values():
        check_trace(events)


def test_a_prompt_is_read_between_the_tokens_of_others(loaded: LoadedModel) -> None:
    batch = Batch(loaded)
    batch.add("a", make_row(loaded, PROMPTS["a"], CONFIG, OPTIONS))
    order: list[tuple[Hashable, type]] = []
    for rounds in range(12):
        if rounds == 4:
            batch.add("d", make_row(loaded, PROMPTS["d"], CONFIG, OPTIONS))
        order += [(key, type(event)) for key, event in batch.round()]
    reading = [at for at, one in enumerate(order) if one == ("d", Progress)]
    tokens = [at for at, one in enumerate(order) if one == ("a", StepEvent)]
    assert len(reading) > 2 and any(reading[0] < at < reading[-1] for at in tokens)
    batch.close()
    assert not len(batch)


def test_one_with_a_reference_measures_what_it_measures_alone(loaded: LoadedModel) -> None:
    options = RunOptions(max_new_tokens=30, reference=True, ignore_eos=True, horizon=8)
    batch = Batch(loaded)
    for name in ("a", "b"):
        batch.add(name, make_row(loaded, PROMPTS[name], CONFIG, options))
    heard = together(batch)
    for name in ("a", "b"):
        mine, single = heard[name][-1].summary["metrics"], alone(loaded, name, options)[-1].summary["metrics"]  # type: ignore[union-attr]
        assert mine["fmm"] == pytest.approx(single["fmm"], abs=1e-6)


@pytest.mark.parametrize(("architecture", "rope"), [("gemma2", "default"), ("phi3", "longrope"), ("qwen3", "yarn")])
def test_models_that_can_not_share_a_forward_take_turns(architecture: str, rope: str) -> None:
    loaded = tiny_loaded(architecture, rope=rope)
    batch = Batch(loaded)
    options = RunOptions(max_new_tokens=12, reference=False, ignore_eos=True)
    for name in ("a", "b"):
        batch.add(name, make_row(loaded, PROMPTS[name], CONFIG, options))
    heard = together(batch)
    for name in ("a", "b"):
        assert text_of(heard[name]) == text_of(alone(loaded, name, options))
        assert heard[name][-1].summary["timing"]["batch_rows"] == (2 if architecture == "qwen3" else 1)


class Failing:
    """A row that fails in its own work."""

    def __init__(self, row: Any, error: Exception) -> None:
        self._row, self._error = row, error
        self.together = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._row, name)

    def events(self, *given: Any) -> Iterator[TraceEvent]:
        yield Progress("prefill", 1, 2)
        raise self._error


def test_who_fails_ends_alone(loaded: LoadedModel) -> None:
    batch = Batch(loaded)
    batch.add("a", make_row(loaded, PROMPTS["a"], CONFIG, OPTIONS))
    batch.add("bad", Failing(make_row(loaded, PROMPTS["c"], CONFIG, OPTIONS), ValueError("broken")))  # type: ignore[arg-type]
    batch.add("big", Failing(make_row(loaded, PROMPTS["c"], CONFIG, OPTIONS), torch.OutOfMemoryError("full")))  # type: ignore[arg-type]
    heard = together(batch)
    assert isinstance(heard["bad"][-1], ValueError)
    assert isinstance(heard["big"][-1], OutOfMemoryError) and "beside other runs" in str(heard["big"][-1])
    assert text_of(heard["a"]) == text_of(alone(loaded, "a"))


def test_a_forward_that_fails_ends_all_that_shared_it(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = Batch(loaded)
    for name in ("a", "c"):
        batch.add(name, make_row(loaded, PROMPTS[name], CONFIG, OPTIONS))

    def fail(*given: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(batch, "_forward", fail)
    heard = together(batch)
    assert all(isinstance(heard[name][-1], OutOfMemoryError) for name in ("a", "c"))


def test_needed_bytes_bound_what_a_run_holds(loaded: LoadedModel) -> None:
    row = make_row(loaded, PROMPTS["d"], CONFIG, OPTIONS)
    batch = Batch(loaded)
    batch.add("d", row)
    assert batch.needed_bytes == batch.reading_bytes == row.needed_bytes()
    kv = together(batch)["d"][-1].summary["kv"]
    assert row.needed_bytes() >= kv["prefill_peak_bytes"] + 0 and row.needed_bytes() >= kv["peak_persistent_bytes"]
    measured = RunOptions(max_new_tokens=40, reference=True)
    assert make_row(loaded, PROMPTS["d"], CONFIG, measured).needed_bytes() > row.needed_bytes()
