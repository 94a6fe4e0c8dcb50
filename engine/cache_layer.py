"""One managed layer of the cache, and which layers of a model are managed.

A layer tags the keys that it is given, so that our attention function finds it, and counts logical
columns; everything else is its owner's work. transformers classifies the layers: what it would give
a plain growing layer becomes ours, sliding and linear layers keep their stock cache layer.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from engine.errors import CacheUseError, UnsupportedModelError
from engine.tagged_layer import TaggedLayer


class LayerOwner(Protocol):
    """What a layer asks of its cache."""

    @property
    def batch(self) -> int: ...

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        scale: float,
        softcap: float | None,
        position_ids: Tensor | None,
    ) -> Tensor: ...

    def forget(self) -> None: ...

    def select_rows(self, index: Tensor) -> None: ...


class QEvictLayer(TaggedLayer):
    """One managed layer: tags keys for our attention function and counts logical columns."""

    def __init__(self, owner: LayerOwner, index: int) -> None:
        super().__init__()
        self.owner = owner
        self.index = index
        self.pending = False

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Tags the new keys; the attention function stores and attends."""
        if self.pending:
            self.pending = False
            raise CacheUseError(
                "this cache must be used with its own attention function: the model attended without it. "
                "Build the cache from the model that runs, and keep its attention implementation."
            )
        self.pending = True
        return super().update(key_states, value_states)

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        *,
        scale: float,
        softcap: float | None,
        position_ids: Tensor | None,
    ) -> Tensor:
        """Called by the adapter right after `update`."""
        self.pending = False
        return self.owner.attend(self.index, query, key, value, mask, scale, softcap, position_ids)

    def crop(self, max_length: int) -> None:
        """Refuses to go back: evicted tokens can't return."""
        if max_length not in (0, self.seen):
            raise CacheUseError(
                "a QEvict cache cannot be cropped: evicted tokens can't come back. "
                "Assisted decoding and prompt lookup need another cache."
            )

    def reset(self) -> None:
        """Forgets the sequence."""
        self.seen, self.pending = 0, False
        if self.index == 0:
            self.owner.forget()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Reorders batch rows; all layers at once, when the first is asked."""
        if self.index == 0:
            self.owner.select_rows(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keeps some batch rows."""
        if self.index == 0:
            self.owner.select_rows(torch.arange(self.owner.batch)[indices.cpu()])

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeats each batch row."""
        if self.index == 0:
            self.owner.select_rows(torch.arange(self.owner.batch).repeat_interleave(repeats))


def build_layers(owner: LayerOwner, text: Any) -> tuple[list[Any], list[int]]:
    """Cache layers of the model: ours for full attention, stock for the rest.

    Raises:
        UnsupportedModelError: nothing to manage, or layers share their keys and values.
    """
    stock = list(DynamicCache(config=text).layers)
    total = int(text.num_hidden_layers)
    shared = int(getattr(text, "num_kv_shared_layers", 0) or 0)
    if len(stock) < total or shared or any(type(layer).__name__ == "DummyLayer" for layer in stock):
        raise UnsupportedModelError(
            f"{text.model_type}: layers that share keys and values are not supported, every layer must own its cache."
        )
    layers: list[Any] = []
    managed: list[int] = []
    for index, layer in enumerate(stock):
        if type(layer) is DynamicLayer:
            layers.append(QEvictLayer(owner, len(managed)))
            managed.append(index)
        else:
            layers.append(layer)
    if not managed:
        raise UnsupportedModelError(
            f"{text.model_type}: the model must have a full-attention layer; all of its layers are sliding or linear, "
            "and their cache is bounded already."
        )
    return layers, managed


def attention_module(model: PreTrainedModel, layer_idx: int) -> nn.Module:
    for module in model.modules():
        if getattr(module, "layer_idx", None) == layer_idx and type(module).__name__.endswith("Attention"):
            return module
    raise UnsupportedModelError("the model has no attention module with a layer_idx; it cannot be managed.")
