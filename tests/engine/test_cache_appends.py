"""Chunked prefill, later turns, appends of every length, re-planning."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from engine.config import QEvictConfig
from tests.engine.drive import BACKENDS, Drive, check_bytes, check_prefixes

BASE: dict[str, Any] = {
    "window_size": 4,
    "sink_tokens": 5,
    "local_tokens": 8,
    "kv_budget": 0.45,
    "planned_new_tokens": 40,
}
OMEGA, SINK = 4, 5
LENGTHS = [0, 1, 2, OMEGA - 1, OMEGA, OMEGA + 1, SINK, 2 * OMEGA, 2 * OMEGA + 3, 3 * OMEGA]


def parts_of(new: list[tuple[torch.Tensor, ...]], cuts: list[int]) -> list[list[tuple[torch.Tensor, ...]]]:
    out, at = [], 0
    for length in cuts:
        out.append([tuple(x[:, :, at : at + length] for x in layer) for layer in new])
        at += length
    return out


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("changes", [{}, {"score_scope": "kv_head"}, {"ranker": "decayed"}, {"prefill_queries": 7},
                                     {"kv_dtype": "float16"}, {"ranker": "key_norm"}])  # fmt: skip
@pytest.mark.parametrize("pads", [(0,), (6, 0)])
def test_chunked_prefill_equals_one_shot(pads: tuple[int, ...], changes: dict[str, Any], backend: str) -> None:
    config = QEvictConfig(**{**BASE, "backend": backend, **changes})
    whole = Drive(config, pads=pads, seed=5)
    prompt = whole.draw(60)
    answer = whole.feed(prompt)
    whole.run([1] * 13)
    for cuts in ([17, 2, 30, 11], [20, 20, 20], [58, 2]):
        parts = Drive(config, pads=pads, seed=5)
        outputs = [parts.feed(part) for part in parts_of(prompt, cuts)]  # type: ignore[arg-type]
        for layer in range(2):
            joined = torch.cat([out[layer] for out in outputs], 2)
            for row, pad in enumerate(pads):
                torch.testing.assert_close(joined[row, :, pad:], answer[layer][row, :, pad:], atol=2e-5, rtol=1e-3)
        for step in whole.seen[1:]:
            parts.feed(step)
        for mine, theirs in zip(parts.records, whole.records, strict=True):
            assert mine.columns == theirs.columns and torch.equal(mine.after, theirs.after)
            torch.testing.assert_close(mine.scores, theirs.scores, atol=1e-4, rtol=1e-4)
        for a, b in zip(parts.outputs[-1], whole.outputs[-1], strict=True):
            torch.testing.assert_close(a, b, atol=2e-5, rtol=1e-3)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_later_turn_in_chunks_equals_one_shot(backend: str) -> None:
    config = QEvictConfig(**BASE, backend=backend)
    whole = Drive(config, seed=5).run([41, 1, 1, 1, 1, 1])
    turn = whole.draw(23)
    whole.feed(turn)
    whole.run([1] * 9)
    parts = Drive(config, seed=5)
    for step in whole.seen[:6]:
        parts.feed(step)
    for part in parts_of(turn, [3, 12, 8]):
        parts.feed(part)  # type: ignore[arg-type]
    for step in whole.seen[7:]:
        parts.feed(step)
    for mine, theirs in zip(parts.records, whole.records, strict=True):
        assert mine.columns == theirs.columns and torch.equal(mine.after, theirs.after)
    for a, b in zip(parts.outputs[-1], whole.outputs[-1], strict=True):
        torch.testing.assert_close(a, b, atol=2e-5, rtol=1e-3)


def test_compressing_between_chunks_bounds_the_peak() -> None:
    """ "chunk" keeps one chunk staged; "end" the whole prompt. They answer differently below a budget of 1."""
    made = {}
    for how in ("end", "chunk"):
        drive = Drive(QEvictConfig(**BASE, backend="sdpa", prefill_routing=how), seed=5)
        for part in parts_of(drive.draw(160), [16] * 10):
            drive.feed(part)  # type: ignore[arg-type]
        drive.step(1)
        made[how] = drive
    block = 2 * 2 * 2 * OMEGA * 16 * 4 + 2 * 4  # K and V of two layers, two heads; and a score each
    assert made["end"].cache.prefill_peak_bytes == block * 41
    assert made["chunk"].cache.prefill_peak_bytes <= block * (16 // OMEGA + 2)
    # The first decoded token completes a window, and routes once more.
    assert len(made["end"].records) == 2 and len(made["chunk"].records) == 11
    assert not torch.allclose(made["end"].outputs[-1][0], made["chunk"].outputs[-1][0], atol=1e-4)
    check_bytes(made["chunk"].cache)
    check_prefixes(made["chunk"].cache)


def test_compressing_between_chunks_is_exact_at_a_whole_budget() -> None:
    made = []
    for how in ("end", "chunk"):
        config = QEvictConfig(**{**BASE, "kv_budget": 1.0, "planned_new_tokens": 200, "prefill_routing": how})
        drive = Drive(config, seed=5)
        made.append(drive)
        for part in parts_of(drive.draw(80), [16] * 5):
            drive.feed(part)  # type: ignore[arg-type]
        drive.step(1)
    for mine, theirs in zip(made[0].outputs, made[1].outputs, strict=True):
        for a, b in zip(mine, theirs, strict=True):
            torch.testing.assert_close(a, b, atol=2e-5, rtol=1e-3)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("start", [SINK - 2, 46, 47])
def test_an_append_of_any_length_at_a_whole_budget(start: int, length: int, backend: str) -> None:
    """Aligned or not, before and after the sink is complete: equals attention over everything."""
    config = QEvictConfig(**{**BASE, "kv_budget": 1.0, "planned_new_tokens": 100, "backend": backend})
    drive = Drive(config, seed=6, layers=1).run([start, 1, 1, length, 1, length, length, 1, 1, 1, 1, 1])
    key, value = (torch.cat([step[0][i] for step in drive.seen], 2).double() for i in (1, 2))
    at = 0
    for step, (out,) in zip(drive.seen, drive.outputs, strict=True):
        query = step[0][0].double()
        tokens = query.shape[2]
        assert out.shape == query.shape
        if not tokens:
            continue
        logits = query @ key[:, :, : at + tokens].repeat_interleave(2, 1).transpose(-1, -2) / 4.0
        later = torch.arange(at + tokens)[None] > torch.arange(at, at + tokens)[:, None]
        wanted = logits.masked_fill(later, -torch.inf).softmax(-1) @ value[:, :, : at + tokens].repeat_interleave(2, 1)
        torch.testing.assert_close(out.double(), wanted, atol=5e-5, rtol=1e-3)
        at += tokens
    assert drive.cache.get_seq_length() == at == start + 8 + 3 * length


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("length", LENGTHS)
def test_many_turns_of_any_length_below_the_whole_budget(length: int, backend: str) -> None:
    drive = Drive(QEvictConfig(**BASE, backend=backend), seed=6)
    for tokens in [46, 1, 1, *[length, 1] * 4, *[1] * 9]:
        drive.step(tokens)
        assert all(bool(out.isfinite().all()) for out in drive.outputs[-1])
        if drive.cache.state.staging is None:
            check_bytes(drive.cache)
            check_prefixes(drive.cache)
            local = drive.cache.plan.local_tokens
            for view in drive.rows():
                kept = sum(block not in view.live and block in view.arena for block in view.arena) * OMEGA
                assert kept >= local
    assert drive.cache.get_seq_length() == 46 + 2 + 4 * (length + 1) + 9


def test_an_append_ages_several_windows_in_one_event() -> None:
    drive = Drive(QEvictConfig(**BASE, backend="sdpa"), seed=6).run([46, 1, 1, 3 * OMEGA, 1])
    last = next(record for record in drive.records if record.columns == 60)
    fresh = (last.before == 1) & (last.after != 1)
    assert int(fresh[0].sum()) == 3


def test_an_empty_append_changes_nothing() -> None:
    steps = [46, 1, 1, 1, 1, 1, 1, 1]
    plain = Drive(QEvictConfig(**BASE, backend="sdpa"), seed=6).run(steps)
    with_empty = Drive(QEvictConfig(**BASE, backend="sdpa"), seed=6).run([0, 46, 0, 1, 1, 0, 0, 1, 1, 1, 1, 1, 0])
    assert len(plain.records) == len(with_empty.records)
    assert torch.equal(plain.cache.board, with_empty.cache.board)
    for a, b in zip(plain.outputs[-1], with_empty.outputs[-2], strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("changes", [{}, {"kv_budget": 1.0}, {"quant_share": 0.0}])
def test_a_long_append_plans_anew_and_never_shrinks(changes: dict[str, Any]) -> None:
    drive = Drive(QEvictConfig(**{**BASE, "planned_new_tokens": 10, **changes}, backend="sdpa"), seed=6).run([50, 1])
    first = drive.cache.plan
    assert first.planned_tokens == 60
    drive.run([1] * 4)
    assert drive.cache.plan == first, "decoding plans nothing"
    drive.run([3, 1])
    assert drive.cache.plan.planned_tokens == 68
    drive.run([100, 1])
    last = drive.cache.plan
    assert last.planned_tokens == 169 and last.total_bytes > first.total_bytes
    assert last.full_capacity >= first.full_capacity and last.quant_capacity >= first.quant_capacity
    assert last.local_tokens == first.local_tokens
    check_bytes(drive.cache)


def test_absolute_bytes_are_never_planned_anew() -> None:
    config = QEvictConfig(**BASE, backend="sdpa", kv_budget_bytes=2 * 14_000)
    drive = Drive(config, seed=6).run([50, 1])
    first = drive.cache.plan
    drive.run([120, 1, 1])
    assert drive.cache.plan == first
    check_bytes(drive.cache)


@pytest.mark.parametrize("interval", [8, 12])
def test_a_longer_interval_holds_its_peak(interval: int) -> None:
    """The local region holds at most local_tokens + routing_interval, also after odd appends."""
    config = QEvictConfig(**{**BASE, "routing_interval": interval, "kv_budget": 0.7}, backend="sdpa")
    drive = Drive(config, seed=6)
    for tokens in [46, *[1] * 30, 3, *[1] * 20, 7, *[1] * 20]:
        drive.step(tokens)
        if drive.cache.state.staging is None:
            check_bytes(drive.cache)
            check_prefixes(drive.cache)
            grid = drive.cache.state.grid
            for view in drive.rows():
                tiers = view.board + [1] * (grid.num_blocks(drive.columns) - len(view.board))
                held = [b for b, tier in enumerate(tiers) if tier == 1]
                assert drive.columns - grid.first_column(min(held)) <= 8 + interval
    assert len(drive.records) < drive.columns / interval


def test_settle_ends_a_prompt_early_and_changes_nothing() -> None:
    config = QEvictConfig(**BASE, backend="sdpa")
    plain, settled = Drive(config, seed=6), Drive(config, seed=6)
    plain.run([46])
    settled.run([46])
    settled.cache.settle()
    assert len(settled.records) == 1 and not plain.records
    for drive in (plain, settled):
        drive.run([1] * 12)
    assert torch.equal(plain.cache.board, settled.cache.board)
    for a, b in zip(plain.outputs[-1], settled.outputs[-1], strict=True):
        assert torch.equal(a, b)
