"""Several caches of one model in one forward, one for each batch row: the weights are read once for all of them.

A row attends to its own cache alone, so there is no padding and nothing is shared but the forward. Knows caches by
their layers; knows neither runs nor systems.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from engine.cache_layer import QEvictLayer
from engine.tagged_layer import TaggedLayer


def attends_alone(cache: Any) -> bool:
    """Whether every layer attends to its own keys: a stock layer's mask would depend on the other rows' lengths."""
    return all(isinstance(layer, QEvictLayer) for layer in cache.layers)


def beside_each_other(caches: Sequence[Any]) -> Cache:
    """One cache whose batch rows are the caches, each of one row and of `attends_alone`; for steps of one token."""
    layers = zip(*(cache.layers for cache in caches), strict=True)
    return Cache(layers=[RowLayer(parts) for parts in layers])


class RowLayer(TaggedLayer):
    """One model layer of several caches, one for each batch row."""

    def __init__(self, layers: Sequence[Any]) -> None:
        super().__init__()
        self._layers = list(layers)
        self._tagged: list[tuple[Tensor, Tensor]] = []

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Hands each cache its row."""
        rows = zip(self._layers, key_states.split(1), value_states.split(1), strict=True)
        self._tagged = [layer.update(key, value, *args, **kwargs) for layer, key, value in rows]
        return self.tag(key_states), value_states

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Any,
        *,
        position_ids: Any,
        **kwargs: Any,
    ) -> Tensor:
        """Each row attends to its own cache: [B, H_q, 1, d] in and out."""
        parts, self._tagged = self._tagged, []
        outputs = []
        for number, (layer, (own_key, own_value)) in enumerate(zip(self._layers, parts, strict=True)):
            row = slice(number, number + 1)
            at = None if position_ids is None else position_ids[row]
            outputs.append(layer.attend(module, query[row], own_key, own_value, None, position_ids=at, **kwargs))
        return torch.cat(outputs)

    def get_seq_length(self, *args: Any) -> int:
        """The longest row's."""
        return max(int(layer.get_seq_length()) for layer in self._layers)
