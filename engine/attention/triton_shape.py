"""What the Triton kernels are compiled for: their constants, tile sizes and warps.

The one place that both the launch and a build without a device take them from. Knows numbers only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

MASS_TILE = 128
"""Slots whose masses one program of `merge` adds."""
MAX_PARTS = 128
"""Most partial results of a head."""
SMALLEST = 16
"""Least edge of a tile in a tensor-core product."""


def power_of_two(number: int) -> int:
    """The next power of two, at least 1."""
    return 1 << max(0, number - 1).bit_length()


@dataclass(frozen=True, slots=True)
class KernelShape:
    """Constants of a run.

    Attributes:
        group: query heads per KV head. heads_per_row: KV heads of a decision row.
        half: r, half the number of rotated channels.
        masses: whether windows are scored in the step.
        wide_arena: products over the arena in float32. wide_ledger: those over codes too, else in float16.
        assembly: unpack codes by PTX; only NVIDIA's compiler takes it.
        stages: tiles of codes in flight, the one in use included.
    """

    group: int
    head_dim: int
    heads_per_row: int
    window: int
    grid_offset: int
    half: int
    rope_scale: float
    bits: int
    value_groups: int
    capped: bool
    masses: bool
    wide_arena: bool
    wide_ledger: bool
    assembly: bool
    stages: int = 2

    @property
    def padded_dim(self) -> int:
        return max(SMALLEST, power_of_two(self.head_dim))

    @property
    def arena_tokens(self) -> int:
        """Tokens of an arena tile: a multiple of every window size, smaller where a tile is wide."""
        narrow = self.padded_dim * (2 if self.wide_arena else 1) <= 256
        return max(64 if narrow else 32, self.window)

    @property
    def ledger_windows(self) -> int:
        """Windows of a ledger tile: a multiple of the 16 lanes."""
        return 16 if self.wide_ledger or self.padded_dim > 128 or self.straight else 32

    @property
    def chunk(self) -> int:
        """Tokens of a window in one softmax round: their logits stay in registers."""
        tight = self.wide_ledger or (self.window > 8 and self.padded_dim > 64)
        return min(self.window, 4 if tight else 8)

    @property
    def straight(self) -> int:
        """Padded number of channels that carry no position; 0 where all do."""
        rest = self.head_dim - 2 * self.half
        return max(SMALLEST, power_of_two(rest)) if rest else 0

    def _heads(self) -> dict[str, Any]:
        return {
            "G": self.group,
            "GP": power_of_two(self.group),
            "D": self.head_dim,
            "DP": self.padded_dim,
            "HD": self.heads_per_row,
        }

    def _grid(self) -> dict[str, Any]:
        return {"OMEGA": self.window, "OFFSET": self.grid_offset}

    def _pairs(self) -> dict[str, Any]:
        return {"HALF": self.half, "HP": max(SMALLEST, power_of_two(self.half))}

    def prepare(self) -> dict[str, Any]:
        """Constants of `prepare`."""
        return {**self._heads(), **self._grid(), **self._pairs(), "ROPE_SCALE": self.rope_scale}

    def arena(self) -> dict[str, Any]:
        """Constants of `arena`."""
        return {
            **self._heads(),
            **self._grid(),
            "TOKENS": self.arena_tokens,
            "WIDE": self.wide_arena,
            "CAPPED": self.capped,
            "MASS": self.masses,
        }

    def ledger(self) -> dict[str, Any]:
        """Constants of `ledger`."""
        return {
            **self._heads(),
            **self._grid(),
            **self._pairs(),
            "RP": self.straight,
            "BITS": self.bits,
            "GV": self.value_groups,
            "WINDOWS": self.ledger_windows,
            "CHUNK": self.chunk,
            "CAPPED": self.capped,
            "MASS": self.masses,
            "ASM": self.assembly,
        }

    def merge(self) -> dict[str, Any]:
        """Constants of `merge`."""
        return {**self._heads(), "PP": MAX_PARTS, "TILE": MASS_TILE, "MASS": self.masses}

    def launch(self, kernel: str) -> dict[str, Any]:
        """Constants and options of the kernel of that name."""
        constants: dict[str, Any] = getattr(self, kernel)()
        return {**constants, **self.options(kernel)}

    def options(self, kernel: str) -> dict[str, Any]:
        """How a kernel is compiled: warps, stages, fused multiply-adds."""
        broad = self.padded_dim > (64 if self.wide_ledger else 128)
        warps = {"prepare": 1, "ledger": 8 if broad else 4}.get(kernel, 4)
        stages = self.stages if kernel == "ledger" else 2
        return {"num_warps": warps, "num_stages": stages, "enable_fp_fusion": True}
