"""A document asked again: the snapshot gives the very run that reading it again gives."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from engine.config import QEvictConfig
from engine.generate import RunOptions, generate
from engine.prefix import PrefixStore
from engine.trace import EndEvent, RoutingEvent, StepEvent, TraceEvent
from tests.tiny import tiny_loaded

DOCUMENT = " ".join(f"word{number % 17} is number {number}" for number in range(60))
CONFIG = QEvictConfig(kv_budget=0.4, window_size=8)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def run(
    prompt: str, store: PrefixStore | None, *, reference: bool = False, document: str = DOCUMENT
) -> list[TraceEvent]:
    options = RunOptions(max_new_tokens=24, reference=reference, ignore_eos=True)
    return list(generate(tiny_loaded(), prompt, CONFIG, options, document=document, prefixes=store))


def tokens(events: list[TraceEvent]) -> list[int]:
    return [token for event in events if isinstance(event, StepEvent) for token in event.ids]


def moves(events: list[TraceEvent]) -> list[bytes]:
    return [event.migrations.tobytes() for event in events if isinstance(event, RoutingEvent)]


def end(events: list[TraceEvent]) -> EndEvent:
    last = events[-1]
    if not isinstance(last, EndEvent):
        raise TypeError(f"a run must end with an end event, got {last}")
    return last


def test_a_kept_document_gives_the_same_run_as_reading_it_again() -> None:
    store = PrefixStore()
    fresh = run("What is word3?", None)
    first = run("Who is word5?", store)
    again = run("What is word3?", store)
    assert end(first).summary["timing"]["prefix_used"] is False
    assert end(again).summary["timing"]["prefix_used"] is True
    assert end(again).summary["timing"]["document_tokens"] > 100
    assert tokens(again) == tokens(fresh) and moves(again) == moves(fresh) and len(moves(fresh)) > 2
    assert store.hits == 1 and store.nbytes == end(again).summary["kv"]["prefix_bytes"] > 0


def test_a_snapshot_is_not_changed_by_the_run_that_starts_from_it() -> None:
    store = PrefixStore()
    run("Who is word5?", store)
    once, twice = run("What is word3?", store), run("What is word3?", store)
    assert tokens(once) == tokens(twice) and store.hits == 2


def test_another_document_or_setting_is_another_key() -> None:
    store = PrefixStore()
    run("Who is word5?", store)
    run("Who is word5?", store, document=DOCUMENT + " and more of it")
    assert store.hits == 0 and len(store) == 2


def test_a_reference_sees_the_document_in_full_precision() -> None:
    store = PrefixStore()
    run("Who is word5?", store)
    events = run("What is word3?", store, reference=True)
    summary = end(events).summary
    assert store.hits == 0 and summary["metrics"] is not None and 0.0 <= summary["metrics"]["fmm"] <= 1.0
    assert tokens(events) == tokens(run("What is word3?", None))


def test_the_store_forgets_what_was_used_longest_ago() -> None:
    store = PrefixStore()
    run("Who is word5?", store)
    store.max_bytes = int(store.nbytes * 2.5)
    for number in range(3):
        run("Who is word5?", store, document=f"{number} {DOCUMENT}")
    assert len(store) == 2 and store.nbytes <= store.max_bytes
    run("Who is word5?", store)
    assert store.hits == 0
    run("Who is word5?", store, document=f"2 {DOCUMENT}")
    assert store.hits == 1


def test_one_that_is_larger_than_the_store_is_not_kept() -> None:
    store = PrefixStore(max_bytes=10)
    run("Who is word5?", store)
    assert len(store) == 0
