"""The 4-bit codes of a GGUF file, taken out as they are: nothing is rounded and nothing is re-quantized.

Q4_1: blocks of 32 weights in 20 bytes, weight = d · code + m, with d and m in float16. Q4_0: 18 bytes, weight =
d · (code - 8). Other types have no codes here. Knows the blocks; knows neither models nor kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

BLOCK = 32
_BYTES = {"Q4_0": 18, "Q4_1": 20}

Reorder = Callable[[Any], Any]
"""Rearranges the rows of a 2D array, as the conversion of the same tensor to float32 does."""


def codes_of(name: str, type_name: str, data: NDArray[np.uint8], reorder: Reorder) -> dict[str, Tensor]:
    """The codes of one tensor under three names, or nothing where the type has none.

    Args:
        name: of the module, e.g. "model.layers.0.mlp.up_proj".
        type_name: GGUF's, e.g. "Q4_1". data: uint8 [out, bytes], as the file holds it.
        reorder: what the rows go through.

    Returns:
        `name`.codes uint8 [out, in / 2], two codes a byte, the earlier in the low half; `name`.scale and
        `name`.minimum float16 [out, in / 32].
    """
    size = _BYTES.get(type_name)
    if size is None:
        return {}
    rows = data.shape[0]
    blocks = np.ascontiguousarray(data).reshape(rows, -1, size)
    scale = _halves(blocks[:, :, 0:2])
    # Exact: a product with a power of two.
    minimum = _halves(blocks[:, :, 2:4]) if type_name == "Q4_1" else (scale * np.float16(-8.0)).astype(np.float16)
    nibbles = blocks[:, :, size - BLOCK // 2 :]
    # A block's first 16 weights are the low halves of its bytes, the last 16 the high halves.
    codes = np.concatenate([nibbles & 15, nibbles >> 4], -1).reshape(rows, -1)
    pairs = codes[:, 0::2] | (codes[:, 1::2] << 4)
    parts = {"codes": pairs, "scale": scale, "minimum": minimum}
    return {f"{name}.{key}": torch.from_numpy(np.ascontiguousarray(reorder(part))) for key, part in parts.items()}


def unpack(pairs: Tensor) -> Tensor:
    """Codes one a byte, uint8 [out, in], from two a byte."""
    return torch.stack([pairs & 15, pairs >> 4], -1).flatten(1)


def _halves(data: NDArray[np.uint8]) -> NDArray[np.float16]:
    return np.ascontiguousarray(data).view(np.float16)[..., 0]
