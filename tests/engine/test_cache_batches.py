"""Rows of a batch do not feel each other; rows can be kept, repeated and reordered."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from engine.cache import QEvictCache
from engine.config import QEvictConfig
from engine.errors import CacheUseError
from tests.engine.drive import BACKENDS, Drive, check_bytes, check_prefixes, shared_model

BASE: dict[str, Any] = {
    "window_size": 4,
    "sink_tokens": 5,
    "local_tokens": 8,
    "kv_budget": 0.5,
    "planned_new_tokens": 40,
}
STEPS = [47, *[1] * 30, 6, *[1] * 9]


def drive_of(pads: tuple[int, ...], row_seeds: tuple[int, ...], steps: list[int], **changes: Any) -> Drive:
    dtype = changes.pop("dtype", torch.float32)
    return Drive(QEvictConfig(**{**BASE, **changes}), pads=pads, row_seeds=row_seeds, dtype=dtype).run(steps)


def same_row(batch: Drive, row: int, alone: Drive, tolerance: float = 2e-5) -> None:
    """Row `row` of a batch decided, stored and answered what it does alone."""
    for mine, theirs in zip(batch.outputs, alone.outputs, strict=True):
        for a, b in zip(mine, theirs, strict=True):
            torch.testing.assert_close(a[row, :, -1], b[0, :, -1], atol=tolerance, rtol=1e-3)
    groups = batch.cache.state.shape.groups
    rows = [(layer * batch.batch + row) * groups + group for layer in range(batch.layers) for group in range(groups)]
    for mine, theirs in zip(batch.records, alone.records, strict=True):
        assert torch.equal(mine.after[rows], theirs.after)
        torch.testing.assert_close(mine.scores[rows], theirs.scores, atol=1e-4, rtol=1e-4)
    left, right = batch.cache.state.pool, alone.cache.state.pool
    assert left.plans[row] == right.plans[0]
    mine, theirs = batch.rows(), alone.rows()
    for n, single in zip(rows, theirs, strict=True):
        assert {b: mine[n].raw_entry(s) for b, s in mine[n].live.items()} == {
            b: single.raw_entry(s) for b, s in single.live.items()
        }


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("changes", [{}, {"score_scope": "kv_head"}, {"quant_share": 0.0}, {"ranker": "decayed"}])
@pytest.mark.parametrize("pads", [(0, 0), (9, 0), (0, 13, 4), (3, 3)])
def test_a_row_gives_what_it_gives_alone(pads: tuple[int, ...], changes: dict[str, Any], backend: str) -> None:
    """Same padding, whatever the neighbours; an unpadded row in a padded batch gives what it gives alone."""
    seeds = tuple(range(20, 20 + len(pads)))
    batch = drive_of(pads, seeds, STEPS, backend=backend, **changes)
    for row, pad in enumerate(pads):
        same_row(batch, row, drive_of((pad,), (seeds[row],), STEPS, backend=backend, **changes))


def test_a_row_gives_what_it_gives_alone_in_float64() -> None:
    pads = (5, 0, 11)
    batch = drive_of(pads, (1, 2, 3), STEPS, backend="eager", dtype=torch.float64)
    for row, pad in enumerate(pads):
        alone = drive_of((pad,), (row + 1,), STEPS, backend="eager", dtype=torch.float64)
        same_row(batch, row, alone, tolerance=1e-6)


def test_other_neighbours_change_nothing() -> None:
    one = drive_of((6, 0), (1, 2), STEPS, backend="sdpa")
    two = drive_of((6, 17), (1, 99), STEPS, backend="sdpa")
    for mine, theirs in zip(one.outputs, two.outputs, strict=True):
        torch.testing.assert_close(mine[1][0, :, -1], theirs[1][0, :, -1], atol=2e-5, rtol=1e-3)
    assert torch.equal(one.cache.board[0], two.cache.board[0])
    assert not torch.equal(one.cache.board[1], two.cache.board[1])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("sink", [0, 3, 4, 5, 9])
@pytest.mark.parametrize("pad", [1, 4, 7, 8])
def test_pads_are_never_scored_and_the_sink_is_the_rows_own(pad: int, sink: int, backend: str) -> None:
    drive = drive_of((pad, 0), (1, 2), [47, *[1] * 21], sink_tokens=sink, backend=backend, kv_budget=0.7)
    state = drive.cache.state
    grid = state.grid
    padded = drive.rows()[0]
    first_real = grid.block_of(pad)
    assert all(tier == 5 for tier in padded.board[:first_real])
    assert not set(padded.arena) & set(range(first_real))
    own_sink = {grid.block_of(c) for c in range(pad, pad + sink)}
    assert own_sink <= {b for b, tier in enumerate(padded.board) if tier == 0}
    if (pad + grid.offset) % 4:
        assert padded.board[first_real] == 0, "a block that is partly pad must stay in full precision"
    for record in drive.records:
        assert float(record.scores[0, : first_real + 1].abs().sum()) == 0.0 or pad % 4 == 0 or sink == 0
    plans = state.pool.plans
    assert plans[0].sink_blocks == plans[1].sink_blocks + 1
    assert plans[0].total_bytes == plans[1].total_bytes and plans[0].persistent_bytes <= plans[0].total_bytes


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("pads", [(0, 0, 0), (9, 0, 4)])
def test_rows_can_be_kept_repeated_and_reordered(pads: tuple[int, ...], backend: str) -> None:
    """What is chosen goes on exactly as it would have; the longest row may be the one that leaves."""
    for order in ([2], [1], [1, 1], [2, 0, 1, 1]):
        drive = drive_of(pads, (1, 2, 3), [47, *[1] * 17], backend=backend)
        wanted = drive_of(tuple(pads[i] for i in order), tuple((1, 2, 3)[i] for i in order), [47, *[1] * 17],
                          backend=backend)  # fmt: skip
        for layer in drive.cache.layers:
            layer.reorder_cache(torch.tensor(order))
        drive.pads, drive.draws = wanted.pads, wanted.draws
        for _ in range(14):
            mine, theirs = drive.step(1), None
            wanted.columns = drive.columns - 1
            theirs = wanted.feed(drive.seen[-1])
            for a, b in zip(mine, theirs, strict=True):
                torch.testing.assert_close(a, b, atol=2e-5, rtol=1e-3)
        assert torch.equal(drive.cache.board, wanted.cache.board)
        check_prefixes(drive.cache)
        check_bytes(drive.cache)


def test_row_operations_of_transformers() -> None:
    drive = drive_of((0, 4), (1, 2), [47, 1, 1], backend="sdpa")
    boards = drive.cache.board.view(2, 2, -1).clone()
    drive.cache.batch_repeat_interleave(2)
    assert drive.cache.batch == 4 and drive.cache.state.pads == [0, 0, 4, 4]
    assert torch.equal(drive.cache.board.view(2, 4, -1), boards.repeat_interleave(2, 1))
    drive.cache.batch_select_indices(torch.tensor([3, 0]))
    assert drive.cache.state.pads == [4, 0]
    assert torch.equal(drive.cache.board.view(2, 2, -1), boards.flip(1))


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_can_change_while_a_later_turn_is_staged(backend: str) -> None:
    order = [1, 0, 1]
    drive = drive_of((3, 0), (1, 2), [47, 1, 1, 1, 9], backend=backend)
    wanted = drive_of(tuple((3, 0)[i] for i in order), tuple((1, 2)[i] for i in order), [47, 1, 1, 1, 9],
                      backend=backend)  # fmt: skip
    drive.cache.reorder_cache(torch.tensor(order))
    drive.pads, drive.draws = wanted.pads, wanted.draws
    for _ in range(9):
        mine = drive.step(1)
        wanted.columns = drive.columns - 1
        for a, b in zip(mine, wanted.feed(drive.seen[-1]), strict=True):
            torch.testing.assert_close(a, b, atol=2e-5, rtol=1e-3)
    assert torch.equal(drive.cache.board, wanted.cache.board)


def test_a_mask_that_is_not_left_padding_is_refused() -> None:
    cache = QEvictCache(shared_model(2, 2, 2, 16), QEvictConfig(**BASE))
    q, k = torch.randn(1, 4, 6, 16), torch.randn(1, 2, 6, 16)
    layer = cache.layers[0]
    with pytest.raises(CacheUseError, match="left"):
        layer.attend(torch.nn.Identity(), q, layer.update(k, k)[0], k, torch.tensor([[1, 1, 1, 1, 1, 0]]),
                     scale=0.25, softcap=None, position_ids=None)  # fmt: skip


def test_positions_without_position_ids_are_columns() -> None:
    """A plain loop that passes a mask and no position_ids: the model counts columns, and so does un-rotation."""
    cache = QEvictCache(shared_model(2, 2, 2, 16), QEvictConfig(**BASE))
    q, k = torch.randn(1, 4, 6, 16), torch.randn(1, 2, 6, 16)
    layer = cache.layers[0]
    layer.attend(torch.nn.Identity(), q, layer.update(k, k)[0], k, torch.tensor([[0, 0, 1, 1, 1, 1]]),
                 scale=0.25, softcap=None, position_ids=None)  # fmt: skip
    assert cache.state.shift.tolist() == [0] and cache.state.pads == [2]
