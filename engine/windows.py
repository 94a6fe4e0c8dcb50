"""The window grid: where positions, blocks and windows lie.

The grid is absolute: window w covers positions [sink + wΩ, sink + (w+1)Ω) and is never relabelled.
Storage counts in *blocks* of Ω columns, shifted so that the sink fills the tail of its last block:
then every window is exactly one block, and ageing moves no bytes. In a left-padded batch the grid is
anchored on the batch's columns. Knows no tensors of keys or values.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Grid:
    """Arithmetic of columns, blocks and windows.

    Args:
        window_size: Ω, columns per block.
        sink_tokens: first tokens, never evicted.
    """

    window_size: int
    sink_tokens: int

    @property
    def offset(self) -> int:
        """Unused columns at the front of block 0, so that the sink ends on a block border."""
        return -self.sink_tokens % self.window_size

    @property
    def sink_blocks(self) -> int:
        """Blocks that hold the sink of an unpadded row: ceil(sink / Ω)."""
        return -(-self.sink_tokens // self.window_size)

    def block_of(self, column: int) -> int:
        """The block that holds `column`."""
        return (column + self.offset) // self.window_size

    def first_column(self, block: int) -> int:
        """First column of `block`; negative only for block 0, whose front is unused."""
        return block * self.window_size - self.offset

    def num_blocks(self, seq_len: int) -> int:
        """Blocks that have begun when `seq_len` columns are known."""
        return -(-(seq_len + self.offset) // self.window_size) if seq_len > 0 else 0

    def complete_blocks(self, seq_len: int) -> int:
        """Blocks that are whole when `seq_len` columns are known."""
        return (seq_len + self.offset) // self.window_size

    def aged_blocks(self, seq_len: int, local_tokens: int) -> int:
        """Number of leading blocks that lie wholly outside the `local_tokens` most recent columns."""
        return max(0, (seq_len - local_tokens + self.offset) // self.window_size)

    def ages_at(self, seq_len: int, interval: int) -> bool:
        """Whether a routing event is due once `seq_len` columns are known, in single-token decoding."""
        return seq_len > 0 and (seq_len + self.offset) % interval == 0

    def window_of(self, block: int) -> int:
        """Window id of a block; negative for sink blocks."""
        return block - self.sink_blocks

    def max_history_windows(self, seq_len: int, local_tokens: int) -> int:
        """Most windows that can have aged by `seq_len` columns."""
        return max(0, self.aged_blocks(seq_len, local_tokens) - self.sink_blocks)
