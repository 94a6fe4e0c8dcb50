"""Attention outputs of the newest token, or of all tokens, layer by layer, read in front of each output projection.

Works with any cache and any attention function. Hooks are removed at the end, also after an exception.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel


class OutputProbe:
    """A context manager; `take()` gives what the last forward produced.

    Args:
        layers: model layers to read. A model without `o_proj` modules yields empty tensors.
        every_token: read all tokens of a forward, not the newest alone.
        every_row: read all batch rows, not the first alone.
    """

    def __init__(
        self, model: PreTrainedModel, layers: list[int], *, every_token: bool = False, every_row: bool = False
    ) -> None:
        self._every_token, self._every_row = every_token, every_row
        self._found: dict[int, Tensor] = {}
        self._handles: list[Any] = []
        self._modules: list[tuple[int, nn.Module, int]] = []
        for module in model.modules():
            index = getattr(module, "layer_idx", None)
            projection = getattr(module, "o_proj", None)
            if index in layers and isinstance(projection, nn.Module):
                self._modules.append((int(index), projection, int(getattr(module, "head_dim", 0) or 0)))

    def __enter__(self) -> OutputProbe:
        for index, projection, dim in self._modules:

            def look(_: nn.Module, inputs: tuple[Tensor, ...], index: int = index, dim: int = dim) -> None:
                read = inputs[0] if self._every_row else inputs[0][0]
                if not self._every_token:
                    read = read[..., -1, :]
                self._found[index] = read.float().unflatten(-1, (-1, dim) if dim else (1, -1))

            self._handles.append(projection.register_forward_pre_hook(look))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def take(self) -> Tensor:
        """float32 [layers, heads, d] of the last forward's newest token, or [layers, tokens, heads, d] of every token;
        rows are in front of tokens, where all are read. Forgets it.
        """
        rows = [self._found[index] for index in sorted(self._found)]
        self._found = {}
        return torch.stack(rows) if rows else torch.empty(0, 1, 1)
