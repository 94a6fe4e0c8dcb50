"""Where we touch transformers: registration, the attention function and the mask function.

Three public extension points: `AttentionInterface`, `AttentionMaskInterface`, and a `Cache` of our
layers. A layer tags the key tensor that it returns from `update`; the attention function finds the
layer by that tag, and leaves everything without a tag to stock attention. No module is replaced.
"""

from __future__ import annotations

import inspect
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface, causal_mask_function, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from engine.errors import CacheUseError

NAME = "qevict"
"""Must not contain flash, sdpa, flex or `paged|`: transformers matches those as patterns."""
TAG = "_qevict"


class LogicalLength(int):
    """A key length that says: this mask serves a cache of ours."""


class Attends(Protocol):
    """A cache layer that attends by itself."""

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
    ) -> Tensor: ...


def qevict_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of one module: ours where the key carries our tag, stock otherwise.

    Returns:
        [B, T, H_q, d] and no weights.
    """
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    layer: Attends | None = getattr(key, TAG, None)
    if layer is None:
        return stock_attention(module, query, key, value, attention_mask, scale, dropout, softcap, **kwargs)
    if dropout:
        raise CacheUseError("attention dropout must be 0 with a QEvict cache: call model.eval() first.")
    if kwargs.get("s_aux") is not None:
        raise CacheUseError("attention sinks as parameters (s_aux) are not supported by a QEvict cache.")
    out = layer.attend(
        module,
        query,
        key,
        value,
        attention_mask,
        scale=scale,
        softcap=softcap,
        position_ids=kwargs.get("position_ids"),
    )
    return out.transpose(1, 2).contiguous(), None


def stock_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scale: float,
    dropout: float,
    softcap: float | None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """What transformers would have done: SDPA, or plain softmax where a softcap is due."""
    if softcap is None:
        stock = ALL_ATTENTION_FUNCTIONS["sdpa"]
        out, _ = stock(module, query, key, value, mask, dropout=dropout, scaling=scale, **kwargs)
        return out, None
    batch, heads, tokens, dim = query.shape
    kv, keys = key.shape[1], key.shape[2]
    grouped = query.reshape(batch, kv, heads // kv, tokens, dim).float()
    logits = softcap * torch.tanh(grouped @ key.float().unsqueeze(2).transpose(-1, -2) * scale / softcap)
    if mask is None:
        seen = torch.ones(tokens, keys, dtype=torch.bool, device=query.device).tril(keys - tokens)
    else:
        seen = mask[..., :keys] if mask.dtype == torch.bool else mask[..., :keys] >= 0
        seen = seen.unsqueeze(2) if seen.dim() == 4 else seen
    probs = logits.masked_fill(~seen, torch.finfo(logits.dtype).min).softmax(-1)
    out = (probs @ value.float().unsqueeze(2)).reshape(batch, heads, tokens, dim).to(query.dtype)
    return out.transpose(1, 2).contiguous(), None


def qevict_mask(
    batch_size: int,
    *args: Any,
    kv_length: Any = None,
    mask_function: Any = causal_mask_function,
    attention_mask: Tensor | None = None,
    **kwargs: Any,
) -> Tensor | None:
    """The raw 2D padding mask for our caches; stock's own mask for everybody else's."""
    if isinstance(kv_length, LogicalLength):
        if mask_function is not causal_mask_function:
            raise CacheUseError("a QEvict cache supports causal attention only, without overlays on the mask.")
        return attention_mask
    rest = {**kwargs, "mask_function": mask_function, "attention_mask": attention_mask}
    if kv_length is not None:
        rest["kv_length"] = kv_length
    return sdpa_mask(batch_size, *args, **rest)


def register() -> None:
    """Makes our attention and mask known under `NAME`; harmless when repeated."""
    AttentionInterface.register(NAME, qevict_attention)
    AttentionMaskInterface.register(NAME, qevict_mask)


def enable(model: PreTrainedModel) -> None:
    """Switches a model to our attention function; other caches keep working on it."""
    register()
    if getattr(model.config, "_attn_implementation", None) != NAME:
        model.set_attn_implementation(NAME)


def cache_keyword(model: nn.Module) -> str:
    """The name of forward's cache argument, which transformers renamed."""
    names = inspect.signature(type(model).forward).parameters
    return "cache" if "cache" in names else "past_key_values"
