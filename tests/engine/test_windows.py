"""The grid against its definition, position by position."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given

from engine.windows import Grid

grids = st.builds(Grid, st.sampled_from([1, 2, 4, 8, 16, 32]), st.integers(0, 70))


@given(grids, st.integers(0, 2000))
def test_a_position_lies_in_its_window(grid: Grid, position: int) -> None:
    block = grid.block_of(position)
    window = grid.window_of(block)
    if position < grid.sink_tokens:
        assert window < 0 and block < grid.sink_blocks
    else:
        assert window == (position - grid.sink_tokens) // grid.window_size
    assert grid.first_column(block) <= position < grid.first_column(block) + grid.window_size
    if window >= 0:
        assert grid.first_column(block) == grid.sink_tokens + window * grid.window_size


@given(grids)
def test_the_sink_ends_on_a_block_border(grid: Grid) -> None:
    assert (grid.sink_tokens + grid.offset) % grid.window_size == 0
    assert 0 <= grid.offset < grid.window_size
    assert grid.sink_blocks * grid.window_size - grid.offset == grid.sink_tokens


@given(grids, st.integers(0, 400), st.integers(1, 6))
def test_counts_of_blocks(grid: Grid, length: int, local_windows: int) -> None:
    local = local_windows * grid.window_size
    begun = {grid.block_of(c) for c in range(length)}
    assert grid.num_blocks(length) == len(begun)
    whole = [b for b in begun if grid.first_column(b) + grid.window_size <= length]
    assert grid.complete_blocks(length) == len(whole)
    aged = [b for b in whole if grid.first_column(b) + grid.window_size <= length - local]
    assert grid.aged_blocks(length, local) == len(aged)
    windows = [b for b in aged if grid.window_of(b) >= 0]
    assert grid.max_history_windows(length, local) == len(windows)


@given(grids, st.integers(1, 3), st.integers(1, 5))
def test_an_event_falls_where_windows_age(grid: Grid, per_event: int, local_windows: int) -> None:
    """Every Ω tokens, aligned with the grid: exactly when one more window is aged (interval = Ω)."""
    local = local_windows * grid.window_size
    interval = per_event * grid.window_size
    lengths = range(local + grid.sink_tokens + 1, local + grid.sink_tokens + 8 * grid.window_size)
    for length in lengths:
        ages = grid.aged_blocks(length, local) > grid.aged_blocks(length - 1, local)
        if grid.ages_at(length, interval):
            assert ages
        if per_event == 1:
            assert grid.ages_at(length, interval) == ages
    assert not grid.ages_at(0, interval)


@pytest.mark.parametrize("sink, window, offset, blocks", [(5, 8, 3, 1), (0, 8, 0, 0), (8, 8, 0, 1), (9, 8, 7, 2)])
def test_by_hand(sink: int, window: int, offset: int, blocks: int) -> None:
    grid = Grid(window, sink)
    assert (grid.offset, grid.sink_blocks) == (offset, blocks)
