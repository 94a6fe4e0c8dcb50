"""One forward of a prompt for several caches at once.

Every system attends a prompt in full precision, so keys, values and queries are the same for all. The
first cache answers; the others watch. Knows cache layers by their `update` and `attend` alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin

from engine.adapter import TAG, cache_keyword


class FanLayer(CacheLayerMixin):
    """One model layer of all caches; `layers[0]` answers."""

    is_sliding = False
    is_compileable = False
    supports_early_init = False

    def __init__(self, layers: Sequence[Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._layers = list(layers)
        self.is_sliding = bool(layers[0].is_sliding)
        self._tagged: list[tuple[Any, Tensor, Tensor]] = []

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Nothing to prepare."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Hands the new keys and values to every cache."""
        answers = [layer.update(key_states, value_states, *args, **kwargs) for layer in self._layers]
        self._tagged = [
            (layer, key, value) for layer, (key, value) in zip(self._layers, answers, strict=True) if hasattr(key, TAG)
        ]
        key, value = answers[0]
        if not hasattr(key, TAG):
            return key, value
        tagged = key.view_as(key)
        setattr(tagged, TAG, self)
        return tagged, value

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any) -> Tensor:
        """Lets every cache see the query; the first one's output counts."""
        outputs = [
            layer.attend(module, query, own_key, own_value, mask, **kwargs)
            for layer, own_key, own_value in self._tagged
        ]
        self._tagged = []
        first: Tensor = outputs[0]
        return first

    def get_seq_length(self, *args: Any) -> int:
        return int(self._layers[0].get_seq_length())

    def get_mask_sizes(self, query: Any, *args: Any) -> tuple[int, int]:
        sizes: tuple[int, int] = self._layers[0].get_mask_sizes(query)
        return sizes

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length


class FanOut:
    """Feeds prompts to several caches of one model.

    Args:
        model: switched to our attention function already. caches: the first one attends for all.
    """

    def __init__(self, model: PreTrainedModel, caches: Sequence[Any]) -> None:
        self._model, self._caches = model, list(caches)
        rows = zip(*(cache.layers for cache in caches), strict=True)
        self._cache = Cache(layers=[FanLayer(row) for row in rows])

    @torch.inference_mode()
    def forward(self, ids: list[int], start: int) -> Tensor:
        """One chunk of the prompt at positions `start` on; logits of its last token, float32 [vocabulary]."""
        device = self._model.device
        for cache in self._caches[1:]:
            cache.only_watching = True
        try:
            output = self._model(
                input_ids=torch.tensor([ids], device=device),
                position_ids=torch.arange(start, start + len(ids), device=device)[None],
                use_cache=True,
                logits_to_keep=1,
                **{cache_keyword(self._model): self._cache},
            )
        finally:
            for cache in self._caches[1:]:
                cache.only_watching = False
        logits: Tensor = output.logits[0, -1].float()
        return logits
