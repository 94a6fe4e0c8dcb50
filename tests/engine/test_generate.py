"""The decode loop: what a run yields, in which order, and that its summary tells the truth."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from engine.config import QEvictConfig
from engine.errors import BudgetError, ConfigError, OutOfMemoryError, PromptError
from engine.generate import RunOptions, generate, prompt_ids
from engine.models import LoadedModel
from engine.run import Run
from engine.trace import (
    EndEvent,
    Keyframe,
    LateMetrics,
    Progress,
    RoutingEvent,
    RunMeta,
    ScoreEvent,
    StepEvent,
    Tier,
    TraceEvent,
    decode,
    encode,
)
from engine.trace_board import Board
from tests.engine.drive import BACKENDS
from tests.tiny import tiny_loaded

torch.set_num_threads(1)

PROMPT = "It was a bright cold day in April, and the clocks were striking thirteen. Winston Smith slipped in."
CONFIG = QEvictConfig(window_size=4, kv_budget=0.3, local_tokens=8)
LONG = RunOptions(max_new_tokens=60, ignore_eos=True)


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return tiny_loaded()


def only(events: list[TraceEvent], kind: type) -> list[Any]:
    return [event for event in events if isinstance(event, kind)]


def stock_tokens(loaded: LoadedModel, ids: list[int], count: int) -> list[int]:
    model = loaded.model
    model.set_attn_implementation("eager")
    with torch.no_grad():
        # The mask is given, for the chat template holds the padding token.
        out = model.generate(
            torch.tensor([ids]), attention_mask=torch.ones(1, len(ids)), max_new_tokens=count, do_sample=False
        )
    return out[0, len(ids) :].tolist()


def test_order_of_events(loaded: LoadedModel) -> None:
    events = list(generate(loaded, PROMPT, CONFIG, RunOptions(max_new_tokens=60, ignore_eos=True, keyframe_every=5)))
    assert [event.seq for event in events] == list(range(len(events)))
    kinds = [event.kind for event in events]
    assert kinds[0] == "meta" and kinds[-1] == "end"
    first_key = kinds.index("key")
    assert set(kinds[1:first_key]) == {"prog"} and kinds.index("tok") > first_key
    assert "tok" not in kinds[:first_key] and kinds.count("end") == kinds.count("meta") == 1
    routes, keys, late = only(events, RoutingEvent), only(events, Keyframe), only(events, LateMetrics)
    assert [event.event_id for event in routes] == list(range(1, len(routes) + 1))
    assert [event.event_id for event in keys] == [e for e in range(len(routes) + 1) if e % 5 == 0]
    assert [event.event_id for event in late] == sorted(event.event_id for event in late)
    for event in late:
        where = events.index(event)
        known = max(e.event_id for e in events[:where] if e.kind in ("key", "route"))
        assert event.event_id <= known, "a future came before its event"
    steps = only(events, StepEvent)
    n = events[0].prompt_tokens
    assert [event.seq_len for event in steps] == list(range(n + 1, n + 61))
    for event in routes:
        before = [e for e in events[: events.index(event)] if isinstance(e, StepEvent)]
        assert before[-1].seq_len == event.seq_len, "a routing event comes right after the token that caused it"
    assert len(only(events, ScoreEvent)) == len(routes) + 1


@pytest.mark.parametrize("backend", BACKENDS)
def test_whole_budget_gives_stock_tokens(loaded: LoadedModel, backend: str) -> None:
    config = QEvictConfig(kv_budget=1.0, backend=backend)
    events = list(generate(loaded, PROMPT, config, LONG))
    tokens = [token for event in only(events, StepEvent) for token in event.ids]
    assert tokens == stock_tokens(loaded, prompt_ids(loaded, PROMPT, True), 60)
    end = only(events, EndEvent)[0]
    assert end.why == "length" and end.summary["num_tokens"] == 60
    assert end.summary["metrics"]["fmm"] == 0.0 and end.summary["routing"]["evictions"] == 0
    assert events[0].backend == end.summary["backend"] == backend


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("scope", ["layer", "kv_head"])
def test_the_board_and_the_bytes_of_every_event(loaded: LoadedModel, backend: str, scope: str) -> None:
    """The moves alone rebuild every keyframe; bytes by kind are the tiers times their costs, within the budget."""
    config = CONFIG.replace(backend=backend, score_scope=scope)
    events = list(generate(loaded, PROMPT, config, RunOptions(max_new_tokens=60, ignore_eos=True, keyframe_every=1)))
    meta: RunMeta = events[0]  # type: ignore[assignment]
    board = Board(meta)
    groups = 2 if scope == "kv_head" else 1
    assert meta.rows == 2 * groups
    checked = promotions = 0
    for event in events:
        if isinstance(event, Keyframe) and event.event_id:
            assert np.array_equal(board.tiers[:, : event.tiers.shape[1]], event.tiers)
            checked += 1
        board.forward(event)
        if isinstance(event, (RoutingEvent, Keyframe)):
            memory = event.memory
            count = {tier: int((board.tiers == tier).sum()) for tier in Tier}
            assert memory.full == count[Tier.FULL] * meta.full_window_bytes // groups
            assert memory.codes == count[Tier.QUANT] * meta.quant_code_bytes // groups
            assert memory.codes + memory.metadata == count[Tier.QUANT] * meta.quant_window_bytes // groups
            assert memory.local == count[Tier.LOCAL] * meta.full_window_bytes // groups
            assert memory.sink == 2 * 2 * meta.full_window_bytes
            assert memory.shadow % (meta.quant_window_bytes // groups) == 0
            assert memory.persistent <= memory.budget == meta.total_bytes
            assert memory.full_kv == 2 * 2 * 2 * 16 * 4 * event.seq_len
        if isinstance(event, RoutingEvent):
            came = event.migrations["move"] >> 4
            went = event.migrations["move"] & 15
            assert event.promotions == int(((came == Tier.QUANT) & (went == Tier.FULL)).sum())
            assert event.demotions == int(((came != Tier.QUANT) & (went == Tier.QUANT)).sum())
            assert event.evictions == int((went == Tier.EVICTED).sum())
            assert event.aged == int((came == Tier.LOCAL).sum())
            promotions += event.promotions
    assert checked > 10
    end = events[-1]
    assert isinstance(end, EndEvent)
    routes = only(events, RoutingEvent)
    assert end.summary["routing"]["events"] == len(routes) + 1
    assert end.summary["routing"]["promotions"] == promotions


def test_the_summary_adds_up(loaded: LoadedModel) -> None:
    events = list(generate(loaded, PROMPT, CONFIG, LONG))
    meta, end = events[0], events[-1]
    assert isinstance(meta, RunMeta) and isinstance(end, EndEvent)
    summary, kv = end.summary, end.summary["kv"]
    said = "".join(piece for event in only(events, StepEvent) for piece in event.pieces)
    new = [token for event in only(events, StepEvent) for token in event.ids]
    assert summary["text"].startswith(said) and summary["text"] == loaded.tokenizer.decode(new)
    assert kv["peak_persistent_bytes"] <= kv["total_bytes"] == meta.total_bytes
    assert kv["peak_occupied_bytes"] <= kv["peak_persistent_bytes"]
    length = meta.prompt_tokens + 60
    assert kv["full_kv_bytes"] == 2 * 2 * 2 * 16 * 4 * length == kv["planned_full_kv_bytes"] == meta.full_kv_bytes
    assert kv["share"] == pytest.approx(kv["peak_persistent_bytes"] / kv["full_kv_bytes"])
    assert kv["share"] <= 0.3 and kv["kv_dtype"] == "float32"
    assert kv["prefill_peak_bytes"] >= 2 * 2 * 2 * 16 * 4 * meta.prompt_tokens
    late = only(events, LateMetrics)
    assert summary["metrics"]["fmm"] == pytest.approx(np.mean([event.fmm for event in late]))
    assert 0.0 < summary["metrics"]["fmm"] < 1.0 and 0.0 < summary["metrics"]["churn"] < 1.0
    assert summary["timing"]["prompt_tokens"] == meta.prompt_tokens
    timing = dict(summary["timing"])
    assert (timing.pop("document_tokens"), timing.pop("prefix_used")) == (0, False)
    assert all(value > 0 for value in timing.values())
    assert meta.planned_tokens == length and meta.settings["planned_new_tokens"] == 60
    assert "".join(meta.pieces) == loaded.tokenizer.decode(prompt_ids(loaded, PROMPT, True))
    for event in events:
        assert encode(decode(encode(event))) == encode(event)


@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 16, 32, 63, 64, 512])
@pytest.mark.parametrize("length", [1, 2, 3, 17, 33, 64, 65])
def test_prompt_chunks_change_nothing(loaded: LoadedModel, length: int, chunk: int) -> None:
    """Also where the last chunk would have been one token, which the cache takes for decoding."""
    prompt = ("lorem ipsum dolor " * 9)[:length]
    options = {"max_new_tokens": 9, "ignore_eos": True, "chat": False}
    config = QEvictConfig(window_size=4, local_tokens=4, kv_budget_bytes=2 * 12_000, backend="sdpa")
    one, many = (
        list(generate(loaded, prompt, config, RunOptions(prefill_chunk=size, **options)))  # type: ignore[arg-type]
        for size in (None, chunk)
    )
    assert [e.ids for e in only(one, StepEvent)] == [e.ids for e in only(many, StepEvent)]
    progress = only(many, Progress)
    assert progress[-1].done == progress[-1].total == length
    assert [e.done for e in progress] == sorted(e.done for e in progress)
    a, b = ([e.tiers.tolist() for e in only(events, Keyframe)] for events in (one, many))
    assert a == b
    assert len(a) == 1


@pytest.mark.parametrize("tokens", [1, 2, 9])
def test_few_new_tokens(loaded: LoadedModel, tokens: int) -> None:
    events = list(generate(loaded, PROMPT, CONFIG, RunOptions(max_new_tokens=tokens, ignore_eos=True)))
    assert len(only(events, StepEvent)) == tokens and isinstance(events[-1], EndEvent)


def test_prefill_routing_in_chunks(loaded: LoadedModel) -> None:
    config = CONFIG.replace(prefill_routing="chunk")
    options = RunOptions(max_new_tokens=20, prefill_chunk=32, ignore_eos=True)
    events = list(generate(loaded, PROMPT * 2, config, options))
    meta, end = events[0], events[-1]
    assert isinstance(end, EndEvent) and end.summary["metrics"] is None
    # The plan is the whole prompt's, from the first chunk on.
    assert end.summary["kv"]["peak_persistent_bytes"] <= end.summary["kv"]["total_bytes"] == meta.total_bytes
    assert all(event.memory.budget == meta.total_bytes for event in only(events, RoutingEvent))
    whole = list(generate(loaded, PROMPT * 2, CONFIG, RunOptions(max_new_tokens=20, ignore_eos=True)))[-1]
    assert isinstance(whole, EndEvent)
    assert end.summary["kv"]["prefill_peak_bytes"] < 0.4 * whole.summary["kv"]["prefill_peak_bytes"]


def test_sampling_follows_its_seed(loaded: LoadedModel) -> None:
    def tokens(**changes: Any) -> list[int]:
        options = RunOptions(max_new_tokens=30, ignore_eos=True, reference=False, **changes)
        return [t for e in only(list(generate(loaded, PROMPT, CONFIG, options)), StepEvent) for t in e.ids]

    hot = tokens(temperature=1.5, seed=1)
    assert hot == tokens(temperature=1.5, seed=1)
    assert hot != tokens(temperature=1.5, seed=2)
    greedy = tokens()
    assert greedy == tokens(seed=5) and greedy != hot
    assert tokens(temperature=1.5, top_p=1e-6, seed=3) == greedy


def test_an_end_of_sequence_token_ends_the_run(loaded: LoadedModel) -> None:
    first = [t for e in only(list(generate(loaded, PROMPT, CONFIG, LONG)), StepEvent) for t in e.ids]
    stop = first[12]
    at = first.index(stop)
    before = loaded.model.generation_config.eos_token_id
    loaded.model.generation_config.eos_token_id = [stop, 259]
    try:
        events = list(generate(loaded, PROMPT, CONFIG, RunOptions(max_new_tokens=60)))
        ignored = list(generate(loaded, PROMPT, CONFIG, LONG))
    finally:
        loaded.model.generation_config.eos_token_id = before
    steps = only(events, StepEvent)
    assert [t for e in steps for t in e.ids] == first[: at + 1]
    assert steps[-1].pieces == [""] and events[-1].why == "eos"
    assert [t for e in only(ignored, StepEvent) for t in e.ids] == first


def test_stopping_between_tokens_gives_a_summary(loaded: LoadedModel) -> None:
    asked = iter([False] * 9 + [True] * 99)
    events = list(generate(loaded, PROMPT, CONFIG, LONG, should_stop=lambda: next(asked)))
    assert isinstance(events[-1], EndEvent) and events[-1].why == "stop"
    assert len(only(events, StepEvent)) == 8 and events[-1].summary["num_tokens"] == 8
    assert only(events, LateMetrics), "futures that were seen are told"


def test_stopping_before_the_prompt_is_done(loaded: LoadedModel) -> None:
    events = list(generate(loaded, PROMPT, CONFIG, LONG, should_stop=lambda: True))
    assert [event.kind for event in events] == ["meta", "end"]
    assert events[-1].summary["num_tokens"] == 0 and events[-1].summary["kv"]["peak_persistent_bytes"] == 0


def test_closing_and_running_again(loaded: LoadedModel) -> None:
    run: Iterator[TraceEvent] = generate(loaded, PROMPT, CONFIG, LONG)
    for event in run:
        if isinstance(event, RoutingEvent):
            break
    run.close()  # type: ignore[attr-defined]
    assert len(only(list(generate(loaded, PROMPT, CONFIG, LONG)), StepEvent)) == 60


def test_the_watched_row_is_recorded(loaded: LoadedModel) -> None:
    events = list(generate(loaded, PROMPT, CONFIG, LONG, watched_row=lambda: 1))
    scores = only(events, ScoreEvent)
    assert {event.row for event in scores} == {1} and all(event.levels.max() == 255 for event in scores)
    turns = [event.row for event in only(list(generate(loaded, PROMPT, CONFIG, LONG)), ScoreEvent)]
    assert turns == [e % 2 for e in range(len(turns))]
    beyond = list(generate(loaded, PROMPT, CONFIG, LONG, watched_row=lambda: 99))
    assert {event.row for event in only(beyond, ScoreEvent)} == {1}


@pytest.mark.parametrize("prompt", ["", "  \n\t "])
def test_an_empty_prompt_is_refused(loaded: LoadedModel, prompt: str) -> None:
    with pytest.raises(PromptError, match="empty"):
        list(generate(loaded, prompt, CONFIG))


def test_a_prompt_beyond_the_positions_is_refused() -> None:
    small = tiny_loaded(positions=64)
    with pytest.raises(PromptError, match="64 positions"):
        list(generate(small, "x" * 64, CONFIG, RunOptions(chat=False)))
    events = list(generate(small, "x" * 50, QEvictConfig(kv_budget=1.0), RunOptions(chat=False, ignore_eos=True)))
    assert "new_tokens_capped" in events[0].notices and len(only(events, StepEvent)) == 14


def test_a_budget_too_small_is_refused_before_any_work(loaded: LoadedModel) -> None:
    with pytest.raises(BudgetError, match="smallest feasible") as caught:
        next(generate(loaded, PROMPT, CONFIG.replace(kv_budget=0.01), LONG))
    assert 0.01 < caught.value.smallest_share < 1.0
    next(generate(loaded, PROMPT, CONFIG.replace(kv_budget=caught.value.smallest_share), LONG))


@pytest.mark.parametrize("changes", [{"max_new_tokens": 0}, {"temperature": -1.0}, {"top_p": 0.0}, {"top_p": 1.1},
                                     {"horizon": 0}, {"keyframe_every": 0}, {"prefill_chunk": 0}])  # fmt: skip
def test_options_out_of_range_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(changes))):
        RunOptions(**changes)


@pytest.mark.parametrize("error", [MemoryError, torch.OutOfMemoryError])
def test_running_out_of_memory_has_a_name(
    loaded: LoadedModel, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise error("no room")

    monkeypatch.setattr(Run, "_forward", fail)
    with pytest.raises(OutOfMemoryError, match="shorter prompt"):
        list(generate(loaded, PROMPT, CONFIG, LONG))
    monkeypatch.undo()
    assert len(only(list(generate(loaded, PROMPT, CONFIG, LONG)), StepEvent)) == 60


@pytest.mark.parametrize("architecture", ["mistral", "qwen2", "qwen3", "gemma2", "gemma3", "phi3"])
def test_every_family_runs(architecture: str) -> None:
    model = tiny_loaded(architecture)
    events = list(generate(model, PROMPT, CONFIG, RunOptions(max_new_tokens=30, ignore_eos=True)))
    assert len(only(events, StepEvent)) == 30 and events[0].num_layers == 2
    assert only(events, LateMetrics)
