"""FullKV, teacher-forced in chunks: the ground truth of every diagnostic.

The reference keeps the whole cache in full precision and sees the very tokens that the tiered run
produced, Ω at a time, so it costs far less than a second decode. Its prompt costs nothing: the keys
and values that the run staged are taken over before they are routed. Attention probabilities exist
for one layer and one chunk only; `FutureMass` reduces them at once. Batch row 0.
"""

from __future__ import annotations

import copy
import time
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from engine.adapter import cache_keyword
from engine.attention.causal import causal_probabilities, weighted_values
from engine.cache import QEvictCache, QEvictLayer, RoutingRecord
from engine.errors import CacheUseError
from engine.metrics.fmm import FutureMass
from engine.tagged_layer import TaggedLayer
from engine.trace import LateMetrics


class ReferenceLayer(TaggedLayer):
    """Full keys and values of one managed layer, and what its attention is reduced to."""

    def __init__(self, owner: Reference, index: int, key: Tensor, value: Tensor, room: int) -> None:
        super().__init__()
        self.owner, self.index = owner, index
        kv, self.seen, dim = key.shape[1], key.shape[2], key.shape[3]
        self.store_key = torch.empty(kv, self.seen + room, dim, dtype=key.dtype, device=key.device)
        self.store_value = torch.empty_like(self.store_key)
        self.store_key[:, : self.seen], self.store_value[:, : self.seen] = key[0], value[0]

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
        """Plain causal attention over everything, with its probabilities handed to the metrics."""
        tokens = query.shape[2]
        begin, end = self.seen, self.seen + tokens
        if end > self.store_key.shape[1]:
            more = self.store_key.new_empty(self.store_key.shape[0], max(tokens, 256), self.store_key.shape[2])
            self.store_key = torch.cat([self.store_key, more], 1)
            self.store_value = torch.cat([self.store_value, more.clone()], 1)
        self.store_key[:, begin:end], self.store_value[:, begin:end] = key[0], value[0]
        self.seen = end
        probs = causal_probabilities(query, self.store_key[:, :end], scale, softcap)
        self.owner.observe_layer(self.index, begin, probs)
        return weighted_values(probs, self.store_value[:, :end]).to(query.dtype)


class Reference:
    """The FullKV twin of a tiered run.

    Args:
        model: the model that both run on.
        cache: the run's cache, with its prompt staged and not yet routed.
        room: tokens that will come after the prompt.
        horizon: H of future missed mass.

    Raises:
        CacheUseError: the prompt is not staged (one token only, or routed already).
    """

    def __init__(self, model: PreTrainedModel, cache: QEvictCache, room: int, horizon: int) -> None:
        state, shape = cache.lead, cache.pool_shape
        if state.staging is None or state.staging.start != 0:
            raise CacheUseError(
                "a reference must be made after the prompt's forward and before its first routing event."
            )
        self._decoder: nn.Module = model.base_model
        self._keyword = cache_keyword(self._decoder)
        self._device = state.device
        self._rows, self._groups, self._batch = shape.num_layers, shape.groups, shape.batch
        self.metrics = FutureMass(
            shape.num_layers,
            state.num_heads,
            state.config.window_size,
            state.config.sink_tokens,
            horizon=horizon,
            groups=shape.groups,
            device=state.device,
        )
        layers: list[Any] = []
        for layer in cache.layers:
            if isinstance(layer, QEvictLayer):
                key, value = cache.staged(layer.index)
                layers.append(ReferenceLayer(self, layer.index, key[:1], value[:1], room))
            else:
                layers.append(copy.deepcopy(layer))
        self._cache = Cache(layers=layers)
        self.columns = state.columns
        self.seconds = 0.0

    def observe_layer(self, layer: int, begin: int, probs: Tensor) -> None:
        """Hands the probabilities [H_q, T, K] of one layer to the metrics, which lie on the first layer's device."""
        self.metrics.observe(layer, begin, probs.to(self._device))

    def open(self, record: RoutingRecord) -> None:
        """Starts the future of a routing event; all its columns must have been observed."""
        tiers = record.after.view(self._rows, self._batch, self._groups, -1)[:, 0]
        self.metrics.open(record.event_id, record.columns, tiers)

    @torch.inference_mode()
    def observe(self, token_ids: list[int]) -> list[LateMetrics]:
        """Runs the next tokens of the sequence and returns what has become known."""
        if token_ids:
            began = time.perf_counter()
            ids = torch.tensor([token_ids], device=self._device)
            positions = torch.arange(self.columns, self.columns + len(token_ids), device=ids.device)[None]
            self._decoder(input_ids=ids, position_ids=positions, use_cache=True, **{self._keyword: self._cache})
            self.columns += len(token_ids)
            self.seconds += time.perf_counter() - began
        return self.metrics.close_due(self.columns)

    def finish(self) -> list[LateMetrics]:
        """What is known of the events whose horizon the run's end cut short."""
        return self.metrics.finish(self.columns)
