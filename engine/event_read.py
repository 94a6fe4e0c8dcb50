"""What the host learns from the device at one routing event: everything in one transfer.

Lists of moved windows need their lengths, the state needs to know how full the pools are, an evicted window must not
come back, and a trace wants the board. All of it is packed on the device and read once, so that an event makes the
host wait once, however many layers there are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True, slots=True)
class EventRead:
    """One event on the host.

    Attributes:
        sizes: moved windows of each kind, as `MovePlan.lists` wants them.
        occupied: arena blocks, live entries and shadows of every decision row, int64 [3, N].
        came_back: an evicted window is in a tier again.
        boards: the tensors of the record, now on the host.
    """

    sizes: list[int]
    occupied: NDArray[np.int64]
    came_back: bool
    boards: tuple[Tensor, ...]


def read_event(
    sizes: Tensor, occupied: Sequence[Tensor], came_back: Tensor, boards: Sequence[Tensor] = ()
) -> EventRead:
    """Reads a routing event.

    Args:
        sizes: int64. occupied: three counts, int64 [N] each. came_back: bool [].
        boards: float32 and uint8 tensors that a trace wants, those of wider numbers first.
    """
    numbers = torch.cat([sizes, came_back.long()[None], *occupied])
    parts = [numbers, *boards]
    raw = torch.cat([part.contiguous().flatten().view(torch.uint8) for part in parts]).cpu()
    flat = raw.numpy()
    lengths = [part.numel() * part.element_size() for part in parts]
    starts = np.cumsum([0, *lengths])
    found = flat[: lengths[0]].view(np.int64)
    count = sizes.shape[0]
    read = [
        raw[begin:end].view(board.dtype).view(board.shape)
        for board, begin, end in zip(boards, starts[1:-1].tolist(), starts[2:].tolist(), strict=True)
    ]
    return EventRead(
        [int(size) for size in found[:count]],
        found[count + 1 :].reshape(3, -1).copy(),
        bool(found[count]),
        tuple(read),
    )
