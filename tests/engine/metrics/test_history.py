"""Reading a stored run, and counting its transitions."""

from __future__ import annotations

import numpy as np
import pytest

from engine.errors import TraceError
from engine.metrics.history import count_transitions, read_history
from engine.trace import Keyframe, Tier, decode, encode
from tests.engine.metrics.traces import reading, trace_of

L, F, Q, E, EMPTY = Tier.LOCAL, Tier.FULL, Tier.QUANT, Tier.EVICTED, Tier.EMPTY
BOARDS = [[[F, L]], [[Q, F, L]], [[F, Q, E, L]]]


def test_history_passes_through_the_boards() -> None:
    history = read_history(decode(encode(event)) for event in trace_of(BOARDS))
    assert list(history.event_ids) == [0, 1, 2]
    assert list(history.seq_lens) == [5, 7, 9]
    for event, board in enumerate(BOARDS):
        width = len(board[0])
        assert (history.tiers[event, :, :width] == board).all()
        assert (history.tiers[event, :, width:] == EMPTY).all()
    assert history.aged[1, 0].tolist()[:4] == [True, True, False, False]
    assert history.in_full[2, 0].tolist()[:4] == [True, False, False, False]


def test_a_keyframe_may_repeat_its_event() -> None:
    events = trace_of(BOARDS)
    events.insert(-1, Keyframe(2, 9, np.array(BOARDS[2], dtype=np.uint8), reading()))
    assert len(read_history(events).event_ids) == 3


def test_transition_counts_by_hand() -> None:
    # Event 0: w0 local -> F. Event 1: w0 F -> Q, w1 local -> F. Event 2: w0 Q -> F, w1 F -> Q, w2 local -> E.
    counts = count_transitions(read_history(trace_of(BOARDS)))
    assert counts.total(L, F) == 2
    assert counts.total(F, Q) == counts.demotions == 2
    assert counts.total(Q, F) == counts.promotions == 1
    assert counts.total(L, E) == counts.evictions == 1
    assert counts.counts.sum(axis=(1, 2)).tolist() == [1, 2, 3]


def test_a_trace_without_its_meta_is_refused() -> None:
    with pytest.raises(TraceError, match="meta"):
        read_history(trace_of(BOARDS)[1:])
    with pytest.raises(TraceError, match="meta"):
        read_history([])
