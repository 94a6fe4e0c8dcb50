"""Packing of small codes, and min-max grids, for quantizing rivals.

Planar: an axis of n codes is cut into equal planes, and a byte holds one code of each plane, so that
unpacking writes whole planes and never interleaves. 2 and 4 bits take one byte for 4 and 2 planes; 3
and 5 bits take 3 and 5 bytes for 8 planes. Byte counts equal n · bits / 8.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.quant import encode, min_max_grid


def planes(bits: int) -> tuple[int, int]:
    """(codes, bytes) of one packing unit."""
    return {1: (8, 1), 2: (4, 1), 3: (8, 3), 4: (2, 1), 5: (8, 5), 8: (1, 1)}[bits]


def pack(codes: Tensor, bits: int, dim: int) -> Tensor:
    """uint8 codes to bytes along `dim`, whose length must be a multiple of `planes(bits)[0]`."""
    count, size = planes(bits)
    dim = dim % codes.dim()
    split = codes.unflatten(dim, (count, codes.shape[dim] // count))
    shape = list(split.shape)
    shape[dim] = size
    out = torch.zeros(shape, dtype=torch.uint8, device=codes.device)
    for plane in range(count):
        byte, inside = divmod(plane * bits, 8)
        part = split.select(dim, plane)
        out.select(dim, byte).bitwise_or_(part << inside)
        if inside + bits > 8:
            out.select(dim, byte + 1).bitwise_or_(part >> (8 - inside))
    return out.flatten(dim, dim + 1)


def unpack(
    packed: Tensor, bits: int, dim: int, dtype: torch.dtype = torch.float32, out: Tensor | None = None
) -> Tensor:
    """Codes from bytes along `dim`, as `dtype`; written into `out` where it is given, a view or not."""
    count, size = planes(bits)
    dim = dim % packed.dim()
    split = packed.unflatten(dim, (size, packed.shape[dim] // size))
    if out is None:
        shape = list(packed.shape)
        shape[dim] = split.shape[dim + 1] * count
        out = torch.empty(shape, dtype=dtype, device=packed.device)
    target = out.unflatten(dim, (count, split.shape[dim + 1]))
    for plane in range(count):
        byte, inside = divmod(plane * bits, 8)
        part = split.select(dim, byte) >> inside
        if inside + bits > 8:
            part = part | (split.select(dim, byte + 1) << (8 - inside))
        # The topmost code of a byte has nothing above it to mask away.
        target.select(dim, plane).copy_(part if inside + bits == 8 else part & (2**bits - 1))
    return out


def minmax(values: Tensor, bits: int, dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """Asymmetric min-max along `dim`, against the grid as stored.

    Args:
        values: float32.

    Returns:
        uint8 codes like `values`; scale and zero, float16, without `dim`. The error is at most half a scale.
    """
    scale, zero = min_max_grid(values.amin(dim), values.amax(dim), bits)
    return encode(values, scale.unsqueeze(dim), zero.unsqueeze(dim), bits), scale, zero


def without_padding(states: Tensor, pads: list[int], first_column: int = 0) -> Tensor:
    """Keys or values [B, H, T, d] whose padding repeats the row's first real token, so that it widens no grid."""
    if not any(pad > first_column for pad in pads):
        return states
    out = states.clone()
    for row, pad in enumerate(pads):
        skip = pad - first_column
        if skip > 0:
            out[row, :, :skip] = states[row, :, min(skip, states.shape[2] - 1) :][:, :1]
    return out
