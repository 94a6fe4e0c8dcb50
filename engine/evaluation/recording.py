"""Records FullKV's attention on a token sequence, teacher-forced in chunks.

Probabilities exist for one layer and one chunk at a time; the prompt is reduced to column sums at once, later
queries are kept whole. Layers that are not full attention keep their stock cache. One sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.cache_utils import Cache, DynamicLayer

from engine.adapter import cache_keyword, enable
from engine.attention.causal import causal_probabilities, weighted_values
from engine.budget import KVShape
from engine.config import QEvictConfig
from engine.errors import ConfigError, PromptError
from engine.model_shape import model_shape
from engine.models import LoadedModel
from engine.policies import FullTrace
from engine.tagged_layer import TaggedLayer

CHUNK = 256
"""Queries per forward."""
MOST_BYTES = 4 * 2**30
"""Largest table of step masses that is recorded."""


class _RecordedLayer(TaggedLayer):
    """Keys and values of one layer; its attention writes into the tables of the recording."""

    def __init__(self, prompt_tokens: int, prompt_mass: Tensor, step_mass: Tensor) -> None:
        super().__init__()
        self.prompt_tokens, self.prompt_mass, self.step_mass = prompt_tokens, prompt_mass, step_mass
        self.store: list[Tensor] = []

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
        """Plain causal attention over everything seen."""
        tokens = query.shape[2]
        begin, end = self.seen, self.seen + tokens
        self.store = (
            [torch.cat([old, new[0]], 1) for old, new in zip(self.store, (key, value), strict=True)]
            if self.store
            else [key[0], value[0]]
        )
        self.seen = end
        probs = causal_probabilities(query, self.store[0], scale, softcap)
        inside = max(0, min(end, self.prompt_tokens) - begin)
        if inside:
            self.prompt_mass[:, : min(end, self.prompt_tokens)] += probs[:, :inside, : self.prompt_tokens].sum(1).cpu()
        if inside < tokens:
            first = begin + inside - self.prompt_tokens
            self.step_mass[first : first + tokens - inside, :, :end] = probs[:, inside:].transpose(0, 1).cpu()
        return weighted_values(probs, self.store[1]).to(query.dtype)


@torch.inference_mode()
def record(
    loaded: LoadedModel,
    ids: Sequence[int],
    prompt_tokens: int,
    *,
    kv_dtype: str = "float16",
    progress: Callable[[int, int], None] | None = None,
) -> FullTrace:
    """FullKV's attention on `ids`; the first `prompt_tokens` of them count as the prompt.

    Args:
        kv_dtype: dtype that byte costs are computed in; FullKV itself runs in the model's own.
        progress: told (tokens done, tokens in all).

    Raises:
        PromptError: no token after the prompt, or more than the model's positions.
        ConfigError: the table of step masses would be too large.
    """
    total = len(ids)
    if not 1 <= prompt_tokens < total:
        raise PromptError(f"a trace needs a prompt and tokens after it, got {prompt_tokens} of {total} tokens.")
    if total > loaded.max_positions:
        raise PromptError(f"the text must fit the model's {loaded.max_positions} positions, got {total} tokens.")
    text = loaded.model.config.get_text_config(decoder=True)
    stock = list(DynamicCache(config=text).layers)
    managed = [index for index, layer in enumerate(stock) if type(layer) is DynamicLayer]
    heads, steps = int(text.num_attention_heads), total - prompt_tokens
    size = 4 * steps * len(managed) * heads * total
    if size > MOST_BYTES:
        raise ConfigError(
            f"a trace of {steps} steps at {total} tokens would take {size / 2**30:.1f} GiB, more than "
            f"{MOST_BYTES / 2**30:.0f}: take fewer steps or a shorter text."
        )
    prompt_mass = torch.zeros(len(managed), heads, prompt_tokens)
    step_mass = torch.zeros(steps, len(managed), heads, total)
    layers: list[Any] = list(stock)
    for place, index in enumerate(managed):
        layers[index] = _RecordedLayer(prompt_tokens, prompt_mass[place], step_mass[:, place])
    enable(loaded.model)
    cache = Cache(layers=layers)
    decoder = loaded.model.base_model
    keyword = cache_keyword(decoder)
    device = next(loaded.model.parameters()).device
    for begin in range(0, total, CHUNK):
        part = torch.tensor([list(ids[begin : begin + CHUNK])], device=device)
        positions = torch.arange(begin, begin + part.shape[1], device=device)[None]
        decoder(input_ids=part, position_ids=positions, use_cache=True, **{keyword: cache})
        if progress is not None:
            progress(begin + part.shape[1], total)
    own = model_shape(loaded, QEvictConfig(kv_dtype=kv_dtype))
    shape = KVShape(len(managed), own.num_kv_heads, own.head_dim, own.element_bytes)
    return FullTrace(prompt_tokens, prompt_mass, step_mass, shape)
