"""What masks and position ids say about a batch: left padding, and how columns differ from positions.

Knows no cache; refuses everything that is not plain left padding.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.errors import CacheUseError


def left_pads(mask: Tensor | None, batch: int, tokens: int) -> list[int]:
    """Left-padding columns of each row.

    Raises:
        CacheUseError: a mask that is not plain left padding.
    """
    if mask is None:
        return [0] * batch
    pads = [int(p) for p in (~mask[:, :tokens].bool()).sum(1).tolist()]
    check_padding(mask, pads, tokens)
    if max(pads) >= tokens:
        raise CacheUseError(
            f"every batch row needs a token in the first forward; a row begins with {max(pads)} columns of padding and "
            f"{tokens} came: take a prefill chunk longer than the padding."
        )
    return pads


def check_padding(mask: Tensor, pads: list[int], columns: int) -> None:
    """Raises a `CacheUseError` where the mask hides anything but the padding on the left."""
    wanted = torch.arange(columns, device=mask.device)[None] >= torch.tensor(pads, device=mask.device)[:, None]
    if not torch.equal(mask[:, :columns].bool(), wanted.expand(mask.shape[0], -1)[:, : mask.shape[1]]):
        raise CacheUseError("padding must be on the left and stay: set tokenizer.padding_side = 'left'.")


def position_shift(position_ids: Tensor | None, batch: int, tokens: int) -> Tensor:
    """Column minus position of every row, from the last prompt token."""
    if position_ids is None:
        return torch.zeros(batch, dtype=torch.int64)
    if position_ids.dim() != 2:
        raise CacheUseError("position_ids must be 2D; several axes (mrope) are not supported.")
    last = position_ids[:, -1].expand(batch).cpu()
    return tokens - 1 - last
