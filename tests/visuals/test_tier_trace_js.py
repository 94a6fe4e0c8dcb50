"""The browser's decoder equals engine.trace_board.Board: forwards, backwards, by seek."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from engine.trace import Keyframe, RoutingEvent, RunMeta, ScoreEvent, Tier, TraceEvent
from engine.trace_board import Board
from tests.visuals.synthetic import Plan, synthetic_events, synthetic_rows

ROOT = Path(__file__).resolve().parents[2]
NODE = shutil.which("node")
pytestmark = pytest.mark.skipif(NODE is None, reason="node is not installed")


def digest(board: Board) -> str:
    hashed = hashlib.sha256()
    for row in board.tiers:
        begun = np_strip(row.tolist())
        hashed.update(bytes(begun))
        hashed.update(b"|")
    return f"{board.event_id}:{board.seq_len}:{hashed.hexdigest()}"


def np_strip(row: list[int]) -> list[int]:
    while row and row[-1] == Tier.EMPTY:
        row.pop()
    return row


def run_node(rows: list[bytes], seeks: list[int]) -> dict[str, Any]:
    payload = json.dumps({"rows": [row.decode() for row in rows], "seeks": seeks})
    done = subprocess.run(
        [str(NODE), str(ROOT / "tests/js/decode.mjs")], input=payload, capture_output=True, text=True, timeout=120
    )
    if done.returncode:
        pytest.fail(done.stderr)
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def python_walk(events: list[TraceEvent]) -> tuple[list[str], list[str], Board, list[RoutingEvent | Keyframe]]:
    meta = events[0]
    if not isinstance(meta, RunMeta):
        pytest.fail("a trace starts with its meta event")
    board = Board(meta)
    everywhere: list[str] = []
    per_step: list[str] = []
    steps: list[RoutingEvent | Keyframe] = []
    for event in events:
        board.forward(event)
        everywhere.append(digest(board))
        if isinstance(event, RoutingEvent) or (isinstance(event, Keyframe) and not steps):
            per_step.append(digest(board))
            steps.append(event)
    return everywhere, per_step, board, steps


@pytest.mark.parametrize(
    "plan",
    [
        Plan(events=70),
        Plan(rows=3, window=4, sink=0, local=8, prompt=37, events=50, full=2, quant=5, keyframe_every=7),
        Plan(rows=2, window=16, sink=5, prompt=300, events=12, full=1, quant=0 + 3, keyframe_every=100),
    ],
    ids=["thirty-rows", "odd-shape", "one-keyframe"],
)
def test_every_way_gives_the_same_board(plan: Plan) -> None:
    events = synthetic_events(plan)
    everywhere, per_step, board, steps = python_walk(events)
    seeks = [0, len(steps) - 1, 3, len(steps) // 2, len(steps) // 2 - 1, 1, len(steps) - 2]
    got = run_node(synthetic_rows(plan), seeks)
    assert got["forward"] == everywhere
    assert got["steps"] == per_step
    assert got["back"] == per_step
    assert got["sought"] == [per_step[i] for i in seeks]
    assert got["walked"] == len(steps), "stepping back must walk over the moves, not rebuild"
    for at in range(len(steps) - 1, 0, -1):
        event = steps[at]
        if isinstance(event, RoutingEvent):
            board.backward(event, steps[at - 1])
            assert got["back"][at - 1] == digest(board)


def test_scores_texts_and_histories_are_read() -> None:
    plan = Plan(rows=4, prompt=200, events=16, full=3, quant=6, local=16)
    events = synthetic_events(plan)
    got = run_node(synthetic_rows(plan), [0])
    assert got["scores"] == sum(isinstance(event, ScoreEvent) for event in events)
    assert got["points"] > 0
    meta = events[0]
    assert isinstance(meta, RunMeta)
    assert got["text"] == "".join(meta.pieces[5:13])
    for event in events:
        if isinstance(event, RoutingEvent):
            for move in event.migrations:
                if move["layer"] == 0 and move["window"] == 3:
                    entry = next(item for item in got["history"] if item["r"] == event.event_id)
                    assert entry["from"] == move["move"] >> 4
                    assert entry["to"] == move["move"] & 15
                    assert entry["score"] == pytest.approx(float(move["score"]), rel=1e-6)


def test_a_lost_stretch_is_rebuilt_from_the_next_keyframe() -> None:
    plan = Plan(rows=4, prompt=200, events=40, full=3, quant=6, local=16, keyframe_every=10)
    rows = synthetic_rows(plan)
    events = synthetic_events(plan)
    _, per_step, _, _ = python_walk(events)
    drop = [i for i, event in enumerate(events) if isinstance(event, RoutingEvent) and 12 <= event.event_id <= 15]
    kept = [row for i, row in enumerate(rows) if i not in drop]
    got = run_node(kept, [0])
    assert got["steps"][-1] == per_step[-1]
    assert got["steps"][11] == per_step[11]
