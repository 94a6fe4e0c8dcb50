"""The whole cache against the brute-force oracle, event by event, and the invariants of every event."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from numpy.typing import NDArray

from engine.attention import unavailable
from engine.config import QEvictConfig
from engine.trace import Tier
from tests.engine.drive import BACKENDS, Drive, check_bytes, check_prefixes
from tests.engine.oracle import Oracle

SMALL: dict[str, Any] = {
    "window_size": 4,
    "sink_tokens": 3,
    "local_tokens": 4,
    "kv_budget": 0.45,
    "planned_new_tokens": 24,
    "backend": "eager",
}
STEPS = [40, *[1] * 22]


def settings_of(**changes: Any) -> QEvictConfig:
    return QEvictConfig(**{**SMALL, **changes})


ANSWERS: dict[str, tuple[Oracle, list[list[NDArray[Any]]]]] = {}
"""What the oracle said, by case: it is slow, and every backend is asked the same."""


def compare(drive: Drive, case: str, *, tolerance: float = 1e-3) -> None:
    """Outputs, tiers, scores and codes of the cache equal the oracle's."""
    oracle, outputs = ANSWERS[case] if case in ANSWERS else ANSWERS.setdefault(case, drive.replay())
    assert len(oracle.events) == len(drive.records)
    assert oracle.events, "nothing was routed"
    for event, record in zip(oracle.events, drive.records, strict=True):
        assert event.gap > 1e-6, "the case has a near tie: choose another seed"
        assert record.columns == event.columns
        for n in range(len(oracle.rows)):
            before, after = record.before[n].tolist(), record.after[n].tolist()
            assert before == [int(event.before[n][b]) for b in range(len(before))], (record.event_id, n)
            assert after == [int(event.after[n][b]) for b in range(len(after))], (record.event_id, n)
            scores = record.scores[n].double().numpy()
            wanted = np.array([event.ranked[n].get(b, 0.0) for b in range(len(scores))])
            np.testing.assert_allclose(scores, wanted, atol=tolerance, rtol=tolerance)
    for step, (mine, theirs) in enumerate(zip(drive.outputs, outputs, strict=True)):
        for layer in range(drive.layers):
            np.testing.assert_allclose(
                mine[layer].double().numpy(), theirs[layer], atol=tolerance, rtol=tolerance, err_msg=f"step {step}"
            )
    for view, row in zip(drive.rows(), oracle.rows, strict=True):
        entries = {**view.live, **view.shadows}
        assert set(entries) == set(row.entries)
        for block, slot in entries.items():
            keys, values = view.codes(slot)
            for (kind, head, line, group), codes in row.entries[block].codes.items():
                local = row.heads.index(head)
                if kind == "key":
                    assert keys[local, line].tolist() == codes
                else:
                    assert values[local, line, group * len(codes) : (group + 1) * len(codes)].tolist() == codes


CASES: dict[str, tuple[dict[str, Any], dict[str, Any], list[int]]] = {
    "default": ({}, {}, STEPS),
    "int4": ({"bits": 4}, {}, STEPS),
    "kv_head": ({"score_scope": "kv_head"}, {}, STEPS),
    "decayed": ({"ranker": "decayed", "decay_half_life": 6.0}, {}, STEPS),
    "p_norm": ({"ranker": "p_norm", "norm_p": 3.0}, {}, STEPS),
    "key_norm small": ({"ranker": "key_norm"}, {}, STEPS),
    "key_norm large": ({"ranker": "key_norm", "key_norm_sign": 1}, {}, STEPS),
    "key_norm kv_head": ({"ranker": "key_norm", "score_scope": "kv_head"}, {}, STEPS),
    "age": ({"age_normalised": True}, {}, STEPS),
    "no promotion": ({"promotion": False}, {}, STEPS),
    "two tiers": ({"quant_share": 0.0}, {}, STEPS),
    "no full": ({"quant_share": 1.0}, {}, STEPS),
    "value groups": ({"value_group_size": 16, "bits": 4}, {"dim": 32}, STEPS),
    "small value groups": ({"value_group_size": 4}, {}, STEPS),
    "interval 2": ({"routing_interval": 8, "kv_budget": 0.6}, {}, STEPS),
    "interval 3": ({"routing_interval": 12, "local_tokens": 8, "kv_budget": 0.8}, {}, STEPS),
    "half": ({"kv_dtype": "float16"}, {}, STEPS),
    "no sink": ({"sink_tokens": 0}, {}, STEPS),
    "sink 9": ({"sink_tokens": 9, "kv_budget": 0.6}, {}, STEPS),
    "window 1": ({"window_size": 1, "quant_share": 0.0, "local_tokens": 3}, {}, STEPS),
    "window 2": ({"window_size": 2, "bits": 4, "local_tokens": 4}, {}, STEPS),
    "window 8": ({"window_size": 8, "local_tokens": 8, "kv_budget": 0.8}, {}, STEPS),
    "window 16": ({"window_size": 16, "local_tokens": 16, "planned_new_tokens": 100, "kv_budget": 0.6}, {},
                  [90, *[1] * 40]),
    "window 32": ({"window_size": 32, "local_tokens": 32, "planned_new_tokens": 200, "kv_budget": 0.6}, {},
                  [200, *[1] * 40]),
    "softcap": ({}, {"softcap": 2.0}, STEPS),
    "last queries": ({"prefill_queries": 5}, {}, STEPS),
    "last queries, chunked": ({"prefill_queries": 5}, {}, [16, 3, 16, 3, 2, *[1] * 22]),
    "last queries, decayed": ({"prefill_queries": 7, "ranker": "decayed"}, {}, [30, 4, 6, *[1] * 22]),
    "chunked": ({}, {}, [13, 14, 13, *[1] * 22]),
    "padded": ({"kv_budget": 0.6}, {"pads": (0, 6, 11)}, STEPS),
    "padded kv_head": ({"kv_budget": 0.6, "score_scope": "kv_head"}, {"pads": (5, 0)}, STEPS),
    "padded no sink": ({"kv_budget": 0.6, "sink_tokens": 0}, {"pads": (5, 0)}, STEPS),
    "one token": ({"kv_budget": 0.9, "planned_new_tokens": 45}, {}, [1] * 46),
    "short": ({"kv_budget": 0.9, "planned_new_tokens": 45}, {}, [2, *[1] * 40]),
    "aligned": ({}, {}, [41, *[1] * 21]),
    "groups 1": ({}, {"groups": 1}, STEPS),
    "groups 3": ({}, {"groups": 3}, STEPS),
    "groups 7, one KV head": ({}, {"groups": 7, "kv_heads": 1}, STEPS),
}  # fmt: skip


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", CASES)
def test_equals_the_oracle(case: str, backend: str) -> None:
    changes, shape, steps = CASES[case]
    if unavailable(backend, "cpu", shape.get("dim", 16), changes.get("value_group_size")) is not None:
        pytest.skip("the compiled kernel reads groups of 16 channels")
    drive = Drive(settings_of(**changes, backend=backend), seed=3, **shape)
    for tokens in steps:
        drive.step(tokens)
        if drive.cache.state.store is not None:
            check_bytes(drive.cache)
            check_prefixes(drive.cache)
    compare(drive, case)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("scope", ["layer", "kv_head"])
def test_appends_equal_the_oracle(backend: str, scope: str) -> None:
    """Later turns, aligned and not, across several windows; capacities fixed from the start by absolute bytes."""
    config = settings_of(kv_budget_bytes=2 * 12_000, planned_new_tokens=200, backend=backend, score_scope=scope)
    drive = Drive(config, seed=5).run([20, 1, 1, 1, 9, 1, 2, 1, 1, 1, 1, 1, 12, 1, 5, 7, 1, 1, 1, 1, 1, 3, 1])
    compare(drive, f"appends {scope}")


@pytest.mark.parametrize("changes", [{"ranker": "decayed", "decay_half_life": 5.0}, {"prefill_queries": 3},
                                     {"routing_interval": 8}, {"prefill_routing": "chunk"}])  # fmt: skip
@pytest.mark.parametrize("backend", BACKENDS)
def test_appends_with_options_equal_the_oracle(changes: dict[str, Any], backend: str) -> None:
    config = settings_of(kv_budget_bytes=2 * 14_000, planned_new_tokens=200, backend=backend, **changes)
    drive = Drive(config, seed=6).run([20, 1, 1, 1, 9, 4, 6, 1, 2, 1, 1, 1, 1, 1, 12, 1, 5, 7, 1, 1, 1, 1])
    compare(drive, f"appends {changes}")


def test_every_kind_of_move_happens() -> None:
    """The oracle comparison would be empty if windows never came back: all seven moves occur."""
    drive = Drive(settings_of(quant_share=0.5), seed=3, layers=2, spread=2.0).run([40, *[1] * 60])
    moves = set()
    for record in drive.records:
        changed = record.before != record.after
        moves |= set(zip(record.before[changed].tolist(), record.after[changed].tolist(), strict=True))
    local, full, quant, evicted = (int(t) for t in (Tier.LOCAL, Tier.FULL, Tier.QUANT, Tier.EVICTED))
    allowed = {(local, full), (local, quant), (local, evicted), (full, quant), (quant, full), (quant, evicted)}
    assert moves - {(full, evicted)} == allowed


@settings(max_examples=30)
@given(data=st.data())
def test_no_position_is_lost_or_doubled(data: st.DataObject) -> None:
    """Every position is in exactly one of sink, local, Full, Quant, Evicted, and its K and V are its own."""
    window = data.draw(st.sampled_from([1, 2, 4, 8]), "window")
    sink = data.draw(st.integers(0, 11), "sink")
    local = window * data.draw(st.integers(1, 3), "local")
    prompt = data.draw(st.integers(2, 70), "prompt")
    interval = window * data.draw(st.sampled_from([1, 1, 2]), "interval")
    q = 0.0 if window < 4 else data.draw(st.sampled_from([0.0, 0.3, 0.7, 1.0]), "q")
    appends = data.draw(st.lists(st.integers(1, 3 * window), max_size=3), "appends")
    pads = data.draw(st.sampled_from([(0,), (0, 1), (3, 0)]), "pads")
    scope = data.draw(st.sampled_from(["layer", "kv_head"]), "scope")
    pads = tuple(min(pad, prompt - 1) for pad in pads)
    config = QEvictConfig(
        window_size=window,
        sink_tokens=sink,
        local_tokens=local,
        routing_interval=interval,
        quant_share=q,
        kv_budget_bytes=2 * (2 * 2 * 16 * 4 * (sink + local + interval + 6 * window) + 900),
        planned_new_tokens=200,
        backend=data.draw(st.sampled_from(BACKENDS), "backend"),
        score_scope=scope,
    )
    drive = Drive(config, seed=1, pads=pads)
    evicted: list[set[int]] = []
    for tokens in [prompt, 1, *[n for append in appends for n in (append, 1, 1)], *[1] * (2 * window + 3)]:
        drive.feed(encoded(drive, tokens))
        if drive.cache.state.staging is None:
            conserve(drive)
            check_bytes(drive.cache)
            check_prefixes(drive.cache)
            now = [{b for b, tier in enumerate(view.board) if tier == Tier.EVICTED} for view in drive.rows()]
            assert not evicted or all(old <= new for old, new in zip(evicted, now, strict=True)), "an id came back"
            evicted = now
    assert [drive.cache.get_seq_length(layer) for layer in range(2)] == [drive.columns] * 2


def encoded(drive: Drive, tokens: int) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Values that say which layer, row, head and column they belong to, in channels that INT2 keeps exactly."""
    new = drive.draw(tokens)
    columns = torch.arange(drive.columns, drive.columns + tokens)
    for layer, (_, _, v) in enumerate(new):
        marks = torch.zeros_like(v)
        for bit in range(9):
            marks[..., bit] = ((columns >> bit) & 1).float()
        marks[..., 9] = torch.arange(drive.kv_heads).view(1, -1, 1) % 2
        marks[..., 10] = torch.arange(drive.batch).view(-1, 1, 1) % 2
        marks[..., 11] = layer % 2
        marks[..., 12], marks[..., 13] = 0.0, 1.0
        v.copy_(marks)
    return new


def conserve(drive: Drive) -> None:
    state, store = drive.cache.state, drive.cache.state.pool
    keys = [torch.cat([step[layer][1] for step in drive.seen], 2) for layer in range(drive.layers)]
    for view in drive.rows():
        layer, rest = divmod(view.n, drive.batch * state.shape.groups)
        row, group = divmod(rest, state.shape.groups)
        heads = list(range(group * state.shape.heads, (group + 1) * state.shape.heads))
        arena, live, shadows = view.arena, view.live, view.shadows
        assert not set(arena) & set(live), "a block lies in both tiers"
        assert set(shadows) <= set(arena), "a shadow without its window"
        board = view.board + [Tier.LOCAL] * (state.grid.num_blocks(drive.columns) - len(view.board))
        for column in range(drive.pads[row], drive.columns):
            block = state.grid.block_of(column)
            inside = column - state.grid.first_column(block)
            where = board[block] if board[block] != Tier.EMPTY else Tier.LOCAL
            if where == Tier.EVICTED:
                assert block not in arena and block not in live
                continue
            assert (block in live) == (where == Tier.QUANT)
            for local, head in enumerate(heads):
                if block in arena:
                    value = store.arena_value[view.n, local, arena[block], inside]
                    if block not in shadows:
                        assert torch.equal(store.arena_key[view.n, local, arena[block], inside],
                                           keys[layer][row, head, column])  # fmt: skip
                else:
                    positions = store.columns(torch.tensor([block])) - drive.pads[row]
                    n, slot = torch.tensor([view.n]), torch.tensor([live[block]])
                    value = store.dequantized(n, slot, positions, state.rope)[1][0, local, inside]
                mark = value.round().int().tolist()
                assert sum(mark[bit] << bit for bit in range(9)) == column
                assert mark[9:14] == [head % 2, row % 2, layer % 2, 0, 1]
        newest = state.grid.aged_blocks(drive.columns, store.plans[0].local_tokens)
        newest = max(newest, state.grid.block_of(drive.pads[row]))
        for block in range(newest, state.grid.num_blocks(drive.columns)):
            assert block in arena, "a local token was dropped"
