"""The wire form and the board."""

from __future__ import annotations

import json
from dataclasses import fields
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from engine.errors import TraceError
from engine.trace import (
    EndEvent,
    ErrorEvent,
    Keyframe,
    LateMetrics,
    Mark,
    MemoryReading,
    Progress,
    RoutingEvent,
    RunMeta,
    ScoreEvent,
    StepEvent,
    Tier,
    TraceEvent,
    decode,
    decode_all,
    encode,
    num_windows,
    pack_migrations,
    score_levels,
)
from engine.trace_board import Board

MEMORY = MemoryReading(1, 2, 3, 4, 5, 6, 1000, 9000)


def meta(**changes: Any) -> RunMeta:
    values: dict[str, Any] = {
        "session": "s", "model": "m", "policy": "qevict", "num_layers": 2, "rows": 2, "window_size": 4,
        "sink_tokens": 3, "local_tokens": 4, "max_windows": 6, "kv_budget": 0.2, "quant_share": 0.7, "bits": 2,
        "kv_dtype": "float16", "backend": "eager", "reference": "none", "prompt_tokens": 9, "planned_tokens": 27,
        "full_window_bytes": 10, "quant_window_bytes": 5, "quant_code_bytes": 2, "full_capacity": 1,
        "quant_capacity": 2, "total_bytes": 100, "full_kv_bytes": 500, "pieces": ["a", "\u6f22", "\n<b>"],
        "notices": ["no_full_history"], "settings": {"x": 1}, "versions": {"torch": "2"},
    }  # fmt: skip
    return RunMeta(**{**values, **changes})


def moves(*rows: tuple[int, Tier, Tier, int, float]) -> np.ndarray[Any, Any]:
    columns = [np.array(c) for c in zip(*rows, strict=True)] if rows else [np.zeros(0, dtype=int)] * 5
    return pack_migrations(columns[0], columns[1], columns[2], columns[3], columns[4])


def routing(event_id: int, seq_len: int, *rows: tuple[int, Tier, Tier, int, float]) -> RoutingEvent:
    return RoutingEvent(event_id, seq_len, num_windows(seq_len, 3, 4), moves(*rows), MEMORY, 1.25, 1, 2, 3, 4)


EVENTS: list[TraceEvent] = [
    meta(),
    Progress("prefill", 3, 9),
    StepEvent(10, ["\U0001f600", ""], [5, 6]),
    Keyframe(0, 9, np.array([[2, 1, 1], [3, 4, 5]], dtype=np.uint8), MEMORY),
    Keyframe(1, 9, np.zeros((1, 0), dtype=np.uint8), MEMORY),
    routing(1, 11, (0, Tier.FULL, Tier.QUANT, 0, 1.5), (1, Tier.LOCAL, Tier.EVICTED, 1, 70000.0)),
    routing(2, 15),
    LateMetrics(1, 0.25, 0.5, 0.75, (0.5, 0.25, 0.25), None, 32, [(0, 3, 0.125)]),
    LateMetrics(2, 0.0, 0.0, 0.0, (1.0, 0.0, 0.0), 0.5, 7),
    ScoreEvent(1, 0, 2.5, np.array([0, 255, 1], dtype=np.uint8)),
    Mark(1, 0, [1, 2], "look here", "me"),
    EndEvent("eos", {"text": "hi", "kv": {"share": 0.2}, "metrics": None}),
    ErrorEvent("it broke", "r1"),
]


def equal(a: TraceEvent, b: TraceEvent) -> bool:
    if type(a) is not type(b):
        return False
    return all(
        np.array_equal(getattr(a, f.name), getattr(b, f.name))
        if isinstance(getattr(a, f.name), np.ndarray)
        else getattr(a, f.name) == getattr(b, f.name)
        for f in fields(a)
    )


@pytest.mark.parametrize("event", EVENTS, ids=lambda e: e.kind)
def test_every_event_goes_there_and_back(event: TraceEvent) -> None:
    data = encode(event, seq=41)
    back = decode(data)
    assert back.seq == 41
    assert equal(back, decode(encode(back))) and back.kind == event.kind
    for f in fields(event):
        if f.name != "seq":
            mine, theirs = getattr(event, f.name), getattr(back, f.name)
            assert np.array_equal(mine, theirs) if isinstance(mine, np.ndarray) else mine == theirs, f.name
    assert b"\n" not in data and decode(data.decode()).seq == 41
    assert encode(back) == data


def test_a_trace_is_read_in_order() -> None:
    rows = [encode(event, seq=i) for i, event in enumerate(EVENTS)]
    assert [event.seq for event in decode_all(rows)] == list(range(len(EVENTS)))


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"7", b'{"k":"tok"}', b'{"k":"what","s":1}', b"\xff\xfe",
                                  b'{"k":"key","s":0,"r":0,"t":1,"rows":1,"n":1,"b":"!","mem":[1]}'])  # fmt: skip
def test_bytes_that_are_no_trace_are_refused(data: bytes) -> None:
    with pytest.raises(TraceError):
        decode(data)


def test_another_version_is_refused_by_number() -> None:
    body = json.loads(encode(meta()))
    body["v"] = 99
    with pytest.raises(TraceError, match="version must be 1, got 99"):
        decode(json.dumps(body))


def test_a_newer_meta_may_carry_more() -> None:
    body = json.loads(encode(meta()))
    body["novelty"] = 1
    assert equal(decode(json.dumps(body)), meta())


def test_numbers_that_json_cannot_say_are_refused() -> None:
    with pytest.raises(ValueError):
        encode(EndEvent("eos", {"x": float("nan")}))


@given(st.lists(st.tuples(st.integers(0, 255), st.sampled_from(list(Tier)), st.sampled_from(list(Tier)),
                          st.integers(0, 65535), st.floats(-1e6, 1e6))))  # fmt: skip
def test_migrations_hold_any_move(rows: list[tuple[int, Tier, Tier, int, float]]) -> None:
    packed = moves(*rows)
    assert packed.itemsize == 6 and len(packed) == len(rows)
    for (row, source, target, window, score), got in zip(rows, packed, strict=True):
        assert (got["layer"], got["move"] >> 4, got["move"] & 15, got["window"]) == (row, source, target, window)
        assert np.isfinite(got["score"]) and abs(float(got["score"]) - np.clip(score, -65504, 65504)) <= 16.0


@given(st.integers(0, 300), st.integers(0, 40), st.sampled_from([1, 4, 8, 32]))
def test_windows_begun(seq_len: int, sink: int, window: int) -> None:
    assert num_windows(seq_len, sink, window) == len({(p - sink) // window for p in range(sink, seq_len)})


@given(st.lists(st.floats(0, 1e6), max_size=20))
def test_score_levels(scores: list[float]) -> None:
    top, levels = score_levels(np.array(scores))
    assert levels.dtype == np.uint8 and len(levels) == len(scores)
    assert top == max(scores, default=0.0)
    for score, level in zip(scores, levels, strict=True):
        assert (level == 0) == (score == 0.0 or top == 0.0)
        if top and score >= top * 1e-4:
            assert 10 ** ((int(level) - 255) * 5 / 254) * top == pytest.approx(score, rel=0.03)
    order = np.argsort(scores, kind="stable")
    assert np.all(np.diff(levels[order].astype(int)) >= 0)


@settings(max_examples=60)
@given(st.data())
def test_a_board_goes_forward_and_backward(data: st.DataObject) -> None:
    """Any run of events: stepping back restores each earlier board; a keyframe says what the moves said."""
    board = Board(meta())
    keyframe = Keyframe(0, 9, np.array([[2, 1], [3, 1]], dtype=np.uint8), MEMORY)
    board.forward(StepEvent(9, [""]))
    board.forward(keyframe)
    events: list[RoutingEvent | Keyframe] = [keyframe]
    snapshots = [(board.tiers.copy(), board.seq_len, board.event_id)]
    seq_len = 9
    for number in range(1, data.draw(st.integers(1, 5)) + 1):
        seq_len += data.draw(st.integers(1, 9))
        board._reach(seq_len)
        count = num_windows(seq_len, 3, 4)
        rows = []
        for row in range(2):
            for window in data.draw(st.lists(st.integers(0, count - 1), unique=True, max_size=3)):
                source = Tier(int(board.tiers[row, window]))
                target = data.draw(st.sampled_from([Tier.FULL, Tier.QUANT, Tier.EVICTED]))
                rows.append((row, source, target, window, 1.0))
        event = routing(number, seq_len, *rows)
        board.forward(event)
        board.forward(event)  # applying one twice is harmless
        events.append(event)
        snapshots.append((board.tiers.copy(), board.seq_len, board.event_id))
        for row, _, target, window, _ in rows:
            assert board.tiers[row, window] == target
        begun = board.tiers[:, : num_windows(seq_len, 3, 4)]
        assert not (begun == Tier.EMPTY).any() and (board.tiers[:, begun.shape[1] :] == Tier.EMPTY).all()
    for number in range(len(events) - 1, 0, -1):
        event = events[number]
        assert isinstance(event, RoutingEvent)
        board.backward(event, events[number - 1])
        tiers, length, event_id = snapshots[number - 1]
        assert board.seq_len == length and board.event_id == event_id
        assert np.array_equal(board.tiers[:, : tiers.shape[1]], tiers)


def test_memory_sums_what_is_held() -> None:
    assert MEMORY.persistent == 21 and MEMORY.to_list() == [1, 2, 3, 4, 5, 6, 1000, 9000]
